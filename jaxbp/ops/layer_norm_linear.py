"""LayerNorm and a dense layer in one: the normalised rows are not kept for the backward, which makes them again."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.ops import _checks
from jaxbp.ops.layer_norm import (
    GRADIENTS,
    NORMALISE,
    check,
    fastest,
    row_statistics,
    rows,
    unsupported,
)
from jaxbp.ops.linear import linear
from jaxbp.pairing import Fastest, Implementation, Op, Pair, differentiable
from pallas_kernels.dense import linear_sm90 as linear_kernels
from pallas_kernels.norm import layer_norm_linear_sm90 as kernels


def _forward(x, scale, bias, w, b, *, eps, precision):
    y, *_ = NORMALISE["xla"](x, scale, bias, eps=eps, center=True)
    return _dense(y, w, b, precision=precision)


def _dense(y, w, b, *, precision):
    return linear(y, w, b, precision=precision, implementation="autodiff")


def _dense_kernel(y, w, b, *, precision):
    if b is None or not linear_kernels.forward_pays(rows(y), w):
        return _dense(y, w, b, precision=precision)
    return linear_kernels.forward(rows(y), w, b).reshape(*y.shape[:-1], -1)


_DENSE = {"xla": _dense, "pallas": differentiable(_dense_kernel, _dense)}


def _save(normalise, dense):
    def save(x, scale, bias, w, b, *, eps, precision):
        y, *statistics = normalise(x, scale, bias, eps=eps, center=True)
        return dense(y, w, b, precision=precision), (x, scale, bias, w, b, *statistics)

    return save


def _backward(gradients, of_parameters):
    def backward(dy, x, scale, bias, w, b, *statistics, eps, precision):
        t = jnp.matmul(dy, w, precision=precision)
        dx, dscale, dbias, y = gradients(t, x, scale, bias, *statistics, eps=eps, center=True, again=True)
        dw, db = of_parameters(rows(dy), rows(y), precision=precision)
        return dx, dscale.astype(x.dtype), dbias.astype(x.dtype), dw, None if b is None else db.astype(b.dtype)

    return backward


def _parameters(dy, y, *, precision):
    return jnp.matmul(dy.T, y, precision=precision), jnp.sum(dy, axis=0)


def _parameters_kernel(dy, y, *, precision):
    if not linear_kernels.pays(dy, y):
        return _parameters(dy, y, precision=precision)
    dw, db = linear_kernels.weights_gradient(dy, y)
    return dw, db.astype(dy.dtype)


_PARAMETERS = {"xla": _parameters, "pallas": differentiable(_parameters_kernel, _parameters)}
_SAVES = {implementation: _save(normalise, _DENSE[implementation]) for implementation, normalise in NORMALISE.items()}
_BACKWARDS = {
    implementation: _backward(gradients, _PARAMETERS[implementation]) for implementation, gradients in GRADIENTS.items()
}


def _narrow_forward(x, scale, bias, w, b, *, eps, precision):
    z, (*_, offset, inv_std) = _SAVES["xla"](x, scale, bias, w, b, eps=eps, precision=precision)
    return z, offset, inv_std


def _narrow_forward_kernel(x, scale, bias, w, b, *, eps, precision):
    b = jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    z, *statistics = kernels.forward(rows(x), scale, bias, w, b, eps=eps)
    return z.reshape(*x.shape[:-1], -1), *(a.reshape(x.shape[:-1]) for a in statistics)


def _narrow_backward_kernel(dy, x, scale, bias, w, b, *statistics, eps, precision):
    statistics = statistics or row_statistics(x, eps=eps, center=True)
    statistics = (a.ravel() for a in statistics)
    dx, dscale, dbias, dw, db = kernels.backward(rows(dy), rows(x), scale, bias, w, *statistics)
    dscale, dbias, db = (a.astype(x.dtype) for a in (dscale, dbias, db))
    return dx.reshape(x.shape), dscale, dbias, dw, None if b is None else db


_NARROW_FORWARD = differentiable(_narrow_forward_kernel, _narrow_forward)
_NARROW_BACKWARD = differentiable(_narrow_backward_kernel, _BACKWARDS["xla"])


def _save_kernel(x, scale, bias, w, b, *, eps, precision):
    if not kernels.pays(rows(x), w):
        return _SAVES["pallas"](x, scale, bias, w, b, eps=eps, precision=precision)
    z, *statistics = _NARROW_FORWARD(x, scale, bias, w, b, eps=eps, precision=precision)
    return z, (x, scale, bias, w, b, *statistics)


def _backward_kernel(dy, x, scale, bias, w, *arrays, eps, precision):
    backward = _NARROW_BACKWARD if kernels.pays(rows(x), w) else _BACKWARDS["pallas"]
    return backward(dy, x, scale, bias, w, *arrays, eps=eps, precision=precision)


def _backward_autodiff(dy, x, scale, bias, w, b, *, eps, precision):
    return jax.vjp(functools.partial(_forward, eps=eps, precision=precision), x, scale, bias, w, b)[1](dy)


def _fastest(x, *arrays, **options):
    """As for LayerNorm, but without JAX's own gradient of a bias in half precisions: it is summed in these."""
    of_layer_norm = fastest(x)
    if x.dtype.itemsize >= 4:
        return of_layer_norm
    return Fastest() if of_layer_norm.gpu == "pallas" else Fastest(gpu="xla")


