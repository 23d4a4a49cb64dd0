"""Backward of an embedding as a gather: each row of the table collects the gradients of the tokens that selected it.

XLA sorts the tokens by row, so that the tokens of one row form a contiguous run. For a short run, one CTA computes the
whole row; for a long run, one block of features. Long runs start first, so that they do not finish last.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, quotient, remainder, vector_length, zeros_like
from pallas_kernels.core.tiles import kernel

_LONG_RUN = 64
"""Fewest tokens of a long run. Not tuned."""
_LOADS_IN_FLIGHT = 16
"""Not tuned."""
_BLOCKS_AT_ONCE = 8
"""Maximum blocks of features per iteration of a CTA. Not tuned."""


class Config(NamedTuple):
    """`length` is the number of features per vector in registers."""

    length: int


def _plan(dy: Any, order: Any, starts: Any) -> Config | str:
    tokens, features = dy.shape
    is_supported = tokens and features and features % LANES == 0
    return Config(vector_length(dy)) if is_supported else f"dy of shape {dy.shape}"


@kernel(plan=_plan)
def table_gradient(dy: Array, order: Array, starts: Array, *, config: Config) -> Array:
    """Compute the gradient with respect to the table, `dtable[r] = Σ dy[order[i]]` for starts[r] <= i < starts[r + 1],
    in dy's dtype, summed in float32.

    Args:
      dy: `(tokens, features)`, with at least one token, and a multiple of 128 features.
      order: `(tokens,)`, int32, the tokens' indices, sorted by the row that each token selects.
      starts: `(rows + 1,)`, int32.
    """
    (tokens, features), rows, length = dy.shape, starts.shape[0] - 1, config.length
    blocks = features // length
    at_once = largest_divisor(blocks, _BLOCKS_AT_ONCE)
    long_rows = _long_rows(tokens, starts)
    long_programs = long_rows.shape[0] * blocks

    def body(dy_ref, order_ref, starts_ref, long_rows_ref, dtable_ref, *, program):
        def write(row, first_block, count):
            columns = [pl.ds((first_block + k) * length, length) for k in range(count)]
            first, end = starts_ref[row], starts_ref[row + 1]
            in_flight = _LOADS_IN_FLIGHT // count

            def load(i):
                token = order_ref[i]
                return [dy_ref[token, c].astype(jnp.float32) for c in columns]

            def add(gradients, totals):
                return tuple(total + gradient for total, gradient in zip(totals, gradients, strict=True))

            def add_group(group, totals):
                for gradients in [load(first + group * in_flight + k) for k in range(in_flight)]:
                    totals = add(gradients, totals)
                return totals

            groups = quotient(end - first, in_flight)
            zeros = (zeros_like(dy_ref[0, columns[0]].astype(jnp.float32)),) * count
            totals = lax.fori_loop(0, groups, add_group, zeros)
            totals = lax.fori_loop(first + groups * in_flight, end, lambda i, totals: add(load(i), totals), totals)
            for c, total in zip(columns, totals, strict=True):
                dtable_ref[row, c] = total.astype(dtable_ref.dtype)

        @pl.when(program < long_programs)
        def _():
            row = long_rows_ref[quotient(program, blocks)]
            pl.when(row < rows)(lambda: write(row, remainder(program, blocks), 1))

        @pl.when(program >= long_programs)
        def _():
            row = program - long_programs
            is_short = starts_ref[row + 1] - starts_ref[row] < _LONG_RUN
            steps = blocks // at_once
            write_all = lambda: lax.fori_loop(0, steps, lambda i, _: write(row, i * at_once, at_once), None)  # noqa: E731
            pl.when(is_short)(write_all)

    return launch(
        body,
        dy,
        order,
        starts,
        long_rows,
        out=jax.ShapeDtypeStruct((rows, features), dy.dtype),
        grid={"program": long_programs + rows},
        barriers=False,
        name="embedding_backward",
    )


def _long_rows(tokens: int, starts: Array) -> Array:
    """Return the indices of the table's rows that at least `_LONG_RUN` of the `tokens` tokens select. `starts`
    has the start of each row's run of sorted tokens, and then `tokens`. A long run contains a position that is a
    multiple of `_LONG_RUN`. The result has one element per multiple: the row if its run is long and this multiple is
    the first in it, else the number of rows, an invalid index."""
    rows = starts.shape[0] - 1
    positions = jnp.arange(0, max(tokens, 1), _LONG_RUN, dtype=jnp.int32)
    at_positions = jnp.searchsorted(starts, positions, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    candidates = jnp.clip(at_positions, 0, rows - 1)
    is_long = starts[candidates + 1] - starts[candidates] >= _LONG_RUN
    is_first = jnp.concatenate([jnp.ones(1, bool), candidates[1:] != candidates[:-1]])
    return jnp.where(is_long & is_first, candidates, rows)
