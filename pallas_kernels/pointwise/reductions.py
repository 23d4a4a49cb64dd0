"""One kernel for every sum of an element-wise formula, which is passed as an argument.

Each CTA computes part of a sum along rows or columns, and XLA adds the parts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, remainder, zeros_like
from pallas_kernels.core.tiles import kernel
from pallas_kernels.pointwise.elementwise import (
    ALIGNMENT,
    Rows,
    float32_or_integer,
    results_structure,
    unsupported_indices,
)

_WANTED_PROGRAMS = 2048
"""Wanted CTAs. More were slower for sums along columns: docs/lab/2026-11-21-pointwise.md."""
_ROW_ELEMENTS, _COLUMN_ELEMENTS = 16, 4
"""Maximum elements of a vector per thread, for sums along rows and along columns. Along columns, each element has a
separate sum. Not tuned."""
_MIXED_ELEMENTS = 2
"""See `elementwise.py`."""


class Config(NamedTuple):
    """`length` is the number of elements that a CTA loads at once, a multiple of 128. Each sum is divided among
    `splits` CTAs."""

    length: int
    splits: int


class _Walk(NamedTuple):
    """Arrangement of the arrays to be summed, chosen so that CTAs read contiguous memory.

    Attributes:
      axis, along_columns: the kernel sums over `axis`, and over all later axes unless `along_columns`.
      order: permutation of the arrays' axes, or None.
      columns: if not None, arrays are reshaped to matrices of this many columns, and padded with zeros to at least 128
        columns.
      remaining_axes: axes of the kernel's result over which XLA sums afterwards.
    """

    shape: tuple[int, ...]
    axis: int
    along_columns: bool = False
    order: tuple[int, ...] | None = None
    columns: int | None = None
    remaining_axes: tuple[int, ...] = ()

    @classmethod
    def from_axes(cls, shape: tuple[int, ...], summed_axes: Sequence[int]) -> "_Walk":
        kept_axes = [i for i in range(len(shape)) if i not in summed_axes]
        first_summed = kept_axes[-1] + 1 if kept_axes else 0
        outer_axes = [i for i in summed_axes if math.prod(shape[i + 1 :]) >= LANES]
        if first_summed < len(shape) and math.prod(shape[first_summed:]) >= LANES:
            return cls(shape, first_summed, remaining_axes=tuple(i for i in summed_axes if i < first_summed))
        if outer_axes:
            axis = max(outer_axes, key=lambda i: shape[i])
            return cls(
                shape, axis, along_columns=True, remaining_axes=tuple(i - (i > axis) for i in summed_axes if i != axis)
            )
        if math.prod(shape[i] for i in summed_axes) >= LANES:
            order = (*kept_axes, *summed_axes)
            return cls(tuple(shape[i] for i in order), len(kept_axes), order=order)
        columns = math.prod(shape[i] for i in kept_axes)
        matrix = math.prod(shape[i] for i in summed_axes), max(columns, LANES)
        return cls(matrix, 0, along_columns=True, order=(*summed_axes, *kept_axes), columns=columns)

    def arrange(self, a: Array, shape: tuple[int, ...]) -> Array:
        if self.columns is not None:
            a = jnp.broadcast_to(a, shape).transpose(self.order).reshape(-1, self.columns)
            return jnp.pad(a, ((0, 0), (0, self.shape[1] - self.columns)))
        return a if self.order is None else a.transpose(self.order)

    def rows(self, arrays: Sequence[Any]) -> Rows:
        return Rows(self.shape, arrays, self.axis + 1 if self.along_columns else self.axis)

    def division(self, rows: Rows, length: int) -> tuple[int, int, int]:
        """Return (count, blocks, steps): a kernel computes `count * blocks` sums over `steps` vectors of `length`.

        Along rows, `count` is the number of rows, `blocks` is 1, and each sum is a number. Along columns, each of
        `count` matrices is divided into `blocks` blocks of `length` columns, and each sum is a vector.
        """
        if not self.along_columns:
            return rows.count, 1, rows.length // length
        return math.prod(self.shape[: self.axis]), -(-rows.length // length), self.shape[self.axis]


def _squeeze(arrays, axes):
    shape = jnp.broadcast_shapes(*(a.shape for a in arrays))
    long_axes = [axis for axis, size in enumerate(shape) if size > 1]
    aligned = [(1,) * (len(shape) - len(a.shape)) + tuple(a.shape) for a in arrays]
    shapes = [tuple(s[axis] for axis in long_axes) for s in aligned]
    return tuple(shape[axis] for axis in long_axes), shapes, [i for i, axis in enumerate(long_axes) if axis in axes]


def _plan(formula, *arrays, axes):
    full_shape = jnp.broadcast_shapes(*(a.shape for a in arrays))
    if reason := unsupported_indices(*(a.shape for a in arrays), full_shape):
        return reason
    shape, shapes, summed_axes = _squeeze(arrays, axes)
    if math.prod(shape) == 0:
        return Config(LANES, 1)
    walk = _Walk.from_axes(shape, summed_axes)
    structs = [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, arrays, strict=True)]
    rows = walk.rows(jax.eval_shape(lambda *arrays: [walk.arrange(a, shape) for a in arrays], *structs))
    max_elements = _COLUMN_ELEMENTS if walk.along_columns else _ROW_ELEMENTS
    if rows.has_mixed_dtypes:
        max_elements = _MIXED_ELEMENTS
    if rows.length % ALIGNMENT:
        max_elements = 1
    length = LANES * next(n for n in (16, 8, 4, 2, 1) if n <= max_elements and n * LANES <= rows.length)
    count, blocks, steps = walk.division(rows, length)
    return Config(length, splits=min(steps, -(-_WANTED_PROGRAMS // (count * blocks))))


@kernel(plan=_plan)
def sum_over(formula: Callable, *arrays: Array, axes: Sequence[int], config: Config) -> Array | tuple[Array, ...]:
    """Compute `Σ formula(*arrays)` over the given axes of the broadcast shape, in a fixed order. Results are float32,
    with size 1 along `axes`.

    Args:
      formula: see `elementwise`.
      axes: nonnegative.
    """
    full_shape = jnp.broadcast_shapes(*(a.shape for a in arrays))
    kept_shape = tuple(1 if axis in axes else size for axis, size in enumerate(full_shape))
    structure = results_structure(formula, arrays)
    if math.prod(full_shape) == 0:
        zeros = jnp.sum(jnp.broadcast_to(arrays[0], full_shape), axis=tuple(axes), keepdims=True, dtype=jnp.float32)
        return structure.unflatten([zeros] * structure.num_leaves)
    shape, shapes, summed_axes = _squeeze(arrays, axes)
    walk = _Walk.from_axes(shape, summed_axes)
    arrays = [walk.arrange(a.reshape(s), shape) for a, s in zip(arrays, shapes, strict=True)]
    rows, length, splits = walk.rows(arrays), config.length, config.splits
    arrays = rows.flatten(arrays)
    count, blocks, steps = walk.division(rows, length)
    split_steps, width = -(-steps // splits), length if walk.along_columns else 1

    def body(x_refs, *y_refs, program):
        part, block = quotient(program, blocks), remainder(program, blocks)
        row, split = quotient(part, splits), remainder(part, splits)

        def load(step, *arrays):
            if walk.along_columns:
                # The last two blocks may overlap. The repeated sums are dropped below.
                start = row * steps + step, jnp.minimum(block * length, rows.length - length)
            else:
                start = row, step * length
            return [rows.load(i, x_refs[i], *start, length) for i in arrays]

        def add(step, totals):
            values = jax.tree.leaves(formula(*load(step, *range(len(x_refs)))))
            return tuple(total + value for total, value in zip(totals, values, strict=True))

        zero = zeros_like(*load(0, rows.spans_row.index(True)))
        last = jnp.minimum((split + 1) * split_steps, steps)
        totals = lax.fori_loop(split * split_steps, last, add, (zero,) * len(y_refs))
        for ref, total in zip(y_refs, totals, strict=True):
            if walk.along_columns:
                ref[pl.ds(program * width, width)] = total
            else:
                ref[program] = jnp.sum(total)

    programs = count * splits * blocks
    results = launch(
        body,
        arrays,
        out=(jax.ShapeDtypeStruct((programs * width,), jnp.float32),) * structure.num_leaves,
        grid={"program": programs},
        name="sum_over",
    )
    results = [jnp.sum(y.reshape(count, splits, blocks * width), axis=1) for y in results]
    if walk.along_columns:
        ends = (blocks - 1) * length
        results = [
            jnp.concatenate([y[:, :ends], y[:, ends + blocks * length - rows.length :]], axis=1) for y in results
        ]
        results = [y.reshape(walk.shape[: walk.axis] + walk.shape[walk.axis + 1 :]) for y in results]
    else:
        results = [y.reshape(rows.lead) for y in results]
        if (covered_length := steps * length) < rows.length:
            split = [a.reshape((*lead, -1)) for a, lead in zip(arrays, rows.leads, strict=True)]
            ends = [
                a[..., covered_length:] if spans_row else a for a, spans_row in zip(split, rows.spans_row, strict=True)
            ]
            tail = jax.tree.leaves(formula(*(a.astype(float32_or_integer(a.dtype)) for a in ends)))
            ends = [jnp.broadcast_to(jnp.sum(y, axis=-1), rows.lead) for y in tail]
            results = [y + end for y, end in zip(results, ends, strict=True)]
    if walk.columns is not None:
        results = [y[: walk.columns] for y in results]
    if walk.remaining_axes:
        results = [jnp.sum(y, axis=walk.remaining_axes) for y in results]
    return structure.unflatten([y.reshape(kept_shape) for y in results])
