"""Activation functions.

Every function takes x of any shape, and returns x's shape, and x's dtype if it is floating.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import barriers, checks
from jaxbp.common.cases import APART, BATCH, SMOOTH, block_cases, case_of, hidden_entries, pair_entries
from jaxbp.common.checks import AnyArray, AnyFloats, AnyMask, Floats, Number
from jaxbp.common.numerics import exclude, exponentials, largest_and_total, select, upcast
from jaxbp.ops._defaults import AUTODIFF_EVERYWHERE, AUTODIFF_ON_CPU, fused_pair, kernel_in_half, xla_and_pallas
from jaxbp.ops.pointwise._elementwise import Elementwise, WithNumber
from jaxbp.pairing import Implementation, in_dtypes_of
from pallas_kernels.pointwise.elementwise import elementwise
from pallas_kernels.pointwise.reductions import sum_over

Axis = int | Sequence[int] | None
Mask = AnyMask | None


def relu_gradient(dy, x):
    return jnp.where(x > 0, dy, 0.0)


def sigmoid_gradient(dy, x):
    return dy * jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)


_RELU = Elementwise("relu", jax.nn.relu, relu_gradient, keeps_result=True)


def relu(x: Float[AnyArray, "..."], *, implementation: Implementation = None) -> Float[Array, "..."]:
    """Rectified linear unit, `y = max(x, 0)`.

    Source: V. Nair and G. Hinton, "Rectified linear units improve restricted Boltzmann machines", ICML 2010.
    """
    return _RELU.of(implementation, {"x": x})


def relu_backward(
    dy: Float[AnyArray, "..."], x: Float[AnyArray, "..."], *, implementation: Implementation = None
) -> Float[Array, "..."]:
    """Gradient of `relu`: `dx = dy where x > 0, else 0`."""
    return _RELU.backward_of(implementation, dy, {"x": x})


_SIGMOID = Elementwise("sigmoid", jax.nn.sigmoid, sigmoid_gradient)
_TANH = Elementwise("tanh", jnp.tanh, lambda dy, x: dy * (1 - jnp.tanh(x) ** 2))


def _leaky_relu(x, slope):
    return jnp.where(x > 0, x, slope * x)


def _leaky_relu_gradient(dy, x, slope):
    return (jnp.where(x > 0, dy, slope * dy),)


def _slope_gradient(dy, x, slope):
    return jnp.where(x > 0, 0.0, dy * x)


def _elu_gradient(dy, x, alpha):
    return (dy * jnp.where(x > 0, 1.0, alpha * jnp.exp(jnp.where(x > 0, 0.0, x))),)


def _alpha_gradient(dy, x, alpha):
    return dy * jnp.where(x > 0, 0.0, jnp.exp(jnp.where(x > 0, 0.0, x)) - 1)


_LEAKY_RELU = WithNumber("leaky_relu", "negative_slope", _leaky_relu, _leaky_relu_gradient, _slope_gradient)


def _prelu(x, alpha):
    return _leaky_relu(x, lax.broadcast_to_rank(alpha, x.ndim))


def _prelu_gradients(dy, x, alpha):
    return *_leaky_relu_gradient(dy, x, lax.broadcast_to_rank(alpha, x.ndim)), _slope_gradient(dy, x, alpha)


_PRELU = Elementwise("prelu", _prelu, _prelu_gradients)
_ELU = WithNumber("elu", "alpha", jax.nn.elu, _elu_gradient, _alpha_gradient)


_SATURATION = 1000.0
"""In float64, `gelu`, `silu`, and `mish` round to 0 or x beyond ±1000."""


def saturating(function):
    """Return `function`, but 0 for x < -1000 and x for x > 1000, where its formula may multiply 0 by infinity."""

    def forward(x, **options):
        is_saturated = jnp.abs(x) > _SATURATION
        y = function(jnp.where(is_saturated, 0, x), **options)
        return jnp.where(is_saturated, jnp.where(x > 0, x, 0), y)

    return forward


def _unsaturated(x):
    return jnp.minimum(jnp.maximum(x, -_SATURATION), _SATURATION)


def _gelu(x, *, approximate):
    by_tanh = functools.partial(saturating(jax.nn.gelu), approximate=approximate)
    # On a GPU, XLA's tanh takes longer than reading x and writing y. On a CPU, the logistic function takes longer.
    return lax.platform_dependent(x, cpu=by_tanh, default=_gelu_by_sigmoid) if approximate else by_tanh(x)


_GELU_SLOPE, _GELU_CUBE = math.sqrt(8 / math.pi), 0.044715


def _gelu_by_sigmoid(x):
    beyond = jnp.maximum(x - _SATURATION, 0)
    x = _unsaturated(x)
    # (1 + tanh(u)) / 2 = σ(2 u)
    return x * jax.nn.sigmoid(_GELU_SLOPE * x * (1 + _GELU_CUBE * x * x)) + beyond


def _gelu_gradient_in_kernels(dy, x, *, approximate):
    if not approximate:
        return gelu_gradient(dy, x, approximate=False)
    x = _unsaturated(x)
    cube = _GELU_CUBE * x * x
    s = 1 / (1 + jnp.exp2(-_GELU_SLOPE / math.log(2) * x * (1 + cube)))
    return dy * (s + x * s * (1 - s) * (_GELU_SLOPE * (1 + 3 * cube)))


def gelu_gradient(dy, x, *, approximate):
    x = _unsaturated(x)
    if approximate:
        slope = math.sqrt(2 / math.pi)
        t = jnp.tanh(slope * (x + 0.044715 * x**3))
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x))
    probability = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    return dy * (probability + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def silu_gradient(dy, x):
    x = _unsaturated(x)
    s = jax.nn.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _mish_gradient(dy, x):
    x = _unsaturated(x)
    # tanh(softplus(x)) = n / d, computed from exponentials that cannot overflow.
    e = jnp.exp(jnp.where(x > 0, -x, x))
    n = jnp.where(x > 0, 1 + 2 * e, e * (e + 2))
    d = jnp.where(x > 0, n + 2 * e * e, n + 2)
    return dy * (n / d + x * jax.nn.sigmoid(x) * ((d - n) / d) * ((d + n) / d))


_GELU = Elementwise(
    "gelu",
    _gelu,
    gelu_gradient,
    in_kernels=_gelu_gradient_in_kernels,
    default=kernel_in_half,
    default_vjp=kernel_in_half,
)
_SILU = Elementwise("silu", saturating(jax.nn.silu), silu_gradient)
_MISH = Elementwise("mish", saturating(jax.nn.mish), _mish_gradient)
_SOFTPLUS = Elementwise("softplus", jax.nn.softplus, lambda dy, x: dy * jax.nn.sigmoid(x))


def _normalized(function, excluded, x, where, *, axis):
    y = function(upcast(exclude(where, x, axis)), axis=axis)
    return select(where, y, excluded).astype(x.dtype)


def _softmax_save(x, where, *, axis):
    y = barriers.stored(_softmax_forward(x, where, axis=axis))
    return y, (y, where)


def _softmax_residuals(x, where, *, axis):
    return _softmax_forward(upcast(x), where, axis=axis), where


def _softmax_terms(dy, y):
    return dy * y, y


def _softmax_combine(dy, y, weighted, total):
    # Half precisions round y, so `total` is not exactly 1. Divided by it, a constant dy still has the gradient 0.
    return y * (dy - weighted / jnp.where(total == 0, 1, total))


def _softmax_backward(elementwise, sum_over, dy, y, where, *, axis):
    arrays = select(where, dy, 0), y
    return elementwise(_softmax_combine, *arrays, *sum_over(_softmax_terms, *arrays, axes=axis)), None


_softmax_forward = functools.partial(_normalized, jax.nn.softmax, 0.0)
_SOFTMAX = fused_pair(
    _softmax_forward,
    xla_and_pallas(_softmax_backward),
    save=_softmax_save,
    residuals=_softmax_residuals,
    name="softmax",
    default=AUTODIFF_ON_CPU,
    default_vjp=AUTODIFF_ON_CPU,
)


def _log_softmax_formula(dy, x, where, *, axis):
    # y has too few digits in half precisions, so the backward computes the softmax from x.
    wide_x = barriers.recomputed(upcast(x))
    e, total = exponentials(exclude(where, wide_x, axis), axis)
    dy = upcast(select(where, dy, 0))
    dx = dy - e * (jnp.sum(dy, axis=axis, keepdims=True) / total)
    return select(where, dx.astype(x.dtype), 0), None


def _log_softmax_gradient(dy, x, largest, total, dy_sum):
    return dy - jnp.exp(x - largest) / total * dy_sum


def _log_softmax_kernel(dy, x, where, *, axis):
    x, dy = exclude(where, x, axis), select(where, dy, 0)
    dy_sum = sum_over(lambda dy: dy, dy, axes=axis)
    dx = elementwise(_log_softmax_gradient, dy, x, *largest_and_total(x, axis), dy_sum)
    return select(where, dx, 0), None


_LOG_SOFTMAX = fused_pair(
    functools.partial(_normalized, jax.nn.log_softmax, -math.inf),
    {"xla": _log_softmax_formula, "pallas": _log_softmax_kernel},
    name="log_softmax",
    default=AUTODIFF_EVERYWHERE,
    default_vjp=AUTODIFF_ON_CPU,
)


def sigmoid(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Logistic function, `y = σ(x) = 1 / (1 + e⁻ˣ)`."""
    return _SIGMOID.of(implementation, {"x": x})


