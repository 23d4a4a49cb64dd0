"""Pair a function with its hand-written backward."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxbp.common import checks
from jaxbp.common.numerics import weakly_typed
from jaxbp.pairing.gradients import CastOnce, by_autodiff, of_floating, positional_names
from jaxbp.pairing.mesh import BatchAxes
from jaxbp.pairing.op import (
    DefaultImplementation,
    Implementation,
    Op,
    Options,
    differentiable,
    name_of,
)
from pallas_kernels.core.arrays import unify_varying_axes
from pallas_kernels.core.launch import remat_rules

P = ParamSpec("P")
R = TypeVar("R")


class Pair(Op[P, R]):
    """A pure function and its hand-written backward.

    Args:
      forward: `forward(*arrays, **options) -> y`, in jnp. An array may be None or a pytree of arrays.
      backward: a dict from implementations to `backward(dy, *saved, **options)`, or an `Op` of `(dy, *saved)`. "xla" is
        a formula in jnp, and "pallas" is a kernel for the same function. The backward returns a tuple with one gradient
        per array of the forward, or one array if there is only one. The gradient of an integer array is None or has
        dtype float0. In the gradient of a pytree, any subtree may be None, which means zero.
      save: `save(*arrays, **options) -> (y, saved)`, or a dict with one such function per implementation. `saved` is a
        tuple of pytrees, by default the result of `residuals`, or else the arguments. Its arrays that are not arguments
        get the op's name, for the policies of `jax.checkpoint`. If `save` calls a kernel, wrap the kernel in
        `differentiable`.
      residuals: `residuals(*arrays, **options) -> saved`, for `vjp`, which does not need y. By default, `vjp` calls
        `save`.
      has_aux: whether the forward returns `(y, *aux)`. Only y has a gradient, dy.
      linear: whether the forward is linear in its only array. If so, each call of the pair must pass the array's shape
        as the option `shape`, and the backward gets no residuals. Forward mode and `jax.linear_transpose` then work.
      batch_axes: the batch axes of `(dy, *saved)` by the names of the "xla" backward's arguments, as `Axes` (see
        `batched`), or a function of these arrays that returns `Axes`. It implies `partitioned`.
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
        checks.function("Pair", "forward", forward)
        name = name or name_of(forward)
        made_of = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        partitioned = partitioned or batch_axes is not None
        if not isinstance(backward, Op):
            if not isinstance(backward, Mapping):
                got = f"{name}: backward is a {type(backward).__name__}"
                raise TypeError(f'{got}; wants a dict from implementations to functions, say {{"xla": ...}}, or an Op')
            backward = Op(f"{name}_backward", _kernels_differentiable(backward, batch_axes), jit=jit)
        if linear or save is None:
            residuals = (lambda *arrays, **options: ()) if linear else residuals or given_arguments
            save = functools.partial(_saving, residuals, forward)
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
        vjps: dict[str, Callable] = {key: functools.partial(self._vjp, key) for key in self._rules}
        if isinstance(backward.implementations.get("xla"), CastOnce):  # `save` uses the arrays, too
            vjps = cast_once(vjps)
        self.vjp: Op[..., Any] = Op(
            f"{name}_backward",
            vjps | {"autodiff": self._vjp_by_autodiff},
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
                kinds = _Kinds.of((x,))
                return linear_call(forward, lambda dy: self._checked(kinds, backward(dy))[0], x)

            return self._scoped(implementation, call_linear)

        call = jax.custom_vjp(lambda *arrays: mapped_axis_first(forward(*arrays))[0])

        def save_with_kinds(*arrays):
            y, saved = _saved(name, save(*arrays))
            if self._has_aux and not isinstance(y, tuple):
                raise TypeError(f"{name}: returns a result that is no tuple; wants (y, *aux), because has_aux is True")
            y, saved = mapped_axis_first(*_named(name, arrays, y, saved))
            return y, (saved, _Kinds.of(arrays))

        def gradients(saved, dy):
            saved, kinds = saved
            dy = dy[0] if self._has_aux else dy
            return self._checked(kinds, _called(self.backward.name, backward, dy, saved))

        call.defvjp(save_with_kinds, gradients)

        return self._scoped(implementation, lambda *arrays: call(*reverse_mode_only(arrays, name)))

    def _checked(self, kinds: "_Kinds", gradients: Any) -> tuple:
        return kinds.checked(f"{self.name}_backward", self.forward, gradients)

    def _vjp(self, implementation: str | None, dy: Any, *arrays: Any, **options: Any) -> Any:
        save, backward = self._rules[implementation]
        if self._residuals:
            saved = self._residuals(*arrays, **options)
        else:
            _, saved = _saved(self.name, save(*arrays, **options))
        found = _called(self.backward.name, functools.partial(backward, **options), dy, saved)
        return found if self._linear else of_floating(self._checked(_Kinds.of(arrays), found), arrays)

    def _vjp_by_autodiff(self, dy: Any, *arrays: Any, **options: Any) -> Any:
        forward = functools.partial(self.forward, **options)
        if self._linear:
            return transpose(forward, options["shape"], dy)
        return by_autodiff((lambda *arrays: forward(*arrays)[0]) if self._has_aux else forward, dy, *arrays)


def cast_once(implementations: Mapping[str, Callable]) -> dict[str, Callable]:
    """Return the implementations of a backward, but cast arrays in half precision once in "xla", as in `CastOnce`, and
    give "pallas" the derivatives of this formula."""
    formula = CastOnce(implementations["xla"])
    others = {key: differentiable(kernel, formula) for key, kernel in implementations.items() if key == "pallas"}
    return {**implementations, "xla": formula, **others}


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


def _called(name, backward, dy, saved):
    try:
        return backward(dy, *saved)
    except TypeError as raised:
        try:
            inspect.signature(backward).bind(dy, *saved)
        except ValueError:  # the backward does not take an option
            raise TypeError(f"{name}: {raised}; wants a backward with the options of the forward") from None
        except TypeError as error:
            raise TypeError(
                f"{name}: does not take dy and {len(saved)} saved arrays ({error}); wants `save=` in `Pair`, which "
                "returns (y, saved), or a backward of dy and the forward's arguments"
            ) from None
        raise


def _behind_dy(function, dy, *arrays, **options):
    return function(*arrays, **options)


def _floating_arguments(*arrays):
    return of_floating(jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, arrays), arrays)


