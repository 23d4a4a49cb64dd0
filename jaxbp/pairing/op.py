"""Choose among the implementations of a function."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from jaxbp.common import checks
from jaxbp.pairing.mesh import BatchAxes, batched, mesh_of, on_explicit_axes, over_devices, with_automatic_axes
from pallas_kernels.core import device
from pallas_kernels.core.arrays import unify_varying_axes

IMPLEMENTATIONS = ("pallas", "xla", "autodiff")

Implementation = Literal["pallas", "xla", "autodiff"] | None

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class DefaultImplementation:
    """The implementations that `implementation=None` selects.

    Attributes:
      gpu: for GPUs that run the kernels.
      older_gpu: for other GPUs, and instead of the kernel if it does not support the arguments or the mesh.
      elsewhere: for other platforms.
    """

    gpu: str = "pallas"
    older_gpu: str = "xla"
    elsewhere: str = "xla"


REMEMBERED = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """An op's options as a cache key that distinguishes equal values of different types, such as 2 and 2.0."""

    values: Mapping[str, Any]

    @functools.cached_property
    def key(self) -> tuple:
        return tuple((name, _typed(value)) for name, value in sorted(self.values.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.key == other.key


def _typed(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    # Hexadecimal text distinguishes 0.0 from -0.0, and makes NaN equal to NaN.
    return type(value), float(value).hex() if isinstance(value, float | np.floating) else value


def remembered(build: Callable[..., Callable]) -> Callable[..., Callable]:
    """Cache the functions that `build` returns. Equal arguments must give the same function, because JAX finds its
    traces by a function's identity."""
    return functools.lru_cache(REMEMBERED)(build)


class Op(Generic[P, R]):
    """A pure function with several implementations. A call selects one with `implementation=`.

    Args:
      name: as shown in error messages and compiled programs.
      implementations: maps names to `function(*arrays, **options)`. `implementation=None` calls the function under the
        key None if there is one, else the one that `default` names. Options are static and hashable.
      unsupported: a function of `(*arrays, **options)` that returns why "pallas" does not support them, or None.
      default: a `DefaultImplementation`, or a function of `(*arrays, **options)` that returns one.
      partitioned: whether each device of a mesh runs the kernel on a part of the examples. If not,
        `implementation=None` does not select the kernel on a mesh.
      sharded_like: a function of the arrays. On a mesh with explicit axes, the op's results are sharded like this
        function's results. By default, they are sharded as with `implementation="autodiff"`.
      jit: whether to compile each call outside of transformations, which saves time on the host. The implementations
        then receive tracers.
    """

    def __init__(
        self,
        name: str,
        implementations: Mapping[Implementation, Callable[P, R]],
        *,
        unsupported: Callable[..., str | None] | None = None,
        default: DefaultImplementation | Callable[..., DefaultImplementation] | None = None,
        partitioned: bool = False,
        sharded_like: Callable | None = None,
        jit: bool = False,
    ):
        if unknown := set(implementations) - {*IMPLEMENTATIONS, None}:
            wanted = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"{name}: implementations has {sorted(unknown)}; wants only names among {wanted}")
        for key, function in implementations.items():
            checks.function(name, f"the implementation {key!r}", function)
        if not (default is None or callable(default) or isinstance(default, DefaultImplementation)):
            raise TypeError(f"{name}: default is {default!r}; wants a jaxbp.DefaultImplementation")
        made_of = dict(name=name, implementations=implementations, unsupported=unsupported, default=default)
        self._made_of = Op, made_of | dict(partitioned=partitioned, sharded_like=sharded_like, jit=jit)
        self.name = name
        self.implementations = dict(implementations)
        self.unsupported = functools.partial(_unsupported, unsupported)
        self.default = default or DefaultImplementation()
        self.partitioned, self.sharded_like = partitioned, sharded_like
        self._built = remembered(self._build)
        self._compiled = remembered(self._compile) if jit else None
        self._renamed: dict[str, Op[P, R]] = {}

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, implementation: Implementation, **kwargs: Any) -> R: ...

    def __call__(self, *arrays: Any, implementation: Implementation = None, **options: Any) -> Any:
        """Call the selected implementation.

        Raises:
          TypeError: an option is not hashable.
          ValueError: the implementation is unknown.
          NotImplementedError: the op lacks this implementation, or its kernel does not support the arguments.
        """
        if self._compiled and not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(arrays)):
            # `_run` raises an error again, without JAX's messages about tracing and hashing.
            with contextlib.suppress(NotImplementedError, TypeError, ValueError):
                return self._compiled(implementation, Options(options))(*arrays)
        return self._run(arrays, implementation, options)

    def _run(self, arrays: tuple, implementation: Implementation, options: Mapping[str, Any]) -> Any:
        token = _CALLED.set(_CALLED.get() or self.name)
        try:
            return self._dispatch(arrays, implementation, options)
        finally:
            _CALLED.reset(token)

    def _dispatch(self, arrays: tuple, implementation: Implementation, options: Mapping[str, Any]) -> Any:
        if _on_a_mesh(arrays):
            arrays = unify_varying_axes(arrays)
            if on_explicit_axes(arrays) and (like := self._sharded_like(implementation, options)):
                dispatch = lambda *arrays: self._dispatch(arrays, implementation, options)  # noqa: E731
                return with_automatic_axes(dispatch, like, arrays)
        if implementation is None and None not in self.implementations:
            return self._by_platform(arrays, options)
        if implementation not in (*IMPLEMENTATIONS, None):
            wanted = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"{self.name}: implementation is {implementation!r}; wants {wanted}, or None")
        if implementation == "pallas" and (reason := self.unsupported(*arrays, **options)):
            raise NotImplementedError(
                f"{self.name}: implementation='pallas' does not take {reason}; wants 'xla', 'autodiff', or None"
            )
        if implementation not in self.implementations:
            has = ", ".join(map(repr, self.implementations))
            raise NotImplementedError(f"{self.name}: has no implementation {implementation!r}; wants one of {has}")
        return self._bind(implementation, options)(*arrays)

    def _sharded_like(self, implementation: str | None, options: Mapping[str, Any]) -> Callable | None:
        if self.sharded_like or implementation == "autodiff" or "autodiff" not in self.implementations:
            return self.sharded_like
        return self._bind("autodiff", options)

    def _by_platform(self, arrays: tuple, options: Mapping[str, Any]) -> Any:
        default = self.default
        if callable(default):
            default = DefaultImplementation() if _has_symbolic_sizes(arrays) else default(*arrays, **options)
        gpu, older_gpu, elsewhere = map(self._available, (default.gpu, default.older_gpu, default.elsewhere))
        if gpu == "pallas" and not (
            device.kernels_run()
            and (self.partitioned or not _on_a_mesh(arrays) or mesh_of(arrays) is None)
            and self.unsupported(*arrays, **options) is None
        ):
            gpu = older_gpu
        if gpu == elsewhere:
            return self._bind(gpu, options)(*arrays)
        # JAX may lower a function for the CPU of a machine with a GPU.
        return lax.platform_dependent(*arrays, cuda=self._bind(gpu, options), default=self._bind(elsewhere, options))

    def _compile(self, implementation: Implementation, options: Options) -> Callable:
        def run(*arrays):
            return self._run(arrays, implementation, options.values)

        return jax.jit(run)

    def _build(self, implementation: str | None, options: Options, name: str) -> Callable:
        return self._scoped(implementation, functools.partial(self.implementations[implementation], **options.values))

    def _scoped(self, implementation: str | None, function: Callable) -> Callable:
        function = function if implementation is None else jax.named_scope(implementation)(function)
        return jax.named_scope(self.name)(function)

    def _bind(self, implementation: str | None, options: Mapping[str, Any]) -> Callable:
        try:
            return self._built(implementation, Options(options), _CALLED.get() or self.name)
        except TypeError:
            for name, value in options.items():
                _require_hashable(self.name, name, value)
            raise

    def _available(self, implementation: str) -> str:
        return next(name for name in (implementation, "xla", "autodiff", "pallas") if name in self.implementations)

    def named(self, name: str) -> "Op[P, R]":
        """Return the op with this name in error messages. Calls with equal names return the same object."""
        if name not in self._renamed:
            maker, arguments = self._made_of
            self._renamed[name] = _made_again(type(self), maker, arguments | {"name": name})
        return self._renamed[name]

    def __reduce__(self):
        # Pickle needs the constructor's functions at the top level of a module.
        return _made_again, (type(self), *self._made_of)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {', '.join(map(str, self.implementations))})"


