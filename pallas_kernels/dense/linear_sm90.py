"""Matrix products on Hopper's tensor cores, among them the forward and the gradients of a dense layer.

    c[g, m, n] = Σ a[g, m, k] * b[g, k, n],    over k.

Operands are in half precision, or in float32, rounded to TF32. The summed axis is split (split-K) until all
multiprocessors are busy, and XLA adds the splits' sums in a fixed order. `docs/kernels/dense.md` describes the data
flow of a CTA, and its ping-pong and cooperative schedules. A cluster's two CTAs compute two tiles, one below the other.
Each copies half of each block of the right operand, and multicasts it to both.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

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
    value_a_column,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import check_divides, kernel

_CONSUMERS = 2
"""Consumer warpgroups per CTA. The last warpgroup is the producer."""
_MAX_SUMS = 64 * 256
"""Sums that fit in the registers of a consumer."""
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Registers per thread, multiples of 8 (PTX ISA, setmaxnreg). A producer and two consumer threads share 512."""

_RASTER_COLUMNS = 2048
"""Columns of the result that concurrent tiles cover. Half and twice this were slower: docs/lab/2026-11-21-dense.md (dw)
and docs/lab/2026-11-24-dense.md (forward)."""
_ROWS = 128
_COLUMNS = 64, 128, 256
"""Columns of a tile, at most 256 (PTX ISA, wgmma), or `_PING_PONG_COLUMNS` if one consumer holds the tile."""
_PING_PONG_COLUMNS = 128
_TILE_ROWS = 8
"""Rows of a swizzled tile. Mosaic copies only between arrays of whole tiles, `_TILE_ROWS` x `OPERAND_BYTES`."""
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
_SPLIT_MICROSECONDS = 5.0
_BYTES_A_MICROSECOND = 3e6
"""Time to launch the sum of the splits, and rate of writing and reading their sums. Not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of `rows` x `columns`. The summed axis is divided into `splits` parts, each with a separate result
    (split-K). CTAs compute the result in vertical blocks, `raster` tiles wide; 0 means a single block. A cluster has 1
    or 2 CTAs. A tile has one consumer in the ping-pong schedule, and two in the cooperative schedule. The ping-pong
    schedule needs the same number of steps for all tiles."""

    rows: int
    columns: int
    stages: int
    splits: int = 1
    cluster: int = 1
    raster: int = 0
    consumers: int = _CONSUMERS


