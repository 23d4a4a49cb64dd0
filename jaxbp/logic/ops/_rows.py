"""Arrays with one row per feature, and sums over the readers of each row and over examples."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxbp.common import barriers
from jaxbp.logic.wires.wires import Wires
from pallas_kernels.core.arrays import batch_first, batch_last

_MOST_TURNS = 32
"""Sums over up to this number of consumers per input are unrolled into gathers."""

_LARGEST_PRODUCT = 2**14
"""Up to this number of elements, a product with a 0-1 matrix `(inputs, consumers)` sums over consumers."""


@functools.partial(jax.jit, inline=True)
def take(a: Array, indices: Array) -> Array:
    """Return `a[indices]`. JAX traces the checks of indices once for all arrays of the same shapes."""
    return a[indices]


def few_have_most(inputs: int, consumers: int, max_fan_out: int) -> bool:
    """Return whether a few inputs have most of the consumers."""
    return max_fan_out > _MOST_TURNS or max_fan_out * inputs > 2 * consumers + inputs


def sum_over_consumers(terms: Callable[[Array], Array], offsets: Array, consumers: int, max_fan_out: int) -> Array:
    """Sum, for each input, one term per consumer, which is a reader of the input: `(inputs, ...)`.

    `terms` maps n indices of consumers, which are sorted by input, to the terms of these consumers, `(n, ...)`. Input i
    has the consumers from `offsets[i]` to `offsets[i + 1] - 1`.
    """
    first, end, places, inputs = offsets[:-1], offsets[1:], np.arange(consumers), offsets.size - 1
    if few_have_most(inputs, consumers, max_fan_out):
        read, values = jnp.searchsorted(end, places, side="right"), terms(places)
        if inputs * consumers > _LARGEST_PRODUCT:
            return jax.ops.segment_sum(values, read, inputs, indices_are_sorted=True)
        reads = jax.nn.one_hot(read, inputs, dtype=values.dtype, axis=0)
        return jnp.tensordot(reads, values, 1, precision=lax.Precision.HIGHEST)
    total = 0
    for turn in range(max_fan_out):
        values = terms(jnp.minimum(first + turn, places[-1]))
        taken = (first + turn < end).reshape(-1, *[1] * (values.ndim - 1))
        total = total + jnp.where(taken, values, 0)
    return total


def rows_of_readers(rows: Array, read: Array, readers: Array, offsets: Array, max_fan_out: int) -> Array:
    """Return `rows[read]`, the row that each reader reads, such that autodiff adds the gradients of a row's readers in
    a fixed order.

    `readers` and `offsets` are as in `pallas_kernels.logic.readers`. On a GPU, the order of a scatter varies, but here
    each reader reads another copy. If a few rows have most of the readers, the copies would need too much memory,
    and the order varies.
    """
    if few_have_most(rows.shape[0], readers.size, max_fan_out):
        return rows[read]
    copies, places = jnp.repeat(rows, max_fan_out, axis=0), copies_read(read, readers, offsets, max_fan_out)
    return copies.at[places].get(unique_indices=True, mode="promise_in_bounds")


def copies_read(read: Array, readers: Array, offsets: Array, max_fan_out: int) -> Array:
    """Return, for each reader, the index of its copy among `max_fan_out` copies of each row."""
    turns = np.arange(readers.size, dtype=np.int32) - offsets[read[readers]]
    return read * max_fan_out + jnp.zeros_like(turns).at[readers].set(turns, unique_indices=True)


def rows_of_inputs(wires: Wires, rows: Array) -> Array:
    """Return `rows_of_readers` for the inputs `(a, b)` of each gate in turn, `(2 * gates, ...)`."""
    read = jnp.stack([wires.a, wires.b], axis=1).ravel()
    return rows_of_readers(rows, read, wires.consumers, wires.offsets[::2], wires.max_fan_out)


_MOST_PARTS = 16
"""LLVM unrolls sums of up to this number of terms, and then uses vector instructions."""


def sums_over_examples(terms: Callable[..., Sequence[Array]], *rows: Array) -> list[Array]:
    """Return the sums of `terms(*rows)` over the last axis. Terms have the shape of the rows."""
    axes, examples = [rows[0].ndim - 1], rows[0].shape[-1]

    def by_parts(*rows):
        parts = max(n for n in range(1, _MOST_PARTS + 1) if examples % n == 0)
        rows = (x.reshape(*x.shape[:-1], parts, examples // parts) for x in rows)
        return _in_one_loop(axes, *_in_one_loop(axes, *terms(*rows)))

    return lax.platform_dependent(*rows, cpu=by_parts, default=lambda *rows: _one_by_one(axes, *terms(*rows)))


def sums(axes: Sequence[int], *terms: Array) -> list[Array]:
    on_cpu, default = (functools.partial(each, axes) for each in (_in_one_loop, _one_by_one))
    return lax.platform_dependent(*terms, cpu=on_cpu, default=default)


def _one_by_one(axes: Sequence[int], *terms: Array) -> list[Array]:
    return [jnp.sum(term, axis=axes) for term in terms]


def _in_one_loop(axes: Sequence[int], *terms: Array) -> list[Array]:
    # On a CPU, separate sums are ten times slower.
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    return lax.reduce(list(terms), zeros, lambda *pair: jax.tree.map(jnp.add, *pair), axes)


def features_first(x: Array) -> Array:
    """Return x with one row per feature, `(features, examples)`."""
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
    # On a CPU, XLA then stores each feature as a row, and does not gather single elements.
    return lax.platform_dependent(x, cpu=_as_rows, default=lambda x: x)


def features_last(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the inverse of `features_first`, with the batch axes `shape`."""
    return barriers.on_cpu(x).T.reshape(*shape, x.shape[0])


@functools.partial(jax.jit, inline=True)
def _as_rows(x):
    # A vector has one memory layout, so the barrier fixes it. A program with a layout constraint is not exportable.
    return barriers.optimization_barrier(x.ravel()).reshape(x.shape)


def rows_of_kernels(x: Array) -> Array:
    """Return x as `(features, N)`, where N is the number of examples, padded with zeros to a multiple of 128."""
    return batch_last(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))


def from_rows_of_kernels(rows: Array, shape: tuple[int, ...]) -> Array:
    """Undo `rows_of_kernels`: return an array `(*shape, features)`, where `shape` has the batch axes."""
    return batch_first(rows, math.prod(shape)).reshape(*shape, rows.shape[0])
