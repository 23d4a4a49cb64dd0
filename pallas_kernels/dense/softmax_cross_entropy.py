"""Softmax and cross-entropy of logits `(classes, N)`, one example per lane.

For an integer label that is not the index of a class, the loss is NaN, and the gradient is NaN unless dy is 0.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import largest_divisor, vector_length, zeros_like
from pallas_kernels.core.tiles import kernel

_MAX_UNROLLED = 16
"""Classes whose loads are in flight at once. Not tuned."""


class Config(NamedTuple):
    """`length` examples per CTA, and `unroll` classes whose loads are in flight at once."""

    length: int
    unroll: int


def _plan(logits, labels):
    statistic = jax.ShapeDtypeStruct(logits.shape[1:], jnp.float32)
    return Config(vector_length(logits, labels, statistic), largest_divisor(logits.shape[0], _MAX_UNROLLED))


@kernel(plan=_plan)
def loss_and_statistics(logits: Array, labels: Array, *, config: Config) -> tuple[Array, Array, Array]:
    """Compute `loss[n] = Σ_k y[k, n] * (log(total[n]) - (logits[k, n] - largest[n]))`.

    y[k, n] is the weight that the label of example n gives to class k. largest[n] is the largest logit, and `total[n] =
    Σ_k exp(logits[k, n] - largest[n])`.

    Args:
      logits: `(classes, N)`, N a multiple of 128.
      labels: integers `(N,)`, or float weights `(classes, N)`.

    Returns:
      loss in the dtype of the logits, and float32 largest and total, from which the backward computes the
        probabilities. Half-precision probabilities would round an almost perfectly classified example's gradient to
        zero.
    """
    (classes, N), length = logits.shape, config.length
    fold_classes = functools.partial(lax.fori_loop, 0, classes, unroll=config.unroll)

    def body(logits_ref, labels_ref, loss_ref, largest_ref, total_ref, *, block):
        lanes = pl.ds(block * length, length)

        def logit(k):
            return logits_ref[k, lanes].astype(jnp.float32)

        weigh, valid = _weigher(labels_ref, lanes, classes)
        zero = zeros_like(logit(0))
        largest = fold_classes(lambda k, m: jnp.maximum(m, logit(k)), zero - jnp.inf)
        total = fold_classes(lambda k, s: s + jnp.exp(logit(k) - largest), zero)
        log_total = jnp.log(total)
        loss = fold_classes(lambda k, loss: loss - weigh(k, logit(k) - largest - log_total), zero)
        loss_ref[lanes] = jnp.where(valid, loss, jnp.nan).astype(loss_ref.dtype)
        largest_ref[lanes], total_ref[lanes] = largest, total

    return launch(
        body,
        logits,
        labels,
        out=(jax.ShapeDtypeStruct((N,), logits.dtype), *(jax.ShapeDtypeStruct((N,), jnp.float32),) * 2),
        grid={"block": N // length},
        name="softmax_cross_entropy",
    )


@kernel(plan=lambda dy, logits, labels, *statistics: _plan(logits, labels))
def logits_gradient(dy: Array, logits: Array, labels: Array, largest: Array, total: Array, *, config: Config) -> Array:
    """Compute `dlogits[k, n] = dy[n] * (p[k, n] * Σ_j y[j, n] - y[k, n])`, in the dtype of the logits.

    p is the softmax: `p[k, n] = exp(logits[k, n] - largest[n]) / total[n]`. `loss_and_statistics` defines y and the
    arguments other than dy, `(N,)`.
    """
    (classes, N), length = logits.shape, config.length
    fold_classes = functools.partial(lax.fori_loop, 0, classes, unroll=config.unroll)
    has_integer_labels = jnp.issubdtype(labels.dtype, jnp.integer)

    def body(dy_ref, logits_ref, labels_ref, largest_ref, total_ref, dlogits_ref, *, block):
        lanes = pl.ds(block * length, length)
        weigh, valid = _weigher(labels_ref, lanes, classes)
        dy = dy_ref[lanes].astype(jnp.float32)
        gradient = jnp.where(valid | (dy == 0), dy, jnp.nan)
        zero = zeros_like(gradient)
        weight = zero + 1.0 if has_integer_labels else fold_classes(lambda k, s: s + weigh(k, 1.0), zero)

        largest, total = largest_ref[lanes], total_ref[lanes]

        def write(k, _):
            p = jnp.exp(logits_ref[k, lanes].astype(jnp.float32) - largest) / total
            dlogits_ref[k, lanes] = (gradient * (p * weight - weigh(k, 1.0))).astype(dlogits_ref.dtype)

        fold_classes(write, None)

    return launch(
        body,
        dy,
        logits,
        labels,
        largest,
        total,
        out=jax.ShapeDtypeStruct((classes, N), logits.dtype),
        grid={"block": N // length},
        name="softmax_cross_entropy_backward",
    )


def _weigher(labels_ref, lanes, classes):
    """Return (weigh, valid). `weigh(k, value)` multiplies `value` by the weight that each example's label gives to
    class k. `valid` is False for examples whose integer label is not a class."""
    if jnp.issubdtype(labels_ref.dtype, jnp.integer):
        label = labels_ref[lanes]
        # At a logit of -inf, the value is infinite, and multiplying it by 0 would give NaN.
        return lambda k, value: jnp.where(label == k, value, 0.0), (label >= 0) & (label < classes)
    first = labels_ref[0, lanes]
    valid = (first == first) | (first != first)

    def weigh(k, value):
        weight = labels_ref[k, lanes].astype(jnp.float32)
        return jnp.where((weight == 0) & (value == -jnp.inf), 0.0, weight * value)

    return weigh, valid
