"""Half-precision products of a dense layer on Hopper's tensor cores: the forward, and the gradients of its parameters.

    z[n, o] = Σ x[n, i] * w[o, i] + b[o],    over the inputs i,
    dw[o, i] = Σ dy[n, o] * x[n, i],    db[o] = Σ dy[n, o],    over the rows n.

The summed axis of dw is split (split-K) until all multiprocessors are busy, and XLA adds the splits' sums in a fixed
order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, operand, quotient, store, value_a_column
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import kernel
from pallas_kernels.dense.linear_product_sm90 import CONSUMERS, ITEM_BYTES, PRODUCER, STEP, Config, Product

_ROWS = 128
_MIN_COLUMNS, _MAX_COLUMNS = 128, 256
"""Columns of a tile, at most 256 (PTX ISA, wgmma): 128 if one consumer holds the tile, or if 256 does not divide the
result's columns."""

_MIN_ROWS = 8192
_MIN_INPUTS = 512
"""Fewest rows (docs/lab/2026-11-21-dense.md), and fewest inputs for the forward (not measured)."""

_MAX_STAGES = 6
"""Four stages of the largest tiles fit on Hopper. Three were slower: docs/lab/2026-11-21-dense.md."""
_RESERVED_BYTES = 2048 + 512
"""Shared memory for Mosaic's sums across warps (2 KiB) and barriers."""
_STEP_MICROSECONDS = 0.75
"""Estimated time of a step of a 128 x 256 tile on an H200: docs/lab/2026-11-21-dense.md."""
_BYTES_A_MICROSECOND = 3e6
"""Rate of writing and reading the splits' sums. Not tuned."""


