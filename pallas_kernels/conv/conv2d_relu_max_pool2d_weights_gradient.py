"""Gradients of `conv2d_relu_max_pool2d` with respect to w and b in exact float32 on the CUDA cores, batch last.

A CTA computes the sums for a few output channels and one input channel, over one split: a part of the windows and of
the batch. It has one example per lane, and keeps the sums in registers. For each window, a lane multiplies dy by the
part of x that the filter reads at the position of the maximum. At the end, the CTA sums over the lanes. XLA adds the
splits.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import unsupported
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    SUMMED_ROWS,
    largest_divisor,
    multiply_add,
    quotient,
    remainder,
    sums_over_lanes,
    zeros_like,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import check_divides, kernel

_MAX_ACCUMULATORS = 160
"""Maximum sums in a thread's 255 registers."""
_OTHER_REGISTERS = 30
"""Registers per thread besides sums and patch. LeNet's estimated occupancy then agrees with ptxas."""
_MAX_PATCH = 72
"""Maximum pixels that a thread's windows read. More were not measured: docs/lab/2026-11-24-lenet.md."""
_REDUCTION_BYTES = 2048
"""Shared memory that Mosaic reserves for sums across warps."""
_FUSED_SPLITS = 64
"""Maximum splits that each operation that reads the gradients adds anew. Not tuned."""


class WeightsGradientConfig(NamedTuple):
    """Output channels per CTA, adjacent pooling windows that a thread processes at once, and wanted CTAs per
    multiprocessor."""

    channels: int
    windows: int
    programs_per_multiprocessor: int

    def division(self, dy: Any, x: Any) -> tuple[int, int, int, int]:
        """Divide the sums over windows and examples into splits. A step takes `windows` windows and `LANES` examples.

        Return four numbers: the splits, the steps in all splits together, the maximum steps per split, and the splits
        that would keep the GPU busy.
        """
        K, P, Q, N = dy.shape
        units = (N // LANES) * P * (Q // self.windows)
        programs = self.programs_per_multiprocessor * device.target().multiprocessors
        wanted = -(-programs // (x.shape[0] * (K // self.channels)))
        per_split = -(-units // min(units, wanted))
        return -(-units // per_split), units, per_split, wanted


def _filter_size(dy, x, window):
    return tuple(size - n * f + 1 for size, n, f in zip(x.shape[1:3], dy.shape[1:3], window, strict=True))


def _sums(channels: int, taps: int) -> int:
    return -(-channels * (taps + 1) // SUMMED_ROWS) * SUMMED_ROWS


def _fits(channels: int, taps: int) -> bool:
    return _sums(channels, taps) * LANES * 4 + _REDUCTION_BYTES <= device.target().shared_bytes


def _plan(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> WeightsGradientConfig | str:
    # This rule was found in a sweep on an H200.
    (F, G), (R, S), (K, _, Q, _), gpu = _filter_size(dy, x, window), window, dy.shape, device.target()
    if not _fits(1, F * G):
        return f"filters of {F} x {G}, whose sums do not fit in shared memory"
    if reason := unsupported(F, G, window):
        return reason
    patch = lambda windows: (F + R - 1) * (G + windows * S - 1)  # noqa: E731
    windows = largest_divisor(Q, 4, lambda d: patch(d) <= _MAX_PATCH)
    for channels in (2, 1) if K % 2 == 0 and 2 * F * G <= _MAX_ACCUMULATORS and _fits(2, F * G) else (1,):
        registers = channels * (F * G + 1) + patch(windows) + _OTHER_REGISTERS
        resident = max(1, gpu.registers // (LANES * registers))
        config = WeightsGradientConfig(channels, windows, programs_per_multiprocessor=2 * resident)
        _, units, _, wanted = config.division(dy, x)
        if units >= wanted:
            break
    return config


@kernel(plan=_plan)
def weights_gradient(
    dy: Array, place: Array, x: Array, *, window: tuple[int, int], config: WeightsGradientConfig
) -> tuple[Array, Array]:
    """Compute float32 dw and db of `conv2d_relu_max_pool2d`, in a fixed order of summation.

    Args:
      dy, place: `(K, P, Q, N)`, the gradient with respect to y, and the indices of the maxima.
      x: `(C, H, W, N)`, with H = P * R + F - 1 and W = Q * S + G - 1, for filters of F x G elements.
      window: R and S.
    """
    (K, P, Q, _), C, (F, G), (R, S) = dy.shape, x.shape[0], _filter_size(dy, x, window), window
    channels, windows = config.channels, config.windows
    check_divides("conv2d_relu_max_pool2d_weights_gradient.weights_gradient", "channels", channels, K)
    check_divides("conv2d_relu_max_pool2d_weights_gradient.weights_gradient", "windows", windows, Q)
    splits, units, per_split, _ = config.division(dy, x)
    taps, rows, steps = channels * F * G, _sums(channels, F * G), Q // windows

    def body(dy, place, x, out, lanes_of_sums, *, split, k, c):
        def add_unit(n, sums):
            row, q = quotient(n, steps), remainder(n, steps) * windows
            p, lanes = remainder(row, P), pl.ds(quotient(row, P) * LANES, LANES)
            image_rows = [p * R + i for i in range(F + R - 1)]
            patch = {
                (i, j): x[c, image_row, image_column, lanes].astype(jnp.float32)
                for j, image_column in enumerate([q * S + j for j in range(G + windows * S - 1)])
                for i, image_row in enumerate(image_rows)
            }
            weights, biases = list(sums[:taps]), list(sums[taps:])
            for n, o in itertools.product(range(windows), range(channels)):
                gradient = dy[k * channels + o, p, q + n, lanes].astype(jnp.float32)
                maximum = place[p, k * channels + o, q + n, lanes].astype(jnp.int32)
                biases[o] += lax.select(maximum < R * S, gradient, zero)
                for t in range(R * S):
                    routed = lax.select(maximum == t, gradient, zero)
                    for u, v in itertools.product(range(F), range(G)):
                        at, value = (o * F + u) * G + v, patch[u + t // S, v + n * S + t % S]
                        weights[at] = multiply_add(weights[at], routed, value)
            return (*weights, *biases)

        zero = zeros_like(x[0, 0, 0, pl.ds(0, LANES)].astype(jnp.float32))
        first, last = split * per_split, jnp.minimum((split + 1) * per_split, units)
        sums = lax.fori_loop(first, last, add_unit, (zero,) * (taps + channels))
        # One vector over the lanes per weight and per bias, then padding.
        for n, total in enumerate([*sums, *[zero] * (rows - len(sums))]):
            lanes_of_sums[n] = total
        sums_over_lanes(lanes_of_sums, out.at[split, k, c])

    sums = launch(
        body,
        dy,
        place.swapaxes(0, 1),
        x,
        out=jax.ShapeDtypeStruct((splits, K // channels, C, rows), jnp.float32),
        grid={"split": splits, "k": K // channels, "c": C},
        scratch=[plgpu.SMEM((rows, LANES), jnp.float32)],
        barriers=False,
        name="conv2d_relu_max_pool2d_backward_weights",
    )
    # XLA fuses these additions with the operations that read dw and db. `jnp.sum` would be a separate launch.
    sums = sum(sums[1:], sums[0]) if splits <= _FUSED_SPLITS else jnp.sum(sums, axis=0)
    dw = sums[:, :, :taps].reshape(K // channels, C, channels, F, G).swapaxes(1, 2).reshape(K, C, F, G)
    # db is the same for all input channels.
    return dw, sums[:, 0, taps : taps + channels].reshape(K)
