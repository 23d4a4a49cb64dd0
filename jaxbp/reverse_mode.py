"""Forward mode and transposes of functions that have a hand-written backward (docs/architecture.md)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_kernels.core.launch import unify_varying_axes


def reverse_mode_only(arrays: Any, op: str) -> Any:
    """Return the arrays unchanged, but make forward-mode differentiation raise an error that names the op."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure.unflatten(_reverse_mode_only_p.bind(*leaves, op=op))


_reverse_mode_only_p = Primitive("reverse_mode_only")
_reverse_mode_only_p.multiple_results = True
_reverse_mode_only_p.def_impl(lambda *arrays, op: list(arrays))
_reverse_mode_only_p.def_abstract_eval(lambda *arrays, op: list(arrays))
mlir.register_lowering(_reverse_mode_only_p, lambda context, *arrays, op: list(arrays))
batching.primitive_batchers[_reverse_mode_only_p] = lambda arrays, axes, op: (
    _reverse_mode_only_p.bind(*arrays, op=op),
    axes,
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


_tangents_p = Primitive("reverse_mode_only_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_impl(_refuse)
_tangents_p.def_abstract_eval(lambda *tangents, op: list(tangents))
mlir.register_lowering(_tangents_p, _refuse)
ad.primitive_jvps[_tangents_p] = _refuse
batching.primitive_batchers[_tangents_p] = _refuse


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
_linear_call_p.def_impl(lambda x, *, program, **_: jaxpr_as_fun(program)(x))
_linear_call_p.def_abstract_eval(lambda x, *, program, **_: program.out_avals)
mlir.register_lowering(
    _linear_call_p, mlir.lower_fun(lambda x, *, program, **_: jaxpr_as_fun(program)(x), multiple_results=True)
)


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


def transposable(
    function: Callable[..., Array], arrays: Sequence[Any], linear_in: Sequence[Sequence[int]], op: str
) -> Array:
    """Return `function(*arrays)`, and support `jax.linear_transpose`. Each entry of `linear_in` is a set of indices of
    arrays in which the function is jointly linear."""
    if not any(isinstance(a, jax.core.Tracer) for a in arrays):
        return function(*arrays)
    leaves, structure = jax.tree.flatten(tuple(arrays))
    given = [i for i, a in enumerate(arrays) if a is not None]
    sets = tuple(frozenset(given.index(i) for i in indices if i in given) for indices in linear_in)
    (y,) = _bind_transposable(lambda *leaves: (function(*structure.unflatten(leaves)),), leaves, sets, op)
    return y


def _bind_transposable(function, arrays, linear_in, op):
    program = jax.make_jaxpr(function)(*arrays)
    return _transposable_p.bind(*arrays, program=program, function=function, linear_in=linear_in, op=op)


_transposable_p = Primitive("transposable")
_transposable_p.multiple_results = True
_transposable_p.def_abstract_eval(lambda *arrays, program, **_: program.out_avals)


def _evaluated(*arrays, program, **_):
    return jaxpr_as_fun(program)(*arrays)


_transposable_p.def_impl(_evaluated)
mlir.register_lowering(_transposable_p, mlir.lower_fun(_evaluated, multiple_results=True))
# JAX calls this rule before it lowers a program.
_transposable_p.to_lojax = _evaluated


def _of_some(function, arrays, indices):
    def of_some(*some):
        replaced = dict(zip(indices, some, strict=True))
        return function(*(replaced.get(i, a) for i, a in enumerate(arrays)))

    return of_some


def _differentiated(arrays, tangents, *, function, **_):
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0]
    of_moving = _of_some(function, arrays, moving)
    return jax.jvp(of_moving, *([values[i] for i in moving] for values in (arrays, tangents)))


def _transposed_in_some(cotangents, *arrays, function, linear_in, op, **_):
    unknown = [i for i, a in enumerate(arrays) if ad.is_undefined_primal(a)]
    if not any(indices.issuperset(unknown) for indices in linear_in):
        raise TypeError(
            f"{op}: linear_transpose is with respect to arrays {unknown}; wants arrays in which {op} is jointly linear"
        )
    known = {i: a for i, a in enumerate(arrays) if i not in unknown}
    avals, count = [arrays[i].aval for i in unknown], len(cotangents)

    def gradients(*leaves):
        dys, constants = leaves[:count], dict(zip(known, leaves[count:], strict=True))
        _, zeros = unify_varying_axes((leaves, [jnp.zeros(a.shape, a.dtype) for a in avals]))
        whole = [constants.get(i) for i in range(len(arrays))]
        return jax.vjp(_of_some(function, whole, unknown), *zeros)[1](dys)

    dys = map(ad.instantiate_zeros, cotangents)
    found = iter(_bind_transposable(gradients, (*dys, *known.values()), (frozenset(range(count)),), op))
    return [next(found) if i in unknown else None for i in range(len(arrays))]


def _mapped(axis_data, arrays, axes, *, function, linear_in, op, **_):
    mapped = jax.vmap(function, tuple(axes), spmd_axis_name=axis_data.spmd_name)
    results = _bind_transposable(mapped, arrays, linear_in, op)
    return results, [0] * len(results)


ad.primitive_jvps[_transposable_p] = _differentiated
ad.primitive_transposes[_transposable_p] = _transposed_in_some
batching.fancy_primitive_batchers[_transposable_p] = _mapped
