"""Normalisation of each row over its last axis: LayerNorm and RMSNorm.

With `x̂ = (x - mean) * inv_std` and `t = dy * scale`, a mean being over the row (derivation: docs/layer_norm.md):

    dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,    dbias = Σ dy, over all rows.

RMSNorm has neither the means nor the bias: `center=False` below.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.ops import _checks
from jaxbp.ops._numerics import widen
from jaxbp.pairing import Fastest, Implementation, Op, Pair, differentiable
from pallas_kernels.norm import layer_norm as kernels


def rows(a):
    """`(..., hidden)` as a matrix."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def _first(x):
    # What is taken off first changes no result, so it needs no gradient.
    return lax.stop_gradient(widen(x[..., :1]))


def row_statistics(x, *, eps, center):
    """A row's inv_std, and with `center` before it the offset of its mean from its first element.

    Their sum would be rounded, and with it the digits of a row far from zero.
    """
    if center:
        x = widen(x) - _first(x)
        offset = jnp.mean(x, axis=-1)
        return offset, _inv_std(x - offset[..., None], eps)
    return (_inv_std(widen(x), eps),)


def _inv_std(centred, eps):
    return lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1) + eps)


def _normalised(x, *statistics):
    """x̂."""
    *offset, inv_std = (a[..., None] for a in statistics)
    centred = widen(x) - _first(x) - offset[0] if offset else widen(x)
    return centred * inv_std


def _scaled(normalised, scale, bias, dtype):
    y = normalised * widen(scale)
    return (y if bias is None else y + widen(bias)).astype(dtype)


def _normalise(x, scale, bias, *, eps, center):
    statistics = row_statistics(x, eps=eps, center=center)
    return _scaled(_normalised(x, *statistics), scale, bias, x.dtype), *statistics


def _normalise_kernel(x, scale, bias, *, eps, center):
    if x.size == 0:
        return _normalise(x, scale, bias, eps=eps, center=center)
    y, *statistics = kernels.normalise(rows(x), scale, bias, eps=eps, center=center)
    return y.reshape(x.shape), *(a.reshape(x.shape[:-1]) for a in statistics)


def _gradients(dy, x, scale, bias, *statistics, eps, center, again):
    statistics = statistics or row_statistics(x, eps=eps, center=center)
    normalised, dy = _normalised(x, *statistics), widen(dy)
    t = dy * widen(scale)
    dx = t - normalised * jnp.mean(t * normalised, axis=-1, keepdims=True)
    sums = [jnp.sum(rows(dy * normalised), axis=0)]
    if center:
        dx -= jnp.mean(t, axis=-1, keepdims=True)
        sums.append(jnp.sum(rows(dy), axis=0))
    y = [_scaled(normalised, scale, bias, x.dtype)] if again else []
    return (dx * statistics[-1][..., None]).astype(x.dtype), *sums, *y


def _gradients_kernel(dy, x, scale, bias, *statistics, eps, center, again):
    options = dict(eps=eps, center=center, again=again)
    if x.size == 0:
        return _gradients(dy, x, scale, bias, *statistics, **options)
    results = kernels.gradients(rows(dy), rows(x), scale, bias, *(a.ravel() for a in statistics), **options)
    return tuple(a.reshape(x.shape) if a.shape == rows(x).shape else a for a in results)


NORMALISE = {"xla": _normalise, "pallas": differentiable(_normalise_kernel, _normalise)}
"""`(x, scale, bias, *, eps, center) -> (y, *statistics)`."""
GRADIENTS = {"xla": _gradients, "pallas": differentiable(_gradients_kernel, _gradients)}
"""`(dy, x, scale, bias, *statistics, eps, center, again) -> (dx, dscale, *dbias, *y)`: the sums in float32, dbias with
`center` alone, the forward's y if it is wanted `again`. Statistics that are not given are computed."""


def unsupported(*arrays, **options):
    return _checks.unsupported_dtype(*arrays)


def fastest(x, *arrays, **options):
    """The kernels, where they can stream the rows; else JAX's own."""
    gpu = "pallas" if kernels.streams(x) else "autodiff"
    return Fastest(gpu=gpu, older_gpu="autodiff", elsewhere="autodiff")


def fastest_backward(dy, x, *arrays, **options):
    return fastest(x)


def _ops(name, center):
    """The pair of `(x, scale, *bias)`, and its backward of `(dy, x, scale)`."""

    def forward(x, scale, bias=None, *, eps):
        return _normalise(x, scale, bias, eps=eps, center=center)[0]

    def save(normalise):
        def save(x, scale, bias=None, *, eps):
            y, *statistics = normalise(x, scale, bias, eps=eps, center=center)
            return y, (x, scale, *statistics)

        return save

    def backward(gradients):
        def backward(dy, x, scale, *statistics, eps):
            dx, *sums = gradients(dy, x, scale, None, *statistics, eps=eps, center=center, again=False)
            return dx, *(a.astype(x.dtype) for a in sums)

        return backward

    def backward_autodiff(dy, x, scale, *, eps):
        parameters = (scale, jnp.zeros_like(scale)) if center else (scale,)
        return jax.vjp(functools.partial(forward, eps=eps), x, *parameters)[1](dy)

    backwards = {implementation: backward(gradients) for implementation, gradients in GRADIENTS.items()}
    saves = {implementation: save(normalise) for implementation, normalise in NORMALISE.items()}
    pair = Pair(
        forward,
        Op(f"{name}_backward", backwards),
        save=saves,
        name=name,
        unsupported=unsupported,
        fastest=fastest,
    )
    return pair, Op(
        f"{name}_backward",
        backwards | {"autodiff": backward_autodiff},
        unsupported=unsupported,
        fastest=fastest_backward,
    )


