"""LayerNorm and a dense layer in one op."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries, row_cases
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.ops.dense._products import parameter_gradients_in_float32
from jaxbp.ops.dense.linear import forward_in_float32, linear
from jaxbp.ops.norm import layer_norm
from jaxbp.ops.norm.layer_norm import row_statistics, rows
from jaxbp.pairing import Axes, DefaultImplementation, Implementation, Pair, differentiable, in_dtypes_of
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.core.layouts import LANES
from pallas_kernels.dense import linear_sm90
from pallas_kernels.norm import layer_norm_linear_sm90, layer_norm_streamed
from pallas_kernels.norm.layer_norm_linear import parameter_gradients

_MIN_ROWS_AN_OUTPUT = 8
"""From this number of rows per output on, saving the normalized rows is faster (docs/lab/2026-11-25-norm.md)."""
_MIN_FUSED_ROWS = 65536
"""Fewest rows for the kernels of `layer_norm_linear_sm90`. With fewer rows, y stays in the L2 cache between separate
kernels (docs/lab/2026-11-21-norm.md)."""
_MIN_PRODUCT_ROWS, _MIN_PRODUCT_INPUTS = 8192, 512
"""Fewest rows for the kernels of `linear_sm90` (docs/lab/2026-11-21-dense.md), and fewest inputs for the forward (not
measured)."""


def _fused_pays(kernel, *arrays, **options):
    return len(arrays[0]) >= _MIN_FUSED_ROWS and kernel.unsupported(*arrays, **options) is None


def _forward_pays(x, w, b):
    rows, inputs = x.shape
    is_large = rows >= _MIN_PRODUCT_ROWS and inputs >= _MIN_PRODUCT_INPUTS
    return is_large and linear_sm90.forward.unsupported(x, w, b) is None


def _weights_gradient_pays(dy, x):
    # Other widths were not measured.
    is_measured = len(dy) >= _MIN_PRODUCT_ROWS and dy.shape[1] % LANES == x.shape[1] % LANES == 0
    return is_measured and linear_sm90.weights_gradient.unsupported(dy, x) is None


def _keeps_normalized(x, w):
    """Return whether the forward saves the normalized rows instead of x.

    It saves them only in bfloat16. In float16, `w * scale`, which multiplies these rows, could lose digits.
    """
    count, (outputs, hidden) = math.prod(x.shape[:-1]), w.shape
    matrix, dy, b = (jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((count, hidden), (count, outputs), (outputs,)))
    return (
        x.dtype == jnp.bfloat16
        and count >= _MIN_ROWS_AN_OUTPUT * outputs
        and layer_norm_streamed.input_gradient.unsupported(matrix, matrix, None) is None
        and _forward_pays(matrix, w, b)
        and _weights_gradient_pays(dy, matrix)
    )


def _dense(y, w, b, *, precision):
    b = b if b is None else b.astype(y.dtype)
    return linear(y, w, b, precision=precision, implementation="autodiff")


def _dense_kernel(y, w, b, *, precision):
    if b is None or not _forward_pays(rows(y), w, b):
        return _dense(y, w, b, precision=precision)
    return on_gpu(linear_sm90.forward, forward_in_float32, rows(y), w, b).reshape(*y.shape[:-1], -1)


def _results(normalize, dense, x, scale, bias, w, b, *, epsilon, precision):
    y, *statistics = normalize(x, scale, bias, epsilon=epsilon, center=True)
    return dense(y, w, b, precision=precision), *statistics


def _results_kernel(x, scale, bias, w, b, *, epsilon, precision):
    def fused(x, *parameters):
        results = layer_norm_linear_sm90.forward(rows(x), *parameters, epsilon=epsilon)
        return tuple(a.reshape(*x.shape[:-1], *a.shape[1:]) for a in results)

    kernels = layer_norm.normalize_kernel, _dense_kernel
    separate = functools.partial(_results, *kernels, epsilon=epsilon, precision=precision)
    parameters = scale, bias, w, jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    if not _fused_pays(layer_norm_linear_sm90.forward, rows(x), *parameters, epsilon=epsilon):
        return separate(x, scale, bias, w, b)
    return on_gpu(fused, separate, x, *parameters)


def _normalized_results(normalize, dense, x, scale, bias, w, b, *, epsilon, precision):
    normalized, _, inv_std = normalize(x, jnp.ones_like(scale), jnp.zeros_like(bias), epsilon=epsilon, center=True)
    offsets = jnp.sum(upcast(w) * upcast(bias), axis=1)
    offsets = offsets if b is None else offsets + upcast(b)
    return dense(normalized, _scaled_weights(w, scale), offsets, precision=precision), normalized, inv_std


def _scaled_weights(w, scale):
    return (upcast(w) * upcast(scale)).astype(w.dtype)


_results_formula = functools.partial(_results, layer_norm.normalize, _dense)
_AXES_OF_RESULTS = Axes({"x": 0}, features=1, others=[Axes({"w": 0, "b": 0}, sums=False)])
_RESULTS = differentiable(_results_kernel, _results_formula, _AXES_OF_RESULTS)
_NORMALIZED_RESULTS = differentiable(
    functools.partial(_normalized_results, layer_norm.normalize_kernel, _dense_kernel),
    functools.partial(_normalized_results, layer_norm.normalize, _dense),
    _AXES_OF_RESULTS,
)


def _save(results, x, scale, bias, w, b, **options):
    z, offset, inv_std = results(x, scale, bias, w, b, **options)
    return z, (x, scale, bias, w, b, offset, inv_std, None)


def _save_kernel(x, scale, bias, w, b, **options):
    if not _keeps_normalized(x, w):
        return _save(_RESULTS, x, scale, bias, w, b, **options)
    z, normalized, inv_std = _NORMALIZED_RESULTS(x, scale, bias, w, b, **options)
    return z, (None, scale, bias, w, b, None, inv_std, normalized)


def _backward_formula(dy, x, scale, bias, w, b, offset, inv_std, normalized, *, epsilon, precision):
    if normalized is None:
        gradients = functools.partial(_separate_backward, layer_norm.gradients, _parameters)
        return gradients(dy, x, scale, bias, w, b, offset, inv_std, epsilon=epsilon, precision=precision)
    # The "xla" forward keeps x. Only derivatives of the "pallas" backward get `normalized`.
    t = jnp.matmul(dy, _scaled_weights(w, scale), precision=precision)
    dx = layer_norm.input_gradient(t, normalized, inv_std)
    return dx, *_of_sums(_parameters_of_sums, _sums(rows(dy), rows(normalized)), scale, bias, w, b)


def _backward_kernel(dy, x, scale, bias, w, b, offset, inv_std, normalized, *, epsilon, precision):
    if normalized is not None or _keeps_normalized(x, w):
        t = jnp.matmul(dy, _scaled_weights(w, scale), precision=precision)
        if normalized is None:
            from_x = layer_norm_streamed.input_gradient_from_x, layer_norm.input_gradient_from_x
            dx, normalized = on_gpu(*(functools.partial(f, epsilon=epsilon) for f in from_x), rows(t), rows(x))
        else:
            normalized, by_hat = rows(normalized), (layer_norm_streamed.input_gradient, layer_norm.input_gradient)
            dx = on_gpu(*by_hat, rows(t), normalized, inv_std.ravel())
        parameters = functools.partial(on_gpu, parameter_gradients, _parameters_of_sums)
        gradients = _of_sums(parameters, _sums_kernel(rows(dy), normalized), scale, bias, w, b)
        return dx.reshape(t.shape), *gradients
    kernels = layer_norm.gradients_kernel, _parameters_kernel
    separate = functools.partial(_separate_backward, *kernels, epsilon=epsilon, precision=precision)
    if not _fused_pays(layer_norm_linear_sm90.input_gradient, rows(dy), rows(x), scale, w, None, None):
        return separate(dy, x, scale, bias, w, b, offset, inv_std)
    if inv_std is None:
        offset, inv_std = row_statistics(x, epsilon=epsilon, center=True)
    return on_gpu(_fused_backward, separate, dy, x, scale, bias, w, b, offset, inv_std)


def _separate_backward(gradients, parameters, dy, x, scale, bias, w, b, offset, inv_std, *, epsilon, precision):
    dn = jnp.matmul(dy, w, precision=precision)
    dx, dscale, dbias, y = gradients(dn, x, scale, bias, offset, inv_std, epsilon=epsilon, center=True, with_y=True)
    dw, db = parameters(rows(dy), rows(y), precision=precision)
    return dx, dscale.astype(x.dtype), dbias.astype(x.dtype), dw, None if b is None else db.astype(b.dtype)


def _fused_backward(dy, x, scale, bias, w, b, offset, inv_std):
    statistics = offset.ravel(), inv_std.ravel()
    dx, normalized = layer_norm_linear_sm90.input_gradient(rows(dy), rows(x), scale, w, *statistics)
    sums = linear_sm90.weights_gradient(rows(dy), normalized, dtype=jnp.float32)
    return dx.reshape(x.shape), *_of_sums(parameter_gradients, sums, scale, bias, w, b)


def _parameters(dy, y, *, precision):
    return jnp.matmul(dy.T, y, precision=precision), jnp.sum(dy, axis=0)


def _parameters_kernel(dy, y, *, precision):
    if not _weights_gradient_pays(dy, y):
        return _parameters(dy, y, precision=precision)
    return on_gpu(linear_sm90.weights_gradient, parameter_gradients_in_float32, dy, y)


_sums = functools.partial(parameter_gradients_in_float32, dtype=jnp.float32)


def _sums_kernel(dy, normalized):
    # One device may have too few rows for the kernel.
    if not _weights_gradient_pays(dy, normalized):
        return _sums(dy, normalized)
    return on_gpu(functools.partial(linear_sm90.weights_gradient, dtype=jnp.float32), _sums, dy, normalized)


def _of_sums(parameters, sums, scale, bias, w, b):
    dw, dscale, dbias = parameters(*sums, scale, bias, w)
    return dscale.astype(scale.dtype), dbias.astype(bias.dtype), dw, None if b is None else sums[1].astype(b.dtype)


def _parameters_of_sums(s, db, scale, bias, w):
    wide = upcast(w)
    dw = s * upcast(scale) + db[:, None] * upcast(bias)
    return dw.astype(w.dtype), jnp.sum(wide * s, axis=0), jnp.sum(wide * db[:, None], axis=0)


def _default(x, scale, bias, w, b, *, epsilon, precision):
    of_layer_norm = layer_norm.default(x, scale, bias, epsilon=epsilon)
    # "autodiff" would sum db in half precision.
    if x.dtype.itemsize >= 4:
        return of_layer_norm
    return DefaultImplementation() if of_layer_norm.gpu == "pallas" else DefaultImplementation(gpu="xla")


_LAYER_NORM_LINEAR = Pair(
    lambda *arrays, **options: _results_formula(*arrays, **options)[0],
    {"xla": _backward_formula, "pallas": _backward_kernel},
    save={"xla": functools.partial(_save, _results_formula), "pallas": _save_kernel},
    residuals=lambda *arrays, **options: (*arrays, None, None, None),
    batch_axes=lambda dy, *_: Axes(
        dict.fromkeys(("dy", "x", "offset", "inv_std", "normalized"), 0),
        features=1,
        others=[Axes({"dy": dy.ndim - 1, "w": 0, "b": 0})],
    ),
    name="layer_norm_linear",
    unsupported=checks.unsupported_dtype,
    default=_default,
    sharded_like=lambda x, scale, bias, w, b: _dense(layer_norm.sharded_like(x, scale, bias), w, b, precision=None),
    jit=True,
)


def layer_norm_linear(
    x: Float[AnyArray, "*batch hidden"],
    scale: Float[AnyArray, "hidden"],
    bias: Float[AnyArray, "hidden"],
    w: Float[AnyArray, "out hidden"],
    b: Float[AnyArray, "out"] | None = None,
    epsilon: float = 1e-5,
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch out"]:
    """LayerNorm and a dense layer, `z = layer_norm(x, scale, bias) wᵀ + b`, in the promoted dtype of the arguments.

    The residuals are x and two numbers per row. For many rows in bfloat16 on compute capability 9.0,
    `implementation="pallas"` saves the normalized rows instead of x, and rounds `w * scale` to bfloat16.

    Args:
      x, scale, bias, epsilon: as in `layer_norm`.
      w, b, precision: as in `linear`.
    """
    op = "layer_norm_linear"
    x, scale, bias, w, b = layer_norm.check(op, epsilon, x=x, scale=scale, bias=bias, w=w, b=b)
    checks.shape(op, "w", w, "out", x.shape[-1])
    if b is not None:
        checks.shape(op, "b", b, w.shape[0])
    options = dict(epsilon=float(epsilon), precision=checks.precision(op, precision), implementation=implementation)
    return _LAYER_NORM_LINEAR(x, scale, bias, w, b, **options)


def layer_norm_linear_backward(
    dy: Float[AnyArray, "*batch out"],
    x: Float[AnyArray, "*batch hidden"],
    scale: Float[AnyArray, "hidden"],
    bias: Float[AnyArray, "hidden"],
    w: Float[AnyArray, "out hidden"],
    epsilon: float = 1e-5,
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
    """Gradients of `layer_norm_linear`. Let y be the result of LayerNorm, and x̂ and inv_std as in
    `layer_norm_backward`. With `dn = dy w` and `t = dn * scale`,

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dn * x̂,    dbias = Σ dn,
        dw = dyᵀ y,    db = Σ dy,

    with means over each row and sums over all rows. db has the dtype of w.

    Source: docs/layer_norm.md.
    """
    op = "layer_norm_linear_backward"
    arguments = x, scale, bias, w, w
    dy, x, scale, bias, w = layer_norm.check(op, epsilon, dy=dy, x=x, scale=scale, bias=bias, w=w)
    checks.shape(op, "w", w, "out", x.shape[-1])
    checks.shape(op, "dy", dy, *x.shape[:-1], w.shape[0])
    b = jnp.zeros(w.shape[:1], w.dtype)
    options = dict(epsilon=float(epsilon), precision=checks.precision(op, precision), implementation=implementation)
    return in_dtypes_of(arguments, _LAYER_NORM_LINEAR.vjp(dy, x, scale, bias, w, b, **options))


_SIZES = (65536, 1024, 4096), (65536, 1024, 1024), (32768, 4096, 4096), (262144, 256, 256)

ENTRIES = pair_entries(
    layer_norm_linear,
    case_of((2, 3, 4), (2, 3, 5), (5,), (5,), (4, 5), (4,)),
    row_cases(
        *_SIZES,
        of=lambda hidden, out: case_of((BATCH, out), (BATCH, hidden), (hidden,), (hidden,), (out, hidden), (out,)),
    ),
    takes=slice(4),
)
