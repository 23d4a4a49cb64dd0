"""A dense layer, softmax, and cross-entropy as one op, for many classes.

A scan computes the logits of one chunk of rows at a time. Unless `reduction` is None, a differentiated forward also
computes the gradients, and the backward multiplies them by the cotangent.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Bool, Float, Int

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import exponentials, largest_and_total, wide
from jaxbp.ops.dense.softmax_cross_entropy import are_valid, dy_of_valid, nan_unless
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, per_implementation
from jaxbp.pairing.gradients import in_dtypes_of
from jaxbp.pairing.mesh import mesh_of, sharding_of_rows
from pallas_kernels.core.launch import unify_varying_axes
from pallas_kernels.dense import linear_softmax_cross_entropy as kernels

Reduction = Literal["mean", "sum"] | None
CHUNK_BYTES = 2**30
"""Larger logits are split into chunks of at most half this size, because the sums of dw also need memory."""
ROWS_MULTIPLE = 128
"""Larger chunks have a multiple of this number of rows, the rows per tensor-core tile."""
COLUMNS_MULTIPLE = 256
"""The kernels load vectors of logits, so classes are padded to a multiple of this number."""
KERNEL_CLASSES = 1024
"""On GPUs, the kernels are the default from this number of classes on (docs/lab/2026-11-26-large-vocabulary.md)."""


def _statistics_formula(logits, labels, b, *, classes, softcap, with_sum):
    z, is_label = _z_and_labels(logits, labels, b, classes, softcap)
    # On a mesh that divides the classes, this sum is an all-reduce, but a gather would need all logits.
    at_label = jnp.sum(jnp.where(is_label, z, 0.0), axis=1)
    largest, total = (a[:, 0] for a in largest_and_total(z, 1))
    return largest, total, jnp.sum(z, axis=1) if with_sum else None, at_label


def _gradient_formula(logits, labels, b, dy, largest, total, *, classes, label_smoothing, z_loss, softcap):
    z, is_label = _z_and_labels(logits, labels, b, classes, softcap)
    e, total = exponentials(z, 1)
    p = e / total
    if z_loss:
        p *= 1 + 2 * z_loss * jax.nn.logsumexp(z, axis=1, keepdims=True)
    y = jnp.where(is_label, 1 - label_smoothing, 0.0) + label_smoothing / classes
    dz = dy[:, None] * (p - y)
    if softcap is not None:
        t = z / softcap
        dz = dz * (1 - t) * (1 + t)  # 1 - t² would lose digits near the cap
    return jnp.pad(dz.astype(logits.dtype), ((0, 0), (0, logits.shape[1] - classes)))


def _z_and_labels(logits, labels, b, classes, softcap):
    z = kernels.capped(logits[:, :classes], None if b is None else b[None, :classes], softcap)
    return z, labels[:, None] == jnp.arange(classes)[None]


_STATISTICS = {False: _statistics_formula, True: differentiable(kernels.statistics, _statistics_formula)}
_GRADIENT = {False: _gradient_formula, True: differentiable(kernels.gradient, _gradient_formula)}


def _losses_and_dlogits(kernel, logits, labels, kept, dy, b, *, classes, label_smoothing, z_loss, softcap):
    """Return one loss per row of logits, and dlogits, the gradient of `Σ dy loss`, or None if dy is None.

    Rows where `kept` is False have loss and gradient 0. If `kernel`, Pallas kernels compute the results.
    """
    kernel = kernel and labels.shape[0] > 0
    valid = are_valid(labels, classes)
    options = dict(classes=classes, softcap=softcap)
    arrays = logits, jnp.where(valid, labels, -1).astype(jnp.int32), b
    largest, total, sum_, at_label = _STATISTICS[kernel](*arrays, **options, with_sum=label_smoothing > 0)
    loss = largest - at_label + jnp.log(total)
    if label_smoothing:
        smooth = largest - sum_ / classes + jnp.log(total)
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    if z_loss:
        loss += z_loss * (largest + jnp.log(total)) ** 2
    loss = jnp.where(kept, nan_unless(valid, loss), 0.0)
    if dy is None:
        return loss, None
    dy = jnp.where(kept, dy_of_valid(dy, labels, classes), 0.0)
    options |= dict(label_smoothing=label_smoothing, z_loss=z_loss)
    return loss, _GRADIENT[kernel](*arrays, dy, largest, total, **options)


def _products(dlogits, x, w, b, precision, dtype):
    dx = jnp.matmul(dlogits, w, precision=precision)
    dw = jnp.matmul(dlogits.T, x, precision=precision, preferred_element_type=dtype)
    return dx, dw, None if b is None else jnp.sum(dlogits, axis=0, dtype=wide(b.dtype)).astype(dtype)


def _rows_of(x, labels, where):
    rows = math.prod(x.shape[:-1])
    x, labels = x.reshape(rows, x.shape[-1]), labels.reshape(rows)
    if where is None:
        return x, labels, jnp.ones(rows, bool)
    kept = where.reshape(rows)
    return jnp.where(kept[:, None], x, 0), jnp.where(kept, labels, 0), kept


def _chunk_rows(rows, w):
    row_bytes = len(w) * w.dtype.itemsize
    most = max(1, CHUNK_BYTES // 2 // row_bytes)
    most -= most % ROWS_MULTIPLE if most > ROWS_MULTIPLE else 0
    if checks.is_symbolic(rows):
        return 1 + rows // (1 + rows // most)  # for every number of rows, in [1, most]
    if rows * row_bytes <= CHUNK_BYTES:
        return None
    size = -(-rows // -(-rows // most))
    return min(most, -(-size // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def _over_chunks(step: Callable, carry: tuple, size: int | None, *rows: Array) -> tuple[tuple, tuple]:
    # Chunk i has rows i, i + chunks, ..., so that each device of a mesh has a part of every chunk.
    if size is None:
        return step(carry, *rows)
    count = rows[0].shape[0]
    chunks = 1 + (count - 1) // size
    padding = jax.core.max_dim(chunks * size - count, 0)  # JAX 0.10 cannot prove that it is at least 0
    padded = (jnp.concatenate([a, jnp.zeros((padding, *a.shape[1:]), a.dtype)]) for a in rows)
    divided = tuple(a.reshape(size, chunks, *a.shape[1:]).swapaxes(0, 1) for a in padded)
    carry, results = lax.scan(lambda carry, chunk: step(carry, *chunk), carry, divided)
    undivided = lambda a: a.swapaxes(0, 1).reshape(chunks * size, *a.shape[2:])[:count]  # noqa: E731
    return carry, jax.tree.map(undivided, results)


def _chunked_rows(x, w, labels, b, kept, dy, *, kernel, label_smoothing, z_loss, softcap, precision, dtype=None):
    """Return one loss per row of x, and (dx, dw, db), the gradients of `Σ dy loss`, each None if dy is None. dw and db
    have the given dtype, by default w's."""
    classes = len(w)
    if kernel and (padding := -classes % COLUMNS_MULTIPLE):
        w, b = jnp.pad(w, ((0, padding), (0, 0))), None if b is None else jnp.pad(b, (0, padding))
    options = dict(classes=classes, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap)
    size = _chunk_rows(x.shape[0], w)
    dtype = dtype or w.dtype
    sums_dtype = dtype if size is None else wide(dtype)

    def step(sums, x, labels, kept, dy=None):
        logits = jnp.matmul(x, w.T, precision=precision)
        loss, dlogits = _losses_and_dlogits(kernel, logits, labels, kept, dy, b, **options)
        if dy is None:
            return sums, (loss, None)
        dx, *gradients = _products(dlogits, x, w, b, precision, sums_dtype)
        return tuple(gradients) if size is None else jax.tree.map(jnp.add, sums, tuple(gradients)), (loss, dx)

    if dy is None:
        (loss, _) = _over_chunks(step, (), size, x, labels, kept)[1]
        return loss, (None, None, None)
    zeros = tuple(None if a is None else jnp.zeros(a.shape, sums_dtype) for a in (w, b))
    sums, (loss, dx) = _over_chunks(step, unify_varying_axes((w, zeros))[1], size, x, labels, kept, dy)
    dw, db = (None if a is None else a[:classes].astype(dtype) for a in sums)
    return loss, (dx, dw, db)


