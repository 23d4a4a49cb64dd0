"""The input's gradient of `conv2d_relu_max_pool2d` on Hopper's tensor cores, with the batch last.

Windows are taken a few beside each other at a time, a group. The input is cut into cells, as high as a window and as
wide as a group, so that the filters of a group at its cell reach into few others, those below and the one to its
right:

    dx[cell (m, j)] = sum over a, b of routed[row m - a, group j - b] @ weights[a, b],

where `routed` has dy at the places of the windows' maxima and zero elsewhere. The same weights serve every cell, and
stay in shared memory. Examples are the rows of the products, rounded to TF32 if float32, and 64 to a warpgroup.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.conv2d_relu_max_pool2d import input_gradient as exact_input_gradient
from pallas_kernels.launch import launch, load, on_gpu, rounded_to_tf32, store

_EXAMPLES = 64
_WARPGROUPS = 2
_MULTIPROCESSORS = 132
_SHARED_BYTES = 224 * 1024
_ROW_BYTES = 128
_MOST_COLUMNS = 256


def group(dy_shape: tuple[int, ...], w_shape: tuple[int, ...], window: tuple[int, int]) -> int | None:
    """Windows in a group, the fewest that fit the tensor cores' tiles and shared memory, or None.

    Args:
      dy_shape: `(K, P, Q, N)`.
      w_shape: `(K, C, F, G)`.
    """
    K, P, Q, _ = dy_shape
    _, C, F, G = w_shape
    R, S = window
    reach = _reach(F, R)
    if (P + reach - 1) % _WARPGROUPS:
        return None
    for windows in (d for d in range(1, Q + 1) if Q % d == 0):
        routed, cell = K * windows, C * R * windows * S
        operands = R * S * routed * (reach * 2 * cell + _WARPGROUPS * _EXAMPLES)
        fits = 4 * (operands + _WARPGROUPS * _EXAMPLES * cell // R) <= _SHARED_BYTES and 2 * cell <= _MOST_COLUMNS
        if fits and windows * S >= G - 1 and routed % 32 == 0 and cell // R % 8 == 0:
            return windows
    return None


def _reach(filter_rows, window_rows):
    """How many cells, one below the other, the filters of a row of windows reach into."""
    return -(-(filter_rows + window_rows - 1) // window_rows)


def input_gradient(dy: Array, place: Array, w: Array, *, window: tuple[int, int], input_size: tuple[int, int]) -> Array:
    """As `conv2d_relu_max_pool2d.input_gradient`, for float32 arrays that have a `group`.

    Where there is no GPU the exact kernel takes this one's place.
    """
    options = dict(window=window, input_size=input_size)
    here, exact = (functools.partial(kernel, **options) for kernel in (_input_gradient, exact_input_gradient))
    return on_gpu(here, exact, dy, place, w)


def _input_gradient(dy, place, w, *, window, input_size):
    K, P, Q, N = dy.shape
    _, C, F, _ = w.shape
    R, S = window
    windows = group(dy.shape, w.shape, window)
    groups, width, reach = Q // windows, windows * S, _reach(F, R)
    routed, half = K * windows, C * R * width
    inner = R * S * routed
    cells = P + reach - 1, groups + 1
    # Few cells a program, down to one a warpgroup, where the batch alone does not fill the GPU.
    pairs, blocks = cells[0] // _WARPGROUPS, N // _EXAMPLES
    turns = next((d for d in range(1, pairs) if pairs % d == 0 and blocks * (pairs // d) <= _MULTIPROCESSORS), pairs)

    def body(dy_ref, place_ref, weights_ref, dx_ref, weights, loaded, operands, stages, *, block, part, warpgroup):
        here = pl.ds(block * _EXAMPLES, _EXAMPLES)
        operand, stage = operands.at[warpgroup], stages.at[warpgroup]

        @pl.when(warpgroup == 0)
        def _():
            for a in range(reach):
                plgpu.copy_gmem_to_smem(weights_ref.at[a], weights.at[a], loaded)

        plgpu.barrier_wait(loaded)

        def route(p, g):
            rows = pl.ds((p * groups + g) * routed, routed)

            def examples_first(ref):
                columns = load(
                    plgpu.transpose_ref(ref.at[rows, here], (1, 0)), plgpu.Layout.WGMMA_TRANSPOSED, optimized=False
                )
                columns = columns if columns.dtype == dy.dtype else columns.astype(jnp.int32)
                return plgpu.layout_cast(columns, plgpu.Layout.WGMMA)

            gradient, at = rounded_to_tf32(examples_first(dy_ref)), examples_first(place_ref)
            for t in range(R * S):
                operand[:, pl.ds(t * routed, routed)] = jnp.where(at == t, gradient, 0.0)
            plgpu.commit_smem()

        def products(m, g):
            def accumulate(sums):
                def add(a, _):
                    route(m - a, g)
                    plgpu.wgmma(sums, operand, weights.at[a].transpose((1, 0)))
                    plgpu.wgmma_wait(0)

                lax.fori_loop(jnp.maximum(0, m - P + 1), jnp.minimum(reach, m + 1), add, None)
                return sums[...]

            return pl.run_scoped(accumulate, plgpu.ACC((_EXAMPLES, 2 * half)))

        def write(m, j, cell):
            for r in range(R):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                row = cell[:, r * C * width : (r + 1) * C * width]
                store(plgpu.transpose_ref(stage, (1, 0)), plgpu.layout_cast(row, plgpu.Layout.WGMMA_TRANSPOSED))
                plgpu.commit_smem()
                for c in range(C):
                    to = dx_ref.at[m * R + r, c, pl.ds(j * width, width), here]
                    plgpu.copy_smem_to_gmem(stage.at[pl.ds(c * width, width)], to)

        def turn(i, _):
            m = (part * turns + i) * _WARPGROUPS + warpgroup
            right = None
            for g in range(groups):
                sums = products(m, g)
                write(m, g, sums[:, :half] if right is None else sums[:, :half] + right)
                right = sums[:, half:]
            write(m, groups, right)

        lax.fori_loop(0, turns, turn, None)
        plgpu.wait_smem_to_gmem(0)

    def by_groups(a):
        return a.reshape(K, P, groups, windows, N).transpose(1, 2, 0, 3, 4).reshape(-1, N)

    tiled = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(_ROW_BYTES)
    dx = launch(
        body,
        by_groups(dy),
        by_groups(place),
        _matrices(w, window, windows, reach),
        out=jax.ShapeDtypeStruct((cells[0] * R, C, cells[1] * width, N), dy.dtype),
        grid={"block": blocks, "part": pairs // turns},
        warpgroups=_WARPGROUPS,
        scratch=[
            plgpu.SMEM((reach, 2 * half, inner), jnp.float32, transforms=tiled),
            plgpu.Barrier(num_arrivals=reach),
            plgpu.SMEM((_WARPGROUPS, _EXAMPLES, inner), jnp.float32, transforms=tiled),
            plgpu.SMEM((_WARPGROUPS, C * width, _EXAMPLES), jnp.float32),
        ],
        name="conv2d_relu_max_pool2d_backward_input_tensor_cores",
    )
    return dx[: input_size[0], :, : input_size[1]].swapaxes(0, 1)


def _matrices(w, window, windows, reach):
    """`[a, (b, r, c, v), (t, k, q)]`: what a place of a group's window adds to a position of the cell (a, b) on."""
    K, C, F, G = w.shape
    R, S = window
    width = windows * S
    a, b, r, v, tr, ts, q = np.ix_(*map(range, (reach, 2, R, width, R, S, windows)))
    row, column = a * R + r - tr, b * width + v - (q * S + ts)
    inside = (row >= 0) & (row < F) & (column >= 0) & (column < G)
    row, column, inside = np.broadcast_arrays(np.where(inside, row, 0), np.where(inside, column, 0), inside)
    taps = jnp.where(inside, lax.reduce_precision(w, 8, 10)[:, :, row, column], 0)
    # K, C, a, b, r, v, tr, ts, q
    return taps.transpose(2, 3, 4, 1, 5, 6, 7, 0, 8).reshape(reach, 2 * C * R * width, R * S * K * windows)
