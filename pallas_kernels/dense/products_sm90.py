"""The body of the matrix products on Hopper's tensor cores, for `linear_sm90` and `grouped_linear_sm90`.

    c[m, n] = Σ a[m, k] * b[k, n],    over k, in tiles that a schedule lists.

`docs/kernels/dense.md` describes the data flow of a CTA, and its ping-pong and cooperative schedules. A cluster's two
CTAs compute two tiles, one below the other. Each copies half of each block of the right operand, and multicasts it to
both.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    OPERAND_BYTES,
    largest_divisor,
    load,
    operand,
    quotient,
    remainder,
    store,
    swizzled,
    value_a_column,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring

CONSUMERS = 2
"""Consumer warpgroups per CTA. The last warpgroup is the producer."""
_MAX_SUMS = 64 * 256
"""Sums that fit in the registers of a consumer."""
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Registers per thread, multiples of 8 (PTX ISA, setmaxnreg). A producer and two consumer threads share 512."""

RASTER_COLUMNS = 2048
"""Columns of the result that concurrent tiles cover. Half and twice this were slower: docs/lab/2026-11-21-dense.md (dw)
and docs/lab/2026-11-24-dense.md (forward)."""
ROWS = 128
COLUMNS = 64, 128, 256
"""Columns of a tile, at most 256 (PTX ISA, wgmma), or `PING_PONG_COLUMNS` if one consumer holds the tile."""
PING_PONG_COLUMNS = 128
TILE_ROWS = 8
"""Rows of a swizzled tile. Mosaic copies only between arrays of whole tiles, `TILE_ROWS` x `OPERAND_BYTES`."""
_ONES = 8
"""The fewest columns of a wgmma (PTX ISA)."""

_MAX_STAGES = 6
"""Four stages of the largest tiles fit on Hopper. Three were slower: docs/lab/2026-11-21-dense.md."""
_RESERVED_BYTES = 2048 + 512
"""Shared memory for Mosaic's sums across warps (2 KiB) and barriers."""
_STEP_MICROSECONDS = {64: 0.25, 128: 0.35, 256: 0.65}
_EPILOGUE_MICROSECONDS = {1: 0.5, 2: 2.3}
"""Time of a step, by columns of the tile, and of a tile's epilogue, by consumers of the tile, on an H200:
docs/lab/2026-11-28-products.md."""


class Config(NamedTuple):
    """Tiles of `rows` x `columns`. The summed axis is divided into `splits` parts, each with a separate result
    (split-K). CTAs compute the result in vertical blocks, `raster` tiles wide; 0 means a single block. A cluster has 1
    or 2 CTAs. A tile has one consumer in the ping-pong schedule, and two in the cooperative schedule."""

    rows: int
    columns: int
    stages: int
    splits: int = 1
    cluster: int = 1
    raster: int = 0
    consumers: int = CONSUMERS


