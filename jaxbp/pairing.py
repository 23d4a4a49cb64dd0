"""Pair a function with a hand-written backward, and choose among its implementations.

An `Op` is a pure function in up to three implementations. A `Pair` is an `Op` made of a forward, a function that
returns the residuals, and a backward. The argument `implementation=` of a call selects one implementation:

    "autodiff"  the forward, which JAX differentiates,
    "xla"       the forward with the backward as a formula in jnp, joined by `jax.custom_vjp`,
    "pallas"    the forward with the backward as a kernel,
    None        the fastest of these that the platform supports.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxbp.mapped_axis import mapped_axis_first
from jaxbp.sharding import BatchAxes, mesh_of, on_explicit_axes, over_devices, with_automatic_axes
from pallas_kernels.core import device
from pallas_kernels.core.launch import unify_varying_axes

IMPLEMENTATIONS = ("pallas", "xla", "autodiff")
"""Names that `implementation=` accepts. It also accepts `None` for the fastest one that the platform supports."""

Implementation = Literal["pallas", "xla", "autodiff"] | None

REMEMBERED = 128
"""The number of combinations of options that an op remembers. For each remembered combination, it keeps the function
with these options bound."""


@dataclasses.dataclass(frozen=True)
class DefaultImplementation:
    """The implementations that measurements found fastest, and that `implementation=None` selects.

    Attributes:
      gpu: the implementation on GPUs that run the kernels.
      older_gpu: the implementation on other GPUs.
      elsewhere: the implementation on other platforms.
    """

    gpu: str = "pallas"
    older_gpu: str = "xla"
    elsewhere: str = "xla"


# ------------------------------------------------------------------------------------------------------------- options


@dataclasses.dataclass(frozen=True, eq=False)
class _Options:
    """Options as a key of a cache. Values of different types are different keys: True is not 1, and 2 is not 2.0."""

    values: Mapping[str, Any]

    @functools.cached_property
    def key(self) -> tuple:
        return tuple((name, _typed(value)) for name, value in sorted(self.values.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Options) and self.key == other.key


def _typed(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    # Hexadecimal text distinguishes 0.0 from -0.0, and makes NaN equal to NaN.
    return type(value), float(value).hex() if isinstance(value, float | np.floating) else value


def _remembered(build: Callable[..., Callable]) -> Callable[[Mapping[str, Any]], Callable]:
    """Return a function that maps options to `build(**options)`. A cache keeps the results of recent calls.

    JAX finds the cached trace of a function by the function's identity. For equal options, the result must therefore be
    the same object.
    """
    cached = functools.lru_cache(REMEMBERED)(lambda options: build(**options.values))
    return lambda options: cached(_Options(options))


def differentiable(kernel: Callable, formula: Callable, batch_axes: BatchAxes | None = None) -> Callable:
    """Return a function that computes its values by `kernel` and its derivatives by `formula`, because JAX cannot
    differentiate a kernel.

    Both take `(*arrays, **options)` and compute the same function. Every kernel of jaxbp is wrapped in `differentiable`
    once. Gradients of gradients and Hessian-vector products, also in forward over reverse mode, therefore work with
    kernels. With `batch_axes`, each device of a mesh runs the kernel on a part of the examples: see `jaxbp.sharding`.
    """

    @_remembered
    def bind(**options):
        formula_ = functools.partial(formula, **options)
        # Without jit, JAX would trace and compile the kernel at every call.
        shared = over_devices(functools.partial(kernel, **options), formula_, batch_axes)
        call = jax.custom_jvp(jax.jit(shared, inline=True))

        @call.defjvp
        def _(primals, tangents):
            return call(*primals), jax.jvp(formula_, primals, tangents)[1]

        return call

    @functools.wraps(kernel)
    def wrapped(*arrays, **options):
        return bind(options)(*arrays)

    return wrapped


# ------------------------------------------------------------------------------------------------------------------ Op


class Op:
    """A pure function in up to three implementations, selected by one argument.

    Args:
      name: the public name, for error messages and for scopes in compiled programs.
      implementations: maps names to `function(*arrays, **options)`. Options are static and hashable. A call with
        `implementation=None` uses the function under the key None if there is one. Otherwise `default` chooses.
      unsupported: `(*arrays, **options) -> str | None`, which returns why the kernel does not support the arguments.
      default: the default implementations, or a function `(*arrays, **options) -> DefaultImplementation` if they depend
        on the arguments.
      partitioned: whether each device of a mesh runs the kernel on a part of the examples. On a mesh,
        `implementation=None` chooses the kernel only if it is partitioned.
      sharded_like: `(*arrays) -> results`. The results of the op get the sharding of these results. It is needed on a
        mesh with explicit axes if JAX cannot infer the sharding from the implementation "autodiff".
      jit: whether to compile the whole op if it is called outside of any transformation, which makes small calls
        faster. The functions then see tracers in place of arrays, as under `jax.jit`.
    """

    def __init__(
        self,
        name: str,
        implementations: Mapping[str | None, Callable],
        *,
        unsupported: Callable[..., str | None] | None = None,
        default: DefaultImplementation | Callable[..., DefaultImplementation] | None = None,
        partitioned: bool = False,
        sharded_like: Callable | None = None,
        jit: bool = False,
    ):
        if unknown := set(implementations) - {*IMPLEMENTATIONS, None}:
            raise ValueError(f"{name}: implementations has {sorted(unknown)}; wants names among {IMPLEMENTATIONS}")
        made_of = dict(name=name, implementations=implementations, unsupported=unsupported, default=default)
        self._made_of = Op, made_of | dict(partitioned=partitioned, sharded_like=sharded_like, jit=jit)
        self.name = name
        self.implementations = {key: jax.named_scope(name)(value) for key, value in implementations.items()}
        self.unsupported = unsupported or (lambda *arrays, **options: None)
        self.default = default or DefaultImplementation()
        self.partitioned, self.sharded_like = partitioned, sharded_like
        self._bound = {
            key: _remembered(functools.partial(functools.partial, f)) for key, f in self.implementations.items()
        }
        self._compiled = self._compiler() if jit else None
        self._renamed: dict[str, Op] = {}

    def __call__(self, *arrays: Any, implementation: Implementation = None, **options: Any) -> Any:
        """Call the selected implementation.

        Raises:
          TypeError: an option is not hashable.
          ValueError: the name of the implementation is unknown.
          NotImplementedError: the op lacks this implementation, or its kernel does not support the arguments.
        """
        if self._compiled and not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(arrays)):
            # After an error, `_run` repeats the call. It raises the same error, but without JAX's messages about
            # tracing and hashing.
            with contextlib.suppress(NotImplementedError, TypeError, ValueError):
                return self._compiled({**options, "implementation": implementation})(*arrays)
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
            raise ValueError(f"{self.name}: implementation is {implementation!r}; wants {wanted} or None")
        if implementation not in self.implementations:
            has = ", ".join(map(repr, self.implementations))
            raise NotImplementedError(f"{self.name}: has no implementation {implementation!r}; it has {has}")
        if implementation == "pallas" and (reason := self.unsupported(*arrays, **options)):
            raise NotImplementedError(
                f"{self.name}: implementation='pallas' does not take {reason}; 'xla', 'autodiff' and None do"
            )
        return self._bind(implementation, options)(*arrays)

    def _sharded_like(self, implementation: str | None, options: Mapping[str, Any]) -> Callable | None:
        """Return the function from which JAX infers the sharding of the op's results.

        This is `sharded_like` if it is given, else the implementation "autodiff". For a call of "autodiff" without
        `sharded_like`, return None, because JAX infers the sharding of its results anyway.
        """
        if self.sharded_like or implementation == "autodiff" or "autodiff" not in self.implementations:
            return self.sharded_like
        return self._bind("autodiff", options)

    def _by_platform(self, arrays: tuple, options: Mapping[str, Any]) -> Any:
        """Run the default implementation for the platform, which is known only when the program is lowered."""
        default = self.default(*arrays, **options) if callable(self.default) else self.default
        gpu, older_gpu, elsewhere = map(self._available, (default.gpu, default.older_gpu, default.elsewhere))
        if gpu == "pallas" and not (
            device.kernels_run()
            and (self.partitioned or mesh_of(arrays) is None)
            and self.unsupported(*arrays, **options) is None
        ):
            gpu = older_gpu
        if gpu == elsewhere:
            return self._bind(gpu, options)(*arrays)
        # On a machine with a GPU, a function may still be lowered for the CPU, and must be correct there, too.
        return lax.platform_dependent(*arrays, cuda=self._bind(gpu, options), default=self._bind(elsewhere, options))

    def _compiler(self) -> Callable[[Mapping[str, Any]], Callable]:
        """Return a function that maps options, including `implementation`, to the compiled op. A cache keeps the
        results."""

        def compiled(implementation, **options):
            return jax.jit(lambda *arrays: self._run(arrays, implementation, options))

        return _remembered(compiled)

    def _bind(self, implementation: str | None, options: Mapping[str, Any]) -> Callable:
        """Return the function of an implementation with its options bound. For equal options, it is the same object."""
        try:
            return self._bound[implementation](options)
        except TypeError:
            for name, value in options.items():
                try:
                    hash(value)
                except TypeError:
                    is_array = isinstance(value, Array | np.ndarray)
                    got = "an array" if is_array else f"a {type(value).__name__}"
                    why = "options are static" + (", arrays are passed by position" if is_array else "")
                    raise TypeError(f"{self.name}: {name} is {got}; wants something hashable: {why}") from None
            raise

    def _available(self, implementation: str) -> str:
        """Return `implementation`, or another implementation if this op lacks it."""
        return next(name for name in (implementation, "xla", "autodiff", "pallas") if name in self.implementations)

    def named(self, name: str) -> "Op":
        """Return the same op with another name for error messages. Each name has one object, which compiles once."""
        if name not in self._renamed:
            renamed = self._renamed[name] = object.__new__(type(self))
            renamed.__dict__ = self.__dict__ | {"name": name}
            renamed._compiled = renamed._compiler() if self._compiled else None
        return self._renamed[name]

    def __reduce__(self):
        # Pickle only the arguments of the constructor. Functions among them must be defined at the top level of a
        # module. Functions with bound options are built again after unpickling.
        return _made_again, (type(self), *self._made_of, self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {', '.join(map(str, self.implementations))})"


def _made_again(kind: type[Op], maker: type[Op], arguments: Mapping[str, Any], name: str) -> Op:
    op = object.__new__(kind)
    maker.__init__(op, **arguments)
    op.name = name
    return op


def per_implementation(function: Callable, implementations: tuple[Implementation, ...] = ("pallas", "xla")) -> dict:
    """Return a dict that maps each implementation to `function` with this `implementation=`.

    `function` is made of ops and passes `implementation=` on to them.
    """
    return {name: functools.partial(function, implementation=name) for name in implementations}


# ---------------------------------------------------------------------------------------------------------------- Pair


class Pair(Op):
    """A pure function and its hand-written backward.

    Args:
      forward: `forward(*arrays, **options) -> y`, in jnp. Options are static and hashable. An array may be None.
      backward: a dict from implementations to `backward(dy, *saved, **options)`, or an `Op` with these implementations.
        It returns a tuple with one gradient, or None, per array of the forward, or one array if there is only one.
        "xla" is a formula in jnp; "pallas" is a kernel that computes the same function.
      save: `save(*arrays, **options) -> (y, saved)`, one function, or a dict with one function per implementation. By
        default, it saves the arguments. A kernel that it calls must be `differentiable`.
      residuals: `residuals(*arrays, **options) -> saved`, for `vjp`, which does not need y. By default, `save` computes
        them. If the residuals are the arguments, `vjp` does not run the forward.
      has_aux: whether the forward returns `(y, *aux)`. Only y has a gradient, dy.
      linear: whether the forward is linear in its only array. The shape of this array is the option `shape`. Nothing is
        saved.
      batch_axes: a function of `(dy, *saved)` that returns their batch axes. Each device of a mesh then runs the
        kernel on a part of the examples: see `jaxbp.sharding`.
      name, unsupported, default, partitioned, jit: as in `Op`. `batch_axes` implies `partitioned`.
      default_vjp: like `default`, for `vjp`. If it is a function, its arguments are `(dy, *arrays)`. By default, it is
        `default`.

    Attributes:
      forward: the forward.
      backward: an `Op` of `(dy, *saved)`.
      vjp: an `Op` of `(dy, *arrays)`, or of `(dy,)` if linear. It computes the residuals, and returns the gradients
        with respect to the floating arrays. Its implementation "autodiff" is `jax.vjp` of the forward.

    Example:
      >>> square = Pair(lambda x: x * x, {"xla": lambda dy, x: 2 * x * dy}, name="square")
      >>> jax.grad(square)(3.0)
      Array(6., dtype=float32, weak_type=True)
    """

    def __init__(
        self,
        forward: Callable,
        backward: Mapping[str, Callable] | Op,
        *,
        save: Callable | Mapping[str, Callable] | None = None,
        residuals: Callable | None = None,
        has_aux: bool = False,
        linear: bool = False,
        name: str | None = None,
        unsupported: Callable[..., str | None] | None = None,
        default: DefaultImplementation | Callable[..., DefaultImplementation] | None = None,
        default_vjp: DefaultImplementation | Callable[..., DefaultImplementation] | None = None,
        batch_axes: BatchAxes | None = None,
        partitioned: bool = False,
        jit: bool = False,
    ):
        name = name or name_of(forward)
        made_of = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        partitioned = partitioned or batch_axes is not None
        if not isinstance(backward, Op):
            if not isinstance(backward, Mapping):
                got = f"{name}: backward is a {type(backward).__name__}"
                raise TypeError(f'{got}; wants a dict, implementation -> function, say {{"xla": ...}}, or an Op')
            backward = Op(f"{name}_backward", _kernels_differentiable(backward, batch_axes), jit=jit)
        if linear:
            save = functools.partial(_saving_nothing, forward)
        elif save is None:
            save, residuals = functools.partial(saving_arguments, forward), residuals or given_arguments
        rules = {
            implementation: (save[implementation] if isinstance(save, Mapping) else save, rule)
            for implementation, rule in backward.implementations.items()
            if not isinstance(save, Mapping) or implementation in save
        }
        rules.pop("autodiff", None)
        paired = {
            # With `implementation=None`, a call without a gradient also computes y by the function `save`, because its
            # forward is the fastest one.
            key: _paired(name, functools.partial(_value, save_) if key is None else forward, save_, rule, has_aux)
            for key, (save_, rule) in rules.items()
        }
        vjps = {key: _vjp(name, forward, save_, residuals, rule, linear) for key, (save_, rule) in rules.items()}
        autodiff = functools.partial(_transposed if linear else _differentiated, forward, has_aux)
        super().__init__(
            name,
            paired | {"autodiff": forward},
            unsupported=unsupported,
            default=default,
            partitioned=partitioned,
            jit=jit,
        )
        self._made_of = Pair, made_of
        self.forward = forward
        self.backward = backward
        self.vjp = Op(
            f"{name}_backward",
            vjps | {"autodiff": autodiff},
            unsupported=self.unsupported if linear else functools.partial(_behind_dy, self.unsupported),
            default=default_vjp or (functools.partial(_behind_dy, default) if callable(default) else default),
            partitioned=partitioned,
            jit=jit,
        )


def transpose(linear: Callable[[Array], Array], shape: tuple[int, ...], dy: Array) -> Array:
    """Return the gradient of a linear function with respect to its argument, an array of this shape, by JAX's autodiff.

    The gradient is the same at every point, so it is computed at zero.
    """
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


def _value(save, *arrays, **options):
    return save(*arrays, **options)[0]


def saving_arguments(forward: Callable, *arrays: Any, **options: Any) -> tuple[Any, tuple]:
    """Return `(y, arguments)`. This is the `save` of a pair whose backward needs only the arguments."""
    return forward(*arrays, **options), arrays


def given_arguments(*arrays: Any, **options: Any) -> tuple:
    """Return the arguments. This is the `residuals` of a pair whose `save` is `saving_arguments`."""
    return arrays


def _saving_nothing(forward, *arrays, **options):
    return forward(*arrays, **options), ()


def _paired(name: str, forward: Callable, save: Callable, backward: Callable, has_aux: bool) -> Callable:
    """Return `forward` as a function with `jax.custom_vjp`, whose gradient is `backward`."""

    @_remembered
    def bind(**options):
        def run(*arrays):
            return mapped_axis_first(forward(*arrays, **options))[0]

        def save_with_kinds(*arrays):
            y, saved = mapped_axis_first(*save(*arrays, **options))
            return y, (saved, _Kinds.of(arrays))

        def gradients(saved, dy):
            saved, kinds = saved
            found = backward(dy[0] if has_aux else dy, *saved, **options)
            return _checked(name, positional_names(forward, len(kinds.each)), kinds, found)

        call = jax.custom_vjp(run)
        call.defvjp(save_with_kinds, gradients)
        return call

    def paired(*arrays, **options):
        try:
            return bind(options)(*arrays)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            message = f'{name}: has no forward mode, because it has a backward; use implementation="autodiff"'
            raise TypeError(message) from error

    return paired


def _vjp(
    name: str, forward: Callable, save: Callable, residuals: Callable | None, backward: Callable, linear: bool
) -> Callable:
    """Return `backward` as a function of the forward's arguments."""

    def vjp(dy, *arrays, **options):
        if linear:
            return backward(dy, **options)
        saved = residuals(*arrays, **options) if residuals else save(*arrays, **options)[1]
        found = backward(dy, *saved, **options)
        return _of_floating(_checked(name, positional_names(forward, len(arrays)), _Kinds.of(arrays), found), arrays)

    return vjp


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Kinds:
    """The shape and the dtype of each argument, as a key of a cache. The entry of an argument that is not an array is
    None."""

    each: tuple[tuple[tuple[int, ...], np.dtype] | None, ...]

    @classmethod
    def of(cls, arrays: tuple) -> "_Kinds":
        return cls(tuple((a.shape, a.dtype) if hasattr(a, "dtype") and hasattr(a, "shape") else None for a in arrays))