def differentiable(
    kernel: Callable[P, R], formula: Callable[P, R], batch_axes: BatchAxes | None = None
) -> Callable[P, R]:
    """Return a function with the values of `kernel`, which JAX cannot differentiate, and the derivatives of `formula`.

    Both take `(*arrays, **options)` and compute the same function. With `batch_axes`, each device of a mesh runs the
    kernel on a part of the examples.
    """

    for name, function in (("kernel", kernel), ("formula", formula)):
        checks.function("differentiable", name, function)

    @remembered
    def bind(options):
        kernel_, formula_ = (functools.partial(f, **options.values) for f in (kernel, formula))

        @functools.wraps(kernel_)
        def call(*arrays):
            if batch_axes is None or mesh_of(arrays) is None:
                return kernel_(*arrays)
            return over_devices(kernel_, formula_, batch_axes, arrays)

        # Without jit, JAX would trace and compile the kernel at every call.
        call = jax.custom_jvp(jax.jit(call, inline=True))

        @call.defjvp
        def _(primals, tangents):
            return call(*primals), jax.jvp(formula_, primals, tangents)[1]

        return call

    @functools.wraps(kernel)
    def wrapped(*arrays, **options):
        return bind(Options(options))(*arrays)

    return wrapped


def _unsupported(by_op: Callable[..., str | None] | None, *arrays: Any, **options: Any) -> str | None:
    if _has_symbolic_sizes(arrays):
        return "arrays of symbolic sizes"
    return by_op and by_op(*arrays, **options)