def sigmoid_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `sigmoid`: `dx = dy σ(x) (1 - σ(x))`."""
    return _SIGMOID.backward_of(implementation, dy, {"x": x})


def tanh(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Hyperbolic tangent, `y = tanh x`."""
    return _TANH.of(implementation, {"x": x})


def tanh_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `tanh`: `dx = dy (1 - tanh² x)`."""
    return _TANH.backward_of(implementation, dy, {"x": x})


def leaky_relu(x: AnyFloats, negative_slope: Number = 0.01, *, implementation: Implementation = None) -> Floats:
    """Leaky ReLU, `y = x where x > 0, else negative_slope x`. The slope may be a differentiable array of shape ().

    Source: A. Maas et al., "Rectifier nonlinearities improve neural network acoustic models", 2013.
    """
    return _LEAKY_RELU.of(implementation, {"x": x}, negative_slope)


def leaky_relu_backward(
    dy: AnyFloats, x: AnyFloats, negative_slope: Number = 0.01, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `leaky_relu` with respect to x: `dx = dy where x > 0, else negative_slope dy`."""
    return _LEAKY_RELU.backward_of(implementation, dy, {"x": x}, negative_slope)


def prelu(x: AnyFloats, alpha: Float[AnyArray, "*alpha_shape"], *, implementation: Implementation = None) -> Floats:
    """Leaky ReLU with learned slopes, `y = x where x > 0, else alpha x`.

    alpha broadcasts to x, as `(channels, 1, 1)` does for one slope per channel of images.

    Source: K. He et al., "Delving deep into rectifiers", ICCV 2015.
    """
    _check_alpha("prelu", x, alpha)
    return _PRELU.of(implementation, {"x": x, "alpha": alpha})


