"""Backward of max-pooling as a gather: each input position adds the gradients of the windows that selected it.

`scatter_to_windows` is for adjacent windows, and `scatter_gradients` for all other windows. In `scatter_gradients`, the
padded input is divided into cells of `stride[0]` x `stride[1]` positions. A CTA computes one row of cells, for one
channel and one block of the batch, with one example per lane. For each cell, it loads dy and the index of the maximum
of every window that can overlap the cell.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import gathers
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, remainder, vector_length, zeros_like
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel
from pallas_kernels.pointwise.elementwise import unsupported_indices


class RouteConfig(NamedTuple):
    lane_block: int


@kernel(plan=lambda dy, indices, **options: RouteConfig(lane_block=vector_length(dy, indices)))
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
    C, P, Q, N = dy.shape
    rows, columns = (-(-(size + before) // s) for size, before, s in zip(input_size, padding, stride, strict=True))
    # Per axis, for each window that can overlap the cell: its distance in cells, and the cell's offset in it.
    reach_p, reach_q = ([(back, back * s) for back in range(-(-f // s))] for f, s in zip(window, stride, strict=True))

    def body(dy_ref, index_ref, dx_ref, *, c, row, block):
        lanes = pl.ds(block * config.lane_block, config.lane_block)

        def cell(column, _):
            zero = zeros_like(dy_ref[0, 0, 0, lanes].astype(jnp.float32))
            sums = [[zero for _ in range(stride[1])] for _ in range(stride[0])]
            for (back_p, offset_u), (back_q, offset_v) in itertools.product(reach_p, reach_q):
                p, q = row - back_p, column - back_q
                exists = (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                at = (c, jnp.clip(p, 0, P - 1), jnp.clip(q, 0, Q - 1), lanes)
                gradient = dy_ref[at].astype(jnp.float32)
                index = jnp.where(exists, index_ref[at].astype(jnp.int32), -1)
                for r in range(min(stride[0], window[0] - offset_u)):
                    for s in range(min(stride[1], window[1] - offset_v)):
                        is_maximum = index == (r + offset_u) * window[1] + s + offset_v
                        sums[r][s] += jnp.where(is_maximum, gradient, 0.0)
            for r, s in itertools.product(*map(range, stride)):
                dx_ref[c, row * stride[0] + r, column * stride[1] + s, lanes] = sums[r][s].astype(dx_ref.dtype)

        lax.fori_loop(0, columns, cell, None)

    padded = launch(
        body,
        dy,
        indices,
        out=jax.ShapeDtypeStruct((C, rows * stride[0], columns * stride[1], N), dy.dtype),
        grid={"c": C, "row": rows, "block": N // config.lane_block},
        name="max_pool2d_route",
    )
    return padded[:, padding[0] : padding[0] + input_size[0], padding[1] : padding[1] + input_size[1]]


ACCESS_BYTES = 16
"""A thread's widest access (CUDA C++ Programming Guide)."""
_ACCESSES = 4
"""Vectors per thread. One to eight took equally long: docs/lab/2026-11-28-pools.md."""


class WindowsConfig(NamedTuple):
    """A thread computes `accesses` vectors of dx, or if `windows` is not 0, `accesses` vectors in each row of its
    windows.

    Attributes:
      windows: number of adjacent windows that fill a vector, or 0 if a vector need not begin at a window.
    """

    accesses: int
    windows: int = 0


def _windows_plan(dy, indices, *, input_size, window, channels_last=False):
    if reason := unsupported_indices(_input_shape(dy, input_size, channels_last)):
        return reason
    widest = ACCESS_BYTES // dy.dtype.itemsize
    windows = widest // window[1]
    fit = not channels_last and windows * window[1] == widest and dy.shape[3] % windows == 0
    fit = fit and input_size == tuple(n * f for n, f in zip(dy.shape[2:], window, strict=True))
    return WindowsConfig(_ACCESSES, windows if fit else 0)