def _value(save, *arrays, **options):
    return save(*arrays, **options)[0]


def _saving(residuals, forward, *arrays, **options):
    return forward(*arrays, **options), residuals(*arrays, **options)


def given_arguments(*arrays: Any, **options: Any) -> tuple:
    return arrays


saving_arguments = functools.partial(_saving, given_arguments)


def _saved(name: str, found: Any) -> tuple[Any, tuple]:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], tuple):
        return found
    kind = lambda value: "an array" if hasattr(value, "dtype") else f"a {type(value).__name__}"  # noqa: E731
    parts = ", ".join(map(kind, found)) if isinstance(found, tuple) else ""
    came = f"({parts})" if parts else kind(found)
    raise TypeError(f"{name}: save returns {came}; wants (y, saved), where saved is a tuple, such as (y, (x,))")


def _named(name: str, arrays: tuple, y: Any, saved: Any) -> tuple[Any, Any]:
    # A residual may also be in the result y.
    given = {id(a) for a in jax.tree.leaves(arrays)}
    named = {id(a): checkpoint_name(a, name) for a in jax.tree.leaves(saved) if id(a) not in given}
    return jax.tree.map(lambda a: named.get(id(a), a), (y, saved))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    weak_type: bool

    @classmethod
    def of(cls, path: tuple, a: Any) -> "_Leaf":
        kind = jax.typeof(a)  # `a` may be a Python number
        return cls(jax.tree_util.keystr(path), kind.shape, kind.dtype, kind.weak_type)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Kinds:
    """The structures, shapes, and dtypes of an op's arguments, which its gradients must match."""

    leaves: tuple[_Leaf, ...]
    structure: Any

    @classmethod
    def of(cls, arguments: tuple) -> "_Kinds":
        leaves, structure = jax.tree_util.tree_flatten_with_path(arguments)
        return cls(tuple(_Leaf.of(path[1:], a) for path, a in leaves), structure)

    def checked(self, op: str, forward: Callable, gradients: Any) -> tuple:
        kinds = self.structure.unflatten(self.leaves)
        names = lambda: positional_names(forward, len(kinds))  # noqa: E731
        if isinstance(gradients, list):
            raise TypeError(f"{op}: returns a list; wants a tuple with one gradient for each of {', '.join(names())}")
        if gradients is None and [isinstance(kind, _Leaf) and _is_inexact(kind.dtype) for kind in kinds] == [True]:
            raise TypeError(f"{op}: returns None; wants one gradient for each of {', '.join(names())}")
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        if len(gradients) != len(kinds):
            wanted = f"wants {len(kinds)}, one gradient for each of {', '.join(names())}"
            raise ValueError(f"{op}: returns {len(gradients)} gradients; {wanted}")
        checked = []
        for i, (kind, gradient) in enumerate(zip(kinds, gradients, strict=True)):
            checked.append(_checked(op, lambda i=i: names()[i], kind, gradient))
        return tuple(checked)


