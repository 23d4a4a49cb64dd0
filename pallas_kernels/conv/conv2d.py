"""A convolution and its weight and bias gradients in float32 on the CUDA cores, with the batch last.

Each lane has one example, and sums stay in registers. A CTA of `correlate` computes one row of the output for a few
output channels. A CTA of `correlate_batch` computes a tile of dw for some rows of dy and some examples. XLA adds the
tiles.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    largest_divisor,
    multiply_add,
    quotient,
    remainder,
    vector_length,
    zeros_like,
)
from pallas_kernels.core.tiles import kernel

_MAX_ACCUMULATORS = 160
"""Maximum sums in a thread's 255 registers."""
_MAX_UNROLLED_TAPS = 64
"""Maximum unrolled filter positions, to bound compile time. Not tuned."""
_WANTED_PROGRAMS = 1024
"""Wanted CTAs, several per multiprocessor."""


class CorrelateConfig(NamedTuple):
    channels: int
    lane_block: int


@kernel(plan=lambda x, w, **options: CorrelateConfig(largest_divisor(w.shape[0], 8), vector_length(x)))
def correlate(x: Array, w: Array, *, config: CorrelateConfig, stride: tuple[int, int] = (1, 1)) -> Array:
    """Compute `y[k, i, j, n] = sum over c, u, v of x[c, i * stride[0] + u, j * stride[1] + v, n] * w[k, c, u, v]`.

    The number of examples is a multiple of `LANES`. Sums are in float32, and y has x's dtype.
    """
    C, H, W, N = x.shape
    K, _, F, G = w.shape
    rows, columns = (H - F) // stride[0] + 1, (W - G) // stride[1] + 1
    channels, lane_block = config.channels, config.lane_block
    # The loop over taps unrolls these channels, rows, and columns of the filters.
    unrolled_rows = F if F * G <= _MAX_UNROLLED_TAPS else 1
    unrolled_columns = G if unrolled_rows * G <= _MAX_UNROLLED_TAPS else 1
    unrolled = largest_divisor(C, 8) if F * G == 1 else 1, unrolled_rows, unrolled_columns
    turns = [size // part for size, part in zip((C, F, G), unrolled, strict=True)]

    def body(x_ref, w_ref, y_ref, *, block, i, k):
        lanes = pl.ds(block * lane_block, lane_block)

        def position(j, _):
            def add_taps(turn, sums):
                c, row = quotient(turn, turns[1] * turns[2]), quotient(turn, turns[2])
                first = c, remainder(row, turns[1]), remainder(turn, turns[2])
                taps = [
                    tuple(n * part + t for n, part, t in zip(first, unrolled, tap, strict=True))
                    for tap in itertools.product(*map(range, unrolled))
                ]
                sums = list(sums)
                for c, u, v in taps:
                    value = x_ref[c, i * stride[0] + u, j * stride[1] + v, lanes].astype(jnp.float32)
                    for o in range(channels):
                        sums[o] += value * w_ref[k * channels + o, c, u, v]
                return tuple(sums)

            zero = zeros_like(x_ref[0, 0, 0, lanes])
            sums = lax.fori_loop(0, math.prod(turns), add_taps, (zero,) * channels)
            for o in range(channels):
                y_ref[k * channels + o, i, j, lanes] = sums[o].astype(y_ref.dtype)

        lax.fori_loop(0, columns, position, None)

    return launch(
        body,
        x,
        w.astype(jnp.float32),
        out=jax.ShapeDtypeStruct((K, rows, columns, N), x.dtype),
        grid={"block": N // lane_block, "i": rows, "k": K // channels},
        name="correlate",
    )


class CorrelateBatchConfig(NamedTuple):
    """A CTA's tile of dw. `splits` CTAs share each tile's sum over dy's rows and the batch."""

    out_channels: int
    in_channels: int
    rows: int
    columns: int
    splits: int


def _correlate_batch_plan(dy: Any, x: Any, *, stride: tuple[int, int] = (1, 1)) -> CorrelateBatchConfig:
    K, C, F, G = filters = _filters(dy, x, stride)
    rows = F if F * G <= _MAX_ACCUMULATORS else 1
    columns = G if rows * G <= _MAX_ACCUMULATORS else 1
    out_channels = largest_divisor(K, min(8, _MAX_ACCUMULATORS // (rows * columns)))
    in_channels = largest_divisor(C, min(8, _MAX_ACCUMULATORS // (rows * columns * out_channels)))
    tiles = math.prod(filters) // (out_channels * in_channels * rows * columns)
    splits = min(_units(dy), -(-_WANTED_PROGRAMS // tiles))
    return CorrelateBatchConfig(out_channels, in_channels, rows, columns, splits)


def _filters(dy, x, stride):
    (K, rows, columns, _), (C, H, W, _) = dy.shape, x.shape
    return K, C, H - (rows - 1) * stride[0], W - (columns - 1) * stride[1]


def _units(dy):
    return (dy.shape[-1] // LANES) * dy.shape[1]


@kernel(plan=_correlate_batch_plan)
def correlate_batch(dy: Array, x: Array, *, config: CorrelateBatchConfig, stride: tuple[int, int] = (1, 1)) -> Array:
    """Compute `dw[k, c, u, v] = sum over i, j, n of dy[k, i, j, n] * x[c, i * stride[0] + u, j * stride[1] + v, n]`.

    The number of examples is a multiple of `LANES`. dw is float32, summed in a fixed order.
    """
    filters, units, (_, rows, columns, _) = _filters(dy, x, stride), _units(dy), dy.shape
    *parts, splits = config
    blocks = [size // part for size, part in zip(filters, parts, strict=True)]
    per_split, tile = -(-units // splits), list(itertools.product(*map(range, parts)))

    def body(dy_ref, x_ref, dw_ref, *, split, k, c, u, v):
        def add_position(n, sums):
            unit, j = quotient(n, columns), remainder(n, columns)
            i, lanes = remainder(unit, rows), pl.ds(quotient(unit, rows) * LANES, LANES)
            gradients = [
                dy_ref[k * config.out_channels + o, i, j, lanes].astype(jnp.float32) for o in range(config.out_channels)
            ]
            sums, loaded = list(sums), {}
            for s, (kt, ct, ut, vt) in enumerate(tile):
                channel = c * config.in_channels + ct
                position = i * stride[0] + u * config.rows + ut, j * stride[1] + v * config.columns + vt
                if (ct, ut, vt) not in loaded:
                    loaded[ct, ut, vt] = x_ref[channel, *position, lanes].astype(jnp.float32)
                sums[s] = multiply_add(sums[s], gradients[kt], loaded[ct, ut, vt])
            return tuple(sums)

        zero = zeros_like(dy_ref[0, 0, 0, pl.ds(0, LANES)])
        first, last = split * per_split, jnp.minimum((split + 1) * per_split, units)
        sums = lax.fori_loop(first * columns, last * columns, add_position, (zero,) * len(tile))
        for total, in_tile in zip(sums, tile, strict=True):
            at = (n * part + t for n, part, t in zip((k, c, u, v), parts, in_tile, strict=True))
            dw_ref[split, *at] = jnp.sum(total)

    partial_sums = launch(
        body,
        dy,
        x,
        out=jax.ShapeDtypeStruct((splits, *filters), jnp.float32),
        grid=dict(zip(("split", "k", "c", "u", "v"), (splits, *blocks), strict=True)),
        name="correlate_batch",
    )
    return jnp.sum(partial_sums, axis=0)


class SumBatchConfig(NamedTuple):
    lane_block: int


@kernel(plan=lambda dy: SumBatchConfig(lane_block=LANES))
def sum_batch(dy: Array, *, config: SumBatchConfig) -> Array:
    """Compute `db[k] = sum over r, n of dy[k, r, n]` in float32, in a fixed order."""
    K, R, N = dy.shape
    blocks = N // config.lane_block

    def body(dy_ref, db_ref, *, k, block):
        lanes = pl.ds(block * config.lane_block, config.lane_block)
        zero = zeros_like(dy_ref[k, 0, lanes])
        total = lax.fori_loop(0, R, lambda r, total: total + dy_ref[k, r, lanes].astype(jnp.float32), zero)
        db_ref[k, block] = jnp.sum(total)

    out = jax.ShapeDtypeStruct((K, blocks), jnp.float32)
    return jnp.sum(launch(body, dy, out=out, grid={"k": K, "block": blocks}, name="sum_batch"), axis=1)