def prelu_backward(
    dy: AnyFloats, x: AnyFloats, alpha: Float[AnyArray, "*alpha_shape"], *, implementation: Implementation = None
) -> tuple[Floats, Float[Array, "*alpha_shape"]]:
    """Gradients of `prelu`: `dx = dy where x > 0, else alpha dy`, and `dalpha = Σ dy x where x <= 0`, summed over the
    axes along which alpha is broadcast."""
    _check_alpha("prelu_backward", x, alpha)
    return _PRELU.backward_of(implementation, dy, {"x": x, "alpha": alpha})


def _check_alpha(op, x, alpha):
    x, alpha = checks.floating(op, x=x, alpha=alpha)
    if checks.broadcast(op, x=x, alpha=alpha) != x.shape:
        raise ValueError(
            f"{op}: alpha has shape {alpha.shape}; wants a shape that broadcasts to {x.shape}, the shape of x"
        )


def elu(x: AnyFloats, alpha: Number = 1.0, *, implementation: Implementation = None) -> Floats:
    """Exponential linear unit, `y = x where x > 0, else alpha (eˣ - 1)`. alpha may be a differentiable array of shape
    ().

    Source: D. Clevert et al., "Fast and accurate deep network learning by exponential linear
    units", ICLR 2016.
    """
    return _ELU.of(implementation, {"x": x}, alpha)


def elu_backward(dy: AnyFloats, x: AnyFloats, alpha: Number = 1.0, *, implementation: Implementation = None) -> Floats:
    """Gradient of `elu` with respect to x: `dx = dy where x > 0, else dy alpha eˣ`."""
    return _ELU.backward_of(implementation, dy, {"x": x}, alpha)


def gelu(x: AnyFloats, approximate: bool = True, *, implementation: Implementation = None) -> Floats:
    """Gaussian error linear unit, `y = x Φ(x)`, where Φ is the standard normal distribution function.

    With `approximate`, `y = x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`.

    Source: D. Hendrycks and K. Gimpel, "Gaussian error linear units", arXiv:1606.08415.
    """
    return _GELU.of(implementation, {"x": x}, approximate=checks.boolean("gelu", "approximate", approximate))


