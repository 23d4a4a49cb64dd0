"""Cross-entropy of rows of logits: the statistics of each row, and its gradient in place of the logits.

The logits of one row do not fit in the shared memory of one CTA if there are many classes. A cluster of CTAs therefore
shares a row. Each CTA reads its part of the row twice:

1. The first pass computes the part's maximum, its sum of exponentials, and its sum of logits. The CTA writes these
   statistics to device memory and arrives at the cluster's barrier. After the barrier, each CTA reads the statistics of
   all parts and combines them in a fixed order.
2. The second pass reads the part again, and overwrites it with the gradient.

Few rows are in flight at a time, about one per multiprocessor. The second pass therefore finds the logits in the L2
cache, and device memory sees one read and one write per logit.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, quotient, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel

_MAX_CTAS = 8
"""The largest portable size of a cluster (CUDA C++ Programming Guide, thread block clusters)."""
_UNROLLED = 16
"""Number of vectors whose loads are in flight at once. Smaller numbers were slower:
docs/lab/2026-11-26-large-vocabulary.md. A CTA has at least this number of vectors per row, if there are enough."""
_SECTOR = 8
"""Number of float32 numbers in a sector of the cache (CUDA C++ Programming Guide, device memory accesses). The L1 cache
is not coherent. The statistics of a row therefore fill whole sectors: a CTA that reads them must not bring statistics
of another row, which are not yet written, into the cache of its multiprocessor."""
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of a row.

    Attributes:
      length: number of logits per vector, a divisor of the length of a row.
      ctas: number of CTAs per row, which form a cluster.
      unrolled: number of vectors whose loads are in flight at once.
    """

    length: int
    ctas: int
    unrolled: int


def _unsupported(logits, labels, dy, b, **options):
    rows, columns = logits.shape
    return None if rows and columns and columns % LANES == 0 else f"logits of shape {logits.shape}"


