"""Forward of `conv2d_relu_max_pool2d` in TF32 on Hopper's tensor cores, batch last.

A tile is a few pooling windows, for all output channels and 64 examples. The patch is the part of the images that a
tile needs. `wgmma` computes the tile's sums:

    sums[n, (t, k, p, q)] = sum over c, i, j of patch[(c, i, j), n] * weights[(t, k, p, q), (c, i, j)].

n is an example, t a position in window (p, q), k an output channel, c an input channel, and (i, j) a pixel of the
patch. `weights` has the filters, shifted to position t of each window, and zeros elsewhere. While one warpgroup
transposes its patch through registers, the tensor cores multiply for another warpgroup.
"""

import functools
import itertools
import math
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
    rounded_to_tf32,
    store,
    value_a_column,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

MIN_JAX = (0, 11, 1)
"""First JAX whose kernels can load a transposed view of swizzled memory."""
_ITEM_BYTES = 4
_GROUP = 32
"""Examples in a row of shared memory: 128 bytes, the widest swizzle."""
_PIXELS = 8
"""Pixels per row of an operand's tile: 32 bytes. A warp writes four rows without bank conflicts."""
_BOX_ROWS = 8
"""Rows of results per copy: the period of the swizzle."""
_MAX_OUTPUTS = 256
"""Columns of the widest `wgmma`."""
_MAX_WARPGROUPS = 4
"""Each thread then has 128 registers."""
_OTHER_REGISTERS = 40
"""Registers per thread besides sums and patch, for which ptxas spills none for LeNet."""
_SHARED_BYTES_A_CLOCK = 128


class Config(NamedTuple):
    rows: int
    columns: int
    channels: int
    warpgroups: int


