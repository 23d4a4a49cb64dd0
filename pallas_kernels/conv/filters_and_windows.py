"""Filters of F x G elements and pooling windows of R x S positions in the kernels of `conv2d_relu_max_pool2d`."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.layouts import quotient

MAX_TAPS = 64
"""Maximum positions of a filter, because the exact kernels unroll them."""
MAX_PLACES = 16
"""Maximum positions of a window in the exact kernels."""


def unsupported(filter_rows: int, filter_columns: int, window: tuple[int, int]) -> str | None:
    if filter_rows * filter_columns > MAX_TAPS:
        return f"filters of {filter_rows} x {filter_columns}, which have more than {MAX_TAPS} positions"
    if window[0] * window[1] > MAX_PLACES:
        return f"window={window}, which has more than {MAX_PLACES} positions"
    return None


def first_maximum(values):
    largest, *rest = values
    place = jnp.where(largest != largest, 0, 0)
    for t, value in enumerate(rest, start=1):
        place = jnp.where(value > largest, t, place)
        largest = jnp.maximum(largest, value)
    return largest, place


def taps(w, row, column):
    """Return `w[:, :, row, column]` for integer arrays `row` and `column`, or zero where they are outside of the
    filter."""
    F, G = w.shape[2:]
    inside = (row >= 0) & (row < F) & (column >= 0) & (column < G)
    row, column, inside = np.broadcast_arrays(np.where(inside, row, 0), np.where(inside, column, 0), inside)
    return jnp.where(inside, w[:, :, row, column], 0)


EXAMPLES = 64
"""Examples per tile of a forward on the tensor cores. With 64 features, a thread then has 32 sums per window
position."""
MAX_BOX = 256
"""Maximum elements along each axis of a bulk copy."""
BARRIER_BYTES = 1024
"""Shared memory for the barriers. Operands are aligned to 1024 bytes."""


def pooled_size(x: Any, w: Any, window: tuple[int, int]) -> tuple[int, int]:
    """Return P and Q, the rows and columns of pooling windows."""
    return (x.shape[1] - w.shape[2] + 1) // window[0], (x.shape[2] - w.shape[3] + 1) // window[1]


def tile_at(number: Any, tiles: tuple[int, int], config: Any) -> tuple[Any, Any, Any]:
    """Return the row and column of the first window in tile `number`, and its block of 64 examples. A block has
    `tiles[0]` x `tiles[1]` tiles, each with `config.rows` x `config.columns` windows. Consecutive tiles share a block,
    so that concurrent CTAs read the same images from the L2 cache."""
    tile_rows, tile_columns = tiles
    row = quotient(number, tile_columns)
    column, block = number - row * tile_columns, quotient(row, tile_rows)
    return (row - block * tile_rows) * config.rows, column * config.columns, block
