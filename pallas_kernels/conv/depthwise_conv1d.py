"""Depthwise convolution of sequences and its gradients, with the channels as the last axis.

Each channel has one filter of F elements: `convolve` has the formula. A CTA moves along the positions of one example,
for one block of channels. The filters and the last F - 1 positions stay in registers, so the CTA loads each position
once.
"""

import dataclasses
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile of a CTA: `length` channels, a multiple of `LANES`, and `rows` positions."""

    length: int
    rows: int


def _unsupported(x: Any, w: Any, *arrays: Any, **options: Any) -> str | None:
    if w.shape[0] > MAX_FILTER_WIDTH:
        return f"filters of width {w.shape[0]}, only up to {MAX_FILTER_WIDTH}"
    return None if x.size and x.shape[-1] % LANES == 0 else f"x of shape {x.shape}"


def _heuristic(x: Any, w: Any, *arrays: Any, before: int, after: int) -> Config:
    batch, width, channels = x.shape
    length = min(vector_length(x), LANES * _LOADED_BYTES // x.dtype.itemsize)
    positions = width + before + after
    rows = batch * positions * (channels // length) // (_PROGRAMS * device.target().multiprocessors)
    parts = -(-positions // min(max(rows, _ROWS_AT_ONCE), _MAX_ROWS))
    return Config(length, _ROWS_AT_ONCE * -(-positions // (parts * _ROWS_AT_ONCE)))


@kernel(unsupported=_unsupported, heuristic=_heuristic)
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
        filters, x = _load_filters(w_ref, lanes), _Rows(x_ref, example, lanes, before)
        bias = None if b_ref is None else b_ref[lanes].astype(jnp.float32)

        def convolve_rows(t, window):
            # `window` has positions t to t + F - 2 of the padded x.
            window = [*window, *(x.load(t + taps - 1 + k) for k in range(_ROWS_AT_ONCE))]
            for k in range(_ROWS_AT_ONCE):
                y = _dot(filters, window[k : k + taps])
                y = y if bias is None else y + bias
                _store_within(y_ref, y, example, t + k, lanes)
            return window[_ROWS_AT_ONCE:]

        first = part * config.rows
        _over_rows(convolve_rows, first, config.rows, outputs, [x.load(first + u) for u in range(taps - 1)])

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


@kernel(
    unsupported=lambda dy, *arrays, **options: _unsupported(*arrays, **options),
    heuristic=lambda dy, *arrays, **options: _heuristic(*arrays, **options),
)
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
    dx, dw, db = launch(
        _Backward(config, before, taps, parts, positions).body,
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


@dataclasses.dataclass(frozen=True)
class _Backward:
    config: Config
    before: int
    taps: int
    parts: int
    positions: int

    def body(
        self, dy_ref: Any, x_ref: Any, w_ref: Any, dx_ref: Any, dw_ref: Any, db_ref: Any, *, example, part, block
    ) -> None:
        config, taps = self.config, self.taps
        lanes = pl.ds(block * config.length, config.length)
        dy, x = _Rows(dy_ref, example, lanes), _Rows(x_ref, example, lanes, self.before)
        filters = _load_filters(w_ref, lanes)

        def add_rows(s, carry):
            # `window` has positions s - F + 1 to s - 1 of dy.
            window, dw, db = carry
            window = [*window, *(dy.load(s + k) for k in range(_ROWS_AT_ONCE))]
            x_rows = [x.load(s + k) for k in range(_ROWS_AT_ONCE)] if dw else []
            for k in range(_ROWS_AT_ONCE):
                reached = window[k : k + taps][::-1]  # the rows s + k - u of dy
                if dx_ref is not None:
                    _store_within(dx_ref, _dot(filters, reached), example, s + k - self.before, lanes)
                dw = [total + x_rows[k] * row for total, row in zip(dw, reached, strict=False)]
                db = [total + reached[0] for total in db]
            return window[_ROWS_AT_ONCE:], dw, db

        first = part * config.rows
        zero = zeros_like(filters[0])
        window = [dy.load(first - taps + 1 + u) for u in range(taps - 1)]
        carry = window, [] if dw_ref is None else [zero] * taps, [] if db_ref is None else [zero]
        _, dw, db = _over_rows(add_rows, first, config.rows, self.positions, carry)
        for u, total in enumerate(dw):
            dw_ref[example * self.parts + part, u, lanes] = total
        for total in db:
            db_ref[example * self.parts + part, lanes] = total


@dataclasses.dataclass(frozen=True)
class _Rows:
    """One example's values at any position, for one block of channels. They are zeros outside of the sequence."""

    ref: Any
    example: Any
    lanes: Any
    before: int = 0

    def load(self, position: Any) -> Array:
        row, width = position - self.before, self.ref.shape[1]
        loaded = self.ref[self.example, jnp.clip(row, 0, width - 1), self.lanes].astype(jnp.float32)
        return jnp.where((row >= 0) & (row < width), loaded, jnp.float32(0))


def _store_within(ref: Any, values: Array, example: Any, row: Any, lanes: Any) -> None:
    @pl.when((row >= 0) & (row < ref.shape[1]))
    def _():
        ref[example, row, lanes] = values.astype(ref.dtype)


def _load_filters(w_ref: Any, lanes: Any) -> list[Array]:
    return [w_ref[u, lanes].astype(jnp.float32) for u in range(w_ref.shape[0])]


def _dot(filters: list[Array], rows: list[Array]) -> Array:
    first, *others = (w * row for w, row in zip(filters, rows, strict=True))
    return sum(others, first)


def _over_rows(step: Any, first: Any, rows: int, end: int, carry: Any) -> Any:
    steps = quotient(jnp.minimum(rows, end - first) + _ROWS_AT_ONCE - 1, _ROWS_AT_ONCE)
    return lax.fori_loop(0, steps, lambda i, carry: step(first + i * _ROWS_AT_ONCE, carry), carry)