def _checked(op: str, names: list[str], kinds: _Kinds, found: Any) -> tuple:
    """Return `found`, the gradients that a backward returned, as a tuple with one gradient, or None, per argument.

    Raise TypeError or ValueError if their number, shapes, or dtypes are wrong.
    """
    gradients, each = _tuple(found), f"a gradient for each of {', '.join(names)}"
    if isinstance(found, list):
        raise TypeError(f"{op}_backward: returns a list; wants a tuple, {each}")
    if len(gradients) != len(names):
        raise ValueError(f"{op}_backward: returns {len(gradients)} gradients; wants {len(names)}, {each}")
    for name, kind, gradient in zip(names, kinds.each, gradients, strict=True):
        if gradient is None or kind is None:
            continue
        dtype = jnp.result_type(gradient)
        if not jnp.issubdtype(kind[1], jnp.inexact):
            if dtype != jax.dtypes.float0:
                raise TypeError(f"{op}_backward: {name} has dtype {kind[1]}, but a gradient of {dtype}; wants None")
            continue
        if jnp.shape(gradient) != kind[0]:
            shape = jnp.shape(gradient)
            raise ValueError(
                f"{op}_backward: the gradient of {name} has shape {shape}; wants {kind[0]}, the shape of {name}"
            )
        if dtype != kind[1]:
            raise TypeError(
                f"{op}_backward: the gradient of {name} has dtype {dtype}; wants {kind[1]}, the dtype of {name}"
            )
    return gradients