def gelu_backward(
    dy: AnyFloats, x: AnyFloats, approximate: bool = True, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `gelu`: `dx = dy (Φ(x) + x φ(x))`, where φ is the standard normal density.

    With `approximate`, `dx = dy/2 (1 + t + x (1 - t²) √(2/π) (1 + 0.134145 x²))`, where t is the tanh in `gelu`.
    """
    approximate = checks.boolean("gelu_backward", "approximate", approximate)
    return _GELU.backward_of(implementation, dy, {"x": x}, approximate=approximate)


def silu(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Sigmoid linear unit, `y = x σ(x)`, also called swish.

    Source: S. Elfwing et al., "Sigmoid-weighted linear units", arXiv:1702.03118.
    """
    return _SILU.of(implementation, {"x": x})


def silu_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `silu`: `dx = dy (σ(x) + x σ(x) (1 - σ(x)))`."""
    return _SILU.backward_of(implementation, dy, {"x": x})


def mish(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Mish, `y = x tanh(softplus(x))`.

    Source: D. Misra, "Mish", BMVC 2020.
    """
    return _MISH.of(implementation, {"x": x})


def mish_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `mish`: `dx = dy (t + x σ(x) (1 - t²))` with `t = tanh(softplus(x))`."""
    return _MISH.backward_of(implementation, dy, {"x": x})


def softplus(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Softplus, `y = ln(1 + eˣ)`."""
    return _SOFTPLUS.of(implementation, {"x": x})


def softplus_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `softplus`: `dx = dy σ(x)`."""
    return _SOFTPLUS.backward_of(implementation, dy, {"x": x})


def softmax(x: AnyFloats, axis: Axis = -1, where: Mask = None, *, implementation: Implementation = None) -> Floats:
    """Softmax, `yᵢ = exp(xᵢ) / Σⱼ exp(xⱼ)`, with the sum over `axis`: one axis, several axes, or None for all axes.

    The boolean array `where` broadcasts to x. An element where it is False is left out of the sum, and has y and
    gradient 0, even if the element is NaN.
    """
    x, where, axis = _check("softmax", axis, where, x=x)
    return _SOFTMAX(x, where, implementation=implementation, axis=axis)


def softmax_backward(
    dy: AnyFloats, x: AnyFloats, axis: Axis = -1, where: Mask = None, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `softmax`: `dxᵢ = yᵢ (dyᵢ - Σⱼ dyⱼ yⱼ)`, where y is the softmax of x."""
    *arrays, axis = _check("softmax_backward", axis, where, dy=dy, x=x)
    return in_dtypes_of(x, _SOFTMAX.vjp(*arrays, implementation=implementation, axis=axis))


def log_softmax(x: AnyFloats, axis: Axis = -1, where: Mask = None, *, implementation: Implementation = None) -> Floats:
    """Logarithm of the softmax, `yᵢ = xᵢ - ln Σⱼ exp(xⱼ)`, with `axis` and `where` as in `softmax`. Excluded elements
    have y = -inf and gradient 0."""
    x, where, axis = _check("log_softmax", axis, where, x=x)
    return _LOG_SOFTMAX(x, where, implementation=implementation, axis=axis)


def log_softmax_backward(
    dy: AnyFloats, x: AnyFloats, axis: Axis = -1, where: Mask = None, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `log_softmax`: `dxᵢ = dyᵢ - exp(yᵢ) Σⱼ dyⱼ`, with y as in `log_softmax` and the sum over the included
    elements."""
    *arrays, axis = _check("log_softmax_backward", axis, where, dy=dy, x=x)
    return in_dtypes_of(x, _LOG_SOFTMAX.vjp(*arrays, implementation=implementation, axis=axis))


def _check(op, axis, where, **arrays):
    checks.refuse_booleans(op, "x", arrays["x"])  # JAX's softmax does not subtract booleans
    *dy, x = checks.floating(op, **arrays)
    if dy:
        checks.shape(op, "dy", *dy, *x.shape)
    return *dy, x, checks.mask(op, where, x.shape), checks.axes(op, axis, x.ndim)


RELU_ENTRIES = pair_entries(
    relu,
    case_of((3, 7), (3, 7)),
    {
        **block_cases("relu", lambda x, w, z, y: case_of(z, z)),
        "relu3": case_of((BATCH, 120), (BATCH, 120)),
        "relu4": case_of((BATCH, 84), (BATCH, 84)),
    },
)
ENTRIES = (
    *hidden_entries(leaky_relu, APART, negative_slope=0.1),
    *pair_entries(
        prelu,
        case_of((2, 3, 4), (2, 3, 4), (3, 1)),
        {"images": case_of((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16, 1, 1))},
        like="divide",
    ),
    *hidden_entries(elu, APART, alpha=0.7),
    *hidden_entries(sigmoid, SMOOTH),
    *hidden_entries(tanh, SMOOTH),
    *hidden_entries(gelu, SMOOTH, approximate=False),
    *hidden_entries(silu, SMOOTH),
    *hidden_entries(mish, SMOOTH),
    *hidden_entries(softplus, SMOOTH),
    *hidden_entries(softmax, SMOOTH, place="rows", like="divide"),
    *hidden_entries(log_softmax, SMOOTH, place="rows", like="divide"),
)
