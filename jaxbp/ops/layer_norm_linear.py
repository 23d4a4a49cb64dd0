"""LayerNorm and a dense layer in one. For its backward the forward keeps the normalised rows x̂ in place of x.

    z = x̂ (w * scale)ᵀ + b + w bias,

and with `s = Σ dyᵀ x̂` over the rows the gradients in the parameters need no other sums over them than db:

    dw = s * scale + db biasᵀ,    dscale = Σ w * s,    dbias = Σ w * db,    db = Σ dy,

sums but the last over the outputs. dx is that of LayerNorm, for the gradient `dy w` of its result; docs/layer_norm.md
has the derivation.

Two cases keep x, and compute x̂ again: narrow layers, which have a kernel of their own, and float16, which may have no
digits for `w * scale`.
"""

import functools

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.ops import _checks, layer_norm
from jaxbp.ops._checks import AnyArray
from jaxbp.ops._numerics import widen
from jaxbp.ops.layer_norm import row_statistics, rows
from jaxbp.ops.linear import forward_in_float32, linear, parameter_gradients_in_float32
from jaxbp.pairing import Fastest, Implementation, Pair, differentiable
from jaxbp.sharding import leading
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.dense import linear_sm90
from pallas_kernels.norm import layer_norm_linear as kernels
from pallas_kernels.norm import layer_norm_linear_sm90

# --------------------------------------------------------------------------------------------------------- the forward


def _forward(x, scale, bias, w, b, *, eps, precision):
    y = layer_norm.normalise(x, scale, bias, eps=eps, center=True)[0]
    return linear(y, w, b, precision=precision, implementation="autodiff")


def _results(normalise, dense, x, scale, bias, w, b, *, eps, precision):
    """(z, x̂, inv_std)."""
    normalised, _, inv_std = normalise(x, jnp.ones_like(scale), jnp.zeros_like(bias), eps=eps, center=True)
    weights = (widen(w) * widen(scale)).astype(w.dtype)
    offsets = jnp.sum(widen(w) * widen(bias), axis=1)
    offsets = offsets if b is None else offsets + widen(b)
    return dense(normalised, weights, offsets, precision=precision), normalised, inv_std


def _results_of_x(normalise, dense, x, scale, bias, w, b, *, eps, precision):
    """(z, offset, inv_std)."""
    y, offset, inv_std = normalise(x, scale, bias, eps=eps, center=True)
    return dense(y, w, b, precision=precision), offset, inv_std


def _results_of_x_kernel(x, scale, bias, w, b, *, eps, precision):
    """`_results_of_x` by one kernel where it pays, else by one for the rows and one for the product."""
    separate = functools.partial(
        _results_of_x, layer_norm.normalise_kernel, _dense_kernel, eps=eps, precision=precision
    )
    b_or_zeros = _zeros_for_none(w, b)
    if not layer_norm_linear_sm90.forward.pays(rows(x), scale, bias, w, b_or_zeros, eps=eps):
        return separate(x, scale, bias, w, b)

    def fused(x, scale, bias, w, b):
        results = layer_norm_linear_sm90.forward(rows(x), scale, bias, w, b, eps=eps)
        return tuple(a.reshape(*x.shape[:-1], *a.shape[1:]) for a in results)

    return on_gpu(fused, separate, x, scale, bias, w, b_or_zeros)


def _zeros_for_none(w, b):
    return jnp.zeros(w.shape[:1], w.dtype) if b is None else b


def _dense(x, w, b, *, precision):
    b = b if b is None else b.astype(x.dtype)
    return linear(x, w, b, precision=precision, implementation="autodiff")


def _dense_kernel(x, w, b, *, precision):
    if b is None or not linear_sm90.forward.pays(rows(x), w, b):
        return _dense(x, w, b, precision=precision)
    return on_gpu(linear_sm90.forward, forward_in_float32, rows(x), w, b).reshape(*x.shape[:-1], -1)


_FORMULA, _FORMULA_OF_X = (functools.partial(f, layer_norm.normalise, _dense) for f in (_results, _results_of_x))
_KERNEL = differentiable(functools.partial(_results, layer_norm.normalise_kernel, _dense_kernel), _FORMULA, leading(0))
_KERNEL_OF_X = differentiable(_results_of_x_kernel, _FORMULA_OF_X, leading(0))


