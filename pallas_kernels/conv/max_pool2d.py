"""Backward of max-pooling as a gather: each input position adds the gradients of the windows that selected it.

The padded input is divided into cells of `stride[0]` x `stride[1]` positions. A CTA computes one row of cells, for one
channel and one block of the batch, with one example per lane. For each cell, it loads dy and the index of the maximum
of every window that can overlap the cell.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import vector_length, zeros_like
from pallas_kernels.core.tiles import kernel


@dataclasses.dataclass(frozen=True)
class RouteConfig:
    lane_block: int


def _heuristic(dy: Any, indices: Any, **options: Any) -> RouteConfig:
    return RouteConfig(lane_block=vector_length(dy, indices))


@kernel(heuristic=_heuristic)
def scatter_gradients(
    dy: Array,
    indices: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    config: RouteConfig,
) -> Array:
    """Compute `dx[c, i, j, n]`, the sum of `dy[c, p, q, n]` over the windows (p, q) whose maximum was at (i, j).
    Windows may overlap, leave gaps, or reach into the padding.

    Args:
      dy: `(C, P, Q, N)`, N a multiple of `LANES`.
      indices: integers of dy's shape: `u * window[1] + v` for a maximum at position (u, v) of the window.
      padding: rows above the input, and columns to its left.
    """
    C, N = dy.shape[0], dy.shape[-1]
    rows, columns = (-(-(size + before) // s) for size, before, s in zip(input_size, padding, stride, strict=True))
    padded = launch(
        functools.partial(_route_row, window=window, stride=stride, columns=columns, lane_block=config.lane_block),
        dy,
        indices,
        out=jax.ShapeDtypeStruct((C, rows * stride[0], columns * stride[1], N), dy.dtype),
        grid={"c": C, "row": rows, "block": N // config.lane_block},
        name="max_pool2d_route",
    )
    return padded[:, padding[0] : padding[0] + input_size[0], padding[1] : padding[1] + input_size[1]]


def _route_row(dy_ref, index_ref, dx_ref, *, c, row, block, window, stride, columns, lane_block):
    _, P, Q, _ = dy_ref.shape
    lanes = pl.ds(block * lane_block, lane_block)
    # Per axis, for each window that can overlap the cell: its distance in cells, and the cell's offset in it.
    reach_p, reach_q = ([(back, back * s) for back in range(-(-f // s))] for f, s in zip(window, stride, strict=True))

    def cell(column, _):
        zero = zeros_like(dy_ref[0, 0, 0, lanes].astype(jnp.float32))
        sums = [[zero for _ in range(stride[1])] for _ in range(stride[0])]
        for back_p, offset_u in reach_p:
            for back_q, offset_v in reach_q:
                p, q = row - back_p, column - back_q
                exists = (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                at = (c, jnp.clip(p, 0, P - 1), jnp.clip(q, 0, Q - 1), lanes)
                gradient = dy_ref[at].astype(jnp.float32)
                index = jnp.where(exists, index_ref[at].astype(jnp.int32), -1)
                for r in range(min(stride[0], window[0] - offset_u)):
                    for s in range(min(stride[1], window[1] - offset_v)):
                        is_maximum = index == (r + offset_u) * window[1] + s + offset_v
                        sums[r][s] += jnp.where(is_maximum, gradient, 0.0)
        for r in range(stride[0]):
            for s in range(stride[1]):
                dx_ref[c, row * stride[0] + r, column * stride[1] + s, lanes] = sums[r][s].astype(dx_ref.dtype)

    lax.fori_loop(0, columns, cell, None)
