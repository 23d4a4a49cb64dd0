"""Primitives that change how JAX differentiates and batches a pair, and do not change values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_kernels.core.launch import remat_rules


def _identity(name: str, evaluate: Callable | None = None, batch: Callable | None = None) -> Primitive:
    """Return a primitive whose results are its arguments. `evaluate` replaces its evaluation and its lowering."""
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


def _transposed(cotangents, *tangents, op):
    return [c if ad.is_undefined_primal(t) else None for c, t in zip(cotangents, tangents, strict=True)]


ad.primitive_transposes[_tangents_p] = _transposed


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
