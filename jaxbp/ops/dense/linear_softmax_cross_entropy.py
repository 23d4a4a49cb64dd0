"""A dense layer, softmax, and cross-entropy as one op, for many classes.

A scan computes the logits of one chunk of rows at a time. Unless `reduction` is None, a differentiated forward also
computes the gradients, and the backward multiplies them by the cotangent.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Bool, Float, Int

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, LABELS, Argument, Case, Entry, case_of, row_cases
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import are_valid, dy_of_valid, exponentials, largest_and_total, nan_unless, wide
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, in_dtypes_of
from jaxbp.pairing.mesh import device_parts, mesh_of, sharding_of_rows
from pallas_kernels.core.arrays import unify_varying_axes
from pallas_kernels.dense import linear_softmax_cross_entropy as kernels

Reduction = Literal["mean", "sum"] | None
CHUNK_BYTES = 2**30
"""Larger logits are split into chunks of at most half this size, because the sums of dw also need memory. On a mesh,
these are sizes per device if the rows and the classes are divided over all devices."""
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
    largest, total = largest_and_total(z, 1)
    return largest[:, 0], total[:, 0], jnp.sum(z, axis=1) if with_sum else None, at_label


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
    if not isinstance(rows, int):  # a symbolic size
        return 1 + rows // (1 + rows // most)  # for every number of rows, in [1, most]
    if rows * row_bytes <= CHUNK_BYTES:
        return None
    size = -(-rows // -(-rows // most))
    return min(most, -(-size // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def _over_chunks(step: Callable, carry: tuple, size: int | None, parts: int, *rows: Array) -> tuple[tuple, tuple]:
    """Call `step(carry, *chunk) -> (carry, results)` for one chunk after the other. Return the last carry, and the
    results of all rows in the order of the rows.

    The rows are divided into `parts` equal parts. A chunk has `size` rows of each part. Zeros pad each part to a
    multiple of `size` rows. `step` sees these rows, too, so they must not change the carry, and their results are
    dropped. If `size` is None, the only chunk has all rows, without padding.
    """
    if size is None:
        return step(carry, *rows)
    count = rows[0].shape[0] // parts
    chunks = 1 + (count - 1) // size
    padding = jax.core.max_dim(chunks * size - count, 0)  # JAX 0.10 cannot prove that it is at least 0

    # Each part is padded, and chunk i has its rows i, i + chunks, .... A device of a mesh then keeps its rows.
    def divided(a):
        a = a.reshape(parts, count, *a.shape[1:])
        a = jnp.concatenate([a, jnp.zeros((parts, padding, *a.shape[2:]), a.dtype)], axis=1)
        return a.reshape(parts * size, chunks, *a.shape[2:]).swapaxes(0, 1)

    def undivided(a):
        a = a.swapaxes(0, 1).reshape(parts, chunks * size, *a.shape[2:])[:, :count]
        return a.reshape(parts * count, *a.shape[2:])

    carry, results = lax.scan(lambda carry, chunk: step(carry, *chunk), carry, tuple(map(divided, rows)))
    return carry, jax.tree.map(undivided, results)


def _losses_and_gradients(x, w, labels, b, where, dy, *, kernel, precision, dtype=None, **options):
    """Return the losses of the rows of x, in the shape of x's leading axes, and if dy is not None, the gradients
    (dx, dw, db) of `Σ dy loss`. dy is one number, or one per row. dw and db have the given dtype, by default the dtype
    of w. `kernel` is as in `_losses_and_dlogits`."""
    shape, classes, dtype = x.shape, len(w), dtype or w.dtype
    rows = _rows_of(x, labels, where)
    # XLA can partition the formula over a mesh. The kernel would need all classes on each device.
    is_on_mesh = mesh_of((x, w, labels, b, where, dy)) is not None
    kernel = kernel and not is_on_mesh
    if kernel and (padding := -classes % COLUMNS_MULTIPLE):
        w, b = jnp.pad(w, ((0, padding), (0, 0))), None if b is None else jnp.pad(b, (0, padding))
    parts = device_parts(rows[0].shape[0], (x, w, labels, b, where, dy))
    size = _chunk_rows(rows[0].shape[0] // parts, w)
    # XLA would add the sums of devices in half precision.
    sums_dtype = dtype if size is None and not is_on_mesh else wide(dtype)

    def step(sums, x, labels, kept, dy=None):
        logits = jnp.matmul(x, w.T, precision=precision)
        loss, dlogits = _losses_and_dlogits(kernel, logits, labels, kept, dy, b, classes=classes, **options)
        if dy is None:
            return sums, (loss, None)
        dx = jnp.matmul(dlogits, w, precision=precision)
        dw = jnp.matmul(dlogits.T, x, precision=precision, preferred_element_type=sums_dtype)
        db = None if b is None else jnp.sum(dlogits, axis=0, dtype=wide(b.dtype)).astype(sums_dtype)
        return jax.tree.map(jnp.add, sums, (dw, db)) if sums else (dw, db), (loss, dx)

    sums = ()
    if dy is not None:
        rows += (jnp.broadcast_to(dy, shape[:-1]).reshape(rows[1].shape),)
    if dy is not None and size is not None:
        sums = unify_varying_axes((w, tuple(None if a is None else jnp.zeros(a.shape, sums_dtype) for a in (w, b))))[1]
    sums, (loss, dx) = _over_chunks(step, sums, size, parts, *rows)
    loss = loss.reshape(shape[:-1])
    if dy is None:
        return loss, None
    return loss, (dx.reshape(shape), *(None if a is None else a[:classes].astype(dtype) for a in sums))


def _reduced(loss, labels, where, reduction):
    loss = loss if reduction is None else jnp.sum(loss)
    return loss / _count(labels, where).astype(loss.dtype) if reduction == "mean" else loss


def _count(labels, where):
    return jnp.maximum(jnp.sum(jnp.ones(labels.shape, bool) if where is None else where), 1)


def _definition(x, w, labels, b, where, *, reduction, softcap, precision, **options):
    rows, row_labels, kept = _rows_of(x, labels, where)
    z = jnp.matmul(rows, w.T, precision=precision, out_sharding=sharding_of_rows(rows, w))
    options |= dict(classes=len(w), softcap=softcap)
    loss, _ = _losses_and_dlogits(False, z if b is None else z + b[None], row_labels, kept, None, None, **options)
    return _reduced(loss.reshape(labels.shape), labels, where, reduction)


def _forward(x, w, labels, b, where, *, reduction, **options):
    loss, _ = _losses_and_gradients(x, w, labels, b, where, None, **options)
    return _reduced(loss, labels, where, reduction)


def _save(x, w, labels, b, where, *, reduction, **options):
    arguments = x, w, labels, b, where
    if reduction is None:
        return _forward(*arguments, reduction=None, **options), arguments
    dtype = wide(x.dtype)
    # Rows with invalid labels have gradient 0 here. The backward replaces it by NaN, unless dy is 0.
    is_invalid = ~are_valid(labels, len(w))
    count = _count(labels, where).astype(dtype) if reduction == "mean" else jnp.ones((), dtype)
    # Dividing dy by the count here saves a pass over the gradients. In float16, the quotient could underflow, so the
    # backward divides. The sums could overflow, so they stay in float32.
    if x.dtype == jnp.float16:
        dy, kept_count, sums_dtype = jnp.ones((), dtype), count, dtype
    else:
        dy, kept_count, sums_dtype = 1 / count, None, x.dtype
    loss, gradients = _losses_and_gradients(*arguments, jnp.where(is_invalid, 0, dy), dtype=sums_dtype, **options)
    saved = *gradients, is_invalid if where is None else is_invalid & where, kept_count
    return _reduced(loss, labels, where, reduction), saved


def _backward(dy, *saved, reduction, **options):
    if reduction is None:
        dx, dw, db = _losses_and_gradients(*saved, dy, **options)[1]
        return dx, dw, None, db, None
    dx, dw, db, is_invalid, count = saved
    nan = jnp.where(is_invalid & (dy != 0), jnp.nan, 0).astype(dy.dtype)
    factor = dy if count is None else dy / count
    scaled = lambda a, factor: a.astype(dy.dtype) * factor  # noqa: E731
    # NaN as a factor of dw would spread to the second derivatives of all rows.
    dw, db = (None if a is None else (scaled(a, factor) + jnp.sum(nan)).astype(dx.dtype) for a in (dw, db))
    return scaled(dx, factor + nan[..., None]).astype(dx.dtype), dw, None, db, None


_CHUNKED = Pair(_forward, {"xla": _backward}, save=_save, name="linear_softmax_cross_entropy")


def _implementations(chunked):
    return {key: functools.partial(chunked, implementation="xla", kernel=key == "pallas") for key in ("pallas", "xla")}


def _definition_backward(dy, x, w, labels, b, where, **options):
    return jax.vjp(lambda x, w, b: _definition(x, w, labels, b, where, **options), x, w, b)[1](dy)


def _default(*arrays, **options):
    w = arrays[-4]
    return DefaultImplementation(gpu="pallas" if len(w) >= KERNEL_CLASSES else "xla")


_public_op = functools.partial(Op, unsupported=checks.unsupported_dtype, default=_default, jit=True)
_LINEAR_SOFTMAX_CROSS_ENTROPY = _public_op(
    "linear_softmax_cross_entropy", {"autodiff": _definition, **_implementations(_CHUNKED)}
)
_LINEAR_SOFTMAX_CROSS_ENTROPY_BACKWARD = _public_op(
    "linear_softmax_cross_entropy_backward", {"autodiff": _definition_backward, **_implementations(_CHUNKED.vjp)}
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
      The loss, in float32 if x, w, and b are in half precision, else in their promoted dtype. If a kept row has an
      invalid label, the loss is NaN, and so are the gradients of this row, of w, and of b, or 0 if dy is 0.

    Source: E. Wijmans et al., "Cut your losses in large-vocabulary language models", ICLR 2025.
    """
    options = (label_smoothing, z_loss, softcap, reduction, precision)
    arrays, options = _check("linear_softmax_cross_entropy", x, w, labels, b, where, *options)
    return _LINEAR_SOFTMAX_CROSS_ENTROPY(*arrays, **options, implementation=implementation)


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

    dy is one number, or one per row if `reduction` is None. It has the dtype of the loss. If b is None, db is the
    gradient at b = 0, in w's dtype.
    """
    op, options = "linear_softmax_cross_entropy_backward", (label_smoothing, z_loss, softcap, reduction, precision)
    arguments = x, w, w if b is None else b
    (x, w, labels, b, where, dy), options = _check(op, x, w, labels, b, where, *options, dy=dy)
    checks.shape(op, "dy", dy, *(labels.shape if reduction is None else ()))
    b = jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    arrays = dy, x, w, labels, b, where
    gradients = _LINEAR_SOFTMAX_CROSS_ENTROPY_BACKWARD(*arrays, **options, implementation=implementation)
    return in_dtypes_of(arguments, gradients)


def _check(op, x, w, labels, b, where, label_smoothing, z_loss, softcap, reduction, precision, **dy):
    given = dict(x=x, w=w, b=b)
    x, w, b = checks.floating(op, **given)
    for name, a in dy.items():
        (a,) = checks.floating(op, **{name: a})
        if a.dtype.itemsize > wide(x.dtype).itemsize:
            x, w, b, a = checks.floating(op, **given, **{name: a})
        dy[name] = a.astype(wide(x.dtype))
    checks.shape(op, "w", w, "classes", "features")
    if x.ndim == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., {w.shape[1]}), the features of w {w.shape}")
    if b is not None:
        checks.shape(op, "b", b, w.shape[0])
    labels = checks.integers(op, "labels", labels, ", one class per row of x")
    checks.shape(op, "labels", labels, *x.shape[:-1])
    if where is not None:
        where = checks.array(op, "where", where)
        if where.dtype != bool:
            raise TypeError(f"{op}: where has dtype {where.dtype}; wants bool")
        checks.shape(op, "where", where, *x.shape[:-1])
    if reduction not in ("mean", "sum", None):
        raise ValueError(f"{op}: reduction is {reduction!r}; wants 'mean', 'sum', or None")
    options = {
        "label_smoothing": checks.number(op, "label_smoothing", label_smoothing, 0, 1),
        "z_loss": checks.number(op, "z_loss", z_loss, 0),
        "softcap": checks.softcap(op, softcap),
        "reduction": reduction,
        "precision": checks.precision(op, precision),
    }
    return (x, w, labels, b, where, *dy.values()), options


def _classifier_case(features: int, classes: int, *dy: tuple, bias: bool = False, **options: Any) -> Case:
    w, labels = Argument((classes, features), scale=features**-0.5), Argument((BATCH,), below=classes)
    return case_of(*dy, (BATCH, features), w, labels, *([(classes,)] if bias else []), **options)


_VOCABULARIES = (32768, 2560, 128256), (4096, 4096, 128256)

ENTRIES = (
    Entry(
        linear_softmax_cross_entropy,
        case_of((2, 3, 5), (4, 5), LABELS, (4,), label_smoothing=0.1, z_loss=0.01, softcap=5.0),
        {
            "digits": _classifier_case(84, 10, bias=True, reduction=None),
            **row_cases(*_VOCABULARIES, of=_classifier_case),
        },
    ),
    Entry(
        linear_softmax_cross_entropy_backward,
        case_of((2, 3), (2, 3, 5), (4, 5), LABELS, (4,), label_smoothing=0.1, z_loss=0.01, reduction=None),
        {
            "digits": _classifier_case(84, 10, (BATCH,), bias=True, reduction=None),
            **row_cases(*_VOCABULARIES, of=lambda *size: _classifier_case(*size, ())),
        },
    ),
)
