"""Pair a function with a hand-written backward, and choose among its implementations (docs/api.md)."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxbp.common import checks
from jaxbp.pairing.gradients import Kinds, by_autodiff, of_floating, positional_names
from jaxbp.pairing.mapped_axis import mapped_axis_first
from jaxbp.pairing.mesh import BatchAxes, mesh_of, on_explicit_axes, over_devices, with_automatic_axes
from jaxbp.pairing.options import Options, remembered
from jaxbp.pairing.reverse_mode import linear_call, reverse_mode_only
from pallas_kernels.core import device
from pallas_kernels.core.launch import unify_varying_axes

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


def differentiable(
    kernel: Callable[P, R], formula: Callable[P, R], batch_axes: BatchAxes | None = None
) -> Callable[P, R]:
    """Return a function with the values of `kernel`, which JAX cannot differentiate, and the derivatives of `formula`.

    Both take `(*arrays, **options)` and compute the same function. With `batch_axes`, each device of a mesh runs the
    kernel on a part of the examples.
    """

    @remembered
    def bind(options):
        formula_ = functools.partial(formula, **options.values)
        # Without jit, JAX would trace and compile the kernel at every call.
        shared = over_devices(functools.partial(kernel, **options.values), formula_, batch_axes)
        call = jax.custom_jvp(jax.jit(shared, inline=True))

        @call.defjvp
        def _(primals, tangents):
            return call(*primals), jax.jvp(formula_, primals, tangents)[1]

        return call

    @functools.wraps(kernel)
    def wrapped(*arrays, **options):
        return bind(Options(options))(*arrays)

    return wrapped


class Op(Generic[P, R]):
    """A pure function with several implementations. A call selects one with `implementation=`.

    Args:
      name: as shown in error messages and compiled programs.
      implementations: maps names to `function(*arrays, **options)`. `implementation=None` calls the function under the
        key None if there is one, else the one that `default` names. Options are static and hashable.
      unsupported: a function of `(*arrays, **options)` that returns why "pallas" does not support them, or None.
      default: a `DefaultImplementation`, or a function of `(*arrays, **options)` that returns one.
      partitioned: whether each device of a mesh runs the kernel on a part of the examples. If not, a mesh excludes the
        kernel from `implementation=None`.
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
        with _within(self.name):
            return self._run(arrays, implementation, options)

    def _run(self, arrays: tuple, implementation: Implementation, options: Mapping[str, Any]) -> Any:
        arrays = unify_varying_axes(arrays)
        if on_explicit_axes(arrays) and (like := self._sharded_like(implementation, options)):
            run = lambda *arrays: self._run(arrays, implementation, options)  # noqa: E731
            return with_automatic_axes(run, like, arrays)
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
            and (self.partitioned or mesh_of(arrays) is None)
            and self.unsupported(*arrays, **options) is None
        ):
            gpu = older_gpu
        if gpu == elsewhere:
            return self._bind(gpu, options)(*arrays)
        # JAX may lower a function for the CPU of a machine with a GPU.
        return lax.platform_dependent(*arrays, cuda=self._bind(gpu, options), default=self._bind(elsewhere, options))

    def _compile(self, implementation: Implementation, options: Options) -> Callable:
        def run(*arrays):
            with _within(self.name):
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


def _unsupported(by_op: Callable[..., str | None] | None, *arrays: Any, **options: Any) -> str | None:
    if _has_symbolic_sizes(arrays):
        return "arrays of symbolic sizes"
    return by_op and by_op(*arrays, **options)


def _has_symbolic_sizes(arrays: Any) -> bool:
    return checks.is_symbolic(*itertools.chain(*(jnp.shape(a) for a in jax.tree.leaves(arrays))))


def _made_again(kind: type[Op], maker: type[Op], arguments: Mapping[str, Any]) -> Op:
    op = object.__new__(kind)
    maker.__init__(op, **arguments)
    return op


_CALLED: contextvars.ContextVar[str | None] = contextvars.ContextVar("called", default=None)
"""The op that the user called."""


@contextlib.contextmanager
def _within(name: str) -> Iterator[None]:
    token = _CALLED.set(_CALLED.get() or name)
    try:
        yield
    finally:
        _CALLED.reset(token)


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