def _config(columns: int, buffer_bytes: int) -> Config:
    available_bytes = device.target().shared_bytes - _RESERVED_BYTES - buffer_bytes
    return Config(_ROWS, columns, stages=min(_MAX_STAGES, available_bytes // ((_ROWS + columns) * STEP * ITEM_BYTES)))


def _unsupported_operands(left: Any, right: Any) -> str | None:
    if left.dtype not in (jnp.bfloat16, jnp.float16) or right.dtype != left.dtype:
        return f"dtypes {left.dtype} and {right.dtype}, only bfloat16 or float16 for both"
    return None if left.shape[0] else "no rows"


def _unsupported_size(name: str, size: int, unit: int) -> str | None:
    return None if size and size % unit == 0 else f"{size} {name}, only multiples of {unit}"


def _unsupported_device(config: Config) -> str | None:
    available = device.target().shared_bytes
    return None if config.stages >= 2 else f"{available} bytes of shared memory, too few for a ring of two stages"


class _ForwardRefs(NamedTuple):
    x: Any
    w: Any
    b: Any
    z: Any
    x_stages: Any
    w_stages: Any
    z_buffers: Any
    loaded: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Forward(Product):
    consumers = 1

    def body(self, *refs, warpgroup, **ids):
        refs = _ForwardRefs(*refs)
        ring = Ring(self.config.stages, functools.partial(self.copy, refs), refs.loaded, free=refs.free)
        multiply = functools.partial(self.multiply, refs)
        self.run(
            ring,
            [plgpu.ACC((self.consumer_rows, self.config.columns))],
            lambda tile: [(tile.first, tile.end, multiply)],
            functools.partial(self.epilogue, refs, warpgroup),
            warpgroup,
            **ids,
        )
        pl.when(warpgroup < PRODUCER)(lambda: plgpu.wait_smem_to_gmem(0))

    def copy(self, refs, count, stage, barrier, tile, step):
        summed_slice = pl.ds(step * STEP, STEP)
        rows, columns = pl.ds(tile.row, self.config.rows), pl.ds(tile.column, self.config.columns)
        plgpu.copy_gmem_to_smem(refs.x.at[rows, summed_slice], refs.x_stages.at[stage], barrier)
        plgpu.copy_gmem_to_smem(refs.w.at[columns, summed_slice], refs.w_stages.at[stage], barrier, **self.multicast)

    def multiply(self, refs, stage, sums):
        plgpu.wgmma(sums, refs.x_stages.at[stage], refs.w_stages.at[stage].transpose((1, 0)))
        plgpu.wgmma_wait(1)

    def epilogue(self, refs, warpgroup, tile, z):
        rows, buffer = self.consumed_rows(tile, warpgroup), refs.z_buffers.at[warpgroup]
        for start in range(0, self.config.columns, STEP):
            columns = pl.ds(tile.column + start, STEP)
            bias = load(refs.b.at[columns], value_a_column(), optimized=False)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            piece = z[:, start : start + STEP] + lax.broadcast_in_dim(bias, (self.consumer_rows, STEP), [1])
            buffer[...] = piece.astype(refs.z.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, refs.z.at[rows, columns])


def _forward_config(outputs):
    return _config(_MIN_COLUMNS, buffer_bytes=CONSUMERS * _ROWS * STEP * ITEM_BYTES).clustered(outputs)


def _forward_unsupported(x, w, b):
    inputs, outputs = x.shape[1], w.shape[0]
    return (
        ("no bias" if b is None else None)
        or _unsupported_operands(x, w)
        or _unsupported_size("inputs", inputs, STEP)
        or _unsupported_size("outputs", outputs, _MIN_COLUMNS)
        or _unsupported_device(_forward_config(outputs))
    )


def _forward_heuristic(x, w, b):
    rows, inputs = x.shape
    return _forward_config(w.shape[0]) if rows >= _MIN_ROWS and inputs >= _MIN_INPUTS else None


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, config: Config) -> Array:
    """Return z `(rows, outputs)`, `x wᵀ + b` in x's dtype. The float32 sums are rounded once, after b is added.

    Args:
      x: `(rows, inputs)` in half precision, inputs a multiple of 64.
      w, b: `(outputs, inputs)` in x's dtype, and `(outputs,)`, outputs a multiple of 128.
      config: `splits` is 1, and `columns` is 64 or 128 and divides the outputs, else ValueError is raised.
    """
    (rows, inputs), outputs = x.shape, w.shape[0]
    if config.splits != 1 or config.columns not in (STEP, _MIN_COLUMNS):
        wanted = f"splits=1, and {STEP} or {_MIN_COLUMNS} columns"
        raise ValueError(f"linear_sm90.forward: config is {config}; wants {wanted}")
    product = _Forward(config, rows, outputs, inputs, device.target().multiprocessors)
    product.check("linear_sm90.forward")
    return launch(
        product.body,
        x,
        w,
        b.astype(jnp.float32),
        out=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        scratch=[
            operand((config.stages, config.rows, STEP), x.dtype),
            operand((config.stages, config.columns, STEP), x.dtype),
            operand((CONSUMERS, product.consumer_rows, STEP), x.dtype),
            *product.barriers,
        ],
        name="linear",
        **product.launch_options,
    )


_ONES = 8
"""The fewest columns of a wgmma (PTX ISA)."""


class _WeightsGradientRefs(NamedTuple):
    dy: Any
    x: Any
    dw: Any
    db: Any
    dy_stages: Any
    x_stages: Any
    ones: Any
    loaded: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _WeightsGradient(Product):
    def body(self, *refs, warpgroup, **ids):
        refs = _WeightsGradientRefs(*refs)
        ring = Ring(self.config.stages, functools.partial(self.copy, refs), refs.loaded, free=refs.free)

        @pl.when(warpgroup < PRODUCER)
        def _():
            two_rows_a_warp = plgpu.Tiling(((_ONES, STEP), (2, STEP), (STEP // 16,)))
            layout = plgpu.Layout.TILED(two_rows_a_warp, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
            refs.ones[warpgroup] = plgpu.layout_cast(jnp.ones((_ONES, STEP), refs.x.dtype), layout)
            plgpu.commit_smem()

        self.run(
            ring,
            [plgpu.ACC((self.consumer_rows, self.config.columns)), plgpu.ACC((self.consumer_rows, _ONES))],
            functools.partial(self.spans, refs, warpgroup),
            functools.partial(self.epilogue, refs, warpgroup),
            warpgroup,
            **ids,
        )

    def copy(self, refs, count, stage, barrier, tile, step):
        summed_slice = pl.ds(step * STEP, STEP)
        rows, columns = pl.ds(tile.row, self.config.rows), pl.ds(tile.column, self.config.columns)
        plgpu.copy_gmem_to_smem(refs.dy.at[summed_slice, rows], refs.dy_stages.at[stage], barrier)
        plgpu.copy_gmem_to_smem(refs.x.at[summed_slice, columns], refs.x_stages.at[stage], barrier, **self.multicast)

    def spans(self, refs, warpgroup, tile):
        """Divide the loop over dy's rows into three consecutive ranges `(first, end, multiply)`, where `multiply`
        computes one iteration. In the second range, it also multiplies dy by ones, for db. The tiles in one row of dw
        need the same db, so their second ranges together cover each iteration once."""
        multiply = functools.partial(self.multiply, refs, warpgroup)
        length = tile.end - tile.first
        start, stop = (
            tile.first + quotient(length * n, self.tile_columns) for n in (tile.tile_column, tile.tile_column + 1)
        )
        with_bias = functools.partial(multiply, with_bias=True)
        return [(tile.first, start, multiply), (start, stop, with_bias), (stop, tile.end, multiply)]

    def multiply(self, refs, warpgroup, stage, sums, bias_sums, *, with_bias=False):
        rows = pl.ds(self.first_row(warpgroup), self.consumer_rows)
        left = refs.dy_stages.at[stage, :, rows].transpose((1, 0))
        plgpu.wgmma(sums, left, refs.x_stages.at[stage])
        if with_bias:
            plgpu.wgmma(bias_sums, left, refs.ones.at[warpgroup].transpose((1, 0)))
        plgpu.wgmma_wait(2 if with_bias else 1)

    def epilogue(self, refs, warpgroup, tile, sums, bias_sums):
        rows, columns = self.consumed_rows(tile, warpgroup), pl.ds(tile.column, self.config.columns)
        store(refs.dw.at[tile.split, rows, columns], sums.astype(refs.dw.dtype))
        store(refs.db.at[tile.split, tile.tile_column, rows], bias_sums)


def _weights_config(rows, outputs, inputs):
    columns = _MIN_COLUMNS if inputs % _MAX_COLUMNS else _MAX_COLUMNS
    config = _config(columns, buffer_bytes=CONSUMERS * _ONES * STEP * ITEM_BYTES)
    multiprocessors, steps = device.target().multiprocessors, -(-rows // STEP)
    tiles = (outputs // config.rows) * (inputs // config.columns)
    if tiles > multiprocessors and outputs % (2 * config.rows) == 0:
        config = config.clustered(inputs)

    def microseconds(splits):
        turns = -(-tiles * splits // multiprocessors) * -(-steps // splits)
        moved_bytes = (splits > 1) * splits * outputs * inputs * 8
        return turns * _STEP_MICROSECONDS * config.columns / _MAX_COLUMNS + moved_bytes / _BYTES_A_MICROSECOND

    return dataclasses.replace(config, splits=min(range(1, min(steps, multiprocessors) + 1), key=microseconds))


def _weights_unsupported(dy, x, *, dtype=None):
    (rows, outputs), inputs = dy.shape, x.shape[1]
    return (
        _unsupported_operands(dy, x)
        or _unsupported_size("outputs", outputs, _ROWS)
        or _unsupported_size("inputs", inputs, _MIN_COLUMNS)
        or _unsupported_device(_weights_config(rows, outputs, inputs))
    )


def _weights_heuristic(dy, x, *, dtype=None):
    return _weights_config(*dy.shape, x.shape[1]) if dy.shape[0] >= _MIN_ROWS else None


@kernel(unsupported=_weights_unsupported, heuristic=_weights_heuristic, capability=(9, 0))
def weights_gradient(dy: Array, x: Array, *, dtype: DTypeLike | None = None, config: Config) -> tuple[Array, Array]:
    """Return dw `(outputs, inputs)`, by default in x's dtype, and float32 db `(outputs,)`.

    Args:
      dy: `(rows, outputs)` in half precision, outputs a multiple of 128.
      x: `(rows, inputs)` in dy's dtype, inputs a multiple of 128 and of `config.columns`.
    """
    dtype = dtype or x.dtype
    (rows, outputs), inputs = dy.shape, x.shape[1]
    product = _WeightsGradient(config, outputs, inputs, rows, device.target().multiprocessors)
    product.check("linear_sm90.weights_gradient")
    dw, db = launch(
        product.body,
        dy,
        x,
        out=(
            jax.ShapeDtypeStruct((config.splits, outputs, inputs), dtype if config.splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((config.splits, product.tile_columns, outputs, _ONES), jnp.float32),
        ),
        scratch=[
            operand((config.stages, STEP, config.rows), x.dtype),
            operand((config.stages, STEP, config.columns), x.dtype),
            operand((CONSUMERS, _ONES, STEP), x.dtype),
            *product.barriers,
        ],
        name="linear_backward_weights",
        **product.launch_options,
    )
    dw = dw[0] if config.splits == 1 else jnp.sum(dw, axis=0).astype(dtype)
    return dw, jnp.sum(db[..., 0], axis=(0, 1))
