"""One kernel for every element-wise formula, which is passed as an argument.

The trailing axes form rows: see `Rows`. A CTA applies the formula to one block of consecutive elements of a row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, remainder
from pallas_kernels.core.tiles import kernel

_ELEMENTS = (8, 4, 2, 1)
"""Candidates for the elements per thread. Numbers from 4 to 32 were equally fast: docs/lab/2026-11-21-pointwise.md."""
_UNFILLED_ELEMENTS = 4
"""Maximum elements per thread with fewer than `_WANTED_PROGRAMS` CTAs. Not tuned."""
_MIXED_ELEMENTS = 2
"""Maximum elements per thread with mixed dtypes: see `vector_length`."""
_WANTED_PROGRAMS = 1024
"""Wanted CTAs: several per multiprocessor. Not tuned."""
ALIGNMENT = 4
"""Elements of float32 per widest access of a thread, 16 bytes."""
_LONG_ROW = 4 * LANES
"""Wanted length of rows: 16 bytes of float32 per thread."""


class Config(NamedTuple):
    """`length` is the number of consecutive elements per CTA: a multiple of 128, at most the elements of a row:
    see `Rows`."""

    length: int


def unsupported_indices(*shapes: tuple[int, ...]) -> str | None:
    return "2^31 or more elements" if any(math.prod(shape) >= 2**31 for shape in shapes) else None


def _plan(formula, *arrays, shape=None):
    shape = _result_shape(arrays, shape)
    if reason := unsupported_indices(shape, *(a.shape for a in arrays)):
        return reason
    if math.prod(shape) < LANES:
        return Config(LANES)
    rows = _rows(shape, arrays)
    max_elements = _MIXED_ELEMENTS if rows.has_mixed_dtypes else _ELEMENTS[0]
    candidates = [n for n in _ELEMENTS if n <= max_elements and n * LANES <= rows.length]
    large_enough = [n for n in candidates if rows.count * rows.length >= n * LANES * _WANTED_PROGRAMS]
    return Config(LANES * (large_enough[0] if large_enough else min(candidates[0], _UNFILLED_ELEMENTS)))


@kernel(plan=_plan)
def elementwise(
    formula: Callable, *arrays: Array, shape: tuple[int, ...] | None = None, config: Config
) -> Array | tuple[Array, ...]:
    """Compute `formula(*arrays)` element by element, with NumPy's broadcasting. Results have the first array's dtype.

    Args:
      formula: maps one vector per array to a vector or a tuple of vectors. Floats are passed as float32, integers
        unchanged.
      shape: shape of the results; by default the shape to which the arrays broadcast.
    """
    shape = _result_shape(arrays, shape)
    dtype, size = arrays[0].dtype, math.prod(shape)
    structure = results_structure(formula, arrays)
    if size == 0:
        # JAX cannot map the derivative of a constant over a batch, so results derive from an argument.
        return structure.unflatten([jnp.broadcast_to(arrays[0], shape)] * structure.num_leaves)
    if size < LANES:
        arrays = [
            a.ravel() if a.size == 1 else jnp.pad(jnp.broadcast_to(a, shape).ravel(), (0, LANES - size)) for a in arrays
        ]
    rows, length = _rows(shape if size >= LANES else (LANES,), arrays), config.length
    blocks = rows.length // length
    last_vectors = -(-(rows.length % length) // LANES)

    def body(x_refs, *y_refs, program):
        row, block = quotient(program, blocks), remainder(program, blocks)

        def compute(start, length):
            values = formula(*(rows.load(i, ref, row, start, length) for i, ref in enumerate(x_refs)))
            for ref, value in zip(y_refs, jax.tree.leaves(values), strict=True):
                if ref is None:
                    continue
                value = jnp.broadcast_to(value, (length,))
                ref[pl.ds(row * rows.length + start, length)] = value.astype(dtype)

        def compute_remainder(i, _):
            # The last vector begins earlier if the row ends within it, and recomputes elements.
            compute(jnp.minimum(blocks * length + i * LANES, rows.length - LANES), LANES)

        compute(block * length, length)
        if last_vectors:
            jax.lax.fori_loop(0, jnp.where(block == blocks - 1, last_vectors, 0), compute_remainder, None)

    results = launch(
        body,
        rows.flatten(arrays),
        out=(jax.ShapeDtypeStruct((rows.count * rows.length,), dtype),) * structure.num_leaves,
        skippable=range(structure.num_leaves),
        grid={"program": rows.count * blocks},
        name=getattr(formula, "__name__", "elementwise").strip("_<>"),
    )
    return structure.unflatten([y[:size].reshape(shape) for y in results])


def _result_shape(arrays, shape):
    return jnp.broadcast_shapes(*(a.shape for a in arrays)) if shape is None else shape


def _rows(shape, arrays):
    rows = Rows(shape, arrays)
    if rows.count > 1 and (rows.length < LANES or rows.length % ALIGNMENT):
        lengths = [math.prod(shape[axis:]) for axis in range(len(shape))]
        long_axes = [axis for axis, n in enumerate(lengths) if n >= _LONG_ROW and n % ALIGNMENT == 0]
        rows = Rows(shape, arrays, axis=max(long_axes, default=0))
    return rows


def float32_or_integer(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


def results_structure(formula: Callable, arrays: Sequence[Array]) -> Any:
    scalars = [jax.ShapeDtypeStruct((), float32_or_integer(a.dtype)) for a in arrays]
    return jax.tree.structure(jax.eval_shape(formula, *scalars))


class Rows:
    """Division of arrays, which broadcast to `shape`, into rows. A row spans the axes from `axis` on.

    Args:
      axis: first axis of a row, by default the earliest for which each array has all elements of a row or only one. If
        the caller passes an earlier axis, `flatten` broadcasts other arrays to whole rows in memory.

    Attributes:
      lead, leads: sizes of the axes before `axis`, for `shape` and for each array.
      spans_row: for each array, whether it has all elements of a row.
    """

    def __init__(self, shape: tuple[int, ...], arrays: Sequence[Any], axis: int | None = None):
        def fits(array_shape, axis):
            return array_shape[axis:] == shape[axis:] or set(array_shape[axis:]) <= {1}

        shapes = [(1,) * (len(shape) - len(a.shape)) + tuple(a.shape) for a in arrays]
        if axis is None:
            axis = next(axis for axis in range(len(shape) + 1) if all(fits(s, axis) for s in shapes))
        self._aligned_shapes = shapes
        self._broadcast_shapes = [s if fits(s, axis) else s[:axis] + shape[axis:] for s in shapes]
        self._dtypes = [a.dtype for a in arrays]
        self.lead, self.length = shape[:axis], math.prod(shape[axis:])
        self.count = math.prod(self.lead)
        self.leads = [s[:axis] for s in self._broadcast_shapes]
        self.spans_row = [s[axis:] == shape[axis:] for s in self._broadcast_shapes]

    @property
    def has_mixed_dtypes(self) -> bool:
        return len({dtype for dtype, spans_row in zip(self._dtypes, self.spans_row, strict=True) if spans_row}) > 1

    def flatten(self, arrays: Sequence[Array]) -> list[Array]:
        shapes = zip(self._aligned_shapes, self._broadcast_shapes, strict=True)
        flat_arrays = [jnp.broadcast_to(a.reshape(s), t).ravel() for a, (s, t) in zip(arrays, shapes, strict=True)]
        return [
            a if spans_row else a.astype(float32_or_integer(a.dtype))
            for a, spans_row in zip(flat_arrays, self.spans_row, strict=True)
        ]

    def load(self, i: int, ref: Any, row: Any, start: Any, length: int) -> Array:
        row = self.row_of(i, row)
        value = ref[pl.ds(row * self.length + start, length)] if self.spans_row[i] else ref[row]
        return jnp.broadcast_to(value.astype(float32_or_integer(value.dtype)), (length,))

    def row_of(self, i: int, row: Any) -> Any:
        lead = self.leads[i]
        if lead == self.lead:
            return row
        array_row, stride, inner_count = 0, 1, self.count
        places = []
        for size in self.lead:
            inner_count //= size
            places.append(remainder(quotient(row, inner_count), size))
        for place, size in zip(reversed(places), reversed(lead), strict=True):
            array_row, stride = (array_row + place * stride, stride * size) if size > 1 else (array_row, stride)
        return array_row