def positional_names(function: Callable, count: int) -> list[str]:
    """Return names for the first `count` positional arguments of a function. If its signature has fewer names, the
    other arguments get numbers."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names[:count], *(f"argument {i}" for i in range(len(names), count))]


def name_of(function: Callable) -> str:
    """Return the name of a function, for error messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)


def _differentiated(forward, has_aux, dy, *arrays, **options):
    """Return the gradients of `forward` with respect to its floating arrays, by JAX's autodiff."""
    floating = [i for i, a in enumerate(arrays) if _is_floating(a)]

    def of_floating(*values):
        given = dict(zip(floating, values, strict=True))
        y = forward(*(given.get(i, a) for i, a in enumerate(arrays)), **options)
        return y[0] if has_aux else y

    _, vjp = jax.vjp(of_floating, *(arrays[i] for i in floating))
    return _one_or_tuple(vjp(dy))


def _transposed(forward, has_aux, dy, **options):
    return transpose(functools.partial(forward, **options), options["shape"], dy)


def _of_floating(gradients, arrays):
    pairs = zip(_tuple(gradients), arrays, strict=True)
    return _one_or_tuple(tuple(gradient for gradient, a in pairs if _is_floating(a)))


def _is_floating(a: Any) -> bool:
    return hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)


def _tuple(gradients: Any) -> tuple:
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _one_or_tuple(gradients: tuple) -> Any:
    return gradients if len(gradients) > 1 else gradients[0]
