"""One kernel for every sum of an element-wise formula: the formula is an argument."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, zeros_like
from pallas_kernels.pointwise.elementwise import ALIGNED, Rows, float32_or_integer

# Enough programs to have several on each multiprocessor of any current GPU.
_WANTED_PROGRAMS = 2048


def sum_over(formula: Callable, *arrays: Array, axes: Sequence[int]) -> Array | tuple[Array, ...]:
    """`Σ formula(*arrays)` over some axes of what the arrays broadcast to, in one pass over the arrays.

    Each program sums a part in a fixed order; the parts are then summed in a fixed order. What is less than a vector at
    the end of a row is summed by XLA.

    Args:
      formula: takes vectors, one an array, floats as float32 and integers as they are; returns one, or a tuple.
      arrays: of shapes that broadcast.
      axes: the axes to sum over, counted from the front.

    Returns:
      A float32 array for each vector that the formula returns, with size 1 along `axes`.
    """
    shape = jnp.broadcast_shapes(*(a.shape for a in arrays))
    arrays = [a.reshape((1,) * (len(shape) - a.ndim) + a.shape) for a in arrays]
    kept_shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    scalars = [jax.ShapeDtypeStruct((), float32_or_integer(a.dtype)) for a in arrays]
    structure = jax.tree.structure(jax.eval_shape(formula, *scalars))
    if math.prod(shape) == 0:
        return structure.unflatten([jnp.zeros(kept_shape)] * structure.num_leaves)

    long = [axis for axis, size in enumerate(shape) if size > 1]
    arrays = [a.reshape([a.shape[axis] for axis in long]) for a in arrays]
    sums = _sums(formula, arrays, tuple(shape[axis] for axis in long), [axis in axes for axis in long])
    return structure.unflatten([y.reshape(kept_shape) for y in sums])


def _sums(formula, arrays, shape, summed):
    """Sums over the axes that are `summed`, along whichever the memory is read in long pieces."""
    kept = [i for i, s in enumerate(summed) if not s]
    reduced = [i for i, s in enumerate(summed) if s]
    behind = kept[-1] + 1 if kept else 0
    above = [i for i in reduced if math.prod(shape[i + 1 :]) >= LANES]
    if behind < len(shape) and math.prod(shape[behind:]) >= LANES:
        sums, rest = _sums_of_rows(formula, arrays, shape, behind), summed[:behind]
    elif above:
        axis = max(above, key=lambda i: shape[i])
        sums, rest = _sums_of_columns(formula, arrays, shape, axis), [*summed[:axis], *summed[axis + 1 :]]
    elif math.prod(shape[i] for i in reduced) >= LANES:
        order = kept + reduced
        moved = [a.transpose(order) for a in arrays]
        sums, rest = _sums_of_rows(formula, moved, tuple(shape[i] for i in order), len(kept)), []
    else:
        # Short in every direction: columns, beside each other and filled up with zeros.
        columns = math.prod(shape[i] for i in kept)
        flat = [jnp.broadcast_to(a, shape).transpose(reduced + kept).reshape(-1, columns) for a in arrays]
        filled = [jnp.pad(a, ((0, 0), (0, max(0, LANES - columns)))) for a in flat]
        sums, rest = _sums_of_columns(formula, filled, filled[0].shape, 0), []
        sums = [y[:columns] for y in sums]
    return [jnp.sum(y, axis=tuple(i for i, s in enumerate(rest) if s)) if any(rest) else y for y in sums]


def _sums_of_rows(formula, arrays, shape, axis):
    """Sums over all axes from `axis` on."""
    rows = Rows(shape, arrays, axis)
    length = _length(rows, 16)
    steps = rows.length // length
    sums = _launch(formula, rows, rows.count, 1, steps, length, lambda row, _, step: (row, step * length), to_one=True)
    if steps * length < rows.length:
        flat = [a.reshape((*lead, -1)) for a, lead in zip(rows.arrays, rows.leads, strict=True)]
        ends = [a[..., steps * length :] if whole else a for a, whole in zip(flat, rows.whole, strict=True)]
        rest = formula(*(a.astype(float32_or_integer(a.dtype)) for a in ends))
        behind = [jnp.broadcast_to(jnp.sum(y, axis=-1), rows.lead) for y in jax.tree.leaves(rest)]
        sums = [y.reshape(rows.lead) + z for y, z in zip(sums, behind, strict=True)]
    return [y.reshape(rows.lead) for y in sums]


def _sums_of_columns(formula, arrays, shape, axis):
    """Sums over one axis, with at least a vector of elements behind it."""
    rows = Rows(shape, arrays, axis + 1)
    length = _length(rows, 4)
    blocks = -(-rows.length // length)
    steps, last = shape[axis], rows.length - length

    def place(row, block, step):
        return row * steps + step, jnp.minimum(block * length, last)

    sums = _launch(formula, rows, math.prod(shape[:axis]), blocks, steps, length, place, to_one=False)
    # The last vector lies partly on the one before it.
    ends = (blocks - 1) * length
    sums = [jnp.concatenate([y[:, :ends], y[:, blocks * length - (rows.length - ends) :]], axis=1) for y in sums]
    return [y.reshape(shape[:axis] + shape[axis + 1 :]) for y in sums]


def _length(rows, longest):
    """Of vectors within a row: as long as fits, if rows begin where long pieces can be loaded."""
    each = 1 if rows.length % ALIGNED else 2 if rows.mixed else longest
    return LANES * next(e for e in (16, 8, 4, 2, 1) if e <= each and e * LANES <= rows.length)


def _launch(formula, rows, count, blocks, steps, length, place, *, to_one):
    """For each row and block the sum over all steps of the formula of the vectors at `place(row, block, step)`."""
    parts = min(steps, -(-_WANTED_PROGRAMS // (count * blocks)))
    per_part = -(-steps // parts)
    width = 1 if to_one else length

    def body(*refs, program):
        in_refs, out_refs = refs[: len(rows.arrays)], refs[len(rows.arrays) :]
        row, part, block = program // (parts * blocks), program // blocks % parts, program % blocks

        def add(step, sums):
            at = place(row, block, step)
            values = jax.tree.leaves(formula(*(rows.load(i, ref, *at, length) for i, ref in enumerate(in_refs))))
            return tuple(total + value for total, value in zip(sums, values, strict=True))

        whole = rows.whole.index(True)
        zero = zeros_like(rows.load(whole, in_refs[whole], *place(row, block, 0), length))
        last = jnp.minimum((part + 1) * per_part, steps)
        sums = lax.fori_loop(part * per_part, last, add, (zero,) * len(out_refs))
        for ref, total in zip(out_refs, sums, strict=True):
            if to_one:
                ref[program] = jnp.sum(total)
            else:
                ref[pl.ds(program * length, length)] = total

    scalars = [jax.ShapeDtypeStruct((), float32_or_integer(a.dtype)) for a in rows.arrays]
    outputs = len(jax.tree.leaves(jax.eval_shape(formula, *scalars)))
    results = launch(
        body,
        *rows.arrays,
        out=(jax.ShapeDtypeStruct((count * parts * blocks * width,), jnp.float32),) * outputs,
        grid={"program": count * parts * blocks},
        name="sum_over",
    )
    return [jnp.sum(y.reshape(count, parts, blocks * width), axis=1) for y in results]
