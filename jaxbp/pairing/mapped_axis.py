from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def mapped_axis_first(results: Any, residuals: Any = ()) -> tuple[Any, Any]:
    """Return both arguments. Under `vmap`, the mapped axis of each array in `results` becomes its first axis, also
    where it is a residual.

    A `custom_vjp` function and its forward rule must both call `mapped_axis_first`. For a `vmap` within `jit`, JAX
    assumes that both have the mapped axis at the same position, and otherwise permutes axes without an error.
    """
    moved = {id(a): _mapped_axis_first_p.bind(a) for a in jax.tree.leaves(results)}
    return jax.tree.map(lambda a: moved.get(id(a), a), (results, residuals))


_mapped_axis_first_p = Primitive("mapped_axis_first")
_mapped_axis_first_p.def_impl(lambda x: x)
_mapped_axis_first_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_mapped_axis_first_p, lambda context, x: [x])
ad.deflinear2(_mapped_axis_first_p, lambda dy, x: [_mapped_axis_first_p.bind(dy)])


def _batched(arrays: tuple[Array], axes: tuple[int]) -> tuple[Array, int]:
    return _mapped_axis_first_p.bind(jnp.moveaxis(arrays[0], axes[0], 0)), 0


batching.primitive_batchers[_mapped_axis_first_p] = _batched
