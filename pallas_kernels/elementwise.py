"""One kernel for every element-wise formula: the formula is an argument."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import LANES, launch

_LENGTH = 4 * LANES


def elementwise(formula: Callable[..., Array], *arrays: Array) -> Array:
    """`formula(*arrays)`, element by element, in one pass over the arrays.

    Args:
      formula: takes float32 vectors, one an array, and returns one.
      arrays: of one shape.

    Returns:
      An array of that shape, in the first array's dtype.
    """
    shape, dtype, size = arrays[0].shape, arrays[0].dtype, arrays[0].size
    blocks = max(1, -(-size // _LENGTH))
    flat = [jnp.pad(a.ravel(), (0, blocks * _LENGTH - size)) for a in arrays]

    def body(*refs, block):
        *in_refs, out_ref = refs
        here = pl.ds(block * _LENGTH, _LENGTH)
        out_ref[here] = formula(*(ref[here].astype(jnp.float32) for ref in in_refs)).astype(dtype)

    out = jax.ShapeDtypeStruct((blocks * _LENGTH,), dtype)
    y = launch(body, *flat, out=out, grid={"block": blocks}, name=getattr(formula, "__name__", "elementwise"))
    return y[:size].reshape(shape)
