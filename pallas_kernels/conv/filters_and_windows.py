import jax.numpy as jnp
import numpy as np

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