def _reduced(loss, kept, shape, reduction, dtype):
    loss = loss.reshape(shape) if reduction is None else jnp.sum(loss)
    return (loss / _count(kept).astype(loss.dtype) if reduction == "mean" else loss).astype(dtype)


def _count(kept):
    return jnp.maximum(jnp.sum(kept), 1)


def _definition(x, w, labels, b, where, *, reduction, softcap, precision, **options):
    rows, labels, kept = _rows_of(x, labels, where)
    z = jnp.matmul(rows, w.T, precision=precision, out_sharding=sharding_of_rows(rows, w))
    options |= dict(classes=len(w), softcap=softcap)
    loss, _ = _losses_and_dlogits(False, z if b is None else z + b[None], labels, kept, None, None, **options)
    return _reduced(loss, kept, x.shape[:-1], reduction, x.dtype)


def _forward(x, w, labels, b, where, *, reduction, **options):
    rows, labels, kept = _rows_of(x, labels, where)
    loss, _ = _chunked_rows(rows, w, labels, b, kept, None, **options)
    return _reduced(loss, kept, x.shape[:-1], reduction, x.dtype)


def _save(x, w, labels, b, where, *, reduction, **options):
    if reduction is None:
        arguments = x, w, labels, b, where
        return _forward(*arguments, reduction=None, **options), arguments
    rows, labels, kept = _rows_of(x, labels, where)
    dtype = wide(x.dtype)
    count = _count(kept).astype(dtype) if reduction == "mean" else jnp.ones((), dtype)
    # Dividing dy by the count here saves a pass over the gradients. In float16, the quotient could underflow, so the
    # backward divides. The sums could overflow, so they stay in float32.
    divided_early = x.dtype != jnp.float16
    dy = jnp.full(labels.shape, 1 / count if divided_early else 1.0, dtype)
    sums_dtype = x.dtype if divided_early else dtype
    loss, (dx, dw, db) = _chunked_rows(rows, w, labels, b, kept, dy, dtype=sums_dtype, **options)
    gradients = dx.reshape(x.shape), dw, db
    return _reduced(loss, kept, x.shape[:-1], reduction, x.dtype), (*gradients, None if divided_early else count)


