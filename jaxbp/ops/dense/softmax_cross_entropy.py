"""Softmax and cross-entropy as one loss of logits. The label of an example is one class, or one weight per class."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import exponentials, largest_and_total, upcast
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, saving_arguments
from jaxbp.sharding import batched
from pallas_kernels.core.launch import batch_first, batch_last
from pallas_kernels.dense import softmax_cross_entropy as kernels

AnyLogits = Float[AnyArray, "*batch classes"]
AnyLabels = Int[AnyArray, "*batch"] | Float[AnyArray, "*batch classes"]
Losses = Float[Array, "*batch"]


def _is_class(labels):
    return jnp.issubdtype(labels.dtype, jnp.integer)


def losses(logits, labels):
    log_probabilities = jax.nn.log_softmax(upcast(logits))
    if _is_class(labels):
        valid = are_valid(labels, logits.shape[-1])
        chosen = jnp.where(valid, labels, 0)[..., None]
        loss = nan_unless(valid, -jnp.take_along_axis(log_probabilities, chosen, axis=-1)[..., 0])
    else:
        y = upcast(labels)
        terms = y * jnp.where(_is_masked(y, log_probabilities), 0.0, log_probabilities)
        loss = -jnp.sum(terms, axis=-1)
    return loss.astype(logits.dtype)


def are_valid(labels, classes):
    return (labels >= 0) & (labels < classes)


def nan_unless(valid, loss):
    """Return the loss where `valid` is true, and NaN elsewhere.

    Where the loss is NaN, the gradient is NaN too, unless the cotangent of the loss is 0.
    """
    # If the loss were multiplied by NaN, a cotangent of 0 would become NaN, too. Instead, the cotangent is multiplied
    # by the largest number twice, then by 0. A cotangent of 0 stays 0. Any other cotangent overflows, and infinity
    # times 0 is NaN.
    zero, largest = (jnp.where(valid, 1.0, factor).astype(loss.dtype) for factor in (0.0, jnp.finfo(loss.dtype).max))
    return loss * zero * largest * largest + jnp.where(valid, 0.0, jnp.nan).astype(loss.dtype)


def _is_masked(weights, log_probabilities):
    """Return for which classes the weight is 0 and the logit is -inf.

    Such a class is excluded from the loss. Its term must be 0, although the formula would compute 0 times infinity.
    """
    return (weights == 0) & (log_probabilities == -jnp.inf)


def dy_of_valid(dy, labels, classes):
    """Return dy for the examples whose label is a class. For other examples, return 0 if dy is 0, else NaN."""
    return jnp.where(are_valid(labels, classes), dy, jnp.where(dy == 0, 0.0, jnp.nan).astype(dy.dtype))


def logits_gradient(dy, logits, labels):
    dy = upcast(dy)
    if _is_class(labels):
        p = jax.nn.softmax(upcast(logits))
        dy = dy_of_valid(dy, labels, p.shape[-1])[..., None]
        gradient = dy * (p - jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype))
    else:
        dy = dy[..., None]
        (e, total), y = exponentials(logits, -1), upcast(labels)
        gradient = e * (dy * jnp.sum(y, axis=-1, keepdims=True) / total) - dy * y
    return gradient.astype(logits.dtype)


def _gradients(dy, logits, labels, *, of_logits=logits_gradient):
    dlogits = of_logits(dy, logits, labels)
    # Integer labels have no gradient.
    if _is_class(labels):
        return dlogits, None
    log_probabilities = jax.nn.log_softmax(upcast(logits))
    log_probabilities = jnp.where(_is_masked(upcast(labels), log_probabilities), 0.0, log_probabilities)
    return dlogits, (-upcast(dy)[..., None] * log_probabilities).astype(labels.dtype)


# --------------------------------------------------------------------------------------------------------- the kernels
# The kernel of the forward keeps the statistics of each row, which the formula of the backward recomputes from the
# logits.


def _losses_and_statistics(logits, labels):
    largest, total = largest_and_total(logits, -1)
    return losses(logits, labels), largest[..., 0], total[..., 0]


def _losses_and_statistics_kernel(logits, labels):
    rows = math.prod(logits.shape[:-1])
    labels_last = batch_last(labels.reshape(rows, *labels.shape[logits.ndim - 1 :]))
    results = kernels.loss_and_statistics(batch_last(logits.reshape(rows, logits.shape[-1])), labels_last)
    return tuple(batch_first(a, rows).reshape(logits.shape[:-1]) for a in results)


def _save_kernel(logits, labels):
    loss, *statistics = _LOSSES_AND_STATISTICS(logits, labels)
    return loss, (logits, labels, *statistics)


def _logits_gradient(dy, logits, labels, largest, total):
    return logits_gradient(dy, logits, labels)


def _logits_gradient_kernel(dy, logits, labels, *statistics):
    rows = dy.size
    labels_last = batch_last(labels.reshape(rows, *labels.shape[dy.ndim :]))
    logits_last = batch_last(logits.reshape(rows, logits.shape[-1]))
    dy, *statistics = (batch_last(a.reshape(rows)) for a in (dy, *statistics))
    dlogits = kernels.logits_gradient(dy, logits_last, labels_last, *statistics)
    return batch_first(dlogits, rows).reshape(logits.shape)


def _gradients_kernel(dy, logits, labels, *statistics):
    def of_logits(dy, logits, labels):
        return _LOGITS_GRADIENT(dy, logits, labels, *statistics)

    return _gradients(dy, logits, labels, of_logits=of_logits)


_LOSSES_AND_STATISTICS = differentiable(_losses_and_statistics_kernel, _losses_and_statistics, batched(0, 1))
_LOGITS_GRADIENT = differentiable(_logits_gradient_kernel, _logits_gradient, batched(0, 1, 2, 3, 4, features=0))


_SOFTMAX_CROSS_ENTROPY = Pair(
    losses,
    Op("softmax_cross_entropy_backward", {"xla": _gradients, "pallas": _gradients_kernel}, jit=True),
    save={"xla": functools.partial(saving_arguments, losses), "pallas": _save_kernel},
    name="softmax_cross_entropy",
    unsupported=checks.unsupported_dtype,
    # With ten classes, launches take most of the time on a GPU. XLA's fusion of the formula needs fewer launches,
    # because it needs no transposes. On a CPU, autodiff computes less, because only the logarithm of the label's class
    # has a gradient.
    default=DefaultImplementation(gpu="xla", elsewhere="autodiff"),
    jit=True,
)


def softmax_cross_entropy(logits: AnyLogits, labels: AnyLabels, *, implementation: Implementation = None) -> Losses:
    """Softmax and cross-entropy, `loss = Σ_k y_k (logsumexp(logits) - logits_k)`, one loss per example.

    The log-sum-exp subtracts the largest logit first, so no exponential overflows.

    Args:
      logits: scores, the classes last.
      labels: one class per example (integers in [0, classes)), or one weight per class and example, in the dtype of the
        logits. In the formula, y are the weights; for a class, its weight is 1 and the others are 0. Weights are
        differentiable and need not sum to 1. A class with weight 0 and a logit of -inf adds nothing to the loss and has
        no gradient.
      implementation: "pallas", "xla", "autodiff", or None for the fastest on this device.

    Returns:
      The losses, in the dtype of the logits, computed in float32 or wider. If an integer label is not a class, the loss
      of its example is NaN. The gradient is NaN, too, unless dy is 0. If `jnp.where` excludes the loss, dy is 0, and so
      is the gradient.

    Raises:
      TypeError, ValueError: dtypes or shapes do not fit.

    Source: J. Bridle, "Probabilistic interpretation of feedforward classification network outputs", 1990.
    """
    logits, labels = _check("softmax_cross_entropy", logits, labels)
    return _SOFTMAX_CROSS_ENTROPY(logits, labels, implementation=implementation)


def softmax_cross_entropy_backward(
    dy: Float[AnyArray, "*batch"], logits: AnyLogits, labels: AnyLabels, *, implementation: Implementation = None
) -> Float[Array, "*batch classes"]:
    """Gradient of `softmax_cross_entropy` with respect to the logits:
    `dlogits_k = dy (softmax(logits)_k Σ_j y_j - y_k)`.

    Args:
      dy: gradient with respect to each loss.
      logits, labels: as in the forward.
      implementation: as in `softmax_cross_entropy`.

    Returns:
      dlogits, in the shape and dtype of the logits.

    Raises:
      TypeError, ValueError: dtypes or shapes do not fit.
    """
    op = "softmax_cross_entropy_backward"
    dy, _ = checks.floating(op, dy=dy, logits=logits)
    logits, labels = _check(op, logits, labels)
    checks.shape(op, "dy", dy, *logits.shape[:-1])
    gradients = _SOFTMAX_CROSS_ENTROPY.vjp(dy, logits, labels, implementation=implementation)
    return gradients if _is_class(labels) else gradients[0]


def _check(op, logits, labels):
    (logits,) = checks.floating(op, logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits has shape {logits.shape}; wants (..., classes), at least one class")
    if hasattr(labels, "dtype") and jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jnp.asarray(labels)
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"{op}: integer labels have shape {labels.shape}; wants {logits.shape[:-1]}, one class per "
                f"example of logits {logits.shape}"
            )
        return logits, labels
    _, labels = checks.floating(op, logits=logits, labels=labels)
    if labels.shape != logits.shape:
        raise ValueError(f"{op}: floating labels have shape {labels.shape}; wants {logits.shape}, the shape of logits")
    return logits, labels
