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

from pallas_kernels.conv.conv2d_relu_max_pool2d import input_gradient as exact_input_gradient
from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import load, operand, rounded_to_tf32, store

_EXAMPLES = 64
_MOST_WARPGROUPS = 4
_SHARED_BYTES = 226 * 1024
_SUMS, _SUMS_TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
# A thread keeps the sums of the cells that a row of windows reaches: with more it spills them.
_MOST_SUMS = 96
# Below, matrix products of the library are as fast.
_LEAST_BATCH = 2048


def group(dy_shape: tuple[int, ...], w_shape: tuple[int, ...], window: tuple[int, int]) -> int | None:
    """Windows in a group, the fewest that fit the tensor cores' tiles and shared memory, or None.

    Args:
      dy_shape: `(K, P, Q, N)`.
      w_shape: `(K, C, F, G)`.
    """
    K, _, Q, _ = dy_shape
    _, C, F, G = w_shape
    R, S = window
    reach = _reach(F, R)
    for windows in (d for d in range(1, Q + 1) if Q % d == 0):
        groups, routed, cell = Q // windows, K * windows, C * R * windows * S
        operands = R * S * routed * (2 * reach * cell + groups * _EXAMPLES)
        fits = 4 * (operands + (groups + 1) * _EXAMPLES * cell // R) <= _SHARED_BYTES
        fits &= groups < _MOST_WARPGROUPS and reach * cell * _EXAMPLES // 128 <= _MOST_SUMS
        if fits and windows * S >= G - 1 and routed % 32 == 0 and cell // R % 8 == 0:
            return windows
    return None


def pays(dy_shape: tuple[int, ...], w_shape: tuple[int, ...], window: tuple[int, int]) -> bool:
    """Whether `input_gradient` takes these shapes, and is faster than the library's products."""
    return dy_shape[-1] >= _LEAST_BATCH and group(dy_shape, w_shape, window) is not None


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
    windows, reach = group(dy.shape, w.shape, window), _reach(F, R)
    groups, width = Q // windows, windows * S
    routed, row = K * windows, C * width
    inner, warpgroups = R * S * routed, groups + 1

    # A warpgroup owns a column of cells.
    def body(dy_ref, place_ref, weights_ref, dx_ref, weights, loaded, operands, met, stages, *, block, warpgroup):
        here = pl.ds(block * _EXAMPLES, _EXAMPLES)
        mine, stage = jnp.minimum(warpgroup, groups - 1), stages.at[warpgroup]

        def fetch(p):
            rows = pl.ds((p * groups + mine) * routed, routed)
            return [
                load(ref.at[rows, here].transpose((1, 0)), _SUMS_TRANSPOSED, optimized=False)
                for ref in (dy_ref, place_ref)
            ]

        def route(gradient, places):
            gradient = rounded_to_tf32(plgpu.layout_cast(gradient, _SUMS))
            places = plgpu.layout_cast(places.astype(jnp.int32), _SUMS)
            for t in range(R * S):
                operands[mine, :, pl.ds(t * routed, routed)] = jnp.where(places == t, gradient, 0.0)

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def multiply(sums, b, _):
            for a in range(reach):
                plgpu.wgmma(sums[a], operands.at[warpgroup - b], weights.at[a, b].transpose((1, 0)))
            plgpu.wgmma_wait(0)

        def write(m, cell):
            for r in range(R):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                part = plgpu.layout_cast(cell[:, r * row : (r + 1) * row], _SUMS_TRANSPOSED)
                store(stage.transpose((1, 0)), part)
                plgpu.commit_smem()
                for c in range(C):
                    to = dx_ref.at[m * R + r, c, pl.ds(warpgroup * width, width), here]
                    plgpu.copy_smem_to_gmem(stage.at[pl.ds(c * width, width)], to)

        @pl.when(warpgroup == 0)
        def _():
            for a in range(reach):
                for b in range(2):
                    plgpu.copy_gmem_to_smem(weights_ref.at[a, b], weights.at[a, b], loaded)

        # The sums of a row of cells are in registers only while rows of windows add to them.
        def rows_from(p, fetched, *sums):
            if p == P:
                for n, cell in enumerate(sums):
                    write(P + n, cell[...])
                return
            if len(sums) < reach:
                pl.run_scoped(functools.partial(rows_from, p, fetched, *sums), plgpu.ACC((_EXAMPLES, R * row)))
                return
            pl.when(warpgroup < groups)(functools.partial(route, *fetched))
            plgpu.commit_smem()
            meet()
            # Under way while the products are.
            fetched = fetch(min(p + 1, P - 1))
            bounds = jnp.maximum(0, warpgroup - groups + 1), jnp.minimum(2, warpgroup + 1)
            lax.fori_loop(*bounds, functools.partial(multiply, sums), None)
            meet()
            write(p, sums[0][...])
            rows_from(p + 1, fetched, *sums[1:])

        fetched = fetch(0)
        plgpu.barrier_wait(loaded)
        rows_from(0, fetched)
        plgpu.wait_smem_to_gmem(0)

    def by_groups(a):
        return a.reshape(K, P, groups, windows, N).transpose(1, 2, 0, 3, 4).reshape(-1, N)

    dx = launch(
        body,
        by_groups(dy),
        by_groups(place),
        _matrices(w, window, windows, reach),
        out=jax.ShapeDtypeStruct(((P + reach - 1) * R, C, warpgroups * width, N), dy.dtype),
        grid={"block": N // _EXAMPLES},
        warpgroups=warpgroups,
        scratch=[
            operand((reach, 2, R * row, inner), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * reach),
            operand((groups, _EXAMPLES, inner), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
            plgpu.SMEM((warpgroups, row, _EXAMPLES), jnp.float32),
        ],
        name="conv2d_relu_max_pool2d_backward_input_tensor_cores",
    )
    return dx[: input_size[0], :, : input_size[1]].swapaxes(0, 1)


def _matrices(w, window, windows, reach):
    """`[a, b, (r, c, v), (t, k, q)]`: what a place of a group's window adds to a position of the cell (a, b) on."""
    K, C, F, G = w.shape
    R, S = window
    width = windows * S
    a, b, r, v, tr, ts, q = np.ix_(*map(range, (reach, 2, R, width, R, S, windows)))
    row, column = a * R + r - tr, b * width + v - (q * S + ts)
    inside = (row >= 0) & (row < F) & (column >= 0) & (column < G)
    row, column, inside = np.broadcast_arrays(np.where(inside, row, 0), np.where(inside, column, 0), inside)
    taps = jnp.where(inside, lax.reduce_precision(w, 8, 10)[:, :, row, column], 0)
    # K, C, a, b, r, v, tr, ts, q
    return taps.transpose(2, 3, 4, 1, 5, 6, 7, 0, 8).reshape(reach, 2, C * R * width, R * S * K * windows)
