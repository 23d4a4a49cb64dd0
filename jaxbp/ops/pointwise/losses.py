"""Losses that compare floating predictions with targets.

Targets may be integers or booleans. Predictions and targets broadcast, except in means over all elements.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import SMOOTH, Argument, hidden_entries
from jaxbp.common.checks import AnyArray, AnyFloats, Floats, Number
from jaxbp.common.numerics import upcast
from jaxbp.ops._defaults import AUTODIFF_ON_GPU, fused_pair, xla_and_pallas
from jaxbp.ops.pointwise._elementwise import Elementwise, WithNumber
from jaxbp.pairing import Implementation, batched, in_dtypes_of, summed_like

Gradients = tuple[Floats, Floats]


def _mean_loss(name, loss, slope):
    def forward(predictions, targets):
        error = upcast(predictions) - upcast(targets)
        return jnp.mean(loss(error)).astype(predictions.dtype)

    def gradients(dy, predictions, targets, *, size):
        # The gradient of a mean of no elements is NaN.
        dpredictions = dy * (1.0 / size if size else math.inf) * slope(predictions - targets)
        return dpredictions, -dpredictions

    def backward(elementwise, sum_over, dy, predictions, targets):
        return elementwise(functools.partial(gradients, size=predictions.size), dy, predictions, targets)

    return fused_pair(forward, xla_and_pallas(backward), name=name)


def _x_log_y(x, y):
    at_zero = (x == 0) & (y == 0)
    return _x_times_log(x, jnp.log(jnp.where(at_zero, 1.0, y)), at_zero)


def _x_times_log(x, log, at_zero):
    """Return `x * log`. Where `at_zero`, it is 0, and its derivative with respect to x is -inf."""
    gap = jnp.where(at_zero, x - lax.stop_gradient(x), 1.0)
    return x * jnp.where(at_zero, 0.0, log) - jnp.where(at_zero, jnp.sqrt(gap), 0.0)


def _huber(predictions, targets, delta):
    error = jnp.abs(predictions - targets)
    return jnp.where(error <= delta, 0.5 * error * error, delta * (error - 0.5 * delta))


def _huber_gradients(dy, predictions, targets, delta):
    # For a minimum of a maximum, autodiff would give the slope 1/2 where |error| = delta.
    error = predictions - targets
    dpredictions = dy * jnp.where(error > delta, delta, jnp.where(error < -delta, -delta, error))
    return dpredictions, -dpredictions


def _delta_gradient(dy, predictions, targets, delta):
    error = jnp.abs(predictions - targets)
    return dy * jnp.where(error <= delta, 0.0, error - delta)


def _binary_cross_entropy_gradients(dy, probabilities, labels):
    p, y = probabilities, labels
    # If label and probability are both 0 or both 1, (p - y) / (p (1 - p)) would be 0 / 0.
    both_0, both_1 = (y == 0) & (p == 0), (y == 1) & (p == 1)
    dividend = jnp.where(both_0, 1 - y, jnp.where(both_1, -y, p - y))
    divisor = jnp.where(both_0, 1 - p, jnp.where(both_1, p, p * (1 - p)))
    return dy * (dividend / divisor), dy * (_log(1 - p) - _log(p))


def _log(x):
    at_zero = x == 0
    # A derivative of infinity at 0, times 0, would be NaN.
    return jnp.where(at_zero, -jnp.inf, jnp.log(jnp.where(at_zero, 1.0, x)))


def _sigmoid_binary_cross_entropy(logits, labels, pos_weight=1.0):
    def term(label, logits):
        return _x_times_log(label, jax.nn.log_sigmoid(logits), (label == 0) & (logits == -jnp.inf))

    return -pos_weight * term(labels, logits) - term(1 - labels, -logits)


def _weighted_gradients(log_sigmoid):
    def gradients(dy, logits, labels, pos_weight):
        x, y = logits, labels
        log_p, log_not_p = log_sigmoid(x), log_sigmoid(-x)
        dlogits = (1 - y) * jax.nn.sigmoid(x) - pos_weight * y * jax.nn.sigmoid(-x)
        dpos_weight = jnp.where((y == 0) & (x == -jnp.inf), 0.0, y * log_p)
        return dy * dlogits, dy * (log_not_p - pos_weight * log_p), -dy * dpos_weight

    return gradients


def _log_sigmoid_in_kernels(x):
    return jnp.minimum(x, 0.0) - jnp.log(1 + jnp.exp(-jnp.abs(x)))


_MEAN_SQUARED_ERROR = _mean_loss("mean_squared_error", jnp.square, lambda error: 2 * error)
_MEAN_ABSOLUTE_ERROR = _mean_loss("mean_absolute_error", lambda error: error * jnp.sign(error), jnp.sign)
_HUBER = WithNumber("huber", "delta", _huber, _huber_gradients, _delta_gradient)
_BINARY_CROSS_ENTROPY = Elementwise(
    "binary_cross_entropy",
    lambda probabilities, labels: -_x_log_y(labels, probabilities) - _x_log_y(1 - labels, 1 - probabilities),
    _binary_cross_entropy_gradients,
    # On a GPU, autodiff reuses the logarithms of the forward.
    default=AUTODIFF_ON_GPU,
)
_SIGMOID_BINARY_CROSS_ENTROPY = Elementwise(
    "sigmoid_binary_cross_entropy",
    _sigmoid_binary_cross_entropy,
    lambda dy, logits, labels: (dy * (jax.nn.sigmoid(logits) - labels), -dy * logits),
)
_WEIGHTED_SIGMOID_BINARY_CROSS_ENTROPY = Elementwise(
    "sigmoid_binary_cross_entropy",
    _sigmoid_binary_cross_entropy,
    _weighted_gradients(jax.nn.log_sigmoid),
    in_kernels=_weighted_gradients(_log_sigmoid_in_kernels),
)


def _kl_divergence(log_predictions, targets):
    q, p = upcast(log_predictions), upcast(targets)
    possible = jnp.where(p == 0, 0.0, q)
    return jnp.sum(_x_log_y(p, p) - p * possible, axis=-1).astype(log_predictions.dtype)


def _kl_gradients(dy, log_predictions, targets):
    q, p = log_predictions, targets
    return -dy * p, dy * jnp.where((p == 0) & (q == -jnp.inf), -jnp.inf, jnp.log(p) - q + 1)


def _kl_backward(elementwise, sum_over, dy, log_predictions, targets):
    return elementwise(_kl_gradients, dy[..., None], log_predictions, targets)


_KL_DIVERGENCE = fused_pair(
    _kl_divergence,
    xla_and_pallas(_kl_backward),
    name="kl_divergence",
    batch_axes=batched("dy", "log_predictions", "targets", features=0),
)


def _loss(op, implementation, **arrays):
    return op(*_checked(op.name, **arrays).values(), implementation=implementation)


def _loss_backward(op, implementation, dy, **arrays):
    gradients = op(*_checked(op.name, dy=dy, **arrays).values(), implementation=implementation)
    return in_dtypes_of(tuple(arrays.values()), gradients)


def _checked(op, **arrays):
    first, second = (name for name in arrays if name != "dy")
    checks.require_floating(op, first, arrays[first])
    values = dict(zip(arrays, checks.floating(op, **arrays), strict=True))
    a, b = values[first], values[second]
    if op.startswith("mean_"):
        if a.shape != b.shape:
            raise ValueError(f"{op}: {second} has shape {b.shape}; wants {a.shape}, the shape of {first}")
        shape = ()
    else:
        shape = checks.broadcast(op, **{first: a, second: b})
    if op.startswith("kl_divergence"):
        checks.require_floating(op, second, arrays[second])
        if not shape:
            raise ValueError(f"{op}: {first} has shape (); wants (..., classes)")
        values |= {first: jnp.broadcast_to(a, shape), second: jnp.broadcast_to(b, shape)}
        shape = shape[:-1]
    if "dy" in values:
        checks.shape(op, "dy", values["dy"], *shape)
    return values


def mean_squared_error(
    predictions: AnyFloats, targets: AnyFloats, *, implementation: Implementation = None
) -> Float[Array, ""]:
    """Mean squared error, `loss = 1/n Σᵢ (predictionsᵢ - targetsᵢ)²`, over all n elements."""
    return _loss(_MEAN_SQUARED_ERROR, implementation, predictions=predictions, targets=targets)


def mean_squared_error_backward(
    dy: Float[AnyArray, ""], predictions: AnyFloats, targets: AnyFloats, *, implementation: Implementation = None
) -> Gradients:
    """Gradients of `mean_squared_error`: `dpredictionsᵢ = 2/n dy (predictionsᵢ - targetsᵢ)`, and
    `dtargets = -dpredictions`."""
    return _loss_backward(_MEAN_SQUARED_ERROR.vjp, implementation, dy, predictions=predictions, targets=targets)


def mean_absolute_error(
    predictions: AnyFloats, targets: AnyFloats, *, implementation: Implementation = None
) -> Float[Array, ""]:
    """Mean absolute error, `loss = 1/n Σᵢ |predictionsᵢ - targetsᵢ|`, over all n elements."""
    return _loss(_MEAN_ABSOLUTE_ERROR, implementation, predictions=predictions, targets=targets)


def mean_absolute_error_backward(
    dy: Float[AnyArray, ""], predictions: AnyFloats, targets: AnyFloats, *, implementation: Implementation = None
) -> Gradients:
    """Gradients of `mean_absolute_error`: `dpredictionsᵢ = dy/n sign(predictionsᵢ - targetsᵢ)`, with sign(0) = 0, and
    `dtargets = -dpredictions`."""
    return _loss_backward(_MEAN_ABSOLUTE_ERROR.vjp, implementation, dy, predictions=predictions, targets=targets)


def huber(
    predictions: AnyFloats, targets: AnyFloats, delta: Number = 1.0, *, implementation: Implementation = None
) -> Floats:
    """Huber loss, `½ e² where |e| <= delta, else delta (|e| - ½ delta)`, element by element, where
    `e = predictions - targets`. delta is at least 0, and may be a differentiable array of shape ().

    Source: P. Huber, "Robust estimation of a location parameter", 1964.
    """
    return _HUBER.of(implementation, _checked("huber", predictions=predictions, targets=targets), delta, low=0.0)


def huber_backward(
    dy: AnyFloats,
    predictions: AnyFloats,
    targets: AnyFloats,
    delta: Number = 1.0,
    *,
    implementation: Implementation = None,
) -> Gradients:
    """Gradients of `huber`: `dpredictions = dy min(max(e, -delta), delta)`, and `dtargets = -dpredictions`, where
    `e = predictions - targets`."""
    arrays = dict(predictions=predictions, targets=targets)
    dy = _checked("huber_backward", dy=dy, **arrays)["dy"]
    return _HUBER.backward_of(implementation, dy, arrays, delta, low=0.0)


def binary_cross_entropy(
    probabilities: AnyFloats, labels: AnyFloats, *, implementation: Implementation = None
) -> Floats:
    """Cross-entropy of probabilities, `loss = -y ln p - (1 - y) ln(1 - p)`, element by element.

    The probabilities p and the labels y are in [0, 1]. p is not clamped, so a loss may be infinite. For logits,
    `sigmoid_binary_cross_entropy` is more accurate.
    """
    return _loss(_BINARY_CROSS_ENTROPY, implementation, probabilities=probabilities, labels=labels)


def binary_cross_entropy_backward(
    dy: AnyFloats, probabilities: AnyFloats, labels: AnyFloats, *, implementation: Implementation = None
) -> Gradients:
    """Gradients of `binary_cross_entropy`: `dp = dy (p - y) / (p (1 - p))`, and `dy (ln(1 - p) - ln p)` with respect to
    the labels y."""
    return _loss_backward(_BINARY_CROSS_ENTROPY.vjp, implementation, dy, probabilities=probabilities, labels=labels)


def sigmoid_binary_cross_entropy(
    logits: AnyFloats,
    labels: AnyFloats,
    *,
    pos_weight: float | Float[AnyArray, "*weights_shape"] | None = None,
    implementation: Implementation = None,
) -> Floats:
    """Cross-entropy of logits, `loss = -w y ln σ(x) - (1 - y) ln σ(-x)`, element by element.

    Args:
      labels: y, in [0, 1].
      pos_weight: w, the weight of positive labels: a number, an array that broadcasts to the logits x, or None for 1.
    """
    arrays = _with_pos_weight("sigmoid_binary_cross_entropy", pos_weight, logits=logits, labels=labels)
    op = _SIGMOID_BINARY_CROSS_ENTROPY if len(arrays) == 2 else _WEIGHTED_SIGMOID_BINARY_CROSS_ENTROPY
    return op(*arrays, implementation=implementation)


def sigmoid_binary_cross_entropy_backward(
    dy: AnyFloats,
    logits: AnyFloats,
    labels: AnyFloats,
    *,
    pos_weight: float | Float[AnyArray, "*weights_shape"] | None = None,
    implementation: Implementation = None,
) -> Gradients:
    """Gradients of `sigmoid_binary_cross_entropy`: `dlogits = dy ((1 - y) σ(x) - w y σ(-x))`,
    `dlabels = dy (ln σ(-x) - w ln σ(x))`. x are the logits, y are the labels, and w is `pos_weight`, which gets no
    gradient."""
    op = "sigmoid_binary_cross_entropy_backward"
    arrays = _with_pos_weight(op, pos_weight, dy=dy, logits=logits, labels=labels)
    vjp = (_SIGMOID_BINARY_CROSS_ENTROPY if len(arrays) == 3 else _WEIGHTED_SIGMOID_BINARY_CROSS_ENTROPY).vjp
    return in_dtypes_of((logits, labels), vjp(*arrays, implementation=implementation)[:2])


def _with_pos_weight(op, pos_weight, *, logits, labels, **dy):
    (x,), (y,) = checks.only_floating(op, logits=logits), checks.floating(op, labels=labels)
    arrays = _checked(op, **dy, logits=x, labels=y.astype(x.dtype))
    if pos_weight is None:
        return tuple(arrays.values())
    *arrays, pos_weight = checks.floating(op, **arrays, pos_weight=pos_weight)
    shape = jnp.broadcast_shapes(*(a.shape for a in arrays[-2:]))
    if checks.broadcast(op, logits=jax.ShapeDtypeStruct(shape, "float32"), pos_weight=pos_weight) != shape:
        got = f"{op}: pos_weight has shape {pos_weight.shape}"
        raise ValueError(f"{got}; wants a shape that broadcasts to {shape}, the shape of the loss")
    return *arrays, pos_weight


def kl_divergence(
    log_predictions: Float[AnyArray, "*batch classes"],
    targets: Float[AnyArray, "*batch classes"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch"]:
    """Kullback-Leibler divergence, `loss = Σ_k p_k (ln p_k - q_k)` over the last axis, where p are the targets, and q
    are the logarithms of the predictions.

    Source: S. Kullback and R. Leibler, "On information and sufficiency", 1951.
    """
    return _loss(_KL_DIVERGENCE, implementation, log_predictions=log_predictions, targets=targets)


def kl_divergence_backward(
    dy: Float[AnyArray, "*batch"],
    log_predictions: Float[AnyArray, "*batch classes"],
    targets: Float[AnyArray, "*batch classes"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch classes"], Float[Array, "*batch classes"]]:
    """Gradients of `kl_divergence`: `dq_k = -dy p_k`, `dp_k = dy (ln p_k - q_k + 1)`, where p are the
    targets, and q the `log_predictions`."""
    arrays = dict(log_predictions=log_predictions, targets=targets)
    gradients = _loss_backward(_KL_DIVERGENCE.vjp, implementation, dy, **arrays)
    return tuple(map(summed_like, map(jnp.asarray, arrays.values()), gradients))


_WEIGHTS = Argument((2, 3, 4), weights=True)

ENTRIES = (
    *hidden_entries(mean_squared_error, SMOOTH, SMOOTH, dy=(), like="divide"),
    *hidden_entries(mean_absolute_error, SMOOTH, SMOOTH, dy=(), like="divide"),
    *hidden_entries(huber, SMOOTH, SMOOTH, like="divide", delta=0.8),
    *hidden_entries(binary_cross_entropy, _WEIGHTS, _WEIGHTS, like="divide"),
    *hidden_entries(sigmoid_binary_cross_entropy, SMOOTH, _WEIGHTS, like="divide"),
    *hidden_entries(kl_divergence, SMOOTH, _WEIGHTS, dy=(2, 3), like="divide"),
)
