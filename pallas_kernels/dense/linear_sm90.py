"""Matrix products on Hopper's tensor cores, among them the forward and the gradients of a dense layer.

    c[g, m, n] = Σ a[g, m, k] * b[g, k, n],    over k.

Operands are in half precision, or in float32, rounded to TF32. The summed axis is split (split-K) until all
multiprocessors are busy, and XLA adds the splits' sums in a fixed order.
"""

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
from pallas_kernels.core.layouts import OPERAND_BYTES, load, operand, quotient, store, value_a_column
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import kernel
from pallas_kernels.dense.linear_product_sm90 import CONSUMERS, PRODUCER, Config, Product

_ROWS = 128
_COLUMNS = 64, 128, 256
"""Columns of a tile, at most 256 (PTX ISA, wgmma), or 128 if one consumer holds the tile."""
_TILE_ROWS = 8
"""Rows of a swizzled tile. Mosaic copies only between arrays of whole tiles, `_TILE_ROWS` x `OPERAND_BYTES`."""
_ONES = 8
"""The fewest columns of a wgmma (PTX ISA)."""

_MIN_ROWS = 8192
_MIN_INPUTS = 512
"""Fewest rows (docs/lab/2026-11-21-dense.md), and fewest inputs for the forward (not measured)."""

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


