"""One kernel for every element-wise formula: the formula is an argument."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES

# Elements a thread handles: enough loads under way at once, unless that leaves multiprocessors without a program.
_EACH = (8, 4, 2, 1)
_WANTED_PROGRAMS = 1024
# Rows that begin at a multiple of it can be loaded in the widest pieces.
ALIGNED = 4
# Where rows are too short, arrays are broadcast in memory along as many axes as make them this long.
_LONG = 4 * LANES


def elementwise(formula: Callable, *arrays: Array, shape: tuple[int, ...] | None = None) -> Array | tuple[Array, ...]:
    """`formula(*arrays)`, element by element with NumPy's broadcasting, in one pass over the arrays.

    An array that is broadcast along whole rows, or has whole rows of its own, is read as it is; any other is
    broadcast in memory first.

    Args:
      formula: takes vectors, one an array, floats as float32 and integers as they are; returns one, or a tuple.
      arrays: of shapes that broadcast to `shape`.
      shape: of the result; by default what the arrays broadcast to.

    Returns:
      An array for each vector that the formula returns, in the first array's dtype.
    """
    shape = jnp.broadcast_shapes(*(a.shape for a in arrays)) if shape is None else shape
    dtype, size = arrays[0].dtype, math.prod(shape)
    scalars = [jax.ShapeDtypeStruct((), float32_or_integer(a.dtype)) for a in arrays]
    structure = jax.tree.structure(jax.eval_shape(formula, *scalars))
    if size == 0:
        return structure.unflatten([jnp.zeros(shape, dtype)] * structure.num_leaves)

    rows = Rows(shape, arrays)
    if rows.count > 1 and (rows.length < LANES or rows.length % ALIGNED):
        lengths = [math.prod(shape[axis:]) for axis in range(len(shape))]
        long = [axis for axis, n in enumerate(lengths) if n >= _LONG and n % ALIGNED == 0]
        rows = Rows(shape, arrays, axis=max(long, default=0))
    if rows.length < LANES:
        flat = [a if a.size == 1 else jnp.pad(a, (0, LANES - size)) for a in rows.arrays]
        rows = Rows((LANES,), flat)

    each = 2 if rows.mixed else _EACH[0]
    fits = [e for e in _EACH if e <= each and e * LANES <= rows.length]
    filled = [e for e in fits if rows.count * rows.length >= e * LANES * _WANTED_PROGRAMS]
    length = LANES * (filled[0] if filled else min(fits[0], 4))
    blocks = rows.length // length
    rest = -(-(rows.length % length) // LANES)

    def body(*refs, program):
        row, block = program // blocks, program % blocks

        def compute(start, length):
            values = formula(*(rows.load(i, ref, row, start, length) for i, ref in enumerate(refs[: len(arrays)])))
            for ref, value in zip(refs[len(arrays) :], jax.tree.leaves(values), strict=True):
                value = jnp.broadcast_to(value, (length,))
                ref[pl.ds(row * rows.length + start, length)] = value.astype(dtype)

        compute(block * length, length)
        if rest:
            # The last program of a row goes on; what is no whole vector it computes as part of the vector before.
            here = jnp.where(block == blocks - 1, rest, 0)

            def one_more(i, _):
                compute(jnp.minimum(blocks * length + i * LANES, rows.length - LANES), LANES)

            jax.lax.fori_loop(0, here, one_more, None)

    results = launch(
        body,
        *rows.arrays,
        out=(jax.ShapeDtypeStruct((rows.count * rows.length,), dtype),) * structure.num_leaves,
        grid={"program": rows.count * blocks},
        name=getattr(formula, "__name__", "elementwise").strip("_<>"),
    )
    return structure.unflatten([y[:size].reshape(shape) for y in results])


def float32_or_integer(dtype):
    """What a kernel computes in."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


class Rows:
    """Arrays that broadcast to `shape`, cut into rows along which each is either whole or one element.

    Args:
      axis: the first axis of a row; by default that of the longest rows. An array that is neither along these rows
        is broadcast in memory.

    Attributes:
      count, length: of the rows.
      arrays: the same, flat.
      mixed: whether vectors of different dtypes are loaded.
    """

    def __init__(self, shape: tuple[int, ...], arrays: Sequence[Array], axis: int | None = None):
        def fits(a, axis):
            return a.shape[axis:] == shape[axis:] or set(a.shape[axis:]) <= {1}

        arrays = [a.reshape((1,) * (len(shape) - a.ndim) + a.shape) for a in arrays]
        if axis is None:
            axis = next(axis for axis in range(len(shape) + 1) if all(fits(a, axis) for a in arrays))
        arrays = [a if fits(a, axis) else jnp.broadcast_to(a, a.shape[:axis] + shape[axis:]) for a in arrays]
        self.lead, self.length = shape[:axis], math.prod(shape[axis:])
        self.count = math.prod(self.lead)
        self.leads = [a.shape[:axis] for a in arrays]
        self.whole = [a.shape[axis:] == shape[axis:] for a in arrays]
        # A single element is loaded as float32.
        self.arrays = [
            a.ravel() if whole else a.ravel().astype(float32_or_integer(a.dtype))
            for a, whole in zip(arrays, self.whole, strict=True)
        ]
        self.mixed = len({a.dtype for a, whole in zip(arrays, self.whole, strict=True) if whole}) > 1

    def load(self, i: int, ref, row, start, length: int) -> Array:
        """From the i-th array: elements `start` to `start + length` of a row."""
        row = self.row_of(i, row)
        value = ref[pl.ds(row * self.length + start, length)] if self.whole[i] else ref[row]
        return jnp.broadcast_to(value.astype(float32_or_integer(value.dtype)), (length,))

    def row_of(self, i: int, row):
        """Which of the i-th array's own rows stands in a row."""
        lead = self.leads[i]
        if lead == self.lead:
            return row
        own, stride, behind = 0, 1, self.count
        place = []
        for size in self.lead:
            behind //= size
            place.append(row // behind % size)
        for at, size in zip(reversed(place), reversed(lead), strict=True):
            own, stride = (own + at * stride, stride * size) if size > 1 else (own, stride)
        return own
