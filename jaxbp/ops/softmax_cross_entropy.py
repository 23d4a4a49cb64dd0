"""Softmax and cross-entropy as one loss of logits, with labels that are classes or weights of all classes."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxbp.ops import _checks
from jaxbp.ops._checks import AnyArray
from jaxbp.ops._numerics import exponentials, largest_and_total, widen
from jaxbp.pairing import Fastest, Implementation, Op, Pair, differentiable, saving_arguments
from jaxbp.sharding import leading
from pallas_kernels.core.launch import batch_first, batch_last
from pallas_kernels.dense import softmax_cross_entropy as kernels

AnyLogits = Float[AnyArray, "*batch classes"]
AnyLabels = Int[AnyArray, "*batch"] | Float[AnyArray, "*batch classes"]
Losses = Float[Array, "*batch"]


def _is_class(labels):
    return jnp.issubdtype(labels.dtype, jnp.integer)


def losses(logits, labels):
    log_probabilities = jax.nn.log_softmax(widen(logits))
    if _is_class(labels):
        valid = (labels >= 0) & (labels < logits.shape[-1])
        chosen = jnp.where(valid, labels, 0)[..., None]
        loss = -jnp.take_along_axis(log_probabilities, chosen, axis=-1)[..., 0]
        # A factor, not a choice: the gradient of an example with an invalid label is NaN as well.
        loss *= jnp.where(valid, 1.0, jnp.nan).astype(loss.dtype)
    else:
        loss = -jnp.sum(widen(labels) * log_probabilities, axis=-1)
    return loss.astype(logits.dtype)


def logits_gradient(dy, logits, labels):
    dy = widen(dy)[..., None]
    if _is_class(labels):
        p = jax.nn.softmax(widen(logits))
        valid = (labels >= 0) & (labels < p.shape[-1])
        gradient = p - jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype)
        gradient = dy * gradient * jnp.where(valid, 1.0, jnp.nan).astype(p.dtype)[..., None]
    else:
        (e, total), y = exponentials(logits, -1), widen(labels)
        gradient = e * (dy * jnp.sum(y, axis=-1, keepdims=True) / total) - dy * y
    return gradient.astype(logits.dtype)


def _gradients(dy, logits, labels, *, of_logits=logits_gradient):
    dlogits = of_logits(dy, logits, labels)
    # A class has no gradient.
    if _is_class(labels):
        return dlogits, None
    return dlogits, (-widen(dy)[..., None] * jax.nn.log_softmax(widen(logits))).astype(labels.dtype)


# --------------------------------------------------------------------------------------------------------- the kernels
# The forward's keeps what the backward's would have to compute from the logits again, as the formula does.


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


_LOSSES_AND_STATISTICS = differentiable(_losses_and_statistics_kernel, _losses_and_statistics, leading(0, 1))
_LOGITS_GRADIENT = differentiable(_logits_gradient_kernel, _logits_gradient, leading(0, 1, 2, 3, 4, features=0))


_SOFTMAX_CROSS_ENTROPY = Pair(
    losses,
    Op("softmax_cross_entropy_backward", {"xla": _gradients, "pallas": _gradients_kernel}, jit=True),
    save={"xla": functools.partial(saving_arguments, losses), "pallas": _save_kernel},
    name="softmax_cross_entropy",
    unsupported=_checks.unsupported_dtype,
    # With ten classes a GPU spends the time on launching either way; XLA's fusion needs no transposes. A CPU has less
    # to do in the gradient that JAX derives, which touches one class an example.
    fastest=Fastest(gpu="xla", elsewhere="autodiff"),
    jit=True,
)


def softmax_cross_entropy(logits: AnyLogits, labels: AnyLabels, *, implementation: Implementation = None) -> Losses:
    """Softmax and cross-entropy, `loss = Σ_k y_k (logsumexp(logits) - logits_k)`, a loss an example.

    The log-sum-exp subtracts the largest logit first, so no exponential overflows.

    Args:
      logits: scores, the classes last.
      labels: a class an example (integers in [0, classes)), or y, a weight a class, of the dtype of the logits.
        Weights are differentiable and need not sum to 1.
      implementation: "pallas", "xla", "autodiff", or None for the fastest on this device.

    Returns:
      The losses, in the dtype of the logits, computed in float32 or wider. An integer that is no class makes its
      example's loss and gradient NaN.

    Raises:
      TypeError, ValueError: dtypes or shapes that do not fit.

    Source: J. Bridle, "Probabilistic interpretation of feedforward classification network outputs", 1990.
    """
    logits, labels = _check("softmax_cross_entropy", logits, labels)
    return _SOFTMAX_CROSS_ENTROPY(logits, labels, implementation=implementation)


def softmax_cross_entropy_backward(
    dy: Float[AnyArray, "*batch"], logits: AnyLogits, labels: AnyLabels, *, implementation: Implementation = None
) -> Float[Array, "*batch classes"]:
    """Gradient of `softmax_cross_entropy` in the logits: `dlogits_k = dy (softmax(logits)_k Σ_j y_j - y_k)`.

    Args:
      dy: gradient of the whole in each loss.
      logits, labels: the forward's inputs.
      implementation: as in `softmax_cross_entropy`.

    Returns:
      dlogits, of the shape and dtype of the logits.

    Raises:
      TypeError, ValueError: dtypes or shapes that do not fit.
    """
    op = "softmax_cross_entropy_backward"
    dy, _ = _checks.floating(op, dy=dy, logits=logits)
    logits, labels = _check(op, logits, labels)
    _checks.shape(op, "dy", dy, *logits.shape[:-1])
    gradients = _SOFTMAX_CROSS_ENTROPY.vjp(dy, logits, labels, implementation=implementation)
    return gradients if _is_class(labels) else gradients[0]


def _check(op, logits, labels):
    (logits,) = _checks.floating(op, logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits has shape {logits.shape}; wants (..., classes), at least one class")
    if hasattr(labels, "dtype") and jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jnp.asarray(labels)
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"{op}: integer labels have shape {labels.shape}; wants {logits.shape[:-1]}, a class for each "
                f"example of logits {logits.shape}"
            )
        return logits, labels
    _, labels = _checks.floating(op, logits=logits, labels=labels)
    if labels.shape != logits.shape:
        raise ValueError(f"{op}: floating labels have shape {labels.shape}; wants {logits.shape}, as logits")
    return logits, labels
