"""A dense layer, softmax, and cross-entropy as one op, for many classes. The logits never exist as a whole.

The rows are divided into chunks, and a scan computes the logits of one chunk at a time. What the backward costs depends
on the reduction:

- "mean" and "sum": all losses get the same cotangent. If a gradient is asked for, the forward computes the gradients of
  the sum of the losses along with the losses, from the same logits, and the backward multiplies them by one number.
  Both directions together compute three matrix products.
- None: each loss has its own cotangent, so the backward computes the logits of each chunk again. Both directions
  together compute four matrix products.
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
from jaxbp.common.numerics import exponentials, largest_and_total, upcast, wide
from jaxbp.ops.dense.softmax_cross_entropy import are_valid, dy_of_valid, nan_unless
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, per_implementation
from pallas_kernels.core.launch import unify_varying_axes

Reduction = Literal["mean", "sum"] | None
CHUNK_BYTES = 2**30
"""The size of the logits of one chunk in bytes. Larger chunks need fewer passes over the gradient of the weights, which
each chunk reads and writes."""


# ------------------------------------------------------------------------------------------------------------- the rows
# All functions below take x as rows (rows, features), one label per row, and `kept`, which rows `where` keeps. Products
# are summed in float32 or wider, and losses and gradients of logits stay in that dtype.


def _logits(x, w, b, softcap, precision):
    """Return the logits `softcap tanh(z / softcap)` with `z = x wᵀ + b`, or z if there is no cap."""
    z = jnp.matmul(x, w.T, precision=precision, preferred_element_type=wide(x.dtype))
    return _capped(z if b is None else z + b.astype(z.dtype)[None], softcap)


def _capped(z, softcap):
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


def _row_losses(logits, labels, kept, label_smoothing, z_loss):
    """Return the loss of each row, and 0 for rows that are not kept."""
    # If the classes are divided over devices, a sum over them needs an all-reduce. A gather would need all logits.
    largest, total = (a[:, 0] for a in largest_and_total(logits, -1))
    at_label = jnp.sum(jnp.where(_is_label(labels, logits), logits, 0.0), axis=-1)
    loss = largest - at_label + jnp.log(total)
    if label_smoothing:
        smooth = largest - jnp.mean(logits, axis=-1) + jnp.log(total)
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    if z_loss:
        loss += z_loss * (largest + jnp.log(total)) ** 2
    loss = nan_unless(are_valid(labels, logits.shape[-1]), loss)
    return jnp.where(kept, loss, 0.0)


def _is_label(labels, logits):
    return labels[:, None] == jnp.arange(logits.shape[-1])[None]


def _logits_gradients(dy, logits, labels, kept, label_smoothing, z_loss, softcap):
    """Return dz = dy (p (1 + 2 z_loss lse) - y), times the derivative of the cap."""
    classes = logits.shape[-1]
    dy = jnp.where(kept, dy_of_valid(dy, labels, classes), 0.0)[:, None]
    e, sum_ = exponentials(logits, -1)
    p = e / sum_
    if z_loss:
        p *= 1 + 2 * z_loss * jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    y = jnp.where(_is_label(labels, logits), 1 - label_smoothing, 0.0) + label_smoothing / classes
    dz = dy * (p - y)
    if softcap is None:
        return dz
    t = logits / softcap
    return dz * (1 - t) * (1 + t)  # 1 - t² would lose digits near the cap


def _products(dz, x, w, b, precision):
    """Return (dx, dw, db) for the gradients dz of one chunk. The sums over rows are in float32 or wider."""
    rounded = dz.astype(x.dtype)
    dx = jnp.matmul(rounded, w, precision=precision)
    dw = jnp.matmul(rounded.T, x, precision=precision, preferred_element_type=dz.dtype)
    return dx, dw, None if b is None else jnp.sum(dz, axis=0)


# ----------------------------------------------------------------------------------------------------------- the chunks


def _rows_of(x, labels, where):
    """Return x as rows, one label per row, and which rows are kept. Rows that are not kept become 0, with label 0."""
    rows = math.prod(x.shape[:-1])
    x, labels = x.reshape(rows, x.shape[-1]), labels.reshape(rows)
    if where is None:
        return x, labels, jnp.ones(rows, bool)
    kept = where.reshape(rows)
    return jnp.where(kept[:, None], x, 0), jnp.where(kept, labels, 0), kept


def _over_chunks(step: Callable, carry: tuple, classes: int, *rows: Array) -> tuple[tuple, tuple]:
    """Return the last carry and the results per row of `step(carry, *chunk) -> (carry, results)`.

    Chunk i has every row whose index is i modulo the number of chunks. If the rows are divided over devices, each
    device has a part of every chunk. Zeros, which are not kept, fill the chunks.
    """
    count = rows[0].shape[0]
    size = max(1, CHUNK_BYTES // (4 * classes))
    if isinstance(count, int) and count <= size:
        return step(carry, *rows)
    chunks = -(-count // size)
    padded = (jnp.concatenate([a, jnp.zeros((chunks * size - count, *a.shape[1:]), a.dtype)]) for a in rows)
    divided = tuple(a.reshape(size, chunks, *a.shape[1:]).swapaxes(0, 1) for a in padded)
    carry, results = lax.scan(lambda carry, chunk: step(carry, *chunk), carry, divided)
    undivided = lambda a: a.swapaxes(0, 1).reshape(chunks * size, *a.shape[2:])[:count]  # noqa: E731
    return carry, jax.tree.map(undivided, results)


def _losses(x, w, labels, b, kept, *, label_smoothing, z_loss, softcap, precision):
    def step(carry, x, labels, kept):
        logits = _logits(x, w, b, softcap, precision)
        return carry, _row_losses(logits, labels, kept, label_smoothing, z_loss)

    return _over_chunks(step, (), len(w), x, labels, kept)[1]


def _losses_and_gradients(x, w, labels, b, kept, *, label_smoothing, z_loss, softcap, precision):
    """Return the losses, and the gradients (dx, dw, db) of their sum."""

    def step(sums, x, labels, kept):
        logits = _logits(x, w, b, softcap, precision)
        dy = jnp.ones(labels.shape, logits.dtype)
        dz = _logits_gradients(dy, logits, labels, kept, label_smoothing, z_loss, softcap)
        dx, *gradients = _products(dz, x, w, b, precision)
        return _added(sums, gradients), (_row_losses(logits, labels, kept, label_smoothing, z_loss), dx)

    sums, (loss, dx) = _over_chunks(step, _zeros(w, b), len(w), x, labels, kept)
    return loss, (dx, *sums)


def _gradients(dy, x, w, labels, b, kept, *, label_smoothing, z_loss, softcap, precision):
    """Return (dx, dw, db), given one cotangent per row."""

    def step(sums, dy, x, labels, kept):
        logits = _logits(x, w, b, softcap, precision)
        dz = _logits_gradients(dy, logits, labels, kept, label_smoothing, z_loss, softcap)
        dx, *gradients = _products(dz, x, w, b, precision)
        return _added(sums, gradients), dx

    sums, dx = _over_chunks(step, _zeros(w, b), len(w), dy.astype(wide(x.dtype)), x, labels, kept)
    return dx, *sums


def _zeros(w, b):
    zeros = tuple(None if a is None else jnp.zeros(a.shape, wide(a.dtype)) for a in (w, b))
    return unify_varying_axes((w, zeros))[1]


def _added(sums, gradients):
    return jax.tree.map(jnp.add, sums, tuple(gradients))


# ------------------------------------------------------------------------------------------------------------- the pair


def _reduced(loss, kept, shape, reduction, dtype):
    loss = loss.reshape(shape) if reduction is None else jnp.sum(loss)
    return (loss / _count(kept).astype(loss.dtype) if reduction == "mean" else loss).astype(dtype)


def _count(kept):
    """Return the number of kept rows, or 1 if there is none, so that their mean is 0."""
    return jnp.maximum(jnp.sum(kept), 1)


def _definition(x, w, labels, b, where, *, reduction, softcap, precision, **options):
    rows, labels, kept = _rows_of(x, labels, where)
    # Half precisions are rounded after the product, because plain JAX rounds there, too.
    z = jnp.matmul(rows, w.T, precision=precision)
    logits = _capped(upcast(z if b is None else z + b[None]), softcap)
    loss = _row_losses(logits, labels, kept, **options)
    return _reduced(loss, kept, x.shape[:-1], reduction, x.dtype)


def _forward(x, w, labels, b, where, *, reduction, **options):
    rows, labels, kept = _rows_of(x, labels, where)
    loss = _losses(rows, w, labels, b, kept, **options)
    return _reduced(loss, kept, x.shape[:-1], reduction, x.dtype)


def _save(x, w, labels, b, where, *, reduction, **options):
    if reduction is None:
        arguments = x, w, labels, b, where
        return _forward(*arguments, reduction=None, **options), arguments
    rows, labels, kept = _rows_of(x, labels, where)
    loss, (dx, dw, db) = _losses_and_gradients(rows, w, labels, b, kept, **options)
    gradients = dx.reshape(x.shape), dw.astype(w.dtype), None if b is None else db.astype(b.dtype)
    return _reduced(loss, kept, x.shape[:-1], reduction, x.dtype), (*gradients, _count(kept))


def _backward(dy, *saved, reduction, **options):
    if reduction is None:
        x, w, labels, b, where = saved
        rows, labels, kept = _rows_of(x, labels, where)
        dx, dw, db = _gradients(dy.reshape(labels.shape), rows, w, labels, b, kept, **options)
        return dx.reshape(x.shape), dw.astype(w.dtype), None, None if b is None else db.astype(b.dtype), None
    *gradients, count = saved
    factor = dy.astype(wide(dy.dtype))
    factor = factor / count.astype(factor.dtype) if reduction == "mean" else factor
    dx, dw, db = (None if a is None else (a.astype(factor.dtype) * factor).astype(a.dtype) for a in gradients)
    return dx, dw, None, db, None


_CHUNKED = Pair(_forward, {"xla": _backward}, save=_save, name="linear_softmax_cross_entropy")


def _chunked(*arrays, implementation, **options):
    # There is no kernel yet. Under "pallas", too, the formula runs, and cuBLAS computes its products.
    return _CHUNKED(*arrays, implementation="xla", **options)


def _chunked_backward(*arrays, implementation, **options):
    return _CHUNKED.vjp(*arrays, implementation="xla", **options)


def _definition_backward(dy, x, w, labels, b, where, **options):
    return jax.vjp(lambda x, w, b: _definition(x, w, labels, b, where, **options), x, w, b)[1](dy)


_public_op = functools.partial(
    Op, unsupported=checks.unsupported_dtype, default=DefaultImplementation(gpu="xla"), jit=True
)
_LINEAR_SOFTMAX_CROSS_ENTROPY = _public_op(
    "linear_softmax_cross_entropy", {"autodiff": _definition, **per_implementation(_chunked)}
)
_LINEAR_SOFTMAX_CROSS_ENTROPY_BACKWARD = _public_op(
    "linear_softmax_cross_entropy_backward", {"autodiff": _definition_backward, **per_implementation(_chunked_backward)}
)


# ------------------------------------------------------------------------------------------------- the public functions


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

    The logits z are computed for a chunk of the rows at a time, and are never stored as a whole, except with
    "autodiff". In a language model, they would need the most memory of a training step.

    Args:
      x: inputs, with any leading axes.
      w: weights, one row per class.
      labels: one class per row of x, in [0, classes).
      b: bias, or None.
      where: which rows are kept, or None for all. A row that is not kept has no loss and no gradient, and neither its
        label nor its x is read.
      label_smoothing: the weights y are `1 - label_smoothing` for the label, plus `label_smoothing / classes` for every
        class.
      z_loss: the factor of the squared log-sum-exp, which keeps the logits small.
      softcap: if given, z is replaced by `softcap tanh(z / softcap)`.
      reduction: "mean" for the mean over the kept rows, which is 0 if no row is kept; "sum" for their sum; None for one
        loss per row, 0 for rows that are not kept.
      precision: the precision of the matrix products, as in `jax.lax.dot`.
      implementation: "pallas", "xla", "autodiff", or None for the fastest on this device. There is no kernel yet, so
        "pallas" computes the formula in jnp.

    Returns:
      The loss, in x's dtype, computed in float32 or wider. If the label of a kept row is not a class, its loss is NaN.

    Under `jax.grad`, "mean" and "sum" compute three matrix products, and None computes four. The gradient of w is
    summed in float32 or wider over all rows, and rounded once to w's dtype, and once more if the cotangent of the loss
    is not 1.

    Raises:
      TypeError: x, w, and b do not have one floating dtype, the labels are not integers, or `where` is not boolean.
      ValueError: shapes do not fit, or an option has an invalid value.

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

    With `softcap`, dz is multiplied by `1 - (z / softcap)²`. With "mean", dz is divided by the number of kept rows.

    Args:
      dy: gradient with respect to the loss: one number, or one per row if the reduction is None.
      x, w, labels, b: as in the forward.
      where, label_smoothing, z_loss, softcap, reduction, precision, implementation: as in
        `linear_softmax_cross_entropy`.

    Returns:
      (dx, dw, db), in the shapes and dtypes of x, w, and b. If b is None, db is the gradient at b = 0.

    Raises:
      TypeError, ValueError: as in `linear_softmax_cross_entropy`.
    """
    op = "linear_softmax_cross_entropy_backward"
    dy, _ = checks.floating(op, dy=dy, x=x)
    x, w, labels, b, where = _check(op, x, w, labels, b, where)
    options = _options(op, label_smoothing, z_loss, softcap, reduction, precision)
    checks.shape(op, "dy", dy, *(x.shape[:-1] if reduction is None else ()))
    b = jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    arrays = dy, x, w, labels, b, where
    return _LINEAR_SOFTMAX_CROSS_ENTROPY_BACKWARD(*arrays, **options, implementation=implementation)


def _check(op, x, w, labels, b, where):
    x, w, b = checks.floating(op, x=x, w=w, b=b)
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
    return x, w, labels, b, where


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