def _tile(x, w, window, config):
    """Return the sizes of a tile of `config.rows` x `config.columns` windows, and whether it fits the kernel."""
    (K, C, F, G), (R, S), (P, Q), gpu = w.shape, window, pooled_size(x, w, window), device.target()
    patch = config.rows * R + F - 1, config.columns * S + G - 1
    windows, pixels, steps = config.rows * config.columns, config.channels * math.prod(patch), C // config.channels
    features, boxed_channels = K * windows, _BOX_ROWS // windows
    outputs = R * S * features
    per_warpgroup = 2 * _ITEM_BYTES * EXAMPLES * pixels + EXAMPLES * features * (_ITEM_BYTES + 1)
    shared_bytes = _ITEM_BYTES * outputs * pixels * steps + config.warpgroups * per_warpgroup + BARRIER_BYTES
    registers = (outputs + pixels) * EXAMPLES // 128 + _OTHER_REGISTERS
    # Estimated clock cycles of shared memory for all windows of 64 examples. TMA writes the pixels, threads transpose
    # them, and `wgmma` reads them and the weights.
    clocks = _ITEM_BYTES * (4 * EXAMPLES * pixels + outputs * pixels) // _SHARED_BYTES_A_CLOCK
    return SimpleNamespace(
        config=config,
        patch=patch,
        windows=windows,
        features=features,
        boxed_channels=boxed_channels,
        outputs=outputs,
        pixels=pixels,
        steps=steps,
        # More warpgroups were faster even with more estimated cycles: docs/lab/2026-11-23-forward.md.
        order=(-config.warpgroups, P // config.rows * (Q // config.columns) * steps * clocks, -config.channels),
        fits=P % config.rows == Q % config.columns == C % config.channels == 0
        and _BOX_ROWS % windows == 0
        and K % boxed_channels == 0
        and outputs <= _MAX_OUTPUTS
        and pixels % _PIXELS == 0
        and max(config.channels, *patch) <= MAX_BOX
        and shared_bytes <= gpu.shared_bytes
        and registers <= min(255, gpu.registers // (128 * config.warpgroups)),
    )


def _plan(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> Config | str:
    if jax.__version_info__ < MIN_JAX:
        return f"JAX {jax.__version__}, which cannot transpose swizzled memory, at least {'.'.join(map(str, MIN_JAX))}"
    if x.dtype != jnp.float32:
        return f"dtype {x.dtype}, only float32"
    sizes = map(divisors, (*pooled_size(x, w, window), w.shape[1]))
    tiles = [
        _tile(x, w, window, Config(*config)) for config in itertools.product(*sizes, range(1, _MAX_WARPGROUPS + 1))
    ]
    if best := min((tile for tile in tiles if tile.fits), key=lambda tile: tile.order, default=None):
        return best.config
    return f"{w.shape} filters on {x.shape}, for which no tile fits the tensor cores and shared memory"


@kernel(plan=_plan, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: Config) -> tuple[Array, Array]:
    """Compute `conv2d_relu_max_pool2d_forward_sm90.forward` for float32, with x and w rounded to TF32."""
    tile = _tile(x, w, window, config)
    if not tile.fits:
        raise ValueError(
            f"conv2d_relu_max_pool2d_forward_tf32_sm90.forward: config is {config}, which does not fit x {x.shape} and "
            f"w {w.shape}; wants None, for the planned config"
        )
    N, K, (R, S), (P, Q), warpgroups = x.shape[-1], w.shape[0], window, pooled_size(x, w, window), config.warpgroups
    (rows, columns), channels, groups, places = tile.patch, config.channels, EXAMPLES // _GROUP, R * S
    tiles = P // config.rows, Q // config.columns
    count = tiles[0] * tiles[1] * (N // EXAMPLES)
    programs = min(device.target().multiprocessors, -(-count // warpgroups))
    # A warp reads 8 pixels of 4 examples from different banks of shared memory, and writes them to 128 adjacent bytes.
    tiling = plgpu.Tiling(((16, 8), (4, 8), (1,)))
    transposing = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def body(x, matrices, bias, y, place, *scratch, program, warpgroup):
        weights, weights_loaded, patches, loaded, operands, y_tiles, place_tiles = scratch
        share, first = programs * warpgroups, warpgroup * programs + program
        turns = quotient(count - first + share - 1, share)

        def fetch(number, step):
            p, q, block = tile_at(number, tiles, config)
            row, column, group, channel = p * R, q * S, block * groups, step * channels
            barrier = loaded.at[warpgroup]
            if simulating() is None:
                patch = as_box(patches).at[warpgroup].reshape(groups, channels, rows, columns, _GROUP)
                at = [pl.ds(channel, channels), pl.ds(row, rows), pl.ds(column, columns), pl.ds(group, groups)]
                plgpu.copy_gmem_to_smem(x.at[*at], patch.transpose((1, 2, 3, 0, 4)), barrier)
                return
            for c, i, n in itertools.product(range(channels), range(rows), range(groups)):
                images = x.at[channel + c, row + i, pl.ds(column, columns), group + n]
                pixels = pl.ds((c * rows + i) * columns, columns)
                plgpu.copy_gmem_to_smem(images, patches.at[warpgroup, n, pixels], barrier)

        @pl.when(warpgroup == 0)
        def _():
            for step in range(tile.steps):
                plgpu.copy_gmem_to_smem(matrices.at[step], weights.at[step], weights_loaded)

        pl.when(turns > 0)(lambda: fetch(first, 0))
        bias = load(bias, value_a_column(), optimized=False)
        plgpu.barrier_wait(weights_loaded)

        def take_tile(turn, _):
            number = first + turn * share

            def multiply(sums):
                for step in range(tile.steps):
                    plgpu.barrier_wait(loaded.at[warpgroup])
                    refs = [as_operand(patches).at[warpgroup, group] for group in range(groups)]
                    patch = [load(ref.transpose((1, 0)), transposing, optimized=False) for ref in refs]
                    patch = [rounded_to_tf32(pixels, transposing) for pixels in patch]
                    # All threads have now read the patch. The next patch is copied during this product.
                    plgpu.commit_smem()
                    if step + 1 < tile.steps:
                        fetch(number, step + 1)
                    else:
                        pl.when(number + share < count)(functools.partial(fetch, number + share, 0))
                    plgpu.wgmma_wait(0)
                    for group, pixels in enumerate(patch):
                        store(operands.at[warpgroup].at[pl.ds(group * _GROUP, _GROUP)], pixels)
                    plgpu.commit_smem()
                    plgpu.wgmma(sums, operands.at[warpgroup], weights.at[step].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return sums[...]

            sums = pl.run_scoped(multiply, plgpu.ACC((EXAMPLES, tile.outputs)))
            each = [sums[:, t * tile.features : (t + 1) * tile.features] for t in range(places)]
            largest, at = first_maximum(each)
            largest += lax.broadcast_in_dim(bias, largest.shape, [1])
            write(number, jnp.maximum(largest, 0.0), jnp.where(largest > 0, at, places))

        def write(number, values, at):
            p, q, block = tile_at(number, tiles, config)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            values, at = (plgpu.layout_cast(a, plgpu.Layout.WGMMA_TRANSPOSED) for a in (values, at))
            store(as_operand(y_tiles).at[warpgroup].transpose((1, 0)), values)
            store(place_tiles.at[warpgroup].transpose((1, 0)), at.astype(jnp.uint8))
            plgpu.commit_smem()
            of_rows, windows = pl.ds(p, config.rows), pl.ds(q, config.columns)
            examples = pl.ds(block * EXAMPLES, EXAMPLES)
            if simulating() is None:
                of_tile = place_tiles.at[warpgroup].reshape(K, config.rows, config.columns, EXAMPLES)
                plgpu.copy_smem_to_gmem(of_tile.transpose((1, 0, 2, 3)), place.at[of_rows, :, windows, examples])
                for box in range(tile.features // _BOX_ROWS):
                    of_tile = as_box(y_tiles).at[warpgroup, box]
                    of_tile = of_tile.reshape(groups, tile.boxed_channels, config.rows, config.columns, _GROUP)
                    of_channels = pl.ds(box * tile.boxed_channels, tile.boxed_channels)
                    to = y.at[of_channels, of_rows, windows, pl.ds(block * groups, groups)]
                    plgpu.copy_smem_to_gmem(of_tile.transpose((1, 2, 3, 0, 4)), to)
                return
            for k, row in itertools.product(range(K), range(config.rows)):
                source = warpgroup, pl.ds((k * config.rows + row) * config.columns, config.columns)
                plgpu.copy_smem_to_gmem(place_tiles.at[source], place.at[p + row, k, windows, examples])
                for n in range(groups):
                    of_group = y_tiles.at[*source, pl.ds(n * _GROUP, _GROUP)]
                    plgpu.copy_smem_to_gmem(of_group, y.at[k, p + row, windows, block * groups + n])

        lax.fori_loop(0, turns, take_tile, None)
        plgpu.wait_smem_to_gmem(0)

    stage, results = (warpgroups, groups, tile.pixels, _GROUP), (warpgroups, tile.features, EXAMPLES)
    boxes = warpgroups, tile.features // _BOX_ROWS, groups, _BOX_ROWS, _GROUP
    copies = 1 if simulating() is None else channels * rows * groups
    y, place = launch(
        body,
        x.reshape(*x.shape[:3], N // _GROUP, _GROUP),
        _matrices(w.astype(x.dtype), window, tile),
        jnp.repeat(b.astype(x.dtype), tile.windows),
        out=(
            jax.ShapeDtypeStruct((K, P, Q, N // _GROUP, _GROUP), x.dtype),
            jax.ShapeDtypeStruct((P, K, Q, N), jnp.uint8),
        ),
        grid={"program": programs},
        warpgroups=warpgroups,
        scratch=[
            operand((tile.steps, tile.outputs, tile.pixels), x.dtype, _PIXELS * _ITEM_BYTES),
            plgpu.Barrier(num_arrivals=tile.steps),
            operand_and_box(stage, stage, x.dtype, _GROUP * _ITEM_BYTES),
            plgpu.Barrier(num_arrivals=copies, num_barriers=warpgroups),
            operand((warpgroups, EXAMPLES, tile.pixels), x.dtype, _PIXELS * _ITEM_BYTES),
            operand_and_box(results, boxes, x.dtype, _GROUP * _ITEM_BYTES),
            plgpu.SMEM(results, jnp.uint8),
        ],
        # `commit_smem` precedes each read of another thread's data.
        barriers=False,
        sums_across_warps=False,
        name="conv2d_relu_max_pool2d_tf32",
    )
    return y.reshape(*y.shape[:3], N), place.swapaxes(0, 1)


def _matrices(w, window, tile):
    (R, S), config = window, tile.config
    r, s, p, q, i, j = np.ix_(*map(range, (R, S, config.rows, config.columns, *tile.patch)))
    w = taps(lax.reduce_precision(w, 8, 10), i - (p * R + r), j - (q * S + s))
    # Axes: K, C, r, s, p, q, i, j.
    w = w.reshape(len(w), tile.steps, config.channels, *w.shape[2:]).transpose(1, 3, 4, 0, 5, 6, 2, 7, 8)
    return w.reshape(tile.steps, tile.outputs, tile.pixels)
