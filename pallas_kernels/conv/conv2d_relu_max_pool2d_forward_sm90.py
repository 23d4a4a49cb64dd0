"""Forward of `conv2d_relu_max_pool2d` in half precision on Hopper's tensor cores, batch last.

A tile is a few pooling windows, for all output channels and 64 examples. The patch is the part of the images that a
tile needs. For each position (r, s) in a window, `wgmma` multiplies a banded matrix of the filters by the patch:

    sums[r, s][(p, k, q), n] = sum over i, c, j of weights[s][(p, k, q), (i, c, j)] * patch[(r + i, c, j), n].

(p, q) is a window of the tile, k an output channel, c an input channel, n an example, and (r + i, j) a pixel of the
patch. `weights` stays in shared memory: see `docs/kernels/conv.md`.
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
from pallas_kernels.conv.window_tiles_sm90 import BARRIER_BYTES, EXAMPLES, MAX_BOX, WindowTiles
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
_MIN_BATCH = 2048
"""Smallest batch for which this kernel is no slower than the exact one: docs/lab/2026-11-23-forward.md."""


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    columns: int
    operand_bytes: int
    warpgroups: int
    stages: int


@dataclasses.dataclass(frozen=True)
class _Sizes(WindowTiles):
    config: Config

    @property
    def group(self) -> int:
        return self.config.operand_bytes // _ITEM_BYTES

    @property
    def panels(self) -> int:
        # Operand rows that hold one pixel for all examples of a tile.
        return EXAMPLES // self.group

    @property
    def features(self) -> int:
        return self.config.rows * self.K * self.config.columns

    @property
    def row(self) -> int:
        return self.C * self.patch[1]

    @property
    def pixels(self) -> int:
        return self.patch[0] * self.row

    @property
    def band(self) -> int:
        """Rows of pixels in one `wgmma` product, which computes one position (r, s) in every window of a tile."""
        return self.patch[0] - self.R + 1

    @property
    def summed(self) -> int:
        """Length of the axis over which a `wgmma` product sums: the pixels in `band` rows of all input channels, then
        padding."""
        return -(-self.band * self.row // self.group) * self.group

    @property
    def stage_rows(self) -> int:
        """Rows of a stage in shared memory: one per pixel and channel for a tile of windows, then padding up to
        the last row that a `wgmma` product reads."""
        return max(self.pixels, (self.R - 1) * self.row + self.summed)

    @property
    def tail(self) -> int:
        return self.stage_rows - self.pixels

    @property
    def ring(self) -> int:
        return self.config.warpgroups * self.config.stages

    @property
    def other_bytes(self) -> int:
        results = self.config.warpgroups * _FEATURES * EXAMPLES * (_ITEM_BYTES + 1)
        return _ITEM_BYTES * self.S * _FEATURES * self.summed + results + BARRIER_BYTES

    @property
    def stages(self) -> int:
        stage = _ITEM_BYTES * self.stage_rows * EXAMPLES * self.config.warpgroups
        return min(_MAX_STAGES, (device.target().shared_bytes - self.other_bytes) // stage)

    def fit(self) -> bool:
        return (
            self.features <= _FEATURES
            # Each product begins one patch row later than the previous product, at a tile of eight operand rows.
            and self.row % 8 == 0
            # If a pixel takes several operand rows, eight of them must be a patch row.
            and (self.panels == 1 or self.patch[1] == 8)
            and max(self.C, *self.patch) <= MAX_BOX
            and self.stages >= max(1, self.config.stages)
        )

    def clocks(self) -> int:
        """Estimated clock cycles for all pooling windows of 64 examples. A `wgmma` product takes two cycles per
        element of the axis over which it sums."""
        return self.tiles[0] * self.tiles[1] * max(2 * self.R * self.S * self.summed, _EPILOGUE_CLOCKS)


def _cheapest(x: Any, w: Any, window: tuple[int, int]) -> Config | None:
    sizes = functools.partial(_Sizes.from_shapes, x, w, window)
    shapes = sizes(Config(1, 1, 0, 0, 0))
    candidates = (
        sizes(Config(rows, columns, operand_bytes, _WARPGROUPS, 0))
        for rows, columns, operand_bytes in itertools.product(divisors(shapes.P), divisors(shapes.Q), (128, 64))
    )
    best = min((candidate for candidate in candidates if candidate.fit()), key=_Sizes.clocks, default=None)
    return best and dataclasses.replace(best.config, stages=best.stages)


def _unsupported(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> str | None:
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}, only bfloat16 and float16"
    if window[0] * window[1] > _MAX_PLACES:
        return f"window={window}, which has more than {_MAX_PLACES} positions"
    if _cheapest(x, w, window) is None:
        return f"{w.shape} filters on {x.shape}, for which no tile fits the tensor cores and shared memory"
    return None


def _heuristic(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> Config | None:
    return _cheapest(x, w, window) if x.shape[-1] >= _MIN_BATCH else None


@kernel(unsupported=_unsupported, heuristic=_heuristic, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: Config) -> tuple[Array, Array]:
    """Compute `conv2d_relu_max_pool2d_forward.forward` in half precision, with float32 sums. N may be any multiple of
    64.

    A NaN or an infinity in x makes all results of its example in the same tile of windows NaN, because zero weights
    multiply it.
    """
    sizes = _Sizes.from_shapes(x, w, window, config)
    if not sizes.fit() or sizes.P % config.rows or sizes.Q % config.columns:
        raise ValueError(
            f"conv2d_relu_max_pool2d_forward_sm90.forward: config is {config}, which does not fit x {x.shape} and "
            f"w {w.shape}; wants None, for the config of the heuristic"
        )
    C, H, W, N = x.shape
    programs = min(device.target().multiprocessors, -(-sizes.units // config.warpgroups))
    y, place = launch(
        functools.partial(_body, sizes, programs),
        x.reshape(C, H, W, N // sizes.group, sizes.group),
        _matrices(w.astype(x.dtype), sizes),
        jnp.zeros((max(sizes.tail, 8), EXAMPLES), x.dtype),
        _by_features(b.astype(jnp.float32), sizes),
        out=(
            jax.ShapeDtypeStruct((sizes.K, sizes.P, sizes.Q, N), x.dtype),
            jax.ShapeDtypeStruct((sizes.P, sizes.K, sizes.Q, N), jnp.uint8),
        ),
        grid={"program": programs},
        warpgroups=config.warpgroups,
        scratch=[
            operand((sizes.S, _FEATURES, sizes.summed), x.dtype, config.operand_bytes),
            plgpu.Barrier(num_arrivals=sizes.S + (sizes.ring if sizes.tail else 0)),
            _patches(sizes, x.dtype),
            plgpu.Barrier(num_arrivals=_copies(sizes), num_barriers=sizes.ring),
            *(swizzled((config.warpgroups, _FEATURES, EXAMPLES), dtype) for dtype in (x.dtype, jnp.uint8)),
        ],
        # `commit_smem` precedes each read of another thread's data.
        barriers=False,
        sums_across_warps=False,
        name="conv2d_relu_max_pool2d_tensor_cores",
    )
    return y, place.swapaxes(0, 1)


def _matrices(w: Array, sizes: _Sizes) -> Array:
    config = sizes.config
    s, p, q, i, j = np.ix_(*map(range, (sizes.S, config.rows, config.columns, sizes.band, sizes.patch[1])))
    w = taps(w, i - p * sizes.R, j - (q * sizes.S + s))
    # Axes: K, C, s, p, q, i, j.
    w = w.transpose(2, 3, 0, 4, 5, 1, 6).reshape(sizes.S, sizes.features, -1)
    return jnp.pad(w, ((0, 0), (0, _FEATURES - sizes.features), (0, sizes.summed - w.shape[2])))


def _by_features(b: Array, sizes: _Sizes) -> Array:
    b = jnp.broadcast_to(b[:, None], (sizes.config.rows, sizes.K, sizes.config.columns))
    return jnp.pad(b.reshape(-1), (0, _FEATURES - sizes.features))


def _patches(sizes: _Sizes, dtype: Any) -> Any:
    box = sizes.ring, sizes.stage_rows // 8, sizes.panels, 8, sizes.group
    return operand_and_box((sizes.ring, sizes.stage_rows, EXAMPLES), box, dtype, sizes.config.operand_bytes)


def _copies(sizes: _Sizes) -> int:
    return 1 if simulating() is None else sizes.patch[0] * sizes.C * sizes.panels


def _body(sizes, programs, *refs, program, warpgroup):
    steps = quotient(sizes.units - program + programs - 1, programs)
    _Program(sizes, *refs, program=program, programs=programs, warpgroup=warpgroup, steps=steps).run()


@dataclasses.dataclass(frozen=True)
class _Program:
    sizes: _Sizes
    x: Any
    matrices: Any
    zeros: Any
    bias: Any
    y: Any
    place: Any
    weights: Any
    constants_loaded: Any
    patches: Any
    loaded: Any
    y_tiles: Any
    place_tiles: Any
    program: Any
    programs: Any
    warpgroup: Any
    steps: Any

    def run(self):
        config = self.sizes.config
        ring = Ring(self.sizes.ring, self.copy, self.loaded, self.steps)
        pl.when(self.warpgroup == 0)(self.fetch_constants)
        for n in range(config.stages):
            ring.fetch(n * config.warpgroups + self.warpgroup)
        bias = load(self.bias, value_a_row(), optimized=False)
        plgpu.barrier_wait(self.constants_loaded)
        turns = quotient(self.steps - self.warpgroup + config.warpgroups - 1, config.warpgroups)
        lax.fori_loop(0, turns, functools.partial(self.take_tile, ring, bias), None)
        plgpu.wait_smem_to_gmem(0)

    def fetch_constants(self):
        sizes = self.sizes
        for s in range(sizes.S):
            plgpu.copy_gmem_to_smem(self.matrices.at[s], self.weights.at[s], self.constants_loaded)
        # The padding after each stage's pixels must not hold NaN, because zero weights multiply it.
        for stage in range(sizes.ring if sizes.tail else 0):
            tail = as_operand(self.patches).at[stage, pl.ds(sizes.pixels, sizes.tail)]
            plgpu.copy_gmem_to_smem(self.zeros, tail, self.constants_loaded)

    def tile(self, step):
        return self.sizes.unit(step * self.programs + self.program)

    def copy(self, step, stage, barrier):
        sizes, (p, q, block) = self.sizes, self.tile(step)
        (rows, columns), C = sizes.patch, sizes.C
        row, column, panel = p * sizes.R, q * sizes.S, block * sizes.panels
        if simulating() is None:
            patch = as_box(self.patches).at[stage, pl.ds(0, sizes.pixels // 8)]
            patch = patch.reshape(rows, C, sizes.panels, columns, sizes.group).transpose((1, 0, 3, 2, 4))
            images = self.x.at[:, pl.ds(row, rows), pl.ds(column, columns), pl.ds(panel, sizes.panels)]
            plgpu.copy_gmem_to_smem(images, patch, barrier)
            return
        for i, c, n in itertools.product(range(rows), range(C), range(sizes.panels)):
            images = self.x.at[c, row + i, pl.ds(column, columns), panel + n]
            pixels = pl.ds((i * C + c) * columns, columns), pl.ds(n * sizes.group, sizes.group)
            plgpu.copy_gmem_to_smem(images, self.patches.at[stage, *pixels], barrier)

    def take_tile(self, ring, bias, turn, _):
        places, step = self.sizes.R * self.sizes.S, turn * self.sizes.config.warpgroups + self.warpgroup
        accumulators = [plgpu.ACC((_FEATURES, EXAMPLES))] * places
        sums = pl.run_scoped(functools.partial(self.multiply, ring, step), *accumulators)
        largest, at = first_maximum(sums)
        largest += lax.broadcast_in_dim(bias, largest.shape, [0])
        at = jnp.where(largest > 0, at, places).astype(jnp.uint8)
        self.write(step, jnp.maximum(largest, 0.0).astype(self.y.dtype), at)

    def multiply(self, ring, step, *sums):
        sizes, stage = self.sizes, ring.stage(step)
        patch = as_operand(self.patches).at[stage]
        ring.wait(step)
        for t, total in enumerate(sums):
            r, s = divmod(t, sizes.S)
            plgpu.wgmma(total, self.weights.at[s], patch.at[pl.ds(r * sizes.row, sizes.summed)])
        plgpu.wgmma_wait(0)
        ring.fetch(step + ring.stages)
        return [total[...] for total in sums]

    def write(self, step, y, at):
        sizes, config, (p, q, block) = self.sizes, self.sizes.config, self.tile(step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(self.y_tiles.at[self.warpgroup], y)
        store(self.place_tiles.at[self.warpgroup], at)
        plgpu.commit_smem()
        columns, examples = pl.ds(q, config.columns), pl.ds(block * EXAMPLES, EXAMPLES)
        if simulating() is None:
            rows, shape = pl.ds(p, config.rows), (config.rows, sizes.K, config.columns, EXAMPLES)
            tiles = [ref.at[self.warpgroup, pl.ds(0, sizes.features)] for ref in (self.y_tiles, self.place_tiles)]
            y, at = (tile.reshape(*shape) for tile in tiles)
            plgpu.copy_smem_to_gmem(y.transpose((1, 0, 2, 3)), self.y.at[:, rows, columns, examples])
            plgpu.copy_smem_to_gmem(at, self.place.at[rows, :, columns, examples])
            return
        for row, k in itertools.product(range(config.rows), range(sizes.K)):
            rows_of_windows = self.warpgroup, pl.ds((row * sizes.K + k) * config.columns, config.columns)
            plgpu.copy_smem_to_gmem(self.y_tiles.at[rows_of_windows], self.y.at[k, p + row, columns, examples])
            plgpu.copy_smem_to_gmem(self.place_tiles.at[rows_of_windows], self.place.at[p + row, k, columns, examples])
