"""Cross-entropy of rows of logits with many classes: one kernel for sums and maxima over the classes, and one for the
gradient.

In the first kernel, each thread computes the maximum and sum of an online softmax of its logits.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, zeros_like
from pallas_kernels.core.tiles import kernel

_MAX_PARTS = 16
_UNROLLED = 16
"""Maximum parts per row, and vectors whose loads are in flight at once: docs/lab/2026-11-26-large-vocabulary.md."""
_LOG2_E = math.log2(math.e)


class Config(NamedTuple):
    """`length` logits per vector, a divisor of the row's length; `parts` CTAs per row; and `unrolled` vectors whose
    loads are in flight at once."""

    length: int
    parts: int
    unrolled: int


def _plan(logits, *others, **options):
    rows, columns = logits.shape
    if not rows or not columns or columns % LANES:
        return f"logits of shape {logits.shape}"
    length = 2 * LANES if columns % (2 * LANES) == 0 else LANES
    parts = min(_MAX_PARTS, 2 ** int(math.log2(max(1, columns // length // _UNROLLED))))
    return Config(length, parts, _UNROLLED)


@kernel(plan=_plan)
def statistics(
    logits: Array,
    labels: Array,
    b: Array | None,
    *,
    classes: int,
    softcap: float | None,
    with_sum: bool,
    config: Config,
) -> tuple[Array, Array, Array | None, Array]:
    """For each row of `z = cap(logits + b)`, with `cap(a) = softcap * tanh(a / softcap)`, compute statistics for
    the loss and `gradient`.

    Args:
      logits: `(rows, columns)`, columns a multiple of 128. Columns after the first `classes` are padding.
      labels: `(rows,)`, int32: a class, or -1.
      b: `(columns,)`, or None.
      softcap: None for no cap.

    Returns:
      (largest, total, sum, label_z), float32 `(rows,)`: the largest z, `Σ exp(z - largest)` and `Σ z` over the classes,
        and the z of the label, or of class 0 for the label -1. Without `with_sum`, sum is None.
    """
    rows, parts = logits.shape[0], config.parts

    def body(logits, labels, b, lanes, largest, total, sum_, label_logits, *, row, part_index):
        load_group, _, groups, zero = _part(logits, b, lanes[...], row, part_index, classes, softcap, config)

        def accumulate(group, statistics):
            largest, total, sum_ = statistics
            loaded = load_group(group)
            zs = [jnp.where(exists, z, -jnp.inf) for exists, z, _ in loaded]
            new = functools.reduce(jnp.maximum, zs, largest)
            total = total * _exp(largest - new)
            for z in zs:
                total = total + _exp(z - new)
            for exists, z, is_class in loaded if with_sum else ():
                sum_ = sum_ + jnp.where(exists, z if is_class is None else jnp.where(is_class, z, 0.0), 0.0)
            return new, total, sum_

        # A finite number, because infinity minus infinity would be NaN.
        lowest = zero + jnp.finfo(jnp.float32).min
        lane_largest, lane_total, lane_sum = lax.fori_loop(0, groups, accumulate, (lowest, zero, zero))
        part_largest = jnp.max(lane_largest)
        largest[row, part_index] = part_largest
        total[row, part_index] = jnp.sum(lane_total * _exp(lane_largest - part_largest))
        if with_sum:
            sum_[row, part_index] = jnp.sum(lane_sum)

        @pl.when(part_index == 0)
        def _():
            label_logits[row] = logits[row, jnp.maximum(labels[row], 0)].astype(jnp.float32)

    of_parts, of_rows = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, parts), (rows,)))
    largest, total, sum_, label_logits = launch(
        body,
        logits,
        labels,
        b,
        jnp.arange(config.length, dtype=jnp.int32),
        out=(of_parts, of_parts, of_parts if with_sum else None, of_rows),
        grid={"row": rows, "part_index": parts},
        approximate=softcap is None,
        name="linear_softmax_cross_entropy_statistics",
    )
    row_largest = jnp.max(largest, axis=1)
    total = jnp.sum(total * jnp.exp(largest - row_largest[:, None]), axis=1)
    label_bias = None if b is None else b[jnp.maximum(labels, 0)]
    sum_ = jnp.sum(sum_, axis=1) if with_sum else None
    return row_largest, total, sum_, capped(label_logits, label_bias, softcap)


@kernel(plan=_plan)
def gradient(
    logits: Array,
    labels: Array,
    b: Array | None,
    dy: Array,
    largest: Array,
    total: Array,
    *,
    classes: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    config: Config,
) -> Array:
    """Compute `dlogits = dy * (p * (1 + 2 * z_loss * logsumexp(z)) - y) * cap'(logits + b)`, with 0 in padding columns.

    p is the softmax of z. y is `1 - label_smoothing` for the label, plus `label_smoothing / classes` for every class.
    dy is float32 `(rows,)`. `statistics` defines z, cap, and the other arguments. dlogits overwrite the logits, which
    XLA copies first if they are still needed.
    """
    rows, smooth = logits.shape[0], label_smoothing / classes
    scale = dy * (1 + 2 * z_loss * (largest + jnp.log(total))) / total

    def body(logits, labels, b, lanes, dy, largest, scale, dlogits, *, row, part_index):
        lanes = lanes[...]
        load_group, columns_of, groups, zero = _part(logits, b, lanes, row, part_index, classes, softcap, config)
        factor, shift, gradient = zero + scale[row], zero + largest[row], zero + dy[row]
        at_label, elsewhere = gradient * (1 - label_smoothing + smooth), gradient * smooth
        label = labels[row]

        def write(group, _):
            loaded = load_group(group)
            for k, (_, z, is_class) in enumerate(loaded):
                columns = columns_of(group * config.unrolled + k)
                dz = _exp(z - shift) * factor - jnp.where(lanes == label - columns.start, at_label, elsewhere)
                if softcap is not None:
                    u = z * (1 / softcap)
                    dz = dz * (1 - u) * (1 + u)  # 1 - u² would lose digits near the cap
                dlogits[row, columns] = (dz if is_class is None else jnp.where(is_class, dz, 0.0)).astype(dlogits.dtype)

        lax.fori_loop(0, groups, write, None)

    return launch(
        body,
        logits,
        labels,
        b,
        jnp.arange(config.length, dtype=jnp.int32),
        dy,
        largest,
        scale,
        out=logits,
        grid={"row": rows, "part_index": config.parts},
        barriers=False,
        approximate=softcap is None,
        name="linear_softmax_cross_entropy_gradient",
        in_place={0: 0},
    )


def capped(logits: Array, b: Array | None, softcap: float | None) -> Array:
    """Return `softcap * tanh((logits + b) / softcap)`, or `logits + b` without a cap, in float32 or wider."""
    z = logits.astype(jnp.float32) if logits.dtype.itemsize < 4 else logits
    z = z if b is None else z + b.astype(z.dtype)
    return z if softcap is None else softcap * jnp.tanh(z * (1 / softcap))


def _part(logits, b, lanes, row, part, classes, softcap, config):
    """Return (load_group, columns_of, number of groups, a vector of zeros) for a CTA's part of a row: every
    `config.parts`-th vector of `config.length` logits, from vector number `part` on.

    `columns_of(i)` is the slice of the i-th vector. `load_group(i)` loads the i-th group of `unrolled` vectors, and
    returns (exists, z, is_class) for each. `exists` is False after the last vector. z is `capped(logits, b, softcap)`,
    or -inf in padding columns. There, `is_class` is False; it is None without padding.
    """
    row_length, length, parts, unrolled = logits.shape[1], config.length, config.parts, config.unrolled

    def count():
        return quotient(row_length // length - part + parts - 1, parts)

    def columns_of(i):
        return pl.ds((jnp.minimum(i, count() - 1) * parts + part) * length, length)

    vectors = count()
    zero = zeros_like(logits[row, pl.ds(0, length)].astype(jnp.float32))

    def load(i):
        columns = columns_of(i)
        z = capped(logits[row, columns], None if b is None else b[columns], softcap)
        if row_length == classes:
            return i < vectors, z, None
        is_class = lanes + columns.start < classes
        return i < vectors, jnp.where(is_class, z, -jnp.inf), is_class

    def load_group(group):
        return [load(group * unrolled + k) for k in range(unrolled)]

    return load_group, columns_of, quotient(vectors + unrolled - 1, unrolled), zero


def _exp(a):
    # `exp2` is one instruction (PTX ISA, ex2); `exp` takes several.
    return jnp.exp2(a * _LOG2_E)