@kernel(plan=_windows_plan)
def scatter_to_windows(
    dy: Array,
    indices: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    channels_last: bool = False,
    config: WindowsConfig,
) -> Array:
    """Compute `dx[n, c, p R + u, q S + v] = dy[n, c, p, q] if indices[n, c, p, q] == u S + v else 0`, for the window
    `(R, S)`. Rows and columns after the last window are 0. The last window may reach beyond the input.

    Args:
      dy: `(N, C, P, Q)`, or `(N, P, Q, C)` if `channels_last`.
      indices: integers of dy's shape.
    """
    if indices.dtype != jnp.uint8 or math.prod(window) > 256:
        indices = indices.astype(jnp.int32)
    shape = _input_shape(dy, input_size, channels_last)
    if math.prod(shape) == 0:
        return jnp.zeros(shape, dy.dtype)
    if config.windows:
        return _scatter_windows(dy, indices, window, shape, config)
    return _scatter_positions(dy, indices, window, shape, channels_last, config)


def _input_shape(dy, input_size, channels_last):
    return (dy.shape[0], *input_size, dy.shape[3]) if channels_last else (*dy.shape[:2], *input_size)


def _scatter_windows(dy, indices, window, shape, config):
    (R, S), k = window, config.windows
    columns = dy.shape[-1] // k

    def body(dy_ref, index_ref, dx_ref, at):
        row, column = quotient(at, columns), remainder(at, columns)
        gradient, index = (gathers.columns(gathers.gather_rows(ref, at)) for ref in (dy_ref, index_ref))
        for u in range(R):
            values = [_at_position(gradient[i], index[i], u * S + v) for i in range(k) for v in range(S)]
            gathers.scatter_rows(dx_ref, gathers.block_of(values), (row * R + u) * columns + column)

    return _launch_vectors(body, dy.reshape(-1, k), indices.reshape(-1, k), shape, k * S, dy.size // k, config)


def _scatter_positions(dy, indices, window, shape, channels_last, config):
    (R, S), widest = window, ACCESS_BYTES // dy.dtype.itemsize
    (P, Q), (H, W), C = (dy.shape[1:3], shape[1:3], shape[3]) if channels_last else (dy.shape[2:], shape[2:], 1)
    k = math.gcd(C, widest)  # adjacent channels per vector
    positions = math.gcd(math.prod(shape), widest) if C == 1 else 1  # adjacent positions per vector

    def body(dy_ref, index_ref, dx_ref, at):
        first, channel = quotient(at, C // k) * positions, remainder(at, C // k)
        values = []
        for place in (first + j for j in range(positions)):
            row, w = quotient(place, W), remainder(place, W)
            image, h = quotient(row, H), remainder(row, H)
            p, u, q, v = quotient(h, R), remainder(h, R), quotient(w, S), remainder(w, S)
            selected = ((image * P + jnp.minimum(p, P - 1)) * Q + jnp.minimum(q, Q - 1)) * (C // k) + channel
            gradient, index = (gathers.columns(gathers.gather_rows(ref, selected)) for ref in (dy_ref, index_ref))
            inside = (p < P) & (q < Q)
            values += [
                jnp.where(inside, _at_position(*pair, u * S + v), 0) for pair in zip(gradient, index, strict=True)
            ]
        gathers.scatter_rows(dx_ref, gathers.block_of(values), at)

    width = k * positions
    vectors = math.prod(shape) // width
    return _launch_vectors(body, dy.reshape(-1, k), indices.reshape(-1, k), shape, width, vectors, config)


def _launch_vectors(body, dy, indices, shape, width, vectors, config):
    """Launch `body(dy_ref, index_ref, dx_ref, at)`, and return dx in the given `shape`. Each row of a ref is a vector.
    A row of dx_ref has `width` elements. `at` has the numbers of a CTA's vectors, all below `vectors`."""
    accesses = config.accesses if simulating() is None else -(-vectors // LANES)
    lanes = LANES * accesses

    def of_program(*refs, program):
        # Threads beyond the end repeat the last vector. Divisions of unsigned integers take fewer instructions.
        at = (program * lanes + gathers.lane_numbers(lanes)).astype(jnp.uint32)
        body(*refs, jnp.minimum(at, jnp.uint32(vectors - 1)))

    return launch(
        of_program,
        dy,
        indices,
        out=jax.ShapeDtypeStruct((math.prod(shape) // width, width), dy.dtype),
        grid={"program": -(-vectors // lanes)},
        name="max_pool2d_windows",
        barriers=False,
        sums_across_warps=False,
    ).reshape(shape)


def _at_position(gradient, index, position):
    position = index.dtype.type(position) if isinstance(position, int) else position.astype(index.dtype)
    return jnp.where(index == position, gradient, jnp.zeros((), gradient.dtype))
