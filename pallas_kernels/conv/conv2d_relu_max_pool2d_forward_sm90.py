"""Forward of `conv2d_relu_max_pool2d` in half precision on Hopper's tensor cores, batch last.

A tile is a few pooling windows, for all output channels and 64 examples. The patch is the part of the images that a
tile needs. For each position (r, s) in a window, `wgmma` multiplies a banded matrix of the filters by the patch:

    sums[r, s][(p, k, q), n] = sum over i, c, j of weights[s][(p, k, q), (i, c, j)] * patch[(r + i, c, j), n].

(p, q) is a window of the tile, k an output channel, c an input channel, n an example, and (r + i, j) a pixel of the
patch. `weights` stays in shared memory: see `docs/kernels/conv.md`.
"""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import (
    BARRIER_BYTES,
    EXAMPLES,
    MAX_BOX,
    first_maximum,
    pooled_size,
    taps,
    tile_at,
)
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    as_box,
    as_operand,
    divisors,
    load,
    operand,
    operand_and_box,
    quotient,
    store,
    swizzled,
    value_a_row,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_ITEM_BYTES = 2
_FEATURES = 64
"""Rows of a `wgmma` product: one per output channel and window."""
_MAX_PLACES = 4
"""With more positions per window, a thread's sums exceed its registers."""
_WARPGROUPS = 2
"""Three warpgroups per CTA were no faster: docs/lab/2026-11-23-forward.md."""
_MAX_STAGES = 4
"""Not tuned."""
_EPILOGUE_CLOCKS = 800
"""Estimated clock cycles to find a tile's maxima: 12 instructions per window, two cycles each."""


class Config(NamedTuple):
    rows: int
    columns: int
    operand_bytes: int
    warpgroups: int
    stages: int