def _backward(dy, *saved, reduction, **options):
    if reduction is None:
        x, w, labels, b, where = saved
        rows, labels, kept = _rows_of(x, labels, where)
        dy = dy.reshape(labels.shape).astype(wide(x.dtype))
        _, (dx, dw, db) = _chunked_rows(rows, w, labels, b, kept, dy, **options)
        return dx.reshape(x.shape), dw, None, db, None
    *gradients, count = saved
    factor = dy.astype(wide(dy.dtype))
    factor = factor if count is None else factor / count
    dx, dw, db = (None if a is None else (a.astype(factor.dtype) * factor).astype(dy.dtype) for a in gradients)
    return dx, dw, None, db, None


_CHUNKED = Pair(_forward, {"xla": _backward}, save=_save, name="linear_softmax_cross_entropy")


def _with_kernel(arrays, implementation):
    # XLA can partition the formula over a mesh. The kernel would need all classes on each device.
    return implementation == "pallas" and mesh_of(arrays) is None


def _chunked(*arrays, implementation, **options):
    return _CHUNKED(*arrays, implementation="xla", kernel=_with_kernel(arrays, implementation), **options)


def _chunked_backward(*arrays, implementation, **options):
    return _CHUNKED.vjp(*arrays, implementation="xla", kernel=_with_kernel(arrays, implementation), **options)


def _definition_backward(dy, x, w, labels, b, where, **options):
    return jax.vjp(lambda x, w, b: _definition(x, w, labels, b, where, **options), x, w, b)[1](dy)


def _default(*arrays, **options):
    w = arrays[-4]
    return DefaultImplementation(gpu="pallas" if len(w) >= KERNEL_CLASSES else "xla")


_public_op = functools.partial(Op, unsupported=checks.unsupported_dtype, default=_default, jit=True)
_LINEAR_SOFTMAX_CROSS_ENTROPY = _public_op(
    "linear_softmax_cross_entropy", {"autodiff": _definition, **per_implementation(_chunked)}
)
_LINEAR_SOFTMAX_CROSS_ENTROPY_BACKWARD = _public_op(
    "linear_softmax_cross_entropy_backward", {"autodiff": _definition_backward, **per_implementation(_chunked_backward)}
)


