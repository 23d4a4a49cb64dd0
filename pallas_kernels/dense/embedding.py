"""Backward of an embedding as a gather. Each row of the table collects the gradients of the tokens that selected it.
Because a single CTA writes each element of the table's gradient, the kernel needs no atomic additions.

XLA sorts the tokens by row beforehand, so that the tokens of one row are a contiguous run of the sorted order. A CTA
computes one row of the gradient, for one block of features. It loops over the run of its row and adds the gradients in
float32 registers, in the order of the tokens. The kernel does not use shared memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, vector_length, zeros_like
from pallas_kernels.core.tiles import kernel

_TOKENS_IN_FLIGHT = 8
"""Number of tokens whose loads begin before the first of them is added. A loop over single tokens would wait for device
memory at each token. Not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile of a CTA: `length` features of one row, a multiple of `LANES` that divides the number of features."""

    length: int


def _unsupported(dy: Any, order: Any, starts: Any) -> str | None:
    tokens, features = dy.shape
    return None if tokens and features and features % LANES == 0 else f"dy of shape {dy.shape}"


def _heuristic(dy: Any, order: Any, starts: Any) -> Config:
    return Config(vector_length(dy))


@kernel(unsupported=_unsupported, heuristic=_heuristic)
def table_gradient(dy: Array, order: Array, starts: Array, *, config: Config) -> Array:
    """Compute `dtable[r] = Σ dy[order[i]]` for starts[r] <= i < starts[r + 1].

    Args:
      dy: `(tokens, features)`, with at least one token. The number of features is a multiple of `LANES`.
      order: the tokens in the order of their rows, int32.
      starts: `(rows + 1,)`, int32. The run of row r begins at `starts[r]` and ends before `starts[r + 1]`.

    Returns:
      dtable `(rows, features)` in dy's dtype, summed in float32. Rows without tokens are 0.
    """
    rows, features = starts.shape[0] - 1, dy.shape[1]

    def body(dy_ref, order_ref, starts_ref, dtable_ref, *, row, block):
        columns = pl.ds(block * config.length, config.length)
        first, end = starts_ref[row], starts_ref[row + 1]

        def load(i):
            return dy_ref[order_ref[i], columns].astype(jnp.float32)

        def add_group(group, total):
            for gradient in [load(first + group * _TOKENS_IN_FLIGHT + k) for k in range(_TOKENS_IN_FLIGHT)]:
                total = total + gradient
            return total

        groups = quotient(end - first, _TOKENS_IN_FLIGHT)
        total = lax.fori_loop(0, groups, add_group, zeros_like(dy_ref[0, columns].astype(jnp.float32)))
        total = lax.fori_loop(first + groups * _TOKENS_IN_FLIGHT, end, lambda i, total: total + load(i), total)
        dtable_ref[row, columns] = total.astype(dtable_ref.dtype)

    return launch(
        body,
        dy,
        order,
        starts,
        out=jax.ShapeDtypeStruct((rows, features), dy.dtype),
        grid={"row": rows, "block": features // config.length},
        name="embedding_backward",
    )