def _config(columns: int, consumers: int = CONSUMERS) -> Config:
    # The ping-pong schedule computes no row sums.
    buffers = CONSUMERS * (_ROWS // consumers + (consumers > 1) * _ONES) * OPERAND_BYTES
    stages = (device.target().shared_bytes - _RESERVED_BYTES - buffers) // ((_ROWS + columns) * OPERAND_BYTES)
    return Config(_ROWS, columns, stages=min(_MAX_STAGES, stages), consumers=consumers)


def _multiply(
    product: Product,
    left: Array,
    right: Array,
    bias: Array | None = None,
    *,
    transposed: tuple[bool, bool],
    dtype: DTypeLike,
    row_sums: bool = False,
    name: str,
) -> tuple[Array, Array | None]:
    """Return the products `(batch, rows, columns)` in `dtype`, plus the bias, and if `row_sums`, float32 sums of the
    rows of `left`, `(rows,)`.

    Args:
      left: `(batch or 1, rows, summed)`, or `(batch or 1, summed, rows)` if transposed.
      right: `(batch or 1, summed, columns)`, or `(batch or 1, columns, summed)` if transposed.
      bias: float32 `(columns,)`, columns a multiple of the tile's columns.
    """
    product.check(name)
    config, step = product.config, product.step
    stored_dtype = jnp.dtype(dtype if config.splits == 1 else jnp.float32)
    piece_columns = OPERAND_BYTES // stored_dtype.itemsize
    left_shape, right_shape = (
        (step, size) if is_transposed else (size, step)
        for size, is_transposed in ((config.rows, transposed[0]), (config.columns, not transposed[1]))
    )

    def body(*refs, warpgroup, **ids):
        left, right, bias, out, sums_out, left_stages, right_stages, ones, buffers, loaded, free = refs
        consumed = pl.ds(product.first_row(warpgroup), product.consumer_rows)

        def copy(count, stage, barrier, tile, number):
            summed = pl.ds(number * step, step)
            rows, columns = pl.ds(tile.row, config.rows), pl.ds(tile.column, config.columns)
            for ref, stages, block, options in (
                (left, left_stages, (summed, rows) if transposed[0] else (rows, summed), {}),
                (right, right_stages, (columns, summed) if transposed[1] else (summed, columns), product.multicast),
            ):
                batch = tile.batch if ref.shape[0] > 1 else 0
                plgpu.copy_gmem_to_smem(ref.at[batch, *block], stages.at[stage], barrier, **options)

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
                return [(tile.first, tile.end, multiply)]
            length, add_rows = tile.end - tile.first, functools.partial(multiply, add_rows=True)
            start, stop = (
                tile.first + quotient(length * n, product.tile_columns)
                for n in (tile.tile_column, tile.tile_column + 1)
            )
            return [(tile.first, start, multiply), (start, stop, add_rows), (stop, tile.end, multiply)]

        def epilogue(tile, sums, *left_sums):
            rows, buffer = product.consumed_rows(tile, warpgroup), buffers.at[warpgroup]

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
                if product.columns % config.columns:
                    pl.when(tile.column + start < product.columns)(functools.partial(store_piece, start))
                else:
                    store_piece(start)
            if row_sums:
                store(sums_out.at[tile.split, tile.tile_column, rows], *left_sums)

        if row_sums:

            @pl.when(warpgroup < PRODUCER)
            def _():
                two_rows_a_warp = plgpu.Tiling(((_ONES, step), (2, step), (step // 16,)))
                layout = plgpu.Layout.TILED(two_rows_a_warp, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
                ones[warpgroup] = plgpu.layout_cast(jnp.ones((_ONES, step), left.dtype), layout)
                plgpu.commit_smem()

        shapes = [(product.consumer_rows, config.columns), *([(product.consumer_rows, _ONES)] if row_sums else [])]
        ring = Ring(config.stages, copy, loaded, free=free)
        product.run(ring, [plgpu.ACC(shape) for shape in shapes], spans, epilogue, warpgroup, **ids)
        pl.when(warpgroup < PRODUCER)(lambda: plgpu.wait_smem_to_gmem(0))

    out = product.batch * config.splits, _up(product.rows, _TILE_ROWS), _up(product.columns, piece_columns)
    sums_rows = product.tile_rows * config.cluster * config.rows
    sums = jax.ShapeDtypeStruct((config.splits, product.tile_columns, sums_rows, _ONES), jnp.float32)
    out, sums = launch(
        body,
        _aligned(left),
        _aligned(right),
        bias,
        out=(jax.ShapeDtypeStruct(out, stored_dtype), sums if row_sums else None),
        scratch=[
            operand((config.stages, *left_shape), left.dtype),
            operand((config.stages, *right_shape), right.dtype),
            operand((CONSUMERS, _ONES, step), left.dtype) if row_sums else None,
            operand((CONSUMERS, product.consumer_rows, piece_columns), stored_dtype),
            *product.barriers,
        ],
        name=name,
        **product.launch_options,
    )
    out = out[:, : product.rows, : product.columns]
    if config.splits > 1:
        out = jnp.sum(out.reshape(product.batch, config.splits, *out.shape[1:]), axis=1).astype(dtype)
    return out, jnp.sum(sums[:, :, : product.rows, 0], axis=(0, 1)) if row_sums else None


def _aligned(a: Array) -> Array:
    """Return a, padded with zeros to whole tiles, and rounded to TF32 if in float32."""
    *_, rows, columns = a.shape
    padding = _up(rows, _TILE_ROWS) - rows, _up(columns, OPERAND_BYTES // a.dtype.itemsize) - columns
    a = jnp.pad(a, ((0, 0), *((0, p) for p in padding))) if any(padding) else a
    return lax.reduce_precision(a, 8, 10) if a.dtype == jnp.float32 else a


def _up(size: int, unit: int) -> int:
    return size + -size % unit


def _unsupported_device(columns: int, consumers: int = CONSUMERS) -> str | None:
    if _config(columns, consumers).stages >= 2:
        return None
    return f"{device.target().shared_bytes} bytes of shared memory, too few for a ring of two stages"


def _unsupported_operands(left: Any, right: Any, dtypes: tuple = (jnp.bfloat16, jnp.float16)) -> str | None:
    if left.dtype not in dtypes or right.dtype != left.dtype:
        return f"dtypes {left.dtype} and {right.dtype}, only {' or '.join(jnp.dtype(d).name for d in dtypes)} for both"
    return None if 0 not in (*left.shape, *right.shape) else "an axis of size 0"


def _unsupported_size(name: str, size: int, unit: int) -> str | None:
    return None if size % unit == 0 else f"{size} {name}, only multiples of {unit}"


def _sizes(a: Any, b: Any, transposed: tuple[bool, bool]) -> tuple[int, int, int, int]:
    rows, summed = a.shape[:-3:-1] if transposed[0] else a.shape[-2:]
    return max(math.prod(x.shape[:-2]) for x in (a, b)), rows, b.shape[-2 if transposed[1] else -1], summed


def _fastest(configs: Iterable[Config], batch: int, rows: int, columns: int, steps: int) -> Config:
    """Return the config with the least estimated time, with its fastest number of splits."""
    multiprocessors = device.target().multiprocessors

    def microseconds(config):
        tiles = batch * -(-rows // config.rows) * -(-columns // config.columns) * config.splits
        tile = (
            -(-steps // config.splits) * _STEP_MICROSECONDS[config.columns] + _EPILOGUE_MICROSECONDS[config.consumers]
        )
        moved_bytes = config.splits * batch * rows * columns * 8
        split = _SPLIT_MICROSECONDS + moved_bytes / _BYTES_A_MICROSECOND if config.splits > 1 else 0
        return -(-tiles // multiprocessors) * tile + split

    def splits(config):
        # The ping-pong schedule needs the same number of steps for all tiles.
        most = min(steps, multiprocessors) if config.consumers > 1 else 1
        return (dataclasses.replace(config, splits=n) for n in range(1, most + 1))

    return min((split for config in configs for split in splits(config)), key=microseconds)


def _product_unsupported(a, b, *, transposed=(False, False), dtype=None):
    return _unsupported_operands(a, b, (jnp.bfloat16, jnp.float16, jnp.float32)) or _unsupported_device(_COLUMNS[-1])


def _product_heuristic(a, b, *, transposed=(False, False), dtype=None):
    batch, rows, columns, summed = _sizes(a, b, transposed)
    steps = -(-summed * jnp.dtype(a.dtype).itemsize // OPERAND_BYTES)
    widths = [width for width in _COLUMNS if width < 2 * columns] or _COLUMNS[:1]
    ping_pong = [_config(width, consumers=1) for width in widths if width <= _PING_PONG_COLUMNS]
    return _fastest([*map(_config, widths), *ping_pong], batch, rows, columns, steps)


_PING_PONG_COLUMNS = 128


@kernel(unsupported=_product_unsupported, heuristic=_product_heuristic, capability=(9, 0))
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
    batch, rows, columns, summed = _sizes(a, b, transposed)
    if a.dtype == jnp.float32:
        # In TF32, the summed axis of both operands must be the last (PTX ISA, wgmma).
        a, b = jnp.swapaxes(a, -1, -2) if transposed[0] else a, b if transposed[1] else jnp.swapaxes(b, -1, -2)
        transposed = False, True
    item = Product(config, rows, columns, summed, a.dtype, device.target().multiprocessors, batch)
    matrices = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
    c, _ = _multiply(item, *matrices, transposed=transposed, dtype=dtype or a.dtype, name="product")
    return c[0] if a.ndim == b.ndim == 2 else c


def _forward_config(outputs):
    return _config(_PING_PONG_COLUMNS, consumers=1).clustered(outputs)


def _forward_unsupported(x, w, b):
    return (
        ("no bias" if b is None else None)
        or _unsupported_operands(x, w)
        or _unsupported_size("outputs", w.shape[0], _PING_PONG_COLUMNS)
        or _unsupported_device(_PING_PONG_COLUMNS, consumers=1)
    )


def _forward_heuristic(x, w, b):
    rows, inputs = x.shape
    return _forward_config(w.shape[0]) if rows >= _MIN_ROWS and inputs >= _MIN_INPUTS else None


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, config: Config) -> Array:
    """Return z `(rows, outputs)`, `x wᵀ + b` in x's dtype. The float32 sums are rounded once, after b is added.

    Args:
      x: `(rows, inputs)` in half precision.
      w, b: `(outputs, inputs)` in x's dtype, and `(outputs,)`, outputs a multiple of 128.
      config: `splits` is 1, and `columns` divides the outputs, else ValueError is raised.
    """
    (rows, inputs), outputs = x.shape, w.shape[0]
    if config.splits != 1 or outputs % config.columns:
        raise ValueError(f"linear_sm90.forward: config is {config}; wants splits=1, and columns that divide {outputs}")
    item = Product(config, rows, outputs, inputs, x.dtype, device.target().multiprocessors)
    z, _ = _multiply(
        item, x[None], w[None], b.astype(jnp.float32), transposed=(False, True), dtype=x.dtype, name="linear"
    )
    return z[0]


def weights_config(rows, outputs, inputs):
    columns = 128 if inputs % 256 else 256
    config = _fastest([_config(columns)], 1, outputs, inputs, -(-rows * 2 // OPERAND_BYTES))
    tiles = -(-outputs // config.rows) * -(-inputs // config.columns)
    if tiles > device.target().multiprocessors and outputs % (2 * config.rows) == 0:
        config = config.clustered(inputs)
    return config


def _weights_unsupported(dy, x, *, dtype=None):
    return _unsupported_operands(dy, x) or _unsupported_device(_COLUMNS[-1])


def _weights_heuristic(dy, x, *, dtype=None):
    (rows, outputs), inputs = dy.shape, x.shape[1]
    measured = rows >= _MIN_ROWS and outputs % _ROWS == inputs % _COLUMNS[1] == 0
    return weights_config(rows, outputs, inputs) if measured else None


@kernel(unsupported=_weights_unsupported, heuristic=_weights_heuristic, capability=(9, 0))
def weights_gradient(dy: Array, x: Array, *, dtype: DTypeLike | None = None, config: Config) -> tuple[Array, Array]:
    """Return dw `(outputs, inputs)`, by default in x's dtype, and float32 db `(outputs,)`, for dy `(rows, outputs)` and
    x `(rows, inputs)` in half precision."""
    (rows, outputs), inputs = dy.shape, x.shape[1]
    item = Product(config, outputs, inputs, rows, x.dtype, device.target().multiprocessors)
    dw, db = _multiply(
        item,
        dy[None],
        x[None],
        transposed=(True, False),
        dtype=dtype or x.dtype,
        row_sums=True,
        name="linear_backward_weights",
    )
    return dw[0], db