class Pair(Op[P, R]):
    """A pure function and its hand-written backward.

    Args:
      forward: `forward(*arrays, **options) -> y`, in jnp. An array may be None or a pytree of arrays.
      backward: a dict from implementations to `backward(dy, *saved, **options)`, or an `Op` of `(dy, *saved)`. "xla" is
        a formula in jnp, and "pallas" is a kernel for the same function. The backward returns a tuple with one gradient
        per array of the forward, or one array if there is only one. The gradient of an integer array is None or has
        dtype float0. In the gradient of a pytree, any subtree may be None, which means zero.
      save: `save(*arrays, **options) -> (y, saved)`, or a dict with one such function per implementation. `saved` is a
        tuple of pytrees, by default the arguments. Its arrays that are not arguments get the op's name, for the
        policies of `jax.checkpoint`. If `save` calls a kernel, wrap the kernel in `differentiable`.
      residuals: `residuals(*arrays, **options) -> saved`, for `vjp`, which does not need y. By default, `vjp` calls
        `save`.
      has_aux: whether the forward returns `(y, *aux)`. Only y has a gradient, dy.
      linear: whether the forward is linear in its only array. If so, each call of the pair must pass the array's shape
        as the option `shape`, and the backward gets no residuals. Forward mode and `jax.linear_transpose` then work.
      batch_axes: a function from `(dy, *saved)` to their batch axes. It implies `partitioned`.
      name, unsupported, default, partitioned, sharded_like, jit: as in `Op`.
      default_vjp: replaces `default` for `vjp`. A function gets `(dy, *arrays)`.

    Attributes:
      backward: an `Op` of `(dy, *saved)`.
      vjp: an `Op` of `(dy, *arrays)`, or of `(dy,)` if linear. It returns the gradients with respect to the floating
        arrays. Its implementation "autodiff" is `jax.vjp` of the forward.

    Example:
      >>> square = Pair(lambda x: x * x, {"xla": lambda dy, x: 2 * x * dy}, name="square")
      >>> jax.grad(square)(3.0)
      Array(6., dtype=float32, weak_type=True)
    """

    def __init__(
        self,
        forward: Callable[P, R],
        backward: Mapping[Literal["pallas", "xla", "autodiff"], Callable[..., Any]] | Op[..., Any],
        *,
        save: Callable[..., Any] | Mapping[Implementation, Callable[..., Any]] | None = None,
        residuals: Callable[..., Any] | None = None,
        has_aux: bool = False,
        linear: bool = False,
        name: str | None = None,
        unsupported: Callable[..., str | None] | None = None,
        default: DefaultImplementation | Callable[..., DefaultImplementation] | None = None,
        default_vjp: DefaultImplementation | Callable[..., DefaultImplementation] | None = None,
        batch_axes: BatchAxes | None = None,
        partitioned: bool = False,
        sharded_like: Callable | None = None,
        jit: bool = False,
    ):
        name = name or name_of(forward)
        made_of = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        partitioned = partitioned or batch_axes is not None
        if not isinstance(backward, Op):
            if not isinstance(backward, Mapping):
                got = f"{name}: backward is a {type(backward).__name__}"
                raise TypeError(f'{got}; wants a dict from implementations to functions, say {{"xla": ...}}, or an Op')
            backward = Op(f"{name}_backward", _kernels_differentiable(backward, batch_axes), jit=jit)
        if linear:
            save, residuals = functools.partial(_saving_nothing, forward), _nothing
        elif save is None:
            save, residuals = functools.partial(saving_arguments, forward), residuals or given_arguments
        saves = save if isinstance(save, Mapping) else dict.fromkeys(backward.implementations, save)
        self._rules = {
            key: (saves[key], rule)
            for key, rule in backward.implementations.items()
            if key in saves and key != "autodiff"
        }
        # Under the key None, `save` runs the fastest forward, also for calls without a gradient.
        forwards = {
            key: functools.partial(_value, save_) if key is None else forward for key, (save_, _) in self._rules.items()
        }
        super().__init__(
            name,
            forwards | {"autodiff": forward},
            unsupported=unsupported,
            default=default,
            partitioned=partitioned,
            sharded_like=sharded_like,
            jit=jit,
        )
        self._made_of = Pair, made_of
        self.forward, self.backward = forward, backward
        self._residuals, self._has_aux, self._linear = residuals, has_aux, linear
        behind_dy = functools.partial(functools.partial, _behind_dy)
        self.vjp: Op[..., Any] = Op(
            f"{name}_backward",
            {key: functools.partial(self._vjp, key) for key in self._rules} | {"autodiff": self._vjp_by_autodiff},
            unsupported=self.unsupported if linear else behind_dy(self.unsupported),
            default=default_vjp or (behind_dy(default) if callable(default) else default),
            partitioned=partitioned,
            sharded_like=None if linear else behind_dy(_floating_arguments),
            jit=jit,
        )

    def _build(self, implementation: str | None, options: Options, name: str) -> Callable:
        if implementation not in self._rules:
            return super()._build(implementation, options, name)
        bound = (self.implementations[implementation], *self._rules[implementation])
        forward, save, backward = (functools.partial(function, **options.values) for function in bound)
        backward = self.backward._scoped(implementation, backward)
        if self._linear:

            def call_linear(x):
                kinds = Kinds.of((x,))
                return linear_call(forward, lambda dy: self._checked(kinds, backward(dy))[0], x)

            return self._scoped(implementation, call_linear)

        call = jax.custom_vjp(lambda *arrays: mapped_axis_first(forward(*arrays))[0])

        def save_with_kinds(*arrays):
            y, saved = mapped_axis_first(*_named(name, arrays, *save(*arrays)))
            return y, (saved, Kinds.of(arrays))

        def gradients(saved, dy):
            saved, kinds = saved
            return self._checked(kinds, backward(dy[0] if self._has_aux else dy, *saved))

        call.defvjp(save_with_kinds, gradients)

        return self._scoped(implementation, lambda *arrays: call(*reverse_mode_only(arrays, name)))

    def _checked(self, kinds: Kinds, gradients: Any) -> tuple:
        return kinds.checked(self.name, positional_names(self.forward, kinds.count), gradients)

    def _vjp(self, implementation: str | None, dy: Any, *arrays: Any, **options: Any) -> Any:
        save, backward = self._rules[implementation]
        saved = self._residuals(*arrays, **options) if self._residuals else save(*arrays, **options)[1]
        found = backward(dy, *saved, **options)
        return found if self._linear else of_floating(self._checked(Kinds.of(arrays), found), arrays)

    def _vjp_by_autodiff(self, dy: Any, *arrays: Any, **options: Any) -> Any:
        forward = functools.partial(self.forward, **options)
        if self._linear:
            return transpose(forward, options["shape"], dy)
        return by_autodiff((lambda *arrays: forward(*arrays)[0]) if self._has_aux else forward, dy, *arrays)


