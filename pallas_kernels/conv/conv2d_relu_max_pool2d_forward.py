"""Forward of `conv2d_relu_max_pool2d` in exact float32 on the CUDA cores, batch last.

A CTA computes adjacent pooling windows in one row, for a few output channels and one block of the batch, with one
example per lane. A lane loads the pixels that these windows need into registers, multiplies them by each weight, and
keeps one sum per window position.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import first_maximum, unsupported
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, divisors, largest_divisor, zeros_like
from pallas_kernels.core.tiles import kernel


def _lane_block(N: int, at_most: int) -> int:
    return max(length for length in (LANES, 2 * LANES) if N % length == 0 and length <= at_most)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Maximum output channels, examples (`lane_block`), and simultaneous pooling windows per CTA. `forward`
    reduces channels and windows until the grid has `programs_per_multiprocessor` CTAs per multiprocessor."""

    channels: int
    windows: int
    lane_block: int
    programs_per_multiprocessor: int


def _forward_unsupported(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> str | None:
    return unsupported(*w.shape[2:], window)


def _forward_heuristic(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> ForwardConfig:
    # Measured on an H100, for LeNet's blocks at batches from 128 to 65536.
    (_, H, W, N), (K, C, F, G), (R, S) = x.shape, w.shape, window
    if C == 1 and R * S > 4:
        return ForwardConfig(channels=8, windows=1, lane_block=2 * LANES, programs_per_multiprocessor=6)
    if C == 1:
        return ForwardConfig(channels=3, windows=4, lane_block=2 * LANES, programs_per_multiprocessor=4)
    P, Q = (H - F + 1) // R, (W - G + 1) // S
    programs = (N // _lane_block(N, 2 * LANES)) * P * -(-Q // 4) * -(-K // 2)
    if programs < device.target().multiprocessors:
        return ForwardConfig(channels=4, windows=2, lane_block=LANES, programs_per_multiprocessor=1)
    return ForwardConfig(channels=2, windows=4, lane_block=2 * LANES, programs_per_multiprocessor=3)


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic)
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: ForwardConfig) -> tuple[Array, Array]:
    """Compute `y[k, p, q, n] = max(0, b[k] + max over r, s of conv(x, w)[k, p * R + r, q * S + s, n])`.

    (r, s) is a position in window (p, q), with (R, S) the argument `window`. The convolution's stride is 1. Return y in
    x's dtype, and uint8 indices of the maxima, of y's shape: `r * S + s`, or `R * S` where y is 0.

    Args:
      x: `(C, H, W, N)`, N a multiple of `LANES`.
      w, b: `(K, C, F, G)` and `(K,)`.
    """
    (_, H, W, N), (K, _, F, G), (R, S) = x.shape, w.shape, window
    P, Q = (H - F + 1) // R, (W - G + 1) // S
    wanted = config.programs_per_multiprocessor * device.target().multiprocessors
    lane_block = _lane_block(N, config.lane_block)
    rows = (N // lane_block) * P
    windows = largest_divisor(Q, config.windows, lambda d: rows * K * (Q // d) >= wanted)
    steps = Q // windows
    channels = largest_divisor(K, config.channels, lambda d: rows * (K // d) * steps >= wanted)
    row_programs = (d for d in divisors(steps) if rows * (K // channels) * d >= wanted)
    turns = steps // next(row_programs, steps)
    y, place = launch(
        _ForwardProgram(window, lane_block, channels, windows, turns).body,
        x,
        w.astype(jnp.float32),
        b.astype(jnp.float32),
        # The backward reads the indices in this order.
        out=(jax.ShapeDtypeStruct((K, P, Q, N), x.dtype), jax.ShapeDtypeStruct((P, K, Q, N), jnp.uint8)),
        grid={"block": N // lane_block, "p": P, "step": steps // turns, "k": K // channels},
        name="conv2d_relu_max_pool2d",
    )
    return y, place.swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class _ForwardProgram:
    window: tuple[int, int]
    lane_block: int
    channels: int
    windows: int
    turns: int

    def body(self, x, w, b, y, place, *, block, p, step, k):
        C, places = x.shape[0], self.window[0] * self.window[1]
        lanes = pl.ds(block * self.lane_block, self.lane_block)

        def take_windows(turn, _):
            q = (step * self.turns + turn) * self.windows
            add_channel = functools.partial(self.add_channel, x, w, (k, p, q, lanes))
            zero = zeros_like(x[0, 0, 0, lanes].astype(jnp.float32))
            sums = [[zero] * places] * (self.channels * self.windows)
            sums = add_channel(0, sums) if C == 1 else lax.fori_loop(0, C, add_channel, sums)
            for (o, n), window in zip(self.windows_by_channel(), sums, strict=True):
                largest, at = first_maximum(window)
                largest += b[k * self.channels + o]
                y[k * self.channels + o, p, q + n, lanes] = jnp.maximum(largest, 0.0).astype(y.dtype)
                at = jnp.where(largest > 0, at, places)
                place[p, k * self.channels + o, q + n, lanes] = at.astype(jnp.uint8)

        lax.fori_loop(0, self.turns, take_windows, None)

    def windows_by_channel(self):
        return list(itertools.product(range(self.channels), range(self.windows)))

    def add_channel(self, x, w, program, c, sums):
        (k, p, q, lanes), (_, _, F, G), (R, S) = program, w.shape, self.window
        sums = dict(zip(self.windows_by_channel(), sums, strict=True))
        patch = {
            (i, j): x[c, p * R + i, q * S + j, lanes].astype(jnp.float32)
            for i in range(F + R - 1)
            for j in range(G + self.windows * S - 1)
        }
        for u, v, o in itertools.product(range(F), range(G), range(self.channels)):
            weight = w[k * self.channels + o, c, u, v]
            for n in range(self.windows):
                values = (patch[u + r, v + n * S + s] for r in range(R) for s in range(S))
                sums[o, n] = [total + value * weight for total, value in zip(sums[o, n], values, strict=True)]
        return list(sums.values())
