"""LayerNorm and RMSNorm over the last axis of `(rows, hidden)`, for rows of any length.

    y = x̂ * scale + bias,    x̂ = (x - mean) * inv_std,    inv_std = 1 / sqrt(mean((x - mean)²) + epsilon)

Means are over a row of x. RMSNorm (`center=False`) omits the mean and the bias. The kernels store `offset`, the mean
minus the row's first element, because rounding a mean far from zero would lose digits of `x - mean`.

A CTA of `normalize` computes one row. A CTA of `gradients` computes a block of columns of dx for some rows, and the
sums over these rows for dscale and dbias. A row may not fit in registers, so each pass reads it again. The kernels
allocate no shared memory, so Pallas' interpreter runs them, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, vector_length, zeros_like
from pallas_kernels.core.tiles import kernel
from pallas_kernels.norm.statistics import inverse_root

_SUMMED_COLUMNS = 4096
"""Maximum columns for which a CTA sums dscale and dbias, in 64 of a thread's 255 registers. Not tuned."""
_SUMMED_ROWS = 32
"""Maximum rows per CTA of `gradients`. Not tuned."""
_PROGRAMS = 4
"""Fewest CTAs of `gradients` per multiprocessor before a CTA gets several rows. Not tuned."""


class NormalizeConfig(NamedTuple):
    """`vector` is the number of elements that a CTA loads at once, a multiple of `LANES`."""

    vector: int


class GradientsConfig(NamedTuple):
    """Tile of a CTA: `rows` rows and `columns` columns of dx. The CTA reads whole rows, `vector` elements at once.
    `columns` is a multiple of `vector`."""

    vector: int
    rows: int
    columns: int