def _save(results, results_of_x, keeps_x, x, scale, bias, w, b, **options):
    if x.dtype == jnp.float16 or keeps_x(x, scale, bias, w, b, **options):
        z, offset, inv_std = results_of_x(x, scale, bias, w, b, **options)
        return z, (x, scale, bias, w, b, offset, inv_std, None)
    z, normalised, inv_std = results(x, scale, bias, w, b, **options)
    return z, (None, scale, bias, w, b, None, inv_std, normalised)


def _is_narrow(x, scale, bias, w, b, *, eps, precision):
    """Whether one kernel computes the forward."""
    return layer_norm_linear_sm90.forward.pays(rows(x), scale, bias, w, _zeros_for_none(w, b), eps=eps)


def _residuals(x, scale, bias, w, b, **options):
    """What a backward by itself wants of the forward: nothing that it cannot compute on the way."""
    return x, scale, bias, w, b, None, None, None


# -------------------------------------------------------------------------------------------------------- the backward


def _backward(
    input_gradient, from_x, sums, parameters, dy, x, scale, bias, w, b, offset, inv_std, normalised, *, eps, precision
):
    """By `input_gradient` of x̂ or, if x is given in its place, by `from_x`, which computes x̂ on the way."""
    dn = jnp.matmul(dy, w, precision=precision)
    if normalised is None:
        dx, normalised = from_x(dn, x, scale, eps=eps)
    else:
        dx = input_gradient(dn, normalised, scale, inv_std)
    s, db = sums(rows(dy), rows(normalised), precision=precision)
    return _gradients(dx, *parameters(s, db, scale, bias, w), db, scale, bias, w, b)


def _sums(dy, normalised, *, precision):
    """`s = Σ dyᵀ x̂` and `db = Σ dy`, in float32 or wider."""
    dtype = widen(dy).dtype
    s = jnp.matmul(dy.T, normalised, precision=precision, preferred_element_type=dtype)
    return s, jnp.sum(dy, axis=0, dtype=dtype)


def _parameters(s, db, scale, bias, w):
    """(dw, dscale, dbias)."""
    scale, bias, w = (widen(a) for a in (scale, bias, w))
    return s * scale + db[:, None] * bias, jnp.sum(w * s, axis=0), jnp.sum(w * db[:, None], axis=0)


def _gradients(dx, dw, dscale, dbias, db, scale, bias, w, b):
    """In the order and the dtypes of what they are gradients of."""
    db = None if b is None else db.astype(b.dtype)
    return dx, dscale.astype(scale.dtype), dbias.astype(bias.dtype), dw.astype(w.dtype), db


def _backward_kernel(dy, x, scale, bias, w, b, offset, inv_std, normalised, **options):
    separate = functools.partial(
        _backward,
        layer_norm.input_gradient_kernel,
        layer_norm.input_gradient_from_x_kernel,
        _sums_kernel,
        _parameters_kernel,
        **options,
    )
    arrays, narrow = (dy, x, scale, bias, w, b), layer_norm_linear_sm90.input_gradient
    if normalised is not None or not narrow.pays(rows(dy), rows(x), scale, w, None, None):
        return separate(*arrays, offset, inv_std, normalised)
    if inv_std is None:
        offset, inv_std = row_statistics(x, eps=options["eps"], center=True)
    return on_gpu(_narrow_backward, functools.partial(separate, normalised=None), *arrays, offset, inv_std)


def _narrow_backward(dy, x, scale, bias, w, b, offset, inv_std):
    statistics = offset.ravel(), inv_std.ravel()
    dx, normalised = layer_norm_linear_sm90.input_gradient(rows(dy), rows(x), scale, w, *statistics)
    s, db = linear_sm90.weights_gradient(rows(dy), normalised, dtype=jnp.float32)
    return _gradients(dx.reshape(x.shape), *_parameters_kernel(s, db, scale, bias, w), db, scale, bias, w, b)


def _sums_kernel(dy, normalised, *, precision):
    if not linear_sm90.weights_gradient.pays(dy, normalised):
        return _sums(dy, normalised, precision=precision)
    kernel = functools.partial(linear_sm90.weights_gradient, dtype=jnp.float32)
    return on_gpu(kernel, functools.partial(parameter_gradients_in_float32, dtype=jnp.float32), dy, normalised)


