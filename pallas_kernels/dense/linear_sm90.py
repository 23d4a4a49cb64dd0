"""Matrix products on Hopper's tensor cores, among them the forward and the gradients of a dense layer.

    c[g, m, n] = Σ a[g, m, k] * b[g, k, n],    over k.

Operands are in half precision, or in float32, rounded to TF32. The summed axis is split (split-K) until all
multiprocessors are busy, and XLA adds the splits' sums in a fixed order.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.core import device
from pallas_kernels.core.layouts import OPERAND_BYTES, quotient, remainder
from pallas_kernels.core.tiles import check_divides, kernel
from pallas_kernels.dense.products_sm90 import (
    COLUMNS,
    PING_PONG_COLUMNS,
    Config,
    Schedule,
    Tile,
    config_of,
    configs_of,
    microseconds,
    multiply,
    raster,
    sizes,
    squared,
    step_elements,
    unsupported,
)

_SPLIT_MICROSECONDS = 5.0
_BYTES_A_MICROSECOND = 3e6
"""Time to launch the sum of the splits, and rate of writing and reading their sums. Not tuned."""


def _clustered(config: Config, columns: int) -> Config:
    return squared(config, columns)._replace(cluster=2)


def _fastest(configs: Iterable[Config], batch: int, rows: int, columns: int, summed_bytes: int) -> Config:
    """Return the config with the least estimated time, with its fastest number of splits."""
    multiprocessors, steps = device.target().multiprocessors, -(-summed_bytes // OPERAND_BYTES)

    def estimate(config):
        tiles = batch * -(-rows // config.rows) * -(-columns // config.columns) * config.splits
        moved_bytes = config.splits * batch * rows * columns * 8
        split = _SPLIT_MICROSECONDS + moved_bytes / _BYTES_A_MICROSECOND if config.splits > 1 else 0
        return microseconds(config, tiles, -(-steps // config.splits)) + split

    def splits(config):
        # The schedule of splits is for two consumers per tile.
        most = min(steps, multiprocessors) if config.consumers > 1 else 1
        return (config._replace(splits=n) for n in range(1, most + 1))

    return min((split for config in configs for split in splits(config)), key=estimate)


def _plan_product(a, b, *, transposed=(False, False), dtype=None):
    if reason := unsupported(a, b, config_of(COLUMNS[-1]), (jnp.bfloat16, jnp.float16, jnp.float32)):
        return reason
    batch, rows, columns, summed = sizes(a, b, transposed)
    return _fastest(configs_of(columns), batch, rows, columns, summed * jnp.dtype(a.dtype).itemsize)


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
    config = config_of(PING_PONG_COLUMNS, consumers=1)
    if reason := unsupported(x, w, config):
        return reason
    outputs = w.shape[0]
    if outputs % PING_PONG_COLUMNS:
        return f"{outputs} outputs, only multiples of {PING_PONG_COLUMNS}"
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
    if reason := unsupported(dy, x, config_of(COLUMNS[-1])):
        return reason
    (rows, outputs), inputs = dy.shape, x.shape[1]
    config = _fastest([config_of(128 if inputs % 256 else 256)], 1, outputs, inputs, rows * 2)
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


def _multiply(left, right, bias=None, *, transposed, dtype, row_sums=False, name, config):
    """Return the products plus the bias, `(batch, rows, columns)` in `dtype`. If `row_sums`, also return the sum of
    each row of `left`, float32 `(rows,)`. The operands are as in `multiply`, and the bias is `(columns,)`."""
    batch, _, columns, _ = sizes(left, right, transposed)
    check_divides(name, "raster", config.raster or 1, -(-columns // config.columns))
    out, sums = multiply(
        left,
        right,
        None if bias is None else bias[None],
        schedule=_schedule(left, right, transposed, config),
        transposed=transposed,
        dtype=dtype if config.splits == 1 else jnp.float32,
        row_sums=row_sums,
        name=name,
        config=config,
    )
    if config.splits > 1:
        out = jnp.sum(out.reshape(batch, config.splits, *out.shape[1:]), axis=1).astype(dtype)
    return out, jnp.sum(sums, axis=(0, 1)) if row_sums else None


def _schedule(left: Any, right: Any, transposed: tuple[bool, bool], config: Config) -> Schedule:
    batch, rows, columns, summed = sizes(left, right, transposed)
    steps = -(-summed // step_elements(left.dtype))
    tile_rows, tile_columns = -(-rows // (config.rows * config.cluster)), -(-columns // config.columns)
    tiles = batch * config.splits * tile_rows * tile_columns

    def tile(_, index, cta):
        part, index = quotient(index, tile_rows * tile_columns), remainder(index, tile_rows * tile_columns)
        row, column = raster(index, tile_rows, config.raster or tile_columns)
        split = remainder(part, config.splits)
        first, end = (quotient(n * steps, config.splits) for n in (split, split + 1))
        row = (row * config.cluster + cta) * config.rows
        return Tile(quotient(part, config.splits), part, row, column * config.columns, column, first, end)

    return Schedule(batch * config.splits, tiles, tile, count=lambda _: tiles, steps=steps)
