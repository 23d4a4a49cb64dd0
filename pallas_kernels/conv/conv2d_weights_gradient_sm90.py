"""Gradients of `conv2d` and `conv2d_relu_max_pool2d` with respect to the weights on Hopper's tensor cores.

For `conv2d_relu_max_pool2d`, each row p of pooling windows adds one matrix product to the sums:

    sums[(c, i, j), (t, k, q)] += sum over n of x[c, p * R + i, j, n] * routed[t, k, q, n].

c and k are input and output channels, and n is an example. i counts the rows of x that the filters read for row p. j
counts all columns of x. q is a window in row p, and t = (r, s) one of its R x S positions. `routed` is dy at the
positions of the maxima, and zero elsewhere. For position (u, v) in a filter, dw[k, c, u, v] is the total over t and q
of the sums with `i = r + u` and `j = q * S + s + v`.

For `conv2d`, each product takes R = 1, 2, or 4 rows of dy: S is 1, and `routed[(r, 0), k, q]` is `dy[k, p * R + r, q]`.

A CTA computes the sums for part of the input channels c and positions t, over one split: part of the rows p and
examples n.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.conv.conv2d_weights_gradient_body_sm90 import ConvolutionProgram, PooledProgram, body
from pallas_kernels.conv.conv2d_weights_gradient_sizes_sm90 import (
    TILE,
    Config,
    cheapest_config,
    convolution_sizes,
    pooled_sizes,
)
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, operand
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_MIN_BATCH = 2048
"""Adding up the sums of smaller batches takes longer than the tensor cores save: docs/lab/2026-11-23-lenet.md."""


def _pooled_config(dy: Any, x: Any, window: tuple[int, int]) -> Config | None:
    return cheapest_config(functools.partial(pooled_sizes, dy, x, window))


def _pooled_unsupported(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> str | None:
    return _misfit(dy, x) if _pooled_config(dy, x, window) is None else None


def _pooled_heuristic(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> Config | None:
    return _pooled_config(dy, x, window) if dy.shape[-1] >= _MIN_BATCH else None


def _misfit(dy, x):
    return f"dy {dy.shape} with x {x.shape}: their rows do not come in eights, or fit no tiles in shared memory"


@kernel(unsupported=_pooled_unsupported, heuristic=_pooled_heuristic, capability=(9, 0))
def weights_gradient(
    dy: Array, place: Array, x: Array, *, window: tuple[int, int], config: Config
) -> tuple[Array, Array]:
    """Compute `conv2d_relu_max_pool2d_weights_gradient.weights_gradient` on the tensor cores. float32 dy is rounded to
    TF32, and float32 x is truncated."""
    sizes = pooled_sizes(dy, x, window, config)
    place = place.swapaxes(0, 1).reshape(sizes.P, -1, sizes.N)
    stages = config.stages, sizes.gradient_rows, sizes.examples
    return _launch(
        PooledProgram,
        sizes,
        [x.reshape(-1, sizes.N), dy, place],
        buffers=2,
        copies=config.channels + 1 + (1 if simulating() is None else sizes.K),  # The simulator reshapes no memory.
        dys_and_places=(plgpu.SMEM(stages, dy.dtype), plgpu.SMEM(stages, jnp.uint8)),
        name="conv2d_relu_max_pool2d_backward_weights_tensor_cores",
    )


def _rows_a_product(dy: Any, x: Any) -> int | None:
    (_, rows, Q, _), W = dy.shape, x.shape[2]
    # A tile of an operand has eight rows, one per pixel.
    return next((R for R in (1, 2, 4) if rows % R == 0 and R * W % 8 == 0 and R * Q % 8 == 0), None)


def _convolution_heuristic(dy: Any, x: Any) -> Config | None:
    rows = _rows_a_product(dy, x)
    return rows and cheapest_config(functools.partial(convolution_sizes, dy, x, rows))


def _convolution_unsupported(dy: Any, x: Any) -> str | None:
    return _misfit(dy, x) if _convolution_heuristic(dy, x) is None else None


@kernel(unsupported=_convolution_unsupported, heuristic=_convolution_heuristic, capability=(9, 0))
def correlate_batch(dy: Array, x: Array, *, config: Config) -> tuple[Array, Array]:
    """Return dw of `conv2d.correlate_batch` for stride 1, and float32 db `(K,)`, the sum of dy per output channel.
    float32 dy is rounded to TF32, and float32 x is truncated."""
    sizes = convolution_sizes(dy, x, _rows_a_product(dy, x), config)
    return _launch(
        ConvolutionProgram,
        sizes,
        [x.reshape(-1, sizes.N), dy.reshape(-1, sizes.N), None],
        buffers=config.stages,
        copies=config.channels + sizes.K,
        name="correlate_batch_tensor_cores",
    )


def _launch(program, sizes, arrays, *, buffers, copies, name, dys_and_places=(None, None)):
    config, per_split = sizes.config, sizes.per_split(device.target().multiprocessors)
    (splits, *shares), rows = (-(-sizes.units // per_split), *sizes.shares), sizes.warpgroups * TILE
    x, dy, *_ = arrays
    _, gradients = launch(
        functools.partial(body, program, sizes, per_split),
        *arrays,
        out=[
            jax.ShapeDtypeStruct((splits, *shares, *shape), jnp.float32)
            for shape in ((rows, sizes.columns), (sizes.vectors * LANES,))
        ],
        grid={"split": splits, "c": shares[0], "t": shares[1]},
        warpgroups=sizes.warpgroups,
        scratch=[
            operand((config.stages, sizes.x_rows, sizes.examples), x.dtype),
            operand((buffers, sizes.routed_rows, sizes.examples), dy.dtype),
            plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=sizes.warpgroups),
            *dys_and_places,
        ],
        name=name,
    )
    gradients = jnp.sum(gradients, axis=(0, 2))
    taps = sizes.taps * sizes.K
    dw = gradients[:, :taps].reshape(sizes.C, *sizes.filter_size, sizes.K).transpose(3, 0, 1, 2)
    # db is the same for all input channels.
    return dw, gradients[0, taps : taps + sizes.K]