def _parameters_kernel(*arrays):
    return kernels.parameter_gradients(*arrays) if kernels.parameter_gradients.pays(*arrays) else _parameters(*arrays)


# ---------------------------------------------------------------------------------------------------------- the choice


def _fastest(x, scale, bias, w, b, *, eps, precision):
    """As for LayerNorm, but without JAX's own gradient of a bias in half precisions: it is summed in these."""
    of_layer_norm = layer_norm.fastest(x, scale, bias, eps=eps)
    if x.dtype.itemsize >= 4:
        return of_layer_norm
    return Fastest() if of_layer_norm.gpu == "pallas" else Fastest(gpu="xla")


_LAYER_NORM_LINEAR = Pair(
    _forward,
    {
        "xla": functools.partial(
            _backward, layer_norm.input_gradient, layer_norm.input_gradient_from_x, _sums, _parameters
        ),
        "pallas": _backward_kernel,
    },
    save={
        "xla": functools.partial(_save, _FORMULA, _FORMULA_OF_X, lambda *arrays, **options: False),
        "pallas": functools.partial(_save, _KERNEL, _KERNEL_OF_X, _is_narrow),
    },
    residuals=_residuals,
    # Of (dy, x, scale, bias, w, b, offset, inv_std, normalised).
    examples=leading(0, 1, 6, 7, 8),
    name="layer_norm_linear",
    unsupported=layer_norm.unsupported,
    fastest=_fastest,
    jit=True,
)


def layer_norm_linear(
    x: Float[AnyArray, "*batch hidden"],
    scale: Float[AnyArray, "hidden"],
    bias: Float[AnyArray, "hidden"],
    w: Float[AnyArray, "out hidden"],
    b: Float[AnyArray, "out"] | None = None,
    eps: float = 1e-5,
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch out"]:
    """LayerNorm and a dense layer, `z = layer_norm(x, scale, bias) wᵀ + b`.

    For the backward the forward keeps the normalised rows, before scale and bias, and a number a row; x is not kept.
    Layers in float16, and narrow ones that one kernel computes on compute capability 9.0, keep x instead, and two
    numbers a row.

    Args:
      x: rows, with any leading axes.
      scale, bias, eps: as in `layer_norm`.
      w: weights, a row an output.
      b: bias of the outputs, or None for none.
      precision: of the matrix products, as in `jax.lax.dot`. They are the library's but in half precisions, where those
        of the forward and of w's gradient are kernels under "pallas" where they pay, on compute capability 9.0.
      implementation: "pallas", "xla", "autodiff", or None for the fastest.

    Returns:
      z, in x's dtype.

    Raises:
      TypeError: arguments that are not of one floating dtype.
      ValueError: shapes that do not fit, or an eps that is no number of at least 0.
    """
    x, scale, bias, w, b = _checks.floating("layer_norm_linear", x=x, scale=scale, bias=bias, w=w, b=b)
    _check("layer_norm_linear", x, scale, bias, w, b, eps)
    options = dict(eps=eps, precision=_checks.precision("layer_norm_linear", precision), implementation=implementation)
    return _LAYER_NORM_LINEAR(x, scale, bias, w, b, **options)


def layer_norm_linear_backward(
    dy: Float[AnyArray, "*batch out"],
    x: Float[AnyArray, "*batch hidden"],
    scale: Float[AnyArray, "hidden"],
    bias: Float[AnyArray, "hidden"],
    w: Float[AnyArray, "out hidden"],
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
    """Gradients of `layer_norm_linear`: with x̂ the normalised rows, before scale and bias, `t = dy w * scale` and
    `s = dyᵀ x̂`,

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dw = s * scale + db biasᵀ,    db = Σ dy,
        dscale = Σ w * s,    dbias = Σ w * db,

    means over each row, the sum for db over all rows, the others over the outputs.

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
    options = dict(eps=eps, precision=_checks.precision(op, precision), implementation=implementation)
    return _LAYER_NORM_LINEAR.vjp(dy, x, scale, bias, w, b, **options)


def _check(op, x, scale, bias, w, b, eps):
    layer_norm.check(op, x, eps, scale=scale, bias=bias)
    _checks.shape(op, "w", w, "out", x.shape[-1])
    if b is not None:
        _checks.shape(op, "b", b, w.shape[0])