_LAYER_NORM, _LAYER_NORM_BACKWARD = _ops("layer_norm", center=True)
_RMS_NORM, _RMS_NORM_BACKWARD = _ops("rms_norm", center=False)


def layer_norm(
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    bias: Float[Array, "hidden"],
    eps: float = 1e-5,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch hidden"]:
    """LayerNorm, `y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias`, mean and variance over each row.

    The variance is the mean of the squared deviations, biased, and never `mean(x²) - mean(x)²`: a row far from zero
    keeps its digits.

    Args:
      x: rows, with any leading axes.
      scale, bias: a value a column.
      eps: added to the variance, so that a constant row gives `bias`.
      implementation: "pallas", "xla", "autodiff", or None for the fastest here: on GPUs with kernels, these where rows
        are a multiple of 128 up to 1024 or of 256 up to 8192 long, elsewhere JAX's own.

    Returns:
      y, of x's shape and dtype, computed in float32 or wider.

    Raises:
      TypeError: arguments that are not of one floating dtype.
      ValueError: shapes that do not fit, or an eps that is no number of at least 0.

    Source: J. Ba, J. Kiros and G. Hinton, "Layer normalization", 2016.
    """
    x, scale, bias = _checks.floating("layer_norm", x=x, scale=scale, bias=bias)
    check("layer_norm", x, eps, scale=scale, bias=bias)
    return _LAYER_NORM(x, scale, bias, implementation=implementation, eps=eps)


def layer_norm_backward(
    dy: Float[Array, "*batch hidden"],
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    eps: float = 1e-5,
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch hidden"], Float[Array, "hidden"], Float[Array, "hidden"]]:
    """Gradients of `layer_norm`: with `t = dy * scale` and x̂ the normalised rows,

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,    dbias = Σ dy,

    means over each row, sums over all rows.

    Args:
      dy: gradient of the loss in y.
      x, scale, eps: the forward's.

    Returns:
      (dx, dscale, dbias), each in the shape and dtype of what it is the gradient of; half precisions are summed in
      float32.

    Raises:
      TypeError, ValueError: as in `layer_norm`.

    Source: derived in docs/layer_norm.md, from the paper that `layer_norm` names.
    """
    dy, x, scale = _checks.floating("layer_norm_backward", dy=dy, x=x, scale=scale)
    check("layer_norm_backward", x, eps, scale=scale)
    _checks.shape("layer_norm_backward", "dy", dy, *x.shape)
    return _LAYER_NORM_BACKWARD(dy, x, scale, implementation=implementation, eps=eps)


def rms_norm(
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    eps: float = 1e-5,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch hidden"]:
    """RMSNorm, `y = x / sqrt(mean(x²) + eps) * scale`, the mean over each row.

    Args:
      x: rows, with any leading axes.
      scale: a value a column.
      eps: added to the mean of the squares.
      implementation: "pallas", "xla", "autodiff", or None for the fastest here.

    Returns:
      y, of x's shape and dtype, computed in float32 or wider.

    Raises:
      TypeError, ValueError: as in `layer_norm`.

    Source: B. Zhang and R. Sennrich, "Root mean square layer normalization", NeurIPS 2019.
    """
    x, scale = _checks.floating("rms_norm", x=x, scale=scale)
    check("rms_norm", x, eps, scale=scale)
    return _RMS_NORM(x, scale, implementation=implementation, eps=eps)


def rms_norm_backward(
    dy: Float[Array, "*batch hidden"],
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    eps: float = 1e-5,
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch hidden"], Float[Array, "hidden"]]:
    """Gradients of `rms_norm`: with `t = dy * scale`, `x̂ = x * inv_rms` and `inv_rms = 1 / sqrt(mean(x²) + eps)`,

        dx = inv_rms * (t - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,

    means over each row, the sum over all rows.

    Args:
      dy: gradient of the loss in y.
      x, scale, eps: the forward's.

    Returns:
      (dx, dscale), each in the shape and dtype of what it is the gradient of; half precisions are summed in float32.

    Raises:
      TypeError, ValueError: as in `layer_norm`.
    """
    dy, x, scale = _checks.floating("rms_norm_backward", dy=dy, x=x, scale=scale)
    check("rms_norm_backward", x, eps, scale=scale)
    _checks.shape("rms_norm_backward", "dy", dy, *x.shape)
    return _RMS_NORM_BACKWARD(dy, x, scale, implementation=implementation, eps=eps)


def check(op, x, eps, **parameters):
    """Rows of at least one element, parameters that fit them, and an eps."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., hidden), at least one element a row")
    for name, a in parameters.items():
        _checks.shape(op, name, a, x.shape[-1])
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps is {eps!r}; wants a finite number of at least 0")
