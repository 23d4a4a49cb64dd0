"""Products of rows that are sorted by group and the matrices of their groups, on Hopper's tensor cores.

    y[r] = x[r] w[g] + b[g],    dx[r] = dy[r] w[g]ᵀ,    dw[g] = Σ x[r]ᵀ dy[r],    with sums over the rows r of group g.

`group_tiles` defines the rows of a group. A tile of y or dx has rows of one group. It begins at a multiple of
eight rows, and its rows outside of the group are not stored. The steps of dw also begin at a multiple of eight rows,
and the consumers replace rows outside of the group by 0 in shared memory. The order of the sums is fixed.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.core.layouts import quotient, remainder
from pallas_kernels.core.tiles import check_divides, kernel
from pallas_kernels.dense.group_tiles import row_tiles
from pallas_kernels.dense.products_sm90 import (
    COLUMNS,
    TILE_ROWS,
    Config,
    Schedule,
    Tile,
    config_of,
    configs_of,
    microseconds,
    multiply,
    raster,
    squared,
    step_elements,
    unsupported,
)


def _fastest(columns, tile_rows, steps):
    """Return the config with the least estimated time, for a number of tile rows and an average number of steps."""

    def estimate(config):
        return microseconds(config, tile_rows * -(-columns // config.columns), steps)

    return squared(min(configs_of(columns), key=estimate), columns)


def _plan_product(x, w, bias, ranges, *, transposed=False, dtype=None):
    config = config_of(COLUMNS[-1])
    if reason := unsupported(x, w, config):
        return reason
    (rows, summed), columns = x.shape, w.shape[1 if transposed else 2]
    # On average, half a tile per group is empty.
    return _fastest(columns, -(-rows // config.rows) + len(w) // 2, -(-summed // step_elements(x.dtype)))


@kernel(plan=_plan_product, capability=(9, 0))
def product(
    x: Array,
    w: Array,
    bias: Array | None,
    ranges: Array,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    config: Config,
) -> Array:
    """Return y `(rows, columns)`, by default in the dtype of x. Rows without a group are 0.

    Args:
      x: `(rows, summed)` in half precision.
      w: `(groups, summed, columns)`, or `(groups, columns, summed)` if `transposed`, in the dtype of x.
      bias: `(groups, columns)`, or None.
      ranges: int32 `(groups, 2)`, as in `group_tiles`.
      config: `splits` is 1.
    """
    (rows, summed), columns = x.shape, w.shape[1 if transposed else 2]
    y, _ = multiply(
        x[None],
        w,
        None if bias is None else bias.astype(jnp.float32),
        row_tiles(ranges, rows, config.rows * config.cluster, TILE_ROWS),
        schedule=_schedule_of_rows(rows, len(w), columns, -(-summed // step_elements(x.dtype)), config),
        transposed=(False, transposed),
        dtype=dtype or x.dtype,
        name="grouped_linear",
        config=config,
    )
    return y[0]


def _schedule_of_rows(rows, groups, columns, steps, config):
    tile_columns = -(-columns // config.columns)
    width = config.raster or tile_columns
    check_divides("grouped_linear", "raster", width, tile_columns)
    lists = row_tiles(jnp.zeros((groups, 2), jnp.int32), rows, config.rows * config.cluster, TILE_ROWS)

    def tile(lists, index, cta):
        in_groups = lists.counts[0]
        has_group = index < in_groups * tile_columns
        row, column = raster(index, jnp.maximum(in_groups, 1), width)
        row = jnp.where(has_group, row, quotient(index, tile_columns))
        column = jnp.where(has_group, column, remainder(index, tile_columns))
        return Tile(
            operands=lists.group[row],
            out=0,
            row=lists.row[row] + cta * config.rows,
            column=column * config.columns,
            tile_column=column,
            first=jnp.int32(0),
            end=jnp.where(has_group, steps, 0),
            stored=(lists.start[row], lists.end[row]),
        )

    # Tiles without a group, which have no steps, come last.
    most = len(lists.row) * tile_columns
    return Schedule(1, most, tile, count=lambda lists: lists.counts[1] * tile_columns, steps=steps)


def _plan_weights(x, dy, ranges, *, dtype=None):
    config = config_of(COLUMNS[-1])
    if reason := unsupported(x, dy, config):
        return reason
    (rows, inputs), outputs, groups = x.shape, dy.shape[1], len(ranges)
    # On average, half a step per group is empty.
    steps = rows / (groups * step_elements(x.dtype)) + 0.5
    return _fastest(outputs, groups * -(-inputs // config.rows), steps)


@kernel(plan=_plan_weights, capability=(9, 0))
def weights_gradient(x: Array, dy: Array, ranges: Array, *, dtype: DTypeLike | None = None, config: Config) -> Array:
    """Return dw `(groups, inputs, outputs)`, by default in the dtype of x.

    Args:
      x, dy: `(rows, inputs)` and `(rows, outputs)` in half precision. Rows without a group are not used.
      ranges, config: as in `product`.
    """
    dw, _ = multiply(
        x[None],
        dy[None],
        lists=largest_first(ranges),
        schedule=_schedule_of_groups(x.shape[1], dy.shape[1], len(ranges), step_elements(x.dtype), config),
        transposed=(True, False),
        dtype=dtype or x.dtype,
        name="grouped_linear_backward_weights",
        config=config,
    )
    return dw


def largest_first(ranges):
    """Return the groups in descending order of their sizes, with their first and their last rows, so that the last
    tiles of the CTAs are short."""
    starts, ends = ranges.T
    group = jnp.arange(len(ranges), dtype=jnp.int32)
    return tuple(lax.sort((starts - ends, group, starts, ends), num_keys=2, is_stable=False)[1:])


def _schedule_of_groups(inputs, outputs, groups, step, config):
    tile_rows, tile_columns = -(-inputs // (config.rows * config.cluster)), -(-outputs // config.columns)
    width = config.raster or tile_columns
    check_divides("grouped_linear_backward_weights", "raster", width, tile_columns)
    tiles = groups * tile_rows * tile_columns

    def tile(lists, index, cta):
        group, starts, ends = lists
        part = jnp.minimum(quotient(index, tile_rows * tile_columns), groups - 1)
        row, column = raster(remainder(index, tile_rows * tile_columns), tile_rows, width)
        start, end = starts[part], ends[part]
        aligned = start - remainder(start, TILE_ROWS)
        return Tile(
            operands=0,
            out=group[part],
            row=(row * config.cluster + cta) * config.rows,
            column=column * config.columns,
            tile_column=column,
            first=jnp.int32(0),
            end=jnp.where(start < end, quotient(end - aligned + step - 1, step), 0),
            start=aligned,
            summed=(start, end),
        )

    return Schedule(groups, tiles, tile, count=lambda _: tiles, masked=True, alternating=True)