def config_of(columns: int, consumers: int = CONSUMERS) -> Config:
    # The ping-pong schedule computes no row sums.
    buffers = CONSUMERS * (ROWS // consumers + (consumers > 1) * _ONES) * OPERAND_BYTES
    stages = (device.target().shared_bytes - _RESERVED_BYTES - buffers) // ((ROWS + columns) * OPERAND_BYTES)
    return Config(ROWS, columns, stages=min(_MAX_STAGES, stages), consumers=consumers)


def configs_of(columns: int) -> list[Config]:
    """Return the configs for a result with this number of columns, the configs of the cooperative schedule first."""
    widths = [width for width in COLUMNS if width < 2 * columns] or COLUMNS[:1]
    ping_pong = [config_of(width, consumers=1) for width in widths if width <= PING_PONG_COLUMNS]
    return [*map(config_of, widths), *ping_pong]


def squared(config: Config, columns: int) -> Config:
    """Return the config with a raster for which concurrent tiles form a square, and share operands in the L2 cache."""
    raster = largest_divisor(-(-columns // config.columns), RASTER_COLUMNS // config.columns)
    return config._replace(raster=raster)


def microseconds(config: Config, tiles: int, steps: float) -> float:
    """Estimate the time of `tiles` tiles, which have `steps` steps on average."""
    turns = -(-tiles // device.target().multiprocessors)
    return turns * (steps * _STEP_MICROSECONDS[config.columns] + _EPILOGUE_MICROSECONDS[config.consumers])


def unsupported(left: Any, right: Any, config: Config, dtypes: tuple = (jnp.bfloat16, jnp.float16)) -> str | None:
    if left.dtype not in dtypes or right.dtype != left.dtype:
        return f"dtypes {left.dtype} and {right.dtype}, only {' or '.join(jnp.dtype(d).name for d in dtypes)} for both"
    if 0 in (*left.shape, *right.shape):
        return "an axis of size 0"
    shared_bytes = device.target().shared_bytes
    return None if config.stages >= 2 else f"{shared_bytes} bytes of shared memory, too few for a ring of two stages"


def sizes(a: Any, b: Any, transposed: tuple[bool, bool]) -> tuple[int, int, int, int]:
    """Return four sizes of the product of a and b: batch, rows, columns, and summed axis."""
    rows, summed = a.shape[:-3:-1] if transposed[0] else a.shape[-2:]
    return max(math.prod(x.shape[:-2]) for x in (a, b)), rows, b.shape[-2 if transposed[1] else -1], summed


def step_elements(dtype: Any) -> int:
    """Return the elements of the summed axis per step: one row of an operand's tile."""
    return OPERAND_BYTES // jnp.dtype(dtype).itemsize


Tile = collections.namedtuple(
    "Tile", "operands out row column tile_column first end start stored summed", defaults=(0, None, None)
)
"""A tile of the result.

Attributes:
  operands, out: index of its matrices in operands and bias with more than one matrix, and in the result.
  row, column, tile_column: its first row and column, and its index among the tiles of a row.
  first, end: its range of steps along the summed axis. Without steps, the tile is 0, without the bias.
  start: first element of step 0, a multiple of 8.
  stored: range of rows to store, or None for all.
  summed: range of elements to sum, or None for all.
"""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tiles of a result.

    Attributes:
      matrices: number of matrices in the result.
      most: the largest possible `count(lists)`.
      tile: `tile(lists, index, cta)` returns the tile that CTA `cta` of a cluster computes as a part of tile number
        `index`. `lists` are references to the arrays `lists` of `multiply`.
      count: `count(lists)` returns the number of values of `index`, which begin at 0.
      steps: the number of steps of every tile, or None if it differs. Tiles without steps may follow the other tiles.
      masked: whether tiles set `Tile.summed`.
      alternating: in each round, each cluster computes one tile. Whether every second round assigns the tiles to the
        clusters in reverse order.
    """

    matrices: int
    most: int
    tile: Callable[..., Tile]
    count: Callable[..., Any]
    steps: int | None = None
    masked: bool = False
    alternating: bool = False


def multiply(
    left: Array,
    right: Array,
    bias: Array | None = None,
    lists: Any = None,
    *,
    schedule: Schedule,
    transposed: tuple[bool, bool],
    dtype: Any,
    row_sums: bool = False,
    name: str,
    config: Config,
) -> tuple[Array, Array | None]:
    """Return the products `(matrices, rows, columns)` in `dtype`, plus the bias, and if `row_sums`, float32 sums of the
    rows of `left`, `(splits, tiles of a row, rows)`.

    Args:
      left: `(matrices or 1, rows, summed)`, or `(matrices or 1, summed, rows)` if transposed.
      right: `(matrices or 1, summed, columns)`, or `(matrices or 1, columns, summed)` if transposed.
      bias: float32 `(matrices or 1, columns)`.
      lists: pytree of integer arrays for the schedule.
    """
    _, rows, columns, _ = sizes(left, right, transposed)
    step, tile_columns = step_elements(left.dtype), -(-columns // config.columns)
    clusters = min(schedule.most, device.target().multiprocessors // config.cluster)
    turns, consumer_rows = CONSUMERS // config.consumers, config.rows // config.consumers
    if consumer_rows * config.columns > _MAX_SUMS:
        raise ValueError(f"{name}: config is {config}; wants at most {_MAX_SUMS} sums per consumer")
    stored_dtype = jnp.dtype(dtype)
    piece_columns = OPERAND_BYTES // stored_dtype.itemsize
    multicast = dict(collective_axes="cta") if config.cluster > 1 else {}

    def body(*refs, warpgroup, cluster, cta=0):
        left, right, bias, lists, out, sums_out, left_stages, right_stages, ones, buffers, *barriers = refs
        loaded, free, masked = barriers

        def first_row():
            return warpgroup * consumer_rows if config.consumers > 1 else 0

        consumed = pl.ds(first_row(), consumer_rows)

        def position(number):
            """Return the index of this cluster's tile in round `number`, in which each cluster computes one tile."""
            if not schedule.alternating:
                return cluster
            return jnp.where(remainder(number, 2) == 1, clusters - 1 - cluster, cluster)

        def tile_at(number):
            return schedule.tile(lists, position(number) + number * clusters, cta)

        def steps_of(number):
            if schedule.steps is not None:
                return schedule.steps
            tile = tile_at(number)
            return tile.end - tile.first

        def visit_tiles(visit, first, stride):
            """Call `count = visit(count, ring, tile)` for every `stride`th tile of the CTA, beginning with tile number
            `first`, and return the last `count`. `count` is the number of steps along the summed axis for the CTA's
            earlier tiles, to which `visit` adds the tile's steps."""

            def visit_next(i, count):
                number = first + i * stride
                turn = remainder(number, turns)
                ring = Ring(config.stages, copy, loaded, free=free, turn=turn)
                count = visit(count, ring, tile_at(number))
                return count if stride == 1 else count + steps_of(number + 1)

            tiles = schedule.count(lists)
            rounds = quotient(tiles, clusters)
            visits = rounds + (position(rounds) < remainder(tiles, clusters)).astype(jnp.int32)
            count = jnp.int32(0) if stride == 1 else jnp.where(first > 0, steps_of(0), 0)
            return lax.fori_loop(0, quotient(visits - first + stride - 1, stride), visit_next, count)

        def copy(count, stage, barrier, tile, number):
            summed = pl.ds(tile.start + number * step, step)
            rows, columns = pl.ds(tile.row, config.rows), pl.ds(tile.column, config.columns)
            for ref, stages, block, options in (
                (left, left_stages, (summed, rows) if transposed[0] else (rows, summed), {}),
                (right, right_stages, (columns, summed) if transposed[1] else (summed, columns), multicast),
            ):
                matrix = tile.operands if ref.shape[0] > 1 else 0
                plgpu.copy_gmem_to_smem(ref.at[matrix, *block], stages.at[stage], barrier, **options)

        def produce(count, ring, tile):
            def fetch(step, count):
                ring.produce(count, tile, step)
                return count + 1

            return lax.fori_loop(tile.first, tile.end, fetch, count)

        def multiply(stage, sums, *left_sums, add_rows=False):
            a, b = left_stages.at[stage], right_stages.at[stage]
            a = a.at[:, consumed].transpose((1, 0)) if transposed[0] else a.at[consumed]
            plgpu.wgmma(sums, a, b.transpose((1, 0)) if transposed[1] else b)
            if add_rows:
                plgpu.wgmma(*left_sums, a, ones.at[warpgroup].transpose((1, 0)))
            plgpu.wgmma_wait(2 if add_rows else 1)

        def mask(stage, tile, number):
            """Set the elements outside of `tile.summed` to 0 in the stage of the ring with index `stage`.

            `number` is the tile's step along the summed axis that the stage holds. Both operands are set to 0, because
            elements outside of the range may be NaN, and 0 times NaN is NaN.
            """
            start, end = (limit - tile.start - number * step for limit in tile.summed)

            def mask_rows(i, _):
                row = i * TILE_ROWS if turns > 1 else (2 * i + warpgroup) * TILE_ROWS

                @pl.when((row < start) | (row + TILE_ROWS > end))
                def _():
                    for stages in (left_stages, right_stages):
                        rows = stages.at[stage, pl.ds(row, TILE_ROWS)]
                        at = row + plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=_two_rows_a_warp(step))
                        values = load(rows, _two_rows_a_warp(step))
                        rows[...] = jnp.where((at >= start) & (at < end), values, jnp.zeros_like(values))

            @pl.when((start > 0) | (end < step))
            def _():
                lax.fori_loop(0, step // TILE_ROWS // config.consumers, mask_rows, None)
                plgpu.commit_smem()
                if config.consumers > 1:
                    plgpu.barrier_arrive(masked)
                    plgpu.barrier_wait(masked)

        def spans(tile):
            """Divide the steps into three consecutive ranges. In the second range, `left` is also multiplied by ones.
            The tiles in one row of the result need the same row sums, so their second ranges together cover each step
            once."""
            if not row_sums:
                return [(tile.first, tile.end, False)]
            length = tile.end - tile.first
            start, stop = (
                tile.first + quotient(length * n, tile_columns) for n in (tile.tile_column, tile.tile_column + 1)
            )
            return [(tile.first, start, False), (start, stop, True), (stop, tile.end, False)]

        def consume(count, ring, tile):
            def accumulate(*sums):
                def add(step, count, *, add_rows):
                    ring.wait(count)
                    if schedule.masked:
                        mask(ring.stage(count), tile, step)
                    multiply(ring.stage(count), *sums, add_rows=add_rows)
                    pl.when(step > tile.first)(lambda: ring.release(count - 1))
                    return count + 1

                next_count = count
                for first, end, add_rows in spans(tile):
                    next_count = lax.fori_loop(first, end, functools.partial(add, add_rows=add_rows), next_count)
                plgpu.wgmma_wait(0)
                pl.when(tile.first < tile.end)(lambda: ring.release(next_count - 1))
                return [a[...] for a in sums]

            widths = (config.columns, _ONES) if row_sums else (config.columns,)
            store_tile(tile, *pl.run_scoped(accumulate, *(plgpu.ACC((consumer_rows, n)) for n in widths)))
            return count + tile.end - tile.first

        def store_tile(tile, sums, *left_sums):
            buffer = buffers.at[warpgroup]

            def store_piece(start):
                columns, piece = pl.ds(tile.column + start, piece_columns), sums[:, start : start + piece_columns]
                if bias is not None:
                    of_matrix = bias.at[tile.operands if bias.shape[0] > 1 else 0, columns]
                    addend = load(of_matrix, value_a_column(), optimized=False)
                    addend = jnp.where(tile.first < tile.end, addend, jnp.zeros_like(addend))
                    piece += lax.broadcast_in_dim(addend, piece.shape, [1])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer[...] = piece.astype(stored_dtype)
                plgpu.commit_smem()
                store_rows(tile, columns)

            for start in range(0, config.columns, piece_columns):
                if columns % config.columns:
                    pl.when(tile.column + start < columns)(functools.partial(store_piece, start))
                else:
                    store_piece(start)
            if row_sums:
                store(sums_out.at[tile.out, tile.tile_column, pl.ds(tile.row + first_row(), consumer_rows)], *left_sums)

        def store_rows(tile, columns):
            """Copy the rows in `tile.stored`, by default all rows, from the consumer's buffer to the result. The sizes
            of bulk copies are static, so the rows are divided into copies whose numbers of rows are powers of two."""
            first = tile.row + first_row()

            def copy_rows(start, size):
                source, target = pl.ds(start, size), pl.ds(first + start, size)
                plgpu.copy_smem_to_gmem(buffers.at[warpgroup, source], out.at[tile.out, target, columns])

            if tile.stored is None:
                return copy_rows(0, consumer_rows)
            start, end = (jnp.clip(limit - first, 0, consumer_rows) for limit in tile.stored)
            for size in (consumer_rows >> i for i in range(consumer_rows.bit_length())):
                has = (end - start) & size
                pl.when(has != 0)(functools.partial(copy_rows, start, size))
                start += has

        if row_sums:

            @pl.when(warpgroup < CONSUMERS)
            def _():
                ones[warpgroup] = plgpu.layout_cast(jnp.ones((_ONES, step), left.dtype), _two_rows_a_warp(step))
                plgpu.commit_smem()

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            Ring(config.stages, copy, loaded, free=free).drain(visit_tiles(produce, first=0, stride=1))

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            visit_tiles(consume, first=warpgroup if turns > 1 else 0, stride=turns)

        pl.when(warpgroup < CONSUMERS)(lambda: plgpu.wait_smem_to_gmem(0))

    left_stage, right_stage = (
        (step, size) if is_transposed else (size, step)
        for size, is_transposed in ((config.rows, transposed[0]), (config.columns, not transposed[1]))
    )
    out = schedule.matrices, rows, up(columns, piece_columns)
    sums = schedule.matrices, tile_columns, up(rows, config.cluster * config.rows), _ONES
    barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cta",)) if multicast else plgpu.Barrier
    out, sums = launch(
        body,
        _aligned(left),
        _aligned(right),
        None if bias is None else jnp.pad(bias, ((0, 0), (0, -columns % config.columns))),
        lists,
        out=(jax.ShapeDtypeStruct(out, stored_dtype), jax.ShapeDtypeStruct(sums, jnp.float32) if row_sums else None),
        grid={"cluster": clusters},
        cluster={"cta": config.cluster} if multicast else {},
        warpgroups=CONSUMERS + 1,
        scratch=[
            operand((config.stages, *left_stage), left.dtype),
            operand((config.stages, *right_stage), right.dtype),
            operand((CONSUMERS, _ONES, step), left.dtype) if row_sums else None,
            swizzled((CONSUMERS, consumer_rows, piece_columns), stored_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=turns * config.stages),
            barrier(num_arrivals=config.consumers, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS) if schedule.masked and config.consumers > 1 else None,
        ],
        name=name,
    )
    return out[:, :, :columns], sums[:, :, :rows, 0] if row_sums else None


def _two_rows_a_warp(step):
    """Return the register layout of eight rows of a stage, with `step` elements per row."""
    tiling = plgpu.Tiling(((TILE_ROWS, step), (2, step), (step // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def raster(index: Any, rows: Any, width: int) -> tuple[Any, Any]:
    """Return the row and the column of tile `index`. Tiles are numbered row by row within each vertical block, which is
    `width` tiles wide."""
    row = remainder(quotient(index, width), rows)
    return row, quotient(index, width * rows) * width + remainder(index, width)


def _aligned(a: Array) -> Array:
    """Return a, padded with zeros to whole tiles, and rounded to TF32 if in float32."""
    *_, rows, columns = a.shape
    padding = up(rows, TILE_ROWS) - rows, up(columns, step_elements(a.dtype)) - columns
    a = jnp.pad(a, ((0, 0), *((0, p) for p in padding))) if any(padding) else a
    return lax.reduce_precision(a, 8, 10) if a.dtype == jnp.float32 else a


def up(size: int, unit: int) -> int:
    return size + -size % unit