def _is_inexact(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _checked(op: str, name: Callable[[], str], kinds: Any, gradient: Any) -> Any:
    if kinds is None or gradient is None:
        return gradient
    leaves, structure = jax.tree.flatten(gradient, is_leaf=lambda g: g is None)
    try:
        parts = structure.flatten_up_to(kinds)
    except ValueError:
        parts = [()]
    if not all(g is None or isinstance(kind, _Leaf) for g, kind in zip(leaves, parts, strict=True)):
        has, wanted = (jax.tree.structure(tree) for tree in (gradient, kinds))
        raise ValueError(f"{op}: the gradient of {name()} has structure {has}; wants {wanted}, as {name()}")
    found = []
    for g, kind in zip(leaves, parts, strict=True):
        if g is not None:
            dtype, is_integer = jnp.result_type(g), not _is_inexact(kind.dtype)
            wanted = jax.dtypes.float0 if is_integer else kind.dtype
            if dtype != wanted or (jnp.shape(g) != kind.shape and not is_integer):
                raise _mismatch(op, f"{name()}{kind.path}", kind, g, dtype, is_integer)
        found.append(weakly_typed(g, kind.dtype) if g is not None and kind.weak_type else g)
    return structure.unflatten(found)


def _mismatch(op: str, name: str, kind: _Leaf, gradient: Any, dtype: np.dtype, is_integer: bool) -> Exception:
    if is_integer:
        wanted = f"but {name} has dtype {kind.dtype}; wants None"
        return TypeError(f"{op}: the gradient of {name} has dtype {dtype}, {wanted}")
    if jnp.shape(gradient) != kind.shape:
        has = jnp.shape(gradient)
        return ValueError(f"{op}: the gradient of {name} has shape {has}; wants {kind.shape}, the shape of {name}")
    return TypeError(f"{op}: the gradient of {name} has dtype {dtype}; wants {kind.dtype}, the dtype of {name}")


def _identity(name: str, evaluate: Callable | None = None, batch: Callable | None = None) -> Primitive:
    """Return a primitive whose results are its arguments. `evaluate` replaces its evaluation and its lowering, and
    `batch` its batching rule."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(evaluate or (lambda *arrays, **_: list(arrays)))
    primitive.def_abstract_eval(lambda *arrays, **_: list(arrays))
    mlir.register_lowering(primitive, evaluate or (lambda context, *arrays, **_: list(arrays)))
    batching.primitive_batchers[primitive] = batch or (lambda arrays, axes, **kw: (primitive.bind(*arrays, **kw), axes))
    return primitive


def mapped_axis_first(results: Any, residuals: Any = ()) -> tuple[Any, Any]:
    """Return both arguments. Under `vmap`, the mapped axis of each array in `results` becomes its first axis, also
    where it is a residual.

    A `custom_vjp` function and its forward rule must both call `mapped_axis_first`. For a `vmap` within `jit`, JAX
    assumes that both have the mapped axis at the same position, and otherwise permutes axes without an error.
    """
    # One primitive per array, so that JAX can remove arrays that a program does not use.
    moved = {id(a): _mapped_axis_first_p.bind(a)[0] for a in jax.tree.leaves(results)}
    return jax.tree.map(lambda a: moved.get(id(a), a), (results, residuals))


_mapped_axis_first_p = _identity(
    "mapped_axis_first",
    batch=lambda arrays, axes: (_mapped_axis_first_p.bind(jnp.moveaxis(arrays[0], axes[0], 0)), [0]),
)
ad.deflinear2(_mapped_axis_first_p, lambda cotangents, *arrays: cotangents)


def reverse_mode_only(arrays: Any, op: str) -> Any:
    """Return the arrays unchanged, but make forward-mode differentiation raise an error that names the op."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure.unflatten(_reverse_mode_only_p.bind(*leaves, op=op))


_reverse_mode_only_p = _identity("reverse_mode_only")
# The forward pass of `jax_remat3` evaluates the forward rule of a `custom_vjp`, which has a forward mode.
remat_rules[_reverse_mode_only_p] = lambda trace, *arrays, op: (
    list(arrays),
    (),
    lambda _, *arrays: _reverse_mode_only_p.bind(*arrays, op=op),
)


def _linearized(arrays: Sequence[Any], tangents: Sequence[Any], op: str) -> tuple[Sequence[Any], list[Any]]:
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    results = list(tangents)
    for i, t in zip(moving, _tangents_p.bind(*(tangents[i] for i in moving), op=op), strict=True):
        results[i] = t
    return arrays, results


ad.primitive_jvps[_reverse_mode_only_p] = _linearized


def _refuse(*_, op: str, **__) -> None:
    raise TypeError(f'{op}: has no forward mode, because its backward is hand-written; use implementation="autodiff"')


_tangents_p = _identity("reverse_mode_only_tangents", _refuse, batch=_refuse)
# JAX calls `to_lojax` before it raises an error of forward mode that does not name the op.
_tangents_p.is_high, _tangents_p.to_lojax = lambda *_, **__: True, _refuse
ad.primitive_jvps[_tangents_p] = _refuse


ad.primitive_transposes[_tangents_p] = lambda cotangents, *tangents, op: [
    c if ad.is_undefined_primal(t) else None for c, t in zip(cotangents, tangents, strict=True)
]


def linear_call(function: Callable[[Array], Array], transposed: Callable[[Array], Array], x: Array) -> Array:
    """Return `function(x)` for a linear function with the gradient `transposed(dy)`. Unlike
    `jax.custom_derivatives.linear_call`, it has derivatives of all orders, in both modes, also under `vmap`."""
    if not isinstance(x, jax.core.Tracer):
        return function(x)
    (result,) = _linear_call_p.bind(x, program=jax.make_jaxpr(function)(x), function=function, transposed=transposed)
    return result


_linear_call_p = Primitive("linear_call")
_linear_call_p.multiple_results = True


def _evaluate(x, *, program, **_):
    return jaxpr_as_fun(program)(x)


_linear_call_p.def_impl(_evaluate)
_linear_call_p.def_abstract_eval(lambda x, *, program, **_: program.out_avals)
mlir.register_lowering(_linear_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
# JAX calls this rule before it lowers a program that contains a `custom_jvp` or a `custom_vjp`.
_linear_call_p.to_lojax = _evaluate


def _jvp(primals, tangents, **parameters):
    moved = lambda x: linear_call(parameters["function"], parameters["transposed"], x)  # noqa: E731
    return _linear_call_p.bind(*primals, **parameters), [moved(*map(ad.instantiate_zeros, tangents))]


def _transpose(cotangents, x, *, function, transposed, **_):
    (dy,) = cotangents
    return [ad.Zero(x.aval) if type(dy) is ad.Zero else linear_call(transposed, function, dy)]


def _batched(arrays, axes, *, function, transposed, **_):
    x = jnp.moveaxis(arrays[0], axes[0], 0)
    return [linear_call(jax.vmap(function), jax.vmap(transposed), x)], [0]


ad.primitive_jvps[_linear_call_p] = _jvp
ad.primitive_transposes[_linear_call_p] = _transpose
batching.primitive_batchers[_linear_call_p] = _batched