_OURS = {"xla": _BACKWARDS["xla"], "pallas": _backward_kernel}
_LAYER_NORM_LINEAR_BACKWARD = Op(
    "layer_norm_linear_backward",
    _OURS | {"autodiff": _backward_autodiff},
    unsupported=unsupported,
    fastest=lambda dy, x, *arrays, **options: _fastest(x),
)
_LAYER_NORM_LINEAR = Pair(
    _forward,
    Op("layer_norm_linear_backward", _OURS),
    save={"xla": _SAVES["xla"], "pallas": _save_kernel},
    name="layer_norm_linear",
    unsupported=unsupported,
    fastest=_fastest,
)


def layer_norm_linear(
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    bias: Float[Array, "hidden"],
    w: Float[Array, "out hidden"],
    b: Float[Array, "out"] | None = None,
    eps: float = 1e-5,
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch out"]:
    """LayerNorm and a dense layer, `z = layer_norm(x, scale, bias) wᵀ + b`.

    The forward keeps two numbers a row for the backward, not the normalised rows, which the backward makes again in the
    pass that computes dx.

    Args:
      x: rows, with any leading axes.
      scale, bias, eps: as in `layer_norm`.
      w: weights, a row an output.
      b: bias of the outputs, or None for none.
      precision: of the matrix products, as in `jax.lax.dot`. They are the library's but in half precisions, where those
        of the forward and of w's gradient are kernels under "pallas" if they pay.
      implementation: "pallas", "xla", "autodiff", or None for the fastest here.

    Returns:
      z, in x's dtype.

    Raises:
      TypeError: arguments that are not of one floating dtype.
      ValueError: shapes that do not fit, or an eps that is no number of at least 0.
    """
    x, scale, bias, w, b = _checks.floating("layer_norm_linear", x=x, scale=scale, bias=bias, w=w, b=b)
    _check("layer_norm_linear", x, scale, bias, w, b, eps)
    options = dict(eps=eps, precision=precision, implementation=implementation)
    return _LAYER_NORM_LINEAR(x, scale, bias, w, b, **options)


def layer_norm_linear_backward(
    dy: Float[Array, "*batch out"],
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    bias: Float[Array, "hidden"],
    w: Float[Array, "out hidden"],
    eps: float = 1e-5,
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "*batch hidden"],
    Float[Array, "hidden"],
    Float[Array, "hidden"],
    Float[Array, "out hidden"],
    Float[Array, "out"],
]:
    """Gradients of `layer_norm_linear`: with y the normalised rows, x̂ those before scale and bias, `dn = dy w` and
    `t = dn * scale`,

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dn * x̂,    dbias = Σ dn,
        dw = dyᵀ y,    db = Σ dy,

    means over each row, sums over all rows.

    Args:
      dy: gradient of the loss in the forward's result.
      x, scale, bias, w, eps: the forward's.

    Returns:
      (dx, dscale, dbias, dw, db), each in the shape and dtype of what it is the gradient of; half precisions are summed
      in float32, but for db by "autodiff", which JAX sums as it is.

    Raises:
      TypeError, ValueError: as in `layer_norm_linear`.

    Source: docs/layer_norm.md; the products are those of `linear_backward`.
    """
    op = "layer_norm_linear_backward"
    dy, x, scale, bias, w = _checks.floating(op, dy=dy, x=x, scale=scale, bias=bias, w=w)
    _check(op, x, scale, bias, w, None, eps)
    _checks.shape(op, "dy", dy, *x.shape[:-1], w.shape[0])
    b = jnp.zeros(w.shape[:1], w.dtype)
    options = dict(eps=eps, precision=precision, implementation=implementation)
    return _LAYER_NORM_LINEAR_BACKWARD(dy, x, scale, bias, w, b, **options)


def _check(op, x, scale, bias, w, b, eps):
    check(op, x, eps, scale=scale, bias=bias)
    _checks.shape(op, "w", w, "out", x.shape[-1])
    if b is not None:
        _checks.shape(op, "b", b, w.shape[0])