def transpose(linear: Callable[[Array], Array], shape: tuple[int, ...], dy: Array) -> Array:
    _, zero = unify_varying_axes((dy, jnp.zeros(shape, dy.dtype)))
    return jax.vjp(linear, zero)[1](dy)[0]


def _kernels_differentiable(
    implementations: Mapping[str, Callable], batch_axes: BatchAxes | None
) -> dict[str, Callable]:
    implementations = dict(implementations)
    kernel, formula = implementations.get("pallas"), implementations.get("xla")
    if kernel is not None and formula is not None and kernel is not formula:
        implementations["pallas"] = differentiable(kernel, formula, batch_axes)
    return implementations


def _behind_dy(function, dy, *arrays, **options):
    return function(*arrays, **options)


def _floating_arguments(*arrays):
    return of_floating(jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, arrays), arrays)


def _value(save, *arrays, **options):
    return save(*arrays, **options)[0]


def saving_arguments(forward: Callable, *arrays: Any, **options: Any) -> tuple[Any, tuple]:
    return forward(*arrays, **options), arrays


def given_arguments(*arrays: Any, **options: Any) -> tuple:
    return arrays


def _saving_nothing(forward, *arrays, **options):
    return forward(*arrays, **options), ()


def _nothing(*arrays, **options):
    return ()


def _named(name: str, arrays: tuple, y: Any, saved: Any) -> tuple[Any, Any]:
    # A residual may also be in the result y.
    given = {id(a) for a in jax.tree.leaves(arrays)}
    named = {id(a): checkpoint_name(a, name) for a in jax.tree.leaves(saved) if id(a) not in given}
    return jax.tree.map(lambda a: named.get(id(a), a), (y, saved))


def name_of(function: Callable) -> str:
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)