def _gradients_plan(dy, x, scale, bias, offset, inv_std, *, epsilon, center, with_y=False):
    filled = jax.eval_shape(_fill_up, x)
    (rows, width), vector = filled.shape, vector_length(filled)
    columns = vector * largest_divisor(width // vector, _SUMMED_COLUMNS // vector)
    rows_of_program = max(1, min(_SUMMED_ROWS, rows // (_PROGRAMS * device.target().multiprocessors)))
    return GradientsConfig(vector, rows_of_program, columns)


@kernel(plan=lambda x, *parameters, **options: NormalizeConfig(vector_length(jax.eval_shape(_fill_up, x))))
def normalize(
    x: Array, scale: Array, bias: Array | None, *, epsilon: float, center: bool, config: NormalizeConfig
) -> tuple[Array, Array | None, Array]:
    """Return the output y in x's dtype, and float32 offset (mean minus first element) and inv_std `(rows,)`, for x
    `(rows, hidden)`. Without `center`, bias and offset are None."""
    rows, hidden = x.shape
    x, scale, bias, mask = map(_fill_up, (x, scale, scale if bias is None else bias, jnp.ones_like(scale)))
    vectors = _vectors(x.shape[1], config.vector)

    def body(x_ref, scale_ref, bias_ref, mask_ref, y_ref, statistics_refs, *, row):
        hat, offset, inv_std = _normalized(x_ref, mask_ref, row, vectors, hidden, epsilon, center)
        if statistics_refs is not None:
            offset_ref, inv_std_ref = statistics_refs
            if center:
                offset_ref[row] = offset
            inv_std_ref[row] = inv_std
        for vector in vectors:
            y = _scaled(hat(vector), scale_ref, bias_ref, vector, center)
            y_ref[row, vector] = y.astype(y_ref.dtype)

    row_statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    y, (offset, inv_std) = launch(
        body,
        x,
        scale,
        bias,
        mask,
        out=(x, [row_statistic if center else None, row_statistic]),
        skippable=[1],
        grid={"row": rows},
        name="layer_norm" if center else "rms_norm",
    )
    return y[:, :hidden], offset, inv_std


@kernel(plan=_gradients_plan)
def gradients(
    dy: Array,
    x: Array,
    scale: Array,
    bias: Array | None,
    offset: Array | None,
    inv_std: Array | None,
    *,
    epsilon: float,
    center: bool,
    with_y: bool = False,
    config: GradientsConfig,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return (dx, dscale, dbias, y). With `t = dy * scale`, means over a row, and sums over all rows, the gradients are

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,    dbias = Σ dy.

    dx has x's dtype, and dscale and dbias are float32. Without `center`, dbias is None and dx has no `mean(t)`. y is
    LayerNorm's output, or None without `with_y`.

    Args:
      bias: used only for y.
      offset, inv_std: unused. The kernel computes them from x.
    """
    rows, hidden = x.shape
    dy, x, scale, bias, mask = map(_fill_up, (dy, x, scale, scale if bias is None else bias, jnp.ones_like(scale)))
    width, parts, count = x.shape[1], -(-rows // config.rows), config.columns // config.vector
    vectors = _vectors(width, config.vector)

    def body(dy_ref, x_ref, scale_ref, bias_ref, mask_ref, dx_ref, sums_refs, y_ref, *, part, owner):
        owned_columns = [pl.ds((owner * count + j) * config.vector, config.vector) for j in range(count)]

        def add_row(i, sums):
            row = part * config.rows + i
            load_hat, _, inv_std = _normalized(x_ref, mask_ref, row, vectors, hidden, epsilon, center)

            def t(vector):
                return _load(dy_ref, (row, vector)) * _load(scale_ref, vector)

            projection = _mean(lambda vector: t(vector) * load_hat(vector), vectors, hidden)
            mean = _mean(t, vectors, hidden) if center else 0.0
            results = []
            for vector, totals in zip(owned_columns, sums, strict=True):
                hat, dy = load_hat(vector), _load(dy_ref, (row, vector))
                dx = dy * _load(scale_ref, vector) - hat * projection - mean
                dx_ref[row, vector] = (dx * inv_std).astype(dx_ref.dtype)
                if y_ref is not None:
                    y_ref[row, vector] = _scaled(hat, scale_ref, bias_ref, vector, center).astype(y_ref.dtype)
                results.append([total + a for total, a in zip(totals, (dy * hat, dy), strict=False)])
            return results

        zeros = [[zeros_like(scale_ref[vector]) for _ in sums_refs or []] for vector in owned_columns]
        sums = lax.fori_loop(0, jnp.minimum(config.rows, rows - part * config.rows), add_row, zeros)
        for vector, totals in zip(owned_columns, sums, strict=True):
            for ref, total in zip(sums_refs or [], totals, strict=True):
                ref[part, vector] = total

    sums = jax.ShapeDtypeStruct((parts, width), jnp.float32)
    dx, sums, y = launch(
        body,
        dy,
        x,
        scale,
        bias,
        mask,
        out=(x, [sums, sums] if center else [sums], x if with_y else None),
        skippable=[1, 2],
        grid={"part": parts, "owner": width // config.columns},
        name="layer_norm_backward" if center else "rms_norm_backward",
    )
    dscale, *dbias = (jnp.sum(a, axis=0)[:hidden] for a in sums)
    return dx[:, :hidden], dscale, dbias[0] if center else None, y[:, :hidden] if with_y else None


def _normalized(
    x_ref: Any, mask_ref: Any, row: Any, vectors: Sequence, hidden: int, epsilon: float, center: bool
) -> tuple[Callable[[Any], Array], Array, Array]:
    """Return a row's x̂ (a function of a vector of columns), its offset, and its inv_std. The mask is 0 in columns that
    pad the row, else 1."""
    first, offset = x_ref[row, 0].astype(jnp.float32), jnp.float32(0)

    def deviation(vector):
        x = _load(x_ref, (row, vector))
        return x - first - offset if center else x

    def masked_deviation(vector):
        return deviation(vector) * _load(mask_ref, vector) if center else deviation(vector)

    if center:
        offset = _mean(masked_deviation, vectors, hidden)
    mean_square = _mean(lambda vector: jnp.square(masked_deviation(vector)), vectors, hidden)
    inv_std = inverse_root(mean_square, epsilon)
    return lambda vector: deviation(vector) * inv_std, offset, inv_std


def _mean(function: Callable[[Any], Array], vectors: Sequence, hidden: int) -> Array:
    return jnp.sum(functools.reduce(jnp.add, map(function, vectors))) / hidden


def _scaled(hat: Array, scale_ref: Any, bias_ref: Any, vector: Any, center: bool) -> Array:
    y = hat * _load(scale_ref, vector)
    return y + _load(bias_ref, vector) if center else y


def _load(ref: Any, index: Any) -> Array:
    return ref[index].astype(jnp.float32)


def _fill_up(a: Array) -> Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % LANES)])


def _vectors(width: int, length: int) -> list[Any]:
    return [pl.ds(start, length) for start in range(0, width, length)]