def _on_a_mesh(arrays: tuple) -> bool:
    return any(not jax.typeof(a).sharding.mesh.empty for a in jax.tree.leaves(arrays))


def _has_symbolic_sizes(arrays: Any) -> bool:
    return any(is_symbolic_dim(size) for a in jax.tree.leaves(arrays) for size in jnp.shape(a))


def _made_again(kind: type[Op], maker: type[Op], arguments: Mapping[str, Any]) -> Op:
    op = object.__new__(kind)
    maker.__init__(op, **arguments)
    return op


_CALLED: contextvars.ContextVar[str | None] = contextvars.ContextVar("called", default=None)
"""The op that the user called."""


def _require_hashable(op: str, name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        is_array = isinstance(value, Array | np.ndarray)
        got = "an array" if is_array else f"a {type(value).__name__}"
        why = "options are static" + ("; pass arrays by position" if is_array else "")
        raise TypeError(f"{op}: {name} is {got}; wants a hashable value, because {why}") from None


def per_implementation(function: Callable, implementations: tuple[Implementation, ...] = ("pallas", "xla")) -> dict:
    return {name: functools.partial(function, implementation=name) for name in implementations}


def formula_and_kernel(
    formula: Callable, kernel: Callable, *names: str, derivatives_of: Callable | None = None
) -> dict[Implementation, Callable]:
    """Return the implementations "xla" and "pallas", with the derivatives of the formula or of another function. On a
    mesh, devices divide axis 0 of the kernel's arguments `names`."""
    xla = formula if derivatives_of is None else differentiable(formula, derivatives_of)
    return {"xla": xla, "pallas": differentiable(kernel, derivatives_of or formula, batched(*names))}


def name_of(function: Callable) -> str:
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)