def _tile(x, w, window, config):
    """Return the sizes of a tile of `config.rows` x `config.columns` windows, and whether it fits the kernel."""
    (K, C, F, G), (R, S), (P, Q) = w.shape, window, pooled_size(x, w, window)
    patch = config.rows * R + F - 1, config.columns * S + G - 1
    group, row, band = config.operand_bytes // _ITEM_BYTES, C * patch[1], patch[0] - R + 1
    summed = -(-band * row // group) * group
    stage_rows = max(patch[0] * row, (R - 1) * row + summed)
    features, panels = config.rows * K * config.columns, EXAMPLES // group
    results = config.warpgroups * _FEATURES * EXAMPLES * (_ITEM_BYTES + 1)
    left = device.target().shared_bytes - _ITEM_BYTES * S * _FEATURES * summed - results - BARRIER_BYTES
    stages = min(_MAX_STAGES, left // (_ITEM_BYTES * stage_rows * EXAMPLES * config.warpgroups))
    return SimpleNamespace(
        config=config._replace(stages=stages),
        patch=patch,
        features=features,
        group=group,
        panels=panels,  # operand rows that hold one pixel for all examples of the tile
        row=row,
        band=band,  # rows of pixels in one product, which computes one position (r, s) in every window of the tile
        summed=summed,  # pixels in `band` rows of all input channels, then padding: the axis over which a product sums
        stage_rows=stage_rows,  # one per pixel and channel, then padding up to the last row that a product reads
        # Estimated clock cycles for all windows of 64 examples: two per element of the axis over which a product sums.
        clocks=P // config.rows * (Q // config.columns) * max(2 * R * S * summed, _EPILOGUE_CLOCKS),
        fits=P % config.rows == Q % config.columns == 0
        and features <= _FEATURES
        # Each product begins one patch row later than the previous product, at a tile of eight operand rows.
        and row % 8 == 0
        # If a pixel takes several operand rows, eight of them must be a patch row.
        and (panels == 1 or patch[1] == 8)
        and max(C, *patch) <= MAX_BOX
        and stages >= max(1, config.stages),
    )


def _plan(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> Config | str:
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}, only bfloat16 and float16"
    if window[0] * window[1] > _MAX_PLACES:
        return f"window={window}, which has more than {_MAX_PLACES} positions"
    tiles = [
        _tile(x, w, window, Config(rows, columns, operand_bytes, _WARPGROUPS, 0))
        for rows, columns, operand_bytes in itertools.product(*map(divisors, pooled_size(x, w, window)), (128, 64))
    ]
    if best := min((tile for tile in tiles if tile.fits), key=lambda tile: tile.clocks, default=None):
        return best.config
    return f"{w.shape} filters on {x.shape}, for which no tile fits the tensor cores and shared memory"


@kernel(plan=_plan, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: Config) -> tuple[Array, Array]:
    """Compute `conv2d_relu_max_pool2d_forward.forward` in half precision, with float32 sums. N may be any multiple of
    64.

    A NaN or an infinity in x makes all results of its example in the same tile of windows NaN, because zero weights
    multiply it.
    """
    tile = _tile(x, w, window, config)
    if not tile.fits:
        raise ValueError(
            f"conv2d_relu_max_pool2d_forward_sm90.forward: config is {config}, which does not fit x {x.shape} and "
            f"w {w.shape}; wants None, for the planned config"
        )
    (C, H, W, N), K, (R, S), (P, Q) = x.shape, w.shape[0], window, pooled_size(x, w, window)
    (rows, columns), group, panels, warpgroups = tile.patch, tile.group, tile.panels, config.warpgroups
    tiles, pixels = (P // config.rows, Q // config.columns), rows * tile.row
    tail, stages, count = tile.stage_rows - pixels, warpgroups * config.stages, tiles[0] * tiles[1] * (N // EXAMPLES)
    programs = min(device.target().multiprocessors, -(-count // warpgroups))

    def body(x, matrices, zeros, bias, y, place, *scratch, program, warpgroup):
        weights, constants_loaded, patches, loaded, y_tiles, place_tiles = scratch
        steps = quotient(count - program + programs - 1, programs)

        def copy(step, stage, barrier):
            p, q, block = tile_at(step * programs + program, tiles, config)
            row, column, panel = p * R, q * S, block * panels
            if simulating() is None:
                patch = as_box(patches).at[stage, pl.ds(0, pixels // 8)]
                patch = patch.reshape(rows, C, panels, columns, group).transpose((1, 0, 3, 2, 4))
                images = x.at[:, pl.ds(row, rows), pl.ds(column, columns), pl.ds(panel, panels)]
                plgpu.copy_gmem_to_smem(images, patch, barrier)
                return
            for i, c, n in itertools.product(range(rows), range(C), range(panels)):
                images = x.at[c, row + i, pl.ds(column, columns), panel + n]
                at = pl.ds((i * C + c) * columns, columns), pl.ds(n * group, group)
                plgpu.copy_gmem_to_smem(images, patches.at[stage, *at], barrier)

        ring = Ring(stages, copy, loaded, steps)

        @pl.when(warpgroup == 0)
        def _():
            for s in range(S):
                plgpu.copy_gmem_to_smem(matrices.at[s], weights.at[s], constants_loaded)
            # The padding after each stage's pixels must not hold NaN, because zero weights multiply it.
            for stage in range(stages if tail else 0):
                to = as_operand(patches).at[stage, pl.ds(pixels, tail)]
                plgpu.copy_gmem_to_smem(zeros, to, constants_loaded)

        for n in range(config.stages):
            ring.fetch(n * warpgroups + warpgroup)
        bias = load(bias, value_a_row(), optimized=False)
        plgpu.barrier_wait(constants_loaded)

        def take_tile(turn, _):
            step = turn * warpgroups + warpgroup

            def multiply(*sums):
                stage = ring.stage(step)
                patch = as_operand(patches).at[stage]
                ring.wait(step)
                for t, total in enumerate(sums):
                    r, s = divmod(t, S)
                    plgpu.wgmma(total, weights.at[s], patch.at[pl.ds(r * tile.row, tile.summed)])
                plgpu.wgmma_wait(0)
                ring.fetch(step + ring.stages)
                return [total[...] for total in sums]

            largest, at = first_maximum(pl.run_scoped(multiply, *[plgpu.ACC((_FEATURES, EXAMPLES))] * (R * S)))
            largest += lax.broadcast_in_dim(bias, largest.shape, [0])
            at = jnp.where(largest > 0, at, R * S).astype(jnp.uint8)
            write(step, jnp.maximum(largest, 0.0).astype(y.dtype), at)

        def write(step, values, at):
            p, q, block = tile_at(step * programs + program, tiles, config)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store(y_tiles.at[warpgroup], values)
            store(place_tiles.at[warpgroup], at)
            plgpu.commit_smem()
            windows, examples = pl.ds(q, config.columns), pl.ds(block * EXAMPLES, EXAMPLES)
            if simulating() is None:
                shape = config.rows, K, config.columns, EXAMPLES
                values, at = (ref.at[warpgroup, pl.ds(0, tile.features)] for ref in (y_tiles, place_tiles))
                to = y.at[:, pl.ds(p, config.rows), windows, examples]
                plgpu.copy_smem_to_gmem(values.reshape(*shape).transpose((1, 0, 2, 3)), to)
                plgpu.copy_smem_to_gmem(at.reshape(*shape), place.at[pl.ds(p, config.rows), :, windows, examples])
                return
            for row, k in itertools.product(range(config.rows), range(K)):
                source = warpgroup, pl.ds((row * K + k) * config.columns, config.columns)
                plgpu.copy_smem_to_gmem(y_tiles.at[source], y.at[k, p + row, windows, examples])
                plgpu.copy_smem_to_gmem(place_tiles.at[source], place.at[p + row, k, windows, examples])

        lax.fori_loop(0, quotient(steps - warpgroup + warpgroups - 1, warpgroups), take_tile, None)
        plgpu.wait_smem_to_gmem(0)

    by_feature = lambda b: jnp.broadcast_to(b[:, None], (config.rows, K, config.columns)).reshape(-1)  # noqa: E731
    box = stages, tile.stage_rows // 8, panels, 8, group
    copies = 1 if simulating() is None else rows * C * panels
    y, place = launch(
        body,
        x.reshape(C, H, W, N // group, group),
        _matrices(w.astype(x.dtype), window, tile),
        jnp.zeros((max(tail, 8), EXAMPLES), x.dtype),
        jnp.pad(by_feature(b.astype(jnp.float32)), (0, _FEATURES - tile.features)),
        out=(jax.ShapeDtypeStruct((K, P, Q, N), x.dtype), jax.ShapeDtypeStruct((P, K, Q, N), jnp.uint8)),
        grid={"program": programs},
        warpgroups=warpgroups,
        scratch=[
            operand((S, _FEATURES, tile.summed), x.dtype, config.operand_bytes),
            plgpu.Barrier(num_arrivals=S + (stages if tail else 0)),
            operand_and_box((stages, tile.stage_rows, EXAMPLES), box, x.dtype, config.operand_bytes),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            *(swizzled((warpgroups, _FEATURES, EXAMPLES), dtype) for dtype in (x.dtype, jnp.uint8)),
        ],
        # `commit_smem` precedes each read of another thread's data.
        barriers=False,
        sums_across_warps=False,
        name="conv2d_relu_max_pool2d_tensor_cores",
    )
    return y, place.swapaxes(0, 1)


def _matrices(w, window, tile):
    (R, S), config = window, tile.config
    s, p, q, i, j = np.ix_(*map(range, (S, config.rows, config.columns, tile.band, tile.patch[1])))
    w = taps(w, i - p * R, j - (q * S + s))
    # Axes: K, C, s, p, q, i, j.
    w = w.transpose(2, 3, 0, 4, 5, 1, 6).reshape(S, tile.features, -1)
    return jnp.pad(w, ((0, 0), (0, _FEATURES - tile.features), (0, tile.summed - w.shape[2])))
