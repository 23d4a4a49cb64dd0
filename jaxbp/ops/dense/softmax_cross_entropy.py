"""Softmax and cross-entropy as one loss of logits."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbp.common import checks, numerics
from jaxbp.common.cases import BATCH, DIGITS, Argument, Entry, case_of
from jaxbp.common.checks import AnyArray
from jaxbp.ops._defaults import AUTODIFF_EVERYWHERE, AUTODIFF_ON_CPU
from jaxbp.pairing import CastOnce, Implementation, Op, Pair, differentiable, saving_arguments
from jaxbp.pairing.gradients import in_dtypes_of, summed_like
from jaxbp.pairing.mesh import batched
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.dense import softmax_cross_entropy as kernels

AnyLogits = Float[AnyArray, "*batch classes"]
AnyLabels = Int[AnyArray, "*batch"] | Float[AnyArray, "*batch classes"]
AnyMask = Bool[AnyArray, "*batch"] | Bool[AnyArray, "*batch classes"]
Losses = Float[Array, "*batch"]


def _is_class(labels):
    return jnp.issubdtype(labels.dtype, jnp.integer)


def losses(logits, labels, where=None, *, label_smoothing=0.0, z_loss=0.0):
    dtype, rows = logits.dtype, _examples(where, logits)
    # After one conversion, autodiff rounds the gradient once. After several, it would add rounded gradients.
    logits, labels = _included(numerics.upcast(logits), labels, where)
    log_probabilities, uniform = jax.nn.log_softmax(logits), _uniform(where, logits, label_smoothing)
    if _is_class(labels):
        valid = numerics.are_valid(labels, logits.shape[-1])
        chosen = jnp.where(valid, labels, 0)[..., None]
        loss = -jnp.take_along_axis(log_probabilities, chosen, axis=-1)[..., 0]
        if label_smoothing:
            loss = (1 - label_smoothing) * loss + _weighted(uniform, log_probabilities)
        loss = numerics.nan_unless(valid, loss)
    else:
        loss = _weighted(_smoothed(numerics.upcast(labels), uniform, label_smoothing), log_probabilities)
    if z_loss:
        loss += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return numerics.select(rows, loss, 0).astype(dtype)


def _examples(where, logits):
    return jnp.any(where, axis=-1) if where is not None and where.ndim == logits.ndim else where


def _included(logits, labels, where):
    """Return logits and labels, with other values where `where` excludes them, so that the loss ignores them.

    Logits and labels of excluded examples become 0. If only some classes of an example are excluded, their logits
    become -inf, and their weights become 0. An integer label of an excluded class then becomes an invalid label, for
    which the loss is NaN.
    """
    if where is None:
        return logits, labels
    if where.ndim < logits.ndim:
        each = where[..., None]
        return numerics.select(each, logits, 0), numerics.select(where if _is_class(labels) else each, labels, 0)
    rows, logits = _examples(where, logits), numerics.exclude(where, logits, -1)
    if not _is_class(labels):
        return logits, numerics.select(where, labels, 0)
    where, labels = jnp.broadcast_to(where, logits.shape), labels.astype(jnp.int32)  # a byte may not hold every class
    possible = jnp.take_along_axis(where, jnp.clip(labels, 0, logits.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    return logits, numerics.select(rows, jnp.where(possible, labels, logits.shape[-1]), 0)


def _uniform(where, logits, label_smoothing):
    if where is None or where.ndim < logits.ndim:
        return label_smoothing / logits.shape[-1]
    where = jnp.broadcast_to(where, logits.shape)
    count = jnp.maximum(jnp.sum(where, axis=-1, keepdims=True), 1)
    return jnp.where(where, label_smoothing / count.astype(numerics.upcast(logits).dtype), 0)


def _smoothed(weights, uniform, label_smoothing):
    return (1 - label_smoothing) * weights + uniform if label_smoothing else weights


def _weighted(weights, log_probabilities):
    terms = weights * jnp.where(_is_masked(weights, log_probabilities), 0.0, log_probabilities)
    return -jnp.sum(terms, axis=-1)


def _is_masked(weights, log_probabilities):
    # The term of weight 0 and logit -inf is 0, not NaN.
    return (weights == 0) & (log_probabilities == -jnp.inf)


def logits_gradient(dy, logits, labels, where=None, *, label_smoothing=0.0, z_loss=0.0):
    dtype, dy = logits.dtype, numerics.select(_examples(where, logits), numerics.upcast(dy), 0)
    uniform = _uniform(where, logits, label_smoothing)
    logits, labels = _included(logits, labels, where)
    if _is_class(labels):
        p = jax.nn.softmax(numerics.upcast(logits))
        dy = numerics.dy_of_valid(dy, labels, p.shape[-1])[..., None]
        weights = jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype)
        gradient = dy * (_with_z_loss(p, p, logits, z_loss) - _smoothed(weights, uniform, label_smoothing))
    else:
        dy, (e, total) = dy[..., None], numerics.exponentials(logits, -1)
        weights = _smoothed(numerics.upcast(labels), uniform, label_smoothing)
        factor = _with_z_loss(jnp.sum(weights, axis=-1, keepdims=True), 1.0, logits, z_loss)
        gradient = e * (dy * factor / total) - dy * weights
    return gradient.astype(dtype)


def _with_z_loss(value, factor, logits, z_loss):
    if not z_loss:
        return value
    return value + factor * (2 * z_loss) * jax.nn.logsumexp(numerics.upcast(logits), axis=-1, keepdims=True)


def _gradients(dy, logits, labels, where, *, label_smoothing, z_loss, of_logits=logits_gradient):
    dlogits = of_logits(dy, logits, labels, where, label_smoothing=label_smoothing, z_loss=z_loss)
    if _is_class(labels):
        return dlogits, None, None
    dy = numerics.select(_examples(where, logits), numerics.upcast(dy), 0)[..., None]
    logits, labels = _included(logits, labels, where)
    log_probabilities = jax.nn.log_softmax(numerics.upcast(logits))
    log_probabilities = jnp.where(_is_masked(numerics.upcast(labels), log_probabilities), 0.0, log_probabilities)
    return dlogits, ((label_smoothing - 1) * dy * log_probabilities).astype(labels.dtype), None


def _losses_and_statistics(logits, labels):
    largest, total = numerics.largest_and_total(logits, -1)
    return losses(logits, labels), largest[..., 0], total[..., 0]


def _losses_and_statistics_kernel(logits, labels):
    shape = logits.shape[:-1]
    results = kernels.loss_and_statistics(*(_examples_last(a, shape) for a in (logits, labels)))
    return tuple(batch_first(a, math.prod(shape)).reshape(shape) for a in results)


def _examples_last(a, shape):
    return batch_last(a.reshape(math.prod(shape), *a.shape[len(shape) :]))


def _save_kernel(logits, labels, where, **options):
    loss, *statistics = _LOSSES_AND_STATISTICS(*_included(logits, labels, where))
    return numerics.select(where, loss, 0), (logits, labels, where, *statistics)


def _logits_gradient(dy, logits, labels, largest, total):
    return logits_gradient(dy, logits, labels)


def _logits_gradient_kernel(dy, logits, *arrays):
    dlogits = kernels.logits_gradient(*(_examples_last(a, dy.shape) for a in (dy, logits, *arrays)))
    return batch_first(dlogits, dy.size).reshape(logits.shape)


def _gradients_kernel(dy, logits, labels, where, *statistics, **options):
    def of_logits(dy, logits, labels, where, **options):
        return _LOGITS_GRADIENT(numerics.select(where, dy, 0), *_included(logits, labels, where), *statistics)

    return _gradients(dy, logits, labels, where, of_logits=of_logits, **options)


def _unsupported(logits, labels, where, *, label_smoothing, z_loss):
    if label_smoothing or z_loss:
        return "label_smoothing" if label_smoothing else "z_loss"
    if where is not None and where.ndim == logits.ndim:
        return "where with one boolean per class, only with one per example"
    return checks.unsupported_dtype(logits, labels)


_LOSSES_AND_STATISTICS = differentiable(
    _losses_and_statistics_kernel, _losses_and_statistics, batched("logits", "labels")
)
_LOGITS_GRADIENT = differentiable(
    _logits_gradient_kernel, _logits_gradient, batched("dy", "logits", "labels", "largest", "total", features=0)
)


def _sharded_like(logits, labels, where=None):
    weights = labels[..., None] if _is_class(labels) else labels
    return jnp.sum(logits * weights.astype(logits.dtype), axis=-1)


MAX_AUTODIFF_CLASSES = 10
"""On GPUs, autodiff is the default for at most this number of weighted classes: 25 instead of 29 us for 16384 examples,
and 9.9 instead of 14 us for the backward alone (commit 2539551). Of more classes, autodiff would keep the
softmax."""


def _default(logits, labels, *_, **options):
    # With ten classes on a GPU, the kernels' transposes need more launches. On a CPU, autodiff differentiates only the
    # logarithm of the label's class.
    if _is_class(labels) or logits.shape[-1] > MAX_AUTODIFF_CLASSES:
        return AUTODIFF_ON_CPU
    return AUTODIFF_EVERYWHERE


_SOFTMAX_CROSS_ENTROPY = Pair(
    losses,
    Op("softmax_cross_entropy_backward", {"xla": CastOnce(_gradients), "pallas": _gradients_kernel}, jit=True),
    save={"xla": functools.partial(saving_arguments, losses), "pallas": _save_kernel},
    name="softmax_cross_entropy",
    unsupported=_unsupported,
    default=_default,
    sharded_like=_sharded_like,
    jit=True,
)


def softmax_cross_entropy(
    logits: AnyLogits,
    labels: AnyLabels,
    axis: int | Sequence[int] | None = -1,
    where: AnyMask | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    implementation: Implementation = None,
) -> Losses:
    """Softmax and cross-entropy, `loss = Σ_k y_k (logsumexp(logits) - logits_k)`, one loss per example.

    y_k is the weight of class k. The z-loss adds `z_loss logsumexp(logits)²`.

    Args:
      labels: one integer in [0, classes) per example, for which y is one-hot; or y, one weight per class and example.
        Weights are differentiable and need not sum to 1. Booleans, and integers of the shape of the logits, are also
        weights. Logits and weights broadcast, except that the logits must have all classes.
      axis: the axes of the classes; None for all. An integer label is a row-major index over them, in the order of
        `axis`.
      where: one boolean per example, or per class and example, False to exclude it. An excluded example has loss and
        gradient 0, even if its logits are NaN. An excluded class is left out of the sum and the log-sum-exp.
      label_smoothing: in [0, 1]. y becomes `(1 - label_smoothing) y + label_smoothing / classes`, where `classes`
        counts the included classes.
      implementation: "pallas" supports neither label smoothing, nor the z-loss, nor one boolean per class.

    Returns:
      The losses, in the promoted dtype of logits and weights. If an integer label is not an included class, the loss is
      NaN, with gradient NaN, or 0 if dy is 0.

    Sources: J. Bridle, "Probabilistic interpretation of feedforward classification network outputs", 1990; C. Szegedy
    et al., "Rethinking the Inception architecture", CVPR 2016 (label smoothing); A. Chowdhery et al., "PaLM", JMLR 2023
    (z-loss).
    """
    arrays, options, _ = _check("softmax_cross_entropy", logits, labels, axis, where, label_smoothing, z_loss)
    return _SOFTMAX_CROSS_ENTROPY(*arrays, **options, implementation=implementation)


def softmax_cross_entropy_backward(
    dy: Float[AnyArray, "*batch"],
    logits: AnyLogits,
    labels: AnyLabels,
    axis: int | Sequence[int] | None = -1,
    where: AnyMask | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    implementation: Implementation = None,
) -> Float[Array, "*batch classes"]:
    """Gradient of `softmax_cross_entropy` with respect to the logits:
    `dlogits_k = dy (softmax(logits)_k Σ_j y_j - y_k)`, where y_k is the weight of class k after label smoothing. The
    z-loss adds `2 dy z_loss logsumexp(logits) softmax(logits)_k`."""
    op = "softmax_cross_entropy_backward"
    (*arrays, dy), options, to_axes = _check(op, logits, labels, axis, where, label_smoothing, z_loss, dy=dy)
    checks.shape(op, "dy", dy, *arrays[0].shape[:-1])
    gradients = _SOFTMAX_CROSS_ENTROPY.vjp(dy, *arrays, **options, implementation=implementation)
    dlogits = gradients[0] if isinstance(gradients, tuple) else gradients
    return in_dtypes_of(logits, summed_like(jnp.asarray(logits), to_axes(dlogits)))


def _check(op, logits, labels, axis, where, label_smoothing, z_loss, **dy):
    """Return ((logits, labels, where, *dy), options, to_axes), with the classes last. `to_axes` moves the classes of
    the gradient with respect to the logits back to `axis`."""
    checks.require_floating(op, "logits", logits)
    labels = checks.array(op, "labels", labels)
    is_class = _is_class(labels) and labels.shape != jnp.shape(logits)
    weights = {} if is_class else {"labels": labels}
    logits, *others = checks.floating(op, logits=logits, **dy, **weights)
    given = logits.shape
    if not is_class and labels.shape != given:
        try:
            shape = checks.broadcast(op, logits=logits, labels=labels)
        except ValueError as error:
            hint = ". Classes are integers, say labels.astype(jnp.int32)" if labels.ndim < len(given) else ""
            raise ValueError(f"{error}{hint}") from None
        logits, others[-1] = jnp.broadcast_to(logits, shape), jnp.broadcast_to(others[-1], shape)
    shape, axes = logits.shape, checks.axes(op, axis, logits.ndim)
    if not axes or math.prod(shape[i] for i in axes) == 0:
        wanted = "(..., classes)" if axes == (len(shape) - 1,) or not shape else f"classes along axis {axis}"
        raise ValueError(f"{op}: logits has shape {shape}; wants {wanted}, at least one class")
    if isinstance(axis, tuple | list):  # integer labels count in this order
        axes = tuple(int(a) % len(shape) for a in axis)
    batch = tuple(size for i, size in enumerate(shape) if i not in axes)

    def classes_last(a):
        if axes == (len(shape) - 1,):
            return a
        a = jnp.moveaxis(a, axes, range(-len(axes), 0))
        return a.reshape(*a.shape[: len(batch)], math.prod(a.shape[len(batch) :]))

    def to_axes(a):
        if axes == (len(shape) - 1,):
            return a
        return jnp.moveaxis(a.reshape(*a.shape[:-1], *(shape[i] for i in axes)), range(-len(axes), 0), axes)

    where = checks.mask(op, where, shape, batch)
    where = where if where is None or where.ndim == len(shape) else jnp.broadcast_to(where, batch)
    if is_class:
        if labels.ndim != len(batch) or any(n not in (1, m) for n, m in zip(labels.shape, batch, strict=True)):
            wanted = f"{batch}, one class per example of logits {shape}"
            raise ValueError(f"{op}: integer labels have shape {labels.shape}; wants {wanted}")
        labels = labels if labels.shape == batch else jnp.broadcast_to(labels, batch)
    else:
        labels = others.pop()
        aligned = (1,) * (len(shape) - len(given)) + given
        if any(aligned[i] != shape[i] for i in axes):
            raise ValueError(f"{op}: logits has shape {given}; wants as many classes as the labels, {labels.shape}")
        labels = classes_last(labels)
    if where is not None and where.ndim == len(shape):
        # A mask with one boolean per example may have axes of size 1 for the classes.
        per_class = any(where.shape[i] > 1 for i in axes)
        where = jnp.broadcast_to(where, [n if per_class or i not in axes else 1 for i, n in enumerate(shape)])
        where = classes_last(where) if per_class else where.reshape(batch)
    options = dict(
        label_smoothing=checks.number(op, "label_smoothing", label_smoothing, 0.0, 1.0),
        z_loss=checks.number(op, "z_loss", z_loss, 0.0),
    )
    return (classes_last(logits), labels, where, *others), options, to_axes


_WEIGHTS = Argument((BATCH, 10), weights=True)

ENTRIES = (
    Entry(
        softmax_cross_entropy,
        case_of((2, 3, 5), Argument((2, 3, 5), weights=True)),
        {"classes": case_of((BATCH, 10), DIGITS), "weights": case_of((BATCH, 10), _WEIGHTS)},
    ),
    Entry(
        softmax_cross_entropy_backward,
        case_of((2, 3), (2, 3, 5), Argument((2, 3), below=5)),
        {"classes": case_of((BATCH,), (BATCH, 10), DIGITS), "weights": case_of((BATCH,), (BATCH, 10), _WEIGHTS)},
    ),
)