def linear_softmax_cross_entropy(
    x: Float[AnyArray, "*batch features"],
    w: Float[AnyArray, "classes features"],
    labels: Int[AnyArray, "*batch"],
    b: Float[AnyArray, "classes"] | None = None,
    *,
    where: Bool[AnyArray, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "..."]:
    """Dense layer, softmax, and cross-entropy, `loss = logsumexp(z) - Σ_k y_k z_k + z_loss logsumexp(z)²` with
    `z = x wᵀ + b`.

    y_k is the weight of class k (see label_smoothing). Only `implementation="autodiff"` stores all logits z.

    Args:
      labels: integers in [0, classes).
      where: True for each row that is kept; None for all. Other rows have loss and gradient 0, even if NaN.
      label_smoothing: y is `1 - label_smoothing` for the label, plus `label_smoothing / classes` for every class.
      softcap: if given, z is replaced by `softcap tanh(z / softcap)`.
      reduction: "mean" or "sum" over the kept rows, or None for one loss per row.
      precision: as in `jax.lax.dot`.
      implementation: "pallas" calls cuBLAS for the products. On a mesh, it runs "xla".

    Returns:
      The loss, in the promoted dtype of x, w, and b. It is NaN if a kept row has an invalid label.

    Source: E. Wijmans et al., "Cut your losses in large-vocabulary language models", ICLR 2025.
    """
    op = "linear_softmax_cross_entropy"
    x, w, labels, b, where = _check(op, x, w, labels, b, where)
    options = _options(op, label_smoothing, z_loss, softcap, reduction, precision)
    return _LINEAR_SOFTMAX_CROSS_ENTROPY(x, w, labels, b, where, **options, implementation=implementation)


def linear_softmax_cross_entropy_backward(
    dy: Float[AnyArray, "..."],
    x: Float[AnyArray, "*batch features"],
    w: Float[AnyArray, "classes features"],
    labels: Int[AnyArray, "*batch"],
    b: Float[AnyArray, "classes"] | None = None,
    *,
    where: Bool[AnyArray, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch features"], Float[Array, "classes features"], Float[Array, "classes"]]:
    """Gradients of `linear_softmax_cross_entropy`: `dx = dz w`, `dw = dzᵀ x`, `db = Σ dz`, with
    `dz = dy (softmax(z) (1 + 2 z_loss logsumexp(z)) - y)`.

    z and y are as in `linear_softmax_cross_entropy`. With `softcap`, z is capped, and dz is multiplied by
    `1 - (z / softcap)²`. With `reduction="mean"`, dz is divided by the number of kept rows.

    dy is one number, or one per row if `reduction` is None. If b is None, db is the gradient at b = 0, in w's dtype.
    """
    op = "linear_softmax_cross_entropy_backward"
    arguments = x, w, w if b is None else b
    x, w, labels, b, where, dy = _check(op, x, w, labels, b, where, dy=dy)
    options = _options(op, label_smoothing, z_loss, softcap, reduction, precision)
    checks.shape(op, "dy", dy, *(x.shape[:-1] if reduction is None else ()))
    b = jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    arrays = dy, x, w, labels, b, where
    gradients = _LINEAR_SOFTMAX_CROSS_ENTROPY_BACKWARD(*arrays, **options, implementation=implementation)
    return in_dtypes_of(arguments, gradients)


def _check(op, x, w, labels, b, where, **dy):
    x, w, b, *dy = checks.floating(op, x=x, w=w, b=b, **dy)
    checks.shape(op, "w", w, "classes", "features")
    if x.ndim == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., {w.shape[1]}), the features of w {w.shape}")
    if b is not None:
        checks.shape(op, "b", b, w.shape[0])
    labels = checks.array(op, "labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{op}: labels has dtype {labels.dtype}; wants integers, one class per row of x")
    checks.shape(op, "labels", labels, *x.shape[:-1])
    if where is not None:
        where = checks.array(op, "where", where)
        if where.dtype != bool:
            raise TypeError(f"{op}: where has dtype {where.dtype}; wants bool")
        checks.shape(op, "where", where, *x.shape[:-1])
    return x, w, labels, b, where, *dy


def _options(op, label_smoothing, z_loss, softcap, reduction, precision):
    if reduction not in ("mean", "sum", None):
        raise ValueError(f"{op}: reduction is {reduction!r}; wants 'mean', 'sum', or None")
    if softcap is not None:
        softcap = checks.number(op, "softcap", softcap)
        if not softcap > 0:
            raise ValueError(f"{op}: softcap is {softcap}; wants a number above 0, or None")
    return {
        "label_smoothing": checks.number(op, "label_smoothing", label_smoothing, 0, 1),
        "z_loss": checks.number(op, "z_loss", z_loss, 0),
        "softcap": softcap,
        "reduction": reduction,
        "precision": checks.precision(op, precision),
    }
