"""Sums over the readers of rows, in a fixed order.

A row may have several readers, such as the gates that read an input. Row i has the readers `readers[e]`, for e from
`offsets[i]` to `offsets[i + 1] - 1`. `sums_over_readers` adds one vector per reader:

    sums[i, n] = sum over the readers r of row i of values[r, n]

One CTA computes a few rows for one block of n. It loads the vectors of several readers at once.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import largest_divisor, zeros_like
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.forward import lane_block_length, unsupported_batch

_LOADS_IN_FLIGHT = 8
"""Not tuned."""


class Config(NamedTuple):
    """Tile of a CTA: `rows` sums for `length` examples, a multiple of 128. For each row, the CTA loads at once the
    vectors of `at_once` readers."""

    rows: int
    at_once: int
    length: int


def sums_of_terms(
    terms: Callable[[Sequence[Any]], Iterable[Array]],
    ends: Sequence[tuple[Any, Any]],
    zeros: Array,
    *,
    at_once: int,
    max_fan_out: int,
) -> list[Array]:
    """Return, for each pair (first, end) of `ends`, the sum of the terms from `first` to `end - 1`, of which there are
    at most `max_fan_out`.

    `terms` maps a list of integers to their terms, vectors of the shape of `zeros`, the initial sum. It also gets
    integers beyond an end, whose terms are not added. A step of the loop adds `at_once` terms per pair.
    """

    def add(turn, sums):
        places = [first + turn * at_once + k for first, _ in ends for k in range(at_once)]
        sums = list(sums)
        for n, (place, term) in enumerate(zip(places, terms(places), strict=True)):
            sums[n // at_once] += jnp.where(place < ends[n // at_once][1], term, jnp.zeros_like(term))
        return tuple(sums)

    sums = (zeros,) * len(ends)
    if at_once == max_fan_out:
        return add(0, sums)
    most = functools.reduce(jnp.maximum, (end - first for first, end in ends))
    return lax.fori_loop(0, (most + at_once - 1) // at_once, add, sums)


def _plan(values, readers, offsets, *, max_fan_out, dtype):
    at_once = max(1, min(max_fan_out, _LOADS_IN_FLIGHT))
    rows = largest_divisor(offsets.shape[0] - 1, _LOADS_IN_FLIGHT // at_once)
    return unsupported_batch(values) or Config(rows, at_once, lane_block_length(values))


@kernel(plan=_plan)
def sums_over_readers(
    values: Array, readers: Array, offsets: Array, *, max_fan_out: int, dtype: DTypeLike, config: Config
) -> Array:
    """Return the sums, `(rows, N)`, in `dtype`, added in float32.

    Args:
      values: `(readers, N)`, N a multiple of 128.
      readers: a permutation of the rows of values, int32.
      offsets: `(rows + 1,)`, int32.
      max_fan_out: the largest number of readers of a row.
    """
    (count, N), rows = values.shape, offsets.shape[0] - 1

    def body(values_ref, readers_ref, offsets_ref, sums_ref, *, block, group):
        lanes = pl.ds(block * config.length, config.length)
        numbers = [group * config.rows + k for k in range(config.rows)]

        def terms(places):
            indices = [readers_ref[jnp.minimum(place, count - 1)] for place in places]
            return [values_ref[reader, lanes].astype(jnp.float32) for reader in indices]

        ends = [(offsets_ref[row], offsets_ref[row + 1]) for row in numbers]
        zeros = zeros_like(values_ref[0, lanes].astype(jnp.float32))
        sums = sums_of_terms(terms, ends, zeros, at_once=config.at_once, max_fan_out=max_fan_out)
        for row, total in zip(numbers, sums, strict=True):
            sums_ref[row, lanes] = total.astype(sums_ref.dtype)

    return launch(
        body,
        values,
        readers,
        offsets,
        out=jax.ShapeDtypeStruct((rows, N), dtype),
        grid={"block": N // config.length, "group": rows // config.rows},
        barriers=False,
        name="sums_over_readers",
    )
