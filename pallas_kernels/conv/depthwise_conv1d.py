"""Depthwise convolution of sequences and its gradients, with the channels as the last axis.

Each channel has one filter of F elements: `convolve` has the formula. A CTA moves along the positions of one example,
for one block of channels. The filters and the last F - 1 positions stay in registers, so the CTA loads each position
once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, vector_length, zeros_like
from pallas_kernels.core.tiles import kernel

MAX_FILTER_WIDTH = 8
"""Maximum elements of a filter. Each takes up to 12 of a thread's 255 registers in the backward."""
_LOADED_BYTES = 8
"""Maximum bytes that a thread loads per position, in one access. LLVM cannot prove that two accesses are aligned, and
would load single elements."""
_ROWS_AT_ONCE = 8
"""Rows whose loads are in flight at once. Not tuned."""
_MAX_ROWS = 256
"""Maximum rows per CTA. Not tuned."""
_PROGRAMS = 8
"""Minimum CTAs per multiprocessor before a CTA gets more rows. Not tuned."""


class Config(NamedTuple):
    """Tile of a CTA: `length` channels, a multiple of `LANES`, and `rows` positions."""

    length: int
    rows: int


def _plan(x: Any, w: Any, *arrays: Any, before: int, after: int) -> Config | str:
    if w.shape[0] > MAX_FILTER_WIDTH:
        return f"filters of width {w.shape[0]}, only up to {MAX_FILTER_WIDTH}"
    if x.size == 0 or x.shape[-1] % LANES:
        return f"x of shape {x.shape}"
    batch, width, channels = x.shape
    length = min(vector_length(x), LANES * _LOADED_BYTES // x.dtype.itemsize)
    positions = width + before + after
    rows = batch * positions * (channels // length) // (_PROGRAMS * device.target().multiprocessors)
    parts = -(-positions // min(max(rows, _ROWS_AT_ONCE), _MAX_ROWS))
    return Config(length, _ROWS_AT_ONCE * -(-positions // (parts * _ROWS_AT_ONCE)))


@kernel(plan=_plan)
def convolve(x: Array, w: Array, b: Array | None, *, before: int, after: int, config: Config) -> Array:
    """Return y in x's dtype, computed in float32:

        y[n, t, c] = b[c] + Σ_u w[u, c] x̄[n, t + u, c]

    x̄ is x with `before` zeros before the sequence and `after` zeros after it.

    Args:
      x: `(batch, width, channels)`, channels a multiple of `LANES`.
      w, b: `(F, channels)` and `(channels,)` or None, in x's dtype, with `F <= MAX_FILTER_WIDTH`.
    """
    (batch, width, channels), taps = x.shape, w.shape[0]
    outputs = width + before + after - taps + 1

    def body(x_ref, w_ref, b_ref, y_ref, *, example, part, block):
        lanes = pl.ds(block * config.length, config.length)
        filters = [w_ref[u, lanes].astype(jnp.float32) for u in range(taps)]
        load = functools.partial(_load, x_ref, example, lanes, before)
        bias = None if b_ref is None else b_ref[lanes].astype(jnp.float32)

        def convolve_rows(t, window):
            # `window` has positions t to t + F - 2 of the padded x.
            window = [*window, *(load(t + taps - 1 + k) for k in range(_ROWS_AT_ONCE))]
            for k in range(_ROWS_AT_ONCE):
                y = _dot(filters, window[k : k + taps])
                y = y if bias is None else y + bias
                _store_within(y_ref, y, example, t + k, lanes)
            return window[_ROWS_AT_ONCE:]

        first = part * config.rows
        _over_rows(convolve_rows, first, config.rows, outputs, [load(first + u) for u in range(taps - 1)])

    return launch(
        body,
        x,
        w,
        b,
        out=jax.ShapeDtypeStruct((batch, outputs, channels), x.dtype),
        grid={"example": batch, "part": -(-outputs // config.rows), "block": channels // config.length},
        barriers=False,
        name="depthwise_conv1d",
    )


@kernel(plan=lambda dy, *arrays, **options: _plan(*arrays, **options))
def gradients(
    dy: Array, x: Array, w: Array, b: Array | None, *, before: int, after: int, config: Config
) -> tuple[Array, Array, Array | None]:
    """Return dx in x's dtype, float32 dw, and float32 db, or None without b:

        dx̄[n, s, c] = Σ_u w[u, c] dy[n, s - u, c],
        dw[u, c] = Σ_{n, s} x̄[n, s, c] dy[n, s - u, c],    db[c] = Σ_{n, s} dy[n, s, c]

    dx is dx̄ without the padding. dy is 0 outside of y. The order of summation is fixed. `convolve` defines x̄, the
    padded x, and the other arguments.
    """
    (batch, width, channels), taps = x.shape, w.shape[0]
    positions = width + before + after
    parts = -(-positions // config.rows)

    def body(dy_ref, x_ref, w_ref, dx_ref, dw_ref, db_ref, *, example, part, block):
        lanes = pl.ds(block * config.length, config.length)
        load_dy = functools.partial(_load, dy_ref, example, lanes, 0)
        load_x = functools.partial(_load, x_ref, example, lanes, before)
        filters = [w_ref[u, lanes].astype(jnp.float32) for u in range(taps)]

        def add_rows(s, carry):
            # `window` has positions s - F + 1 to s - 1 of dy.
            window, dw, db = carry
            window = [*window, *(load_dy(s + k) for k in range(_ROWS_AT_ONCE))]
            x_rows = [load_x(s + k) for k in range(_ROWS_AT_ONCE)] if dw else []
            for k in range(_ROWS_AT_ONCE):
                reached = window[k : k + taps][::-1]  # the rows s + k - u of dy
                if dx_ref is not None:
                    _store_within(dx_ref, _dot(filters, reached), example, s + k - before, lanes)
                dw = [total + x_rows[k] * row for total, row in zip(dw, reached, strict=False)]
                db = [total + reached[0] for total in db]
            return window[_ROWS_AT_ONCE:], dw, db

        first = part * config.rows
        zero = zeros_like(filters[0])
        window = [load_dy(first - taps + 1 + u) for u in range(taps - 1)]
        carry = window, [] if dw_ref is None else [zero] * taps, [] if db_ref is None else [zero]
        _, dw, db = _over_rows(add_rows, first, config.rows, positions, carry)
        for u, total in enumerate(dw):
            dw_ref[example * parts + part, u, lanes] = total
        for total in db:
            db_ref[example * parts + part, lanes] = total

    dx, dw, db = launch(
        body,
        dy,
        x,
        w,
        out=(
            x,
            jax.ShapeDtypeStruct((batch * parts, taps, channels), jnp.float32),
            None if b is None else jax.ShapeDtypeStruct((batch * parts, channels), jnp.float32),
        ),
        skippable=[0, 1, 2],
        grid={"example": batch, "part": parts, "block": channels // config.length},
        barriers=False,
        name="depthwise_conv1d_backward",
    )
    return dx, jnp.sum(dw, axis=0), db if db is None else jnp.sum(db, axis=0)


def _load(ref: Any, example: Any, lanes: Any, before: int, position: Any) -> Array:
    """Return one example's values at a position of the padded sequence: zeros outside of the sequence."""
    row, width = position - before, ref.shape[1]
    loaded = ref[example, jnp.clip(row, 0, width - 1), lanes].astype(jnp.float32)
    return jnp.where((row >= 0) & (row < width), loaded, jnp.float32(0))


def _store_within(ref: Any, values: Array, example: Any, row: Any, lanes: Any) -> None:
    @pl.when((row >= 0) & (row < ref.shape[1]))
    def _():
        ref[example, row, lanes] = values.astype(ref.dtype)


def _dot(filters: list[Array], rows: list[Array]) -> Array:
    first, *others = (w * row for w, row in zip(filters, rows, strict=True))
    return sum(others, first)


def _over_rows(step: Any, first: Any, rows: int, end: int, carry: Any) -> Any:
    steps = quotient(jnp.minimum(rows, end - first) + _ROWS_AT_ONCE - 1, _ROWS_AT_ONCE)
    return lax.fori_loop(0, steps, lambda i, carry: step(first + i * _ROWS_AT_ONCE, carry), carry)