def _heuristic(logits, labels, dy, b, **options):
    columns = logits.shape[1]
    length = 2 * LANES if columns % (2 * LANES) == 0 else LANES
    ctas = min(_MAX_CTAS, 2 ** int(math.log2(max(1, columns // length // _UNROLLED))))
    return Config(length, ctas, _UNROLLED)


@kernel(unsupported=_unsupported, heuristic=_heuristic)
def statistics_and_gradient(
    logits: Array,
    labels: Array,
    dy: Array | None,
    b: Array | None,
    *,
    classes: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    config: Config,
) -> tuple[Array, Array, Array | None, Array, Array | None]:
    """Compute the statistics of each row of `z = cap(logits + b)`, and `dlogits = dy (p (1 + 2 z_loss lse) - y) cap'`.

    Here `cap(a) = softcap tanh(a / softcap)`, or a without a softcap; p is the softmax of z, and lse its log-sum-exp.
    The weights y are `1 - label_smoothing` for the label, plus `label_smoothing / classes` for every class.

    The kernel runs only on GPUs and in the simulator: see `on_gpu`.

    Args:
      logits: `(rows, columns)`, where the number of columns is a multiple of `LANES`. Only the first `classes` columns
        are logits.
      labels: `(rows,)`, int32. A label that is not a class is -1.
      dy: `(rows,)`, float32. If it is None, dlogits is not computed.
      b: `(columns,)`, or None.

    Returns:
      largest, total, sum, and at_label, each `(rows,)` in float32: the largest z, `Σ exp(z - largest)`, `Σ z`, and
      the label's z. Without label smoothing, sum is None. For the label -1, at_label is that of class 0.
      dlogits has the shape and dtype of the logits, and uses their memory. Its columns after `classes` are 0.
    """
    (rows, columns), ctas = logits.shape, config.ctas
    smooth = label_smoothing / classes
    vectors = columns // config.length

    def body(logits, labels, dy, b, lanes, parts, label_logits, dlogits, barrier, *, row, cta=0):
        lanes = lanes[...]
        zero = zeros_like(logits[row, pl.ds(0, config.length)].astype(jnp.float32))
        count = quotient(vectors - cta + ctas - 1, ctas)
        groups = quotient(count + config.unrolled - 1, config.unrolled)

        def load(i):
            """Return the CTA's i-th vector of z, or the last one if there are fewer, and its first column."""
            first = (jnp.minimum(i, count - 1) * ctas + cta) * config.length
            place = pl.ds(first, config.length)
            bias = None if b is None else b[place]
            z = capped(logits[row, place], bias, softcap)
            return z if columns == classes else jnp.where(lanes + first < classes, z, -jnp.inf), first

        def load_group(group):
            """Return, for each vector of a group, its index, z, and first column. All loads come before all stores."""
            indices = [group * config.unrolled + k for k in range(config.unrolled)]
            return [(i, *load(i)) for i in indices]

        def accumulate(group, statistics):
            largest, total, sum_ = statistics
            loaded = load_group(group)
            zs = [jnp.where(i < count, z, -jnp.inf) for i, z, _ in loaded]
            new = largest
            for z in zs:
                new = jnp.maximum(new, z)
            total = total * _exp(largest - new)
            for z in zs:
                total = total + _exp(z - new)
            for i, z, first in loaded if label_smoothing else ():
                sum_ = sum_ + jnp.where(i < count, jnp.where(lanes + first < classes, z, 0.0), 0.0)
            return new, total, sum_

        # A finite lower bound, because the difference of two infinities would be NaN.
        lowest = zero + jnp.finfo(jnp.float32).min
        largest, total, sum_ = lax.fori_loop(0, groups, accumulate, (lowest, zero, zero))
        part_largest = jnp.max(largest)
        parts[row, 0, cta] = part_largest
        parts[row, 1, cta] = jnp.sum(total * _exp(largest - part_largest))
        if label_smoothing:
            parts[row, 2, cta] = jnp.sum(sum_)
        label = labels[row]

        @pl.when(cta == 0)
        def _():
            label_logits[row] = logits[row, jnp.maximum(label, 0)].astype(jnp.float32)

        if dlogits is None:
            return
        plgpu.commit_smem()  # The barrier of the cluster does not wait for the other threads of a CTA.
        if ctas > 1:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
        part_values = [[zero + parts[row, k, n] for n in range(ctas)] for k in range(2)]
        largest, total = _combined(*part_values)
        gradient = zero + dy[row]
        factor = gradient * (1 + 2 * z_loss * (largest + jnp.log(total))) / total
        at_label, elsewhere = gradient * (1 - label_smoothing + smooth), gradient * smooth

        def write(group, _):
            for _, z, first in load_group(group):
                dz = _exp(z - largest) * factor - jnp.where(lanes == label - first, at_label, elsewhere)
                if softcap is not None:
                    u = z * (1 / softcap)
                    dz = dz * (1 - u) * (1 + u)  # 1 - u² would lose digits near the cap
                if columns != classes:
                    dz = jnp.where(lanes + first < classes, dz, 0.0)
                dlogits[row, pl.ds(first, config.length)] = dz.astype(dlogits.dtype)

        lax.fori_loop(0, groups, write, None)

    statistics = 3 if label_smoothing else 2
    parts, label_logits, dlogits = launch(
        body,
        logits,
        labels,
        dy,
        b,
        jnp.arange(config.length, dtype=jnp.int32),
        out=(
            jax.ShapeDtypeStruct((rows, statistics, _SECTOR), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            None if dy is None else jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        ),
        grid={"row": rows},
        cluster={"cta": ctas} if ctas > 1 else {},
        scratch=[plgpu.ClusterBarrier(collective_axes=("cta",)) if ctas > 1 else plgpu.Barrier()],
        name="linear_softmax_cross_entropy",
        barriers=False,
        approximate=softcap is None,
        in_place=None if dy is None else {0: 2},
    )
    parts = jnp.moveaxis(parts[:, :, :ctas], 2, 0)
    largest, total = _combined(parts[:, :, 0], parts[:, :, 1])
    sum_ = jnp.sum(parts[:, :, 2], axis=0) if label_smoothing else None
    bias = None if b is None else b[jnp.maximum(labels, 0)]
    return largest, total, sum_, capped(label_logits, bias, softcap), dlogits


def capped(logits: Array, b: Array | None, softcap: float | None) -> Array:
    """Return z in float32 or wider: the logits plus the bias, capped if there is a softcap."""
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    z = z if b is None else z + b.astype(z.dtype)
    return z if softcap is None else softcap * jnp.tanh(z * (1 / softcap))


def _exp(a):
    # `exp` takes several times as many operations as `exp2`, which is one instruction (PTX ISA, ex2).
    return jnp.exp2(a * _LOG2_E)


def _combined(largest, total):
    """Return the maximum and the sum of exponentials of a row, given sequences with those of its parts."""
    maximum = largest[0]
    for a in largest[1:]:
        maximum = jnp.maximum(maximum, a)
    return maximum, sum(s * _exp(a - maximum) for a, s in zip(largest, total, strict=True))
