"""Forward of `conv2d_relu_max_pool2d` in exact float32 on the CUDA cores, batch last.

A CTA computes adjacent pooling windows in one row, for a few output channels and one block of the batch, with one
example per lane. A lane loads the pixels that these windows need into registers, multiplies them by each weight, and
keeps one sum per window position.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import first_maximum, pooled_size, unsupported
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, divisors, largest_divisor, multiply_add, zeros_like
from pallas_kernels.core.tiles import kernel


def _lane_block(N: int, at_most: int) -> int:
    return max(length for length in (LANES, 2 * LANES) if N % length == 0 and length <= at_most)


class ForwardConfig(NamedTuple):
    """Maximum output channels, examples (`lane_block`), and simultaneous pooling windows per CTA. `forward`
    reduces channels and windows until the grid has `programs_per_multiprocessor` CTAs per multiprocessor."""

    channels: int
    windows: int
    lane_block: int
    programs_per_multiprocessor: int


def _plan(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> ForwardConfig | str:
    # Measured on an H100, for LeNet's blocks at batches from 128 to 65536.
    if reason := unsupported(*w.shape[2:], window):
        return reason
    K, C, (P, Q), N = *w.shape[:2], pooled_size(x, w, window), x.shape[-1]
    if C == 1 and window[0] * window[1] > 4:
        return ForwardConfig(channels=8, windows=1, lane_block=2 * LANES, programs_per_multiprocessor=6)
    if C == 1:
        return ForwardConfig(channels=3, windows=4, lane_block=2 * LANES, programs_per_multiprocessor=4)
    programs = (N // _lane_block(N, 2 * LANES)) * P * -(-Q // 4) * -(-K // 2)
    if programs < device.target().multiprocessors:
        return ForwardConfig(channels=4, windows=2, lane_block=LANES, programs_per_multiprocessor=1)
    return ForwardConfig(channels=2, windows=4, lane_block=2 * LANES, programs_per_multiprocessor=3)


@kernel(plan=_plan)
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: ForwardConfig) -> tuple[Array, Array]:
    """Compute `y[k, p, q, n] = max(0, b[k] + max over r, s of conv(x, w)[k, p * R + r, q * S + s, n])`.

    (r, s) is a position in window (p, q), with (R, S) the argument `window`. The convolution's stride is 1. Return y in
    x's dtype, and uint8 indices of the maxima, of y's shape: `r * S + s`, or `R * S` where y is 0.

    Args:
      x: `(C, H, W, N)`, N a multiple of `LANES`.
      w, b: `(K, C, F, G)` and `(K,)`.
    """
    (K, C, F, G), (R, S), (P, Q), N = w.shape, window, pooled_size(x, w, window), x.shape[-1]
    wanted = config.programs_per_multiprocessor * device.target().multiprocessors
    lane_block = _lane_block(N, config.lane_block)
    rows = (N // lane_block) * P
    windows = largest_divisor(Q, config.windows, lambda d: rows * K * (Q // d) >= wanted)
    steps = Q // windows
    channels = largest_divisor(K, config.channels, lambda d: rows * (K // d) * steps >= wanted)
    row_programs = (d for d in divisors(steps) if rows * (K // channels) * d >= wanted)
    turns = steps // next(row_programs, steps)
    windows_by_channel = list(itertools.product(range(channels), range(windows)))

    def body(x, w, b, y, place, *, block, p, step, k):
        lanes = pl.ds(block * lane_block, lane_block)

        def take_windows(turn, _):
            q = (step * turns + turn) * windows

            def add_channel(c, sums):
                sums = dict(zip(windows_by_channel, sums, strict=True))
                image_columns = [q * S + j for j in range(G + windows * S - 1)]
                patch = {
                    (i, j): x[c, image_row, image_column, lanes].astype(jnp.float32)
                    for i, image_row in enumerate([p * R + i for i in range(F + R - 1)])
                    for j, image_column in enumerate(image_columns)
                }
                for u, v, o in itertools.product(range(F), range(G), range(channels)):
                    weight = w[k * channels + o, c, u, v]
                    for n in range(windows):
                        values = (patch[u + r, v + n * S + s] for r in range(R) for s in range(S))
                        sums[o, n] = [
                            multiply_add(total, value, weight) for total, value in zip(sums[o, n], values, strict=True)
                        ]
                return list(sums.values())

            zero = zeros_like(x[0, 0, 0, lanes].astype(jnp.float32))
            sums = [[zero] * (R * S)] * (channels * windows)
            sums = add_channel(0, sums) if C == 1 else lax.fori_loop(0, C, add_channel, sums)
            for (o, n), window_sums in zip(windows_by_channel, sums, strict=True):
                largest, at = first_maximum(window_sums)
                largest += b[k * channels + o]
                y[k * channels + o, p, q + n, lanes] = jnp.maximum(largest, 0.0).astype(y.dtype)
                at = jnp.where(largest > 0, at, R * S)
                place[p, k * channels + o, q + n, lanes] = at.astype(jnp.uint8)

        lax.fori_loop(0, turns, take_windows, None)

    y, place = launch(
        body,
        x,
        w.astype(jnp.float32),
        b.astype(jnp.float32),
        # The backward reads the indices in this order.
        out=(jax.ShapeDtypeStruct((K, P, Q, N), x.dtype), jax.ShapeDtypeStruct((P, K, Q, N), jnp.uint8)),
        grid={"block": N // lane_block, "p": P, "step": steps // turns, "k": K // channels},
        name="conv2d_relu_max_pool2d",
    )
    return y, place.swapaxes(0, 1)