def _config(columns: int, consumers: int = _CONSUMERS) -> Config:
    # The ping-pong schedule computes no row sums.
    buffers = _CONSUMERS * (_ROWS // consumers + (consumers > 1) * _ONES) * OPERAND_BYTES
    stages = (device.target().shared_bytes - _RESERVED_BYTES - buffers) // ((_ROWS + columns) * OPERAND_BYTES)
    return Config(_ROWS, columns, stages=min(_MAX_STAGES, stages), consumers=consumers)


def _clustered(config: Config, columns: int) -> Config:
    # Concurrent tiles then form a square, and share operands in the L2 cache.
    raster = largest_divisor(-(-columns // config.columns), _RASTER_COLUMNS // config.columns)
    return dataclasses.replace(config, cluster=2, raster=raster)


def _fastest(configs: Iterable[Config], batch: int, rows: int, columns: int, summed_bytes: int) -> Config:
    """Return the config with the least estimated time, with its fastest number of splits."""
    multiprocessors, steps = device.target().multiprocessors, -(-summed_bytes // OPERAND_BYTES)

    def microseconds(config):
        tiles = batch * -(-rows // config.rows) * -(-columns // config.columns) * config.splits
        step, epilogue = _STEP_MICROSECONDS[config.columns], _EPILOGUE_MICROSECONDS[config.consumers]
        moved_bytes = config.splits * batch * rows * columns * 8
        split = _SPLIT_MICROSECONDS + moved_bytes / _BYTES_A_MICROSECOND if config.splits > 1 else 0
        return -(-tiles // multiprocessors) * (-(-steps // config.splits) * step + epilogue) + split

    def splits(config):
        # The ping-pong schedule needs the same number of steps for all tiles.
        most = min(steps, multiprocessors) if config.consumers > 1 else 1
        return (dataclasses.replace(config, splits=n) for n in range(1, most + 1))

    return min((split for config in configs for split in splits(config)), key=microseconds)


def _unsupported(left: Any, right: Any, config: Config, dtypes: tuple = (jnp.bfloat16, jnp.float16)) -> str | None:
    if left.dtype not in dtypes or right.dtype != left.dtype:
        return f"dtypes {left.dtype} and {right.dtype}, only {' or '.join(jnp.dtype(d).name for d in dtypes)} for both"
    if 0 in (*left.shape, *right.shape):
        return "an axis of size 0"
    shared_bytes = device.target().shared_bytes
    return None if config.stages >= 2 else f"{shared_bytes} bytes of shared memory, too few for a ring of two stages"


def _sizes(a: Any, b: Any, transposed: tuple[bool, bool]) -> tuple[int, int, int, int]:
    rows, summed = a.shape[:-3:-1] if transposed[0] else a.shape[-2:]
    return max(math.prod(x.shape[:-2]) for x in (a, b)), rows, b.shape[-2 if transposed[1] else -1], summed


def _plan_product(a, b, *, transposed=(False, False), dtype=None):
    if reason := _unsupported(a, b, _config(_COLUMNS[-1]), (jnp.bfloat16, jnp.float16, jnp.float32)):
        return reason
    batch, rows, columns, summed = _sizes(a, b, transposed)
    widths = [width for width in _COLUMNS if width < 2 * columns] or _COLUMNS[:1]
    ping_pong = [_config(width, consumers=1) for width in widths if width <= _PING_PONG_COLUMNS]
    summed_bytes = summed * jnp.dtype(a.dtype).itemsize
    return _fastest([*map(_config, widths), *ping_pong], batch, rows, columns, summed_bytes)


@kernel(plan=_plan_product, capability=(9, 0))
def product(
    a: Array,
    b: Array,
    *,
    transposed: tuple[bool, bool] = (False, False),
    dtype: DTypeLike | None = None,
    config: Config,
) -> Array:
    """Return c `(batch, rows, columns)`, by default in the dtype of a.

    Args:
      a: `(batch, rows, summed)`, or `(batch, summed, rows)` if `transposed[0]`, in half precision or float32.
      b: `(batch, summed, columns)`, or `(batch, columns, summed)` if `transposed[1]`, in the dtype of a.

    Float32 operands are rounded to TF32. The batch of one operand may be 1. Without a batch axis in both, c has none.
    """
    if a.dtype == jnp.float32:
        # In TF32, the summed axis of both operands must be the last (PTX ISA, wgmma).
        a, b = jnp.swapaxes(a, -1, -2) if transposed[0] else a, b if transposed[1] else jnp.swapaxes(b, -1, -2)
        transposed = False, True
    matrices = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
    c, _ = _multiply(*matrices, transposed=transposed, dtype=dtype or a.dtype, name="product", config=config)
    return c[0] if a.ndim == b.ndim == 2 else c


def _plan_forward(x, w, b):
    if b is None:
        return "no bias"
    config = _config(_PING_PONG_COLUMNS, consumers=1)
    if reason := _unsupported(x, w, config):
        return reason
    outputs = w.shape[0]
    if outputs % _PING_PONG_COLUMNS:
        return f"{outputs} outputs, only multiples of {_PING_PONG_COLUMNS}"
    return _clustered(config, outputs)


@kernel(plan=_plan_forward, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, config: Config) -> Array:
    """Return z `(rows, outputs)`, `x wᵀ + b` in x's dtype. The float32 sums are rounded once, after b is added.

    Args:
      x: `(rows, inputs)` in half precision.
      w, b: `(outputs, inputs)` in x's dtype, and `(outputs,)`, outputs a multiple of 128.
      config: `splits` is 1, and `columns` divides the outputs, else ValueError is raised.
    """
    if config.splits != 1 or len(w) % config.columns:
        raise ValueError(f"linear_sm90.forward: config is {config}; wants splits=1, and columns that divide {len(w)}")
    options = dict(transposed=(False, True), dtype=x.dtype, name="linear", config=config)
    z, _ = _multiply(x[None], w[None], b.astype(jnp.float32), **options)
    return z[0]


def _plan_weights(dy, x, *, dtype=None):
    if reason := _unsupported(dy, x, _config(_COLUMNS[-1])):
        return reason
    (rows, outputs), inputs = dy.shape, x.shape[1]
    config = _fastest([_config(128 if inputs % 256 else 256)], 1, outputs, inputs, rows * 2)
    tiles = -(-outputs // config.rows) * -(-inputs // config.columns)
    is_clustered = tiles > device.target().multiprocessors and outputs % (2 * config.rows) == 0
    return _clustered(config, inputs) if is_clustered else config


@kernel(plan=_plan_weights, capability=(9, 0))
def weights_gradient(dy: Array, x: Array, *, dtype: DTypeLike | None = None, config: Config) -> tuple[Array, Array]:
    """Return dw `(outputs, inputs)`, by default in x's dtype, and float32 db `(outputs,)`, for dy `(rows, outputs)` and
    x `(rows, inputs)` in half precision."""
    options = dict(transposed=(True, False), dtype=dtype or x.dtype, row_sums=True, config=config)
    dw, db = _multiply(dy[None], x[None], name="linear_backward_weights", **options)
    return dw[0], db


_Tile = collections.namedtuple("_Tile", "batch split row column tile_column first end")
"""Indices of a tile in the batch and among the splits, its first row and column, its index among the tiles of a row,
and the range of its steps along the summed axis."""


def _multiply(left, right, bias=None, *, transposed, dtype, row_sums=False, name, config):
    """Return the products `(batch, rows, columns)` in `dtype`, plus the bias, and if `row_sums`, float32 sums of the
    rows of `left`, `(rows,)`.

    Args:
      left: `(batch or 1, rows, summed)`, or `(batch or 1, summed, rows)` if transposed.
      right: `(batch or 1, summed, columns)`, or `(batch or 1, columns, summed)` if transposed.
      bias: float32 `(columns,)`, columns a multiple of the tile's columns.
    """
    batch, rows, columns, summed = _sizes(left, right, transposed)
    step = OPERAND_BYTES // left.dtype.itemsize  # elements of the summed axis per step: one row of an operand's tile
    steps = -(-summed // step)
    tile_rows, tile_columns = -(-rows // (config.rows * config.cluster)), -(-columns // config.columns)
    tiles = batch * config.splits * tile_rows * tile_columns
    clusters = min(tiles, device.target().multiprocessors // config.cluster)
    turns, consumer_rows = _CONSUMERS // config.consumers, config.rows // config.consumers
    check_divides(name, "raster", config.raster or tile_columns, tile_columns)
    if consumer_rows * config.columns > _MAX_SUMS:
        raise ValueError(f"{name}: config is {config}; wants at most {_MAX_SUMS} sums per consumer")
    stored_dtype = jnp.dtype(dtype if config.splits == 1 else jnp.float32)
    piece_columns = OPERAND_BYTES // stored_dtype.itemsize
    multicast = dict(collective_axes="cta") if config.cluster > 1 else {}

    def body(*refs, warpgroup, cluster, cta=0):
        left, right, bias, out, sums_out, left_stages, right_stages, ones, buffers, loaded, free = refs

        def first_row():
            return warpgroup * consumer_rows if config.consumers > 1 else 0

        consumed = pl.ds(first_row(), consumer_rows)

        def tile_at(index):
            part, index = quotient(index, tile_rows * tile_columns), remainder(index, tile_rows * tile_columns)
            batch, split = quotient(part, config.splits), remainder(part, config.splits)
            row, column = _raster(index, tile_rows, config.raster or tile_columns)
            first, end = (quotient(n * steps, config.splits) for n in (split, split + 1))
            row, start = (row * config.cluster + cta) * config.rows, column * config.columns
            return _Tile(batch, split, row, start, column, first, end)

        def visit_tiles(visit, first, stride):
            """Call `count = visit(count, ring, tile)` for every `stride`th tile of the CTA, beginning with tile number
            `first`, and return the last `count`. `count` is the number of steps along the summed axis for the CTA's
            earlier tiles, to which `visit` adds the tile's steps."""

            def visit_next(i, count):
                number = first + i * stride
                tile = tile_at(cluster + number * clusters)
                turn = remainder(number, turns)
                next_count = visit(count, Ring(config.stages, copy, loaded, free=free, turn=turn), tile)
                return next_count + (stride - 1) * steps

            visits = quotient(quotient(tiles - cluster + clusters - 1, clusters) - first + stride - 1, stride)
            return lax.fori_loop(0, visits, visit_next, jnp.int32(first * steps))

        def copy(count, stage, barrier, tile, number):
            summed = pl.ds(number * step, step)
            rows, columns = pl.ds(tile.row, config.rows), pl.ds(tile.column, config.columns)
            for ref, stages, block, options in (
                (left, left_stages, (summed, rows) if transposed[0] else (rows, summed), {}),
                (right, right_stages, (columns, summed) if transposed[1] else (summed, columns), multicast),
            ):
                batch = tile.batch if ref.shape[0] > 1 else 0
                plgpu.copy_gmem_to_smem(ref.at[batch, *block], stages.at[stage], barrier, **options)

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
                    multiply(ring.stage(count), *sums, add_rows=add_rows)
                    pl.when(step > tile.first)(lambda: ring.release(count - 1))
                    return count + 1

                next_count = count
                for first, end, add_rows in spans(tile):
                    next_count = lax.fori_loop(first, end, functools.partial(add, add_rows=add_rows), next_count)
                plgpu.wgmma_wait(0)
                ring.release(next_count - 1)
                return [a[...] for a in sums]

            widths = (config.columns, _ONES) if row_sums else (config.columns,)
            store_tile(tile, *pl.run_scoped(accumulate, *(plgpu.ACC((consumer_rows, n)) for n in widths)))
            return count + tile.end - tile.first

        def store_tile(tile, sums, *left_sums):
            rows, buffer = pl.ds(tile.row + first_row(), consumer_rows), buffers.at[warpgroup]

            def store_piece(start):
                columns, piece = pl.ds(tile.column + start, piece_columns), sums[:, start : start + piece_columns]
                if bias is not None:
                    addend = load(bias.at[columns], value_a_column(), optimized=False)
                    piece += lax.broadcast_in_dim(addend, piece.shape, [1])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer[...] = piece.astype(stored_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, out.at[tile.batch * config.splits + tile.split, rows, columns])

            for start in range(0, config.columns, piece_columns):
                if columns % config.columns:
                    pl.when(tile.column + start < columns)(functools.partial(store_piece, start))
                else:
                    store_piece(start)
            if row_sums:
                store(sums_out.at[tile.split, tile.tile_column, rows], *left_sums)

        if row_sums:

            @pl.when(warpgroup < _CONSUMERS)
            def _():
                two_rows_a_warp = plgpu.Tiling(((_ONES, step), (2, step), (step // 16,)))
                layout = plgpu.Layout.TILED(two_rows_a_warp, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
                ones[warpgroup] = plgpu.layout_cast(jnp.ones((_ONES, step), left.dtype), layout)
                plgpu.commit_smem()

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            Ring(config.stages, copy, loaded, free=free).drain(visit_tiles(produce, first=0, stride=1))

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            visit_tiles(consume, first=warpgroup if turns > 1 else 0, stride=turns)

        pl.when(warpgroup < _CONSUMERS)(lambda: plgpu.wait_smem_to_gmem(0))

    left_stage, right_stage = (
        (step, size) if is_transposed else (size, step)
        for size, is_transposed in ((config.rows, transposed[0]), (config.columns, not transposed[1]))
    )
    out = batch * config.splits, _up(rows, _TILE_ROWS), _up(columns, piece_columns)
    sums = config.splits, tile_columns, tile_rows * config.cluster * config.rows, _ONES
    barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cta",)) if multicast else plgpu.Barrier
    out, sums = launch(
        body,
        _aligned(left),
        _aligned(right),
        bias,
        out=(jax.ShapeDtypeStruct(out, stored_dtype), jax.ShapeDtypeStruct(sums, jnp.float32) if row_sums else None),
        grid={"cluster": clusters},
        cluster={"cta": config.cluster} if multicast else {},
        warpgroups=_CONSUMERS + 1,
        scratch=[
            operand((config.stages, *left_stage), left.dtype),
            operand((config.stages, *right_stage), right.dtype),
            operand((_CONSUMERS, _ONES, step), left.dtype) if row_sums else None,
            operand((_CONSUMERS, consumer_rows, piece_columns), stored_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=turns * config.stages),
            barrier(num_arrivals=config.consumers, num_barriers=config.stages),
        ],
        name=name,
    )
    out = out[:, :rows, :columns]
    if config.splits > 1:
        out = jnp.sum(out.reshape(batch, config.splits, *out.shape[1:]), axis=1).astype(dtype)
    return out, jnp.sum(sums[:, :, :rows, 0], axis=(0, 1)) if row_sums else None


def _raster(index: Any, rows: int, width: int) -> tuple[Any, Any]:
    row = remainder(quotient(index, width), rows)
    return row, quotient(index, width * rows) * width + remainder(index, width)


def _aligned(a: Array) -> Array:
    """Return a, padded with zeros to whole tiles, and rounded to TF32 if in float32."""
    *_, rows, columns = a.shape
    padding = _up(rows, _TILE_ROWS) - rows, _up(columns, OPERAND_BYTES // a.dtype.itemsize) - columns
    a = jnp.pad(a, ((0, 0), *((0, p) for p in padding))) if any(padding) else a
    return lax.reduce_precision(a, 8, 10) if a.dtype == jnp.float32 else a


def _up(size: int, unit: int) -> int:
    return size + -size % unit
