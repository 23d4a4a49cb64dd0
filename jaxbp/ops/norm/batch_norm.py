"""Batch normalization with the statistics of the batch, as in training."""

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import mean_and_rest, upcast
from jaxbp.ops._defaults import fused_pair
from jaxbp.pairing import Implementation
from pallas_kernels.norm.statistics import inverse_root
from pallas_kernels.pointwise.elementwise import elementwise
from pallas_kernels.pointwise.reductions import sum_over

AnyImages = Float[AnyArray, "batch channels *space"]
AnyChannels = Float[AnyArray, "channels"]
Results = tuple[Float[Array, "batch channels *space"], Float[Array, "channels"], Float[Array, "channels"]]
"""The results of the op, (y, mean, var), or of its backward, (dx, dscale, dbias)."""


def _over(x):
    """Return the axes over which the mean and the variance are computed: all axes except the channels."""
    return (0, *range(2, x.ndim))


def _along(a, x):
    """Reshape a vector with one element per channel so that it broadcasts to x."""
    return a.reshape(1, -1, *(1,) * (x.ndim - 2))


def _normalise(x, scale, bias, *, epsilon):
    """Return ((y, mean, var), residuals), where y is the normalized x, scaled and shifted, and the residuals are for
    `_backward`."""
    mean, rest = mean_and_rest(x, _over(x))
    centred = (upcast(x) - mean) - rest
    var = jnp.mean(jnp.square(centred), axis=_over(x))
    factor = upcast(scale) * inverse_root(var, epsilon)
    y = centred * _along(factor, x) + _along(upcast(bias), x)
    results = y, (mean + rest).reshape(var.shape), var
    return tuple(a.astype(x.dtype) for a in results), (x, scale, mean, rest, var)


def _forward(x, scale, bias, *, epsilon):
    return _normalise(x, scale, bias, epsilon=epsilon)[0]


def _backward(dys, x, scale, mean, rest, var, *, epsilon):
    wide, dy = upcast(x), upcast(dys[0])
    sums = (jnp.sum(terms, axis=_over(x)) for terms in _terms(dy, wide, mean, rest))
    coefficients, dscale, dbias = _coefficients(*sums, dys, x, scale, var, epsilon)
    dx = _combine(dy, wide, mean, rest, *(_along(a, x) for a in coefficients))
    return dx.astype(x.dtype), dscale, dbias


def _backward_kernel(dys, x, scale, mean, rest, var, *, epsilon):
    dy = dys[0]
    sums = (a.reshape(-1) for a in sum_over(_terms, dy, x, mean, rest, axes=_over(x)))
    coefficients, dscale, dbias = _coefficients(*sums, dys, x, scale, var, epsilon)
    dx = elementwise(_combine, dy, x, mean, rest, *(_along(a, x) for a in coefficients))
    return dx.astype(x.dtype), dscale, dbias


def _terms(dy, x, mean, rest):
    """Return the two arrays that the backward sums over the batch and the spatial axes: dy, and dy times the deviation
    of x from the mean."""
    return dy, dy * ((x - mean) - rest)


def _coefficients(dy_sum, deviation_sum, dys, x, scale, var, epsilon):
    """Return ((a, b, c), dscale, dbias), where `dx = a dy + b (x - mean) + c`.

    The arguments dy_sum and deviation_sum are the sums of `_terms`. With `s = 1/√(var + epsilon)`, `x̂ = s (x - mean)`,
    and n elements per channel: `dbias = Σ dy`, `dscale = Σ dy x̂`, and `dx = scale s (dy - dbias/n - x̂ dscale/n) +
    dmean/n + dvar 2 (x - mean)/n`.
    """
    _, dmean, dvar = dys
    count = math.prod(x.shape[axis] for axis in _over(x))
    s = inverse_root(var, epsilon)
    dscale = deviation_sum * s
    a = upcast(scale) * s
    b = (2 * upcast(dvar) - a * s * dscale) / count
    c = (upcast(dmean) - a * dy_sum) / count
    return (a, b, c), dscale.astype(scale.dtype), dy_sum.astype(scale.dtype)


def _combine(dy, x, mean, rest, a, b, c):
    return a * dy + b * ((x - mean) - rest) + c


_BATCH_NORM = fused_pair(_forward, {"xla": _backward, "pallas": _backward_kernel}, save=_normalise, name="batch_norm")


def batch_norm(
    x: AnyImages, scale: AnyChannels, bias: AnyChannels, *, epsilon: float = 1e-5, implementation: Implementation = None
) -> Results:
    """Batch normalization, `y = scale (x - mean) / √(var + epsilon) + bias`, with the mean and variance of each channel
    over the batch and the spatial axes.

    A channel whose squares overflow becomes NaN.

    Args:
      x: an array whose second axis is the channels, followed by any number of spatial axes.
      scale, bias: one value per channel.
      epsilon: a number of at least 0.
      implementation: "pallas", "xla", "autodiff", or None for the fastest.

    Returns:
      (y, mean, var), in x's dtype, computed in float32 or wider. With n elements per channel, the variance is a sum
      divided by n, not by n - 1. The caller computes running averages for inference. All three results have gradients.

    Raises:
      TypeError: the arguments do not have one floating dtype.
      ValueError: shapes do not fit, or epsilon is not a number of at least 0.

    Source: S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015.
    """
    x, scale, bias = checks.floating("batch_norm", x=x, scale=scale, bias=bias)
    epsilon = _check("batch_norm", x, scale, epsilon)
    checks.shape("batch_norm", "bias", bias, *scale.shape)
    return _BATCH_NORM(x, scale, bias, epsilon=epsilon, implementation=implementation)


def batch_norm_backward(
    dy: AnyImages, x: AnyImages, scale: AnyChannels, *, epsilon: float = 1e-5, implementation: Implementation = None
) -> Results:
    """Gradients of `batch_norm` through its result y. With `s = 1/√(var + epsilon)`, `x̂ = s (x - mean)`, and n
    elements per channel,

        dbias = Σ dy,  dscale = Σ dy x̂,  dx = scale s (dy - dbias/n - x̂ dscale/n),

    with sums over the batch and the spatial axes. The last two terms come from the statistics, which depend on every x.

    Returns:
      (dx, dscale, dbias).

    Raises:
      TypeError, ValueError: as in `batch_norm`.
    """
    op = "batch_norm_backward"
    dy, x, scale = checks.floating(op, dy=dy, x=x, scale=scale)
    epsilon = _check(op, x, scale, epsilon)
    checks.shape(op, "dy", dy, *x.shape)
    none = jnp.zeros_like(scale)
    return _BATCH_NORM.vjp((dy, none, none), x, scale, none, epsilon=epsilon, implementation=implementation)


def _check(op, x, scale, epsilon):
    if x.ndim < 2:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (batch, channels, ...)")
    checks.shape(op, "scale", scale, x.shape[1])
    return checks.number(op, "epsilon", epsilon, 0.0)
