"""Forward of `conv2d_relu_max_pool2d` in TF32 on Hopper's tensor cores, batch last.

A tile is a few pooling windows, for all output channels and 64 examples. The patch is the part of the images that a
tile needs. `wgmma` computes the tile's sums:

    sums[n, (t, k, p, q)] = sum over c, i, j of patch[(c, i, j), n] * weights[(t, k, p, q), (c, i, j)].

n is an example, t a position in window (p, q), k an output channel, c an input channel, and (i, j) a pixel of the
patch. `weights` has the filters, shifted to position t of each window, and zeros elsewhere. While one warpgroup
transposes its patch through registers, the tensor cores multiply for another warpgroup.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import first_maximum, taps
from pallas_kernels.conv.window_tiles_sm90 import (
    BARRIER_BYTES,
    EXAMPLES,
    MAX_BOX,
    WindowTiles,
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

_MIN_BATCH = 1024
"""Smallest batch for which the kernel makes LeNet's training step faster."""
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


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    columns: int
    channels: int
    warpgroups: int


@dataclasses.dataclass(frozen=True)
class _Sizes(WindowTiles):
    config: Config

    @property
    def windows(self) -> int:
        return self.config.rows * self.config.columns

    @property
    def features(self) -> int:
        return self.K * self.windows

    @property
    def outputs(self) -> int:
        return self.R * self.S * self.features

    @property
    def steps(self) -> int:
        return self.C // self.config.channels

    @property
    def pixels(self) -> int:
        return self.config.channels * self.patch[0] * self.patch[1]

    @property
    def boxed_channels(self) -> int:
        return _BOX_ROWS // self.windows

    @property
    def shared_bytes(self) -> int:
        weights, patch = self.outputs * self.pixels * self.steps, EXAMPLES * self.pixels
        results = EXAMPLES * self.features * (_ITEM_BYTES + 1)
        return _ITEM_BYTES * weights + self.config.warpgroups * (2 * _ITEM_BYTES * patch + results) + BARRIER_BYTES

    @property
    def registers(self) -> int:
        return (self.outputs + self.pixels) * EXAMPLES // 128 + _OTHER_REGISTERS

    def fit(self) -> bool:
        gpu = device.target()
        return (
            _BOX_ROWS % self.windows == 0
            and self.K % self.boxed_channels == 0
            and self.outputs <= _MAX_OUTPUTS
            and self.pixels % _PIXELS == 0
            and max(self.config.channels, *self.patch) <= MAX_BOX
            and self.shared_bytes <= gpu.shared_bytes
            and self.registers <= min(255, gpu.registers // (128 * self.config.warpgroups))
        )

    def clocks(self) -> int:
        """Estimated clock cycles of shared memory for all pooling windows of 64 examples. TMA writes the pixels,
        threads transpose them, and `wgmma` reads them and the weights."""
        patch, weights = 4 * EXAMPLES * self.pixels, self.outputs * self.pixels
        read_and_written = _ITEM_BYTES * (patch + weights) // _SHARED_BYTES_A_CLOCK
        return self.tiles[0] * self.tiles[1] * self.steps * read_and_written


def _cheapest(x: Any, w: Any, window: tuple[int, int]) -> Config | None:
    # More warpgroups were faster even with more estimated cycles: docs/lab/2026-11-23-forward.md.
    sizes = functools.partial(_Sizes.from_shapes, x, w, window)
    shapes = sizes(Config(1, 1, 1, 1))
    candidates = (
        sizes(Config(rows, columns, channels, warpgroups))
        for rows, columns, channels in itertools.product(divisors(shapes.P), divisors(shapes.Q), divisors(shapes.C))
        for warpgroups in range(1, _MAX_WARPGROUPS + 1)
    )
    order = lambda sizes: (-sizes.config.warpgroups, sizes.clocks(), -sizes.config.channels)  # noqa: E731
    best = min((candidate for candidate in candidates if candidate.fit()), key=order, default=None)
    return best and best.config


def _unsupported(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> str | None:
    if jax.__version_info__ < MIN_JAX:
        return f"JAX {jax.__version__}, which cannot transpose swizzled memory, at least {'.'.join(map(str, MIN_JAX))}"
    if x.dtype != jnp.float32:
        return f"dtype {x.dtype}, only float32"
    if _cheapest(x, w, window) is None:
        return f"{w.shape} filters on {x.shape}, for which no tile fits the tensor cores and shared memory"
    return None


def _heuristic(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> Config | None:
    return _cheapest(x, w, window) if x.shape[-1] >= _MIN_BATCH else None


@kernel(unsupported=_unsupported, heuristic=_heuristic, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: Config) -> tuple[Array, Array]:
    """Compute `conv2d_relu_max_pool2d_forward_sm90.forward` for float32, with x and w rounded to TF32."""
    sizes = _Sizes.from_shapes(x, w, window, config)
    if not sizes.fit() or sizes.P % config.rows or sizes.Q % config.columns or sizes.C % config.channels:
        raise ValueError(
            f"conv2d_relu_max_pool2d_forward_tf32_sm90.forward: config is {config}, which does not fit x {x.shape} and "
            f"w {w.shape}; wants None, for the config of the heuristic"
        )
    N, warpgroups = x.shape[-1], config.warpgroups
    stage = warpgroups, EXAMPLES // _GROUP, sizes.pixels, _GROUP
    results = warpgroups, sizes.features, EXAMPLES
    boxes = warpgroups, sizes.features // _BOX_ROWS, EXAMPLES // _GROUP, _BOX_ROWS, _GROUP
    programs = min(device.target().multiprocessors, -(-sizes.units // warpgroups))
    y, place = launch(
        functools.partial(_body, sizes, programs),
        x.reshape(*x.shape[:3], N // _GROUP, _GROUP),
        _matrices(w.astype(x.dtype), sizes),
        jnp.repeat(b.astype(x.dtype), sizes.windows),
        out=(
            jax.ShapeDtypeStruct((sizes.K, sizes.P, sizes.Q, N // _GROUP, _GROUP), x.dtype),
            jax.ShapeDtypeStruct((sizes.P, sizes.K, sizes.Q, N), jnp.uint8),
        ),
        grid={"program": programs},
        warpgroups=warpgroups,
        scratch=[
            operand((sizes.steps, sizes.outputs, sizes.pixels), x.dtype, _PIXELS * _ITEM_BYTES),
            plgpu.Barrier(num_arrivals=sizes.steps),
            operand_and_box(stage, stage, x.dtype, _GROUP * _ITEM_BYTES),
            plgpu.Barrier(num_arrivals=_copies(sizes), num_barriers=warpgroups),
            operand((warpgroups, EXAMPLES, sizes.pixels), x.dtype, _PIXELS * _ITEM_BYTES),
            operand_and_box(results, boxes, x.dtype, _GROUP * _ITEM_BYTES),
            plgpu.SMEM(results, jnp.uint8),
        ],
        # `commit_smem` precedes each read of another thread's data.
        barriers=False,
        sums_across_warps=False,
        name="conv2d_relu_max_pool2d_tf32",
    )
    return y.reshape(*y.shape[:3], N), place.swapaxes(0, 1)


def _matrices(w: Array, sizes: _Sizes) -> Array:
    config = sizes.config
    axes = sizes.R, sizes.S, config.rows, config.columns, *sizes.patch
    r, s, p, q, i, j = np.ix_(*map(range, axes))
    w = taps(lax.reduce_precision(w, 8, 10), i - (p * sizes.R + r), j - (q * sizes.S + s))
    # Axes: K, C, r, s, p, q, i, j.
    w = w.reshape(sizes.K, sizes.steps, config.channels, *w.shape[2:]).transpose(1, 3, 4, 0, 5, 6, 2, 7, 8)
    return w.reshape(sizes.steps, sizes.outputs, sizes.pixels)


def _copies(sizes: _Sizes) -> int:
    return 1 if simulating() is None else sizes.config.channels * sizes.patch[0] * (EXAMPLES // _GROUP)


def _transposing() -> Any:
    """Register layout for transposing the pixels of 32 examples. A warp reads 8 pixels of 4 examples from different
    banks of shared memory, and writes them to 128 adjacent bytes."""
    tiling = plgpu.Tiling(((16, 8), (4, 8), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _body(sizes, programs, *refs, program, warpgroup):
    _Program(sizes, *refs, program=program, programs=programs, warpgroup=warpgroup).run()


@dataclasses.dataclass(frozen=True)
class _Program:
    sizes: _Sizes
    x: Any
    matrices: Any
    bias: Any
    y: Any
    place: Any
    weights: Any
    weights_loaded: Any
    patches: Any
    loaded: Any
    operands: Any
    y_tiles: Any
    place_tiles: Any
    program: Any
    programs: Any
    warpgroup: Any

    def run(self):
        share = self.programs * self.sizes.config.warpgroups
        first = self.warpgroup * self.programs + self.program
        turns = quotient(self.sizes.units - first + share - 1, share)
        pl.when(self.warpgroup == 0)(self.fetch_weights)
        pl.when(turns > 0)(functools.partial(self.fetch, first, 0))
        bias = load(self.bias, value_a_column(), optimized=False)
        plgpu.barrier_wait(self.weights_loaded)
        lax.fori_loop(0, turns, lambda turn, _: self.take_tile(first + turn * share, share, bias), None)
        plgpu.wait_smem_to_gmem(0)

    def fetch_weights(self):
        for step in range(self.sizes.steps):
            plgpu.copy_gmem_to_smem(self.matrices.at[step], self.weights.at[step], self.weights_loaded)

    def fetch(self, unit, step):
        sizes, (p, q, block) = self.sizes, self.sizes.unit(unit)
        (rows, columns), channels, groups = sizes.patch, sizes.config.channels, EXAMPLES // _GROUP
        row, column, group, channel = p * sizes.R, q * sizes.S, block * groups, step * channels
        barrier = self.loaded.at[self.warpgroup]
        if simulating() is None:
            patch = as_box(self.patches).at[self.warpgroup].reshape(groups, channels, rows, columns, _GROUP)
            at = [pl.ds(channel, channels), pl.ds(row, rows), pl.ds(column, columns), pl.ds(group, groups)]
            plgpu.copy_gmem_to_smem(self.x.at[*at], patch.transpose((1, 2, 3, 0, 4)), barrier)
            return
        for c, i, n in itertools.product(range(channels), range(rows), range(groups)):
            images = self.x.at[channel + c, row + i, pl.ds(column, columns), group + n]
            pixels = pl.ds((c * rows + i) * columns, columns)
            plgpu.copy_gmem_to_smem(images, self.patches.at[self.warpgroup, n, pixels], barrier)

    def take_tile(self, unit, share, bias):
        sizes, places = self.sizes, self.sizes.R * self.sizes.S
        multiply = functools.partial(self.multiply, unit, share)
        sums = pl.run_scoped(multiply, plgpu.ACC((EXAMPLES, sizes.outputs)))
        each = [sums[:, t * sizes.features : (t + 1) * sizes.features] for t in range(places)]
        largest, at = first_maximum(each)
        largest += lax.broadcast_in_dim(bias, largest.shape, [1])
        self.write(unit, jnp.maximum(largest, 0.0), jnp.where(largest > 0, at, places))

    def multiply(self, unit, share, sums):
        steps, operand = self.sizes.steps, self.operands.at[self.warpgroup]
        for step in range(steps):
            plgpu.barrier_wait(self.loaded.at[self.warpgroup])
            patch = [self.read(group) for group in range(EXAMPLES // _GROUP)]
            # All threads have now read the patch. The next patch is copied during this product.
            plgpu.commit_smem()
            if step + 1 < steps:
                self.fetch(unit, step + 1)
            else:
                pl.when(unit + share < self.sizes.units)(functools.partial(self.fetch, unit + share, 0))
            plgpu.wgmma_wait(0)
            for group, pixels in enumerate(patch):
                store(operand.at[pl.ds(group * _GROUP, _GROUP)], pixels)
            plgpu.commit_smem()
            plgpu.wgmma(sums, operand, self.weights.at[step].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return sums[...]

    def read(self, group):
        patch = as_operand(self.patches).at[self.warpgroup, group]
        return rounded_to_tf32(load(patch.transpose((1, 0)), _transposing(), optimized=False))

    def write(self, unit, y, at):
        sizes, config, (p, q, block) = self.sizes, self.sizes.config, self.sizes.unit(unit)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        y, at = (plgpu.layout_cast(a, plgpu.Layout.WGMMA_TRANSPOSED) for a in (y, at))
        store(as_operand(self.y_tiles).at[self.warpgroup].transpose((1, 0)), y)
        store(self.place_tiles.at[self.warpgroup].transpose((1, 0)), at.astype(jnp.uint8))
        plgpu.commit_smem()
        rows, columns = pl.ds(p, config.rows), pl.ds(q, config.columns)
        examples, groups = pl.ds(block * EXAMPLES, EXAMPLES), EXAMPLES // _GROUP
        if simulating() is None:
            places = self.place_tiles.at[self.warpgroup].reshape(sizes.K, config.rows, config.columns, EXAMPLES)
            plgpu.copy_smem_to_gmem(places.transpose((1, 0, 2, 3)), self.place.at[rows, :, columns, examples])
            for box in range(sizes.features // _BOX_ROWS):
                tile = as_box(self.y_tiles).at[self.warpgroup, box]
                tile = tile.reshape(groups, sizes.boxed_channels, config.rows, config.columns, _GROUP)
                channels = pl.ds(box * sizes.boxed_channels, sizes.boxed_channels)
                destination = self.y.at[channels, rows, columns, pl.ds(block * groups, groups)]
                plgpu.copy_smem_to_gmem(tile.transpose((1, 2, 3, 0, 4)), destination)
            return
        for k, row in itertools.product(range(sizes.K), range(config.rows)):
            rows_of_windows = self.warpgroup, pl.ds((k * config.rows + row) * config.columns, config.columns)
            plgpu.copy_smem_to_gmem(self.place_tiles.at[rows_of_windows], self.place.at[p + row, k, columns, examples])
            for n in range(groups):
                tile = self.y_tiles.at[*rows_of_windows, pl.ds(n * _GROUP, _GROUP)]
                plgpu.copy_smem_to_gmem(tile, self.y.at[k, p + row, columns, block * groups + n])
