"""Max-pool's backward: each gradient goes to the place its maximum came from, as a gather without atomics."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import vector_length, zeros_like


def route(
    dy: Array,
    indices: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Array:
    """`dx[c, i, j, n] = sum of dy[c, p, q, n]` over the windows (p, q) whose maximum lay at (i, j).

    A program owns the input positions that `stride` maps to one row of windows and writes each exactly once,
    whether or not windows overlap, leave gaps or reach into the padding. Windows that do none of these need no kernel:
    see `jaxbp/ops/max_pool2d.py`.

    Args:
      dy: `(C, P, Q, N)`, the batch N a multiple of `LANES`.
      indices: integers of the same shape, the maximum's place in its window, `u * window[1] + v`.
      input_size: H and W.
      padding: rows above and columns to the left of the input.

    Returns:
      dx `(C, H, W, N)` in dy's dtype; overlapping windows are summed in float32.
    """
    C, P, Q, N = dy.shape
    length = vector_length(dy, indices)
    # In padded coordinates position (a * stride + r) is row r of window a, row r + stride of window a - 1, ...
    rows, columns = (-(-(size + before) // s) for size, before, s in zip(input_size, padding, stride, strict=True))
    # Windows that can reach a stride's cell: (cells back, offset added to the place within the cell).
    reach = [[(back, back * s) for back in range(-(-f // s))] for f, s in zip(window, stride, strict=True)]

    def body(dy_ref, index_ref, dx_ref, *, c, row, block):
        lanes = pl.ds(block * length, length)

        def cell(column, _):
            zero = zeros_like(dy_ref[0, 0, 0, lanes].astype(jnp.float32))
            sums = [[zero for _ in range(stride[1])] for _ in range(stride[0])]
            for back_p, offset_u in reach[0]:
                for back_q, offset_v in reach[1]:
                    p, q = row - back_p, column - back_q
                    exists = (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                    at = (c, jnp.clip(p, 0, P - 1), jnp.clip(q, 0, Q - 1), lanes)
                    gradient = dy_ref[at].astype(jnp.float32)
                    # An index no window has, where there is no window.
                    index = jnp.where(exists, index_ref[at].astype(jnp.int32), -1)
                    for r in range(min(stride[0], window[0] - offset_u)):
                        for s in range(min(stride[1], window[1] - offset_v)):
                            here = index == (r + offset_u) * window[1] + s + offset_v
                            sums[r][s] += jnp.where(here, gradient, 0.0)
            for r in range(stride[0]):
                for s in range(stride[1]):
                    dx_ref[c, row * stride[0] + r, column * stride[1] + s, lanes] = sums[r][s].astype(dx_ref.dtype)

        lax.fori_loop(0, columns, cell, None)

    padded = launch(
        body,
        dy,
        indices,
        out=jax.ShapeDtypeStruct((C, rows * stride[0], columns * stride[1], N), dy.dtype),
        grid={"c": C, "row": rows, "block": N // length},
        name="max_pool2d_route",
    )
    return padded[:, padding[0] : padding[0] + input_size[0], padding[1] : padding[1] + input_size[1]]
