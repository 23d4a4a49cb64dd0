"""Element-wise functions of one array.

Every function takes floating x of any shape, and returns x's shape and dtype.
"""

import math

import jax.numpy as jnp
from jax import lax

from jaxbp.common import checks
from jaxbp.common.checks import AnyFloats, Floats
from jaxbp.ops.pointwise._elementwise import Elementwise
from jaxbp.pairing import Implementation

_EXP = Elementwise("exp", jnp.exp, lambda dy, x: dy * jnp.exp(x))
_LOG = Elementwise("log", jnp.log, lambda dy, x: dy / x)
_SQRT = Elementwise(
    "sqrt",
    jnp.sqrt,
    # For small x, the derivative of `rsqrt` overflows, and a dy of 0 times infinity would be NaN.
    lambda dy, x: dy / jnp.sqrt(x) * 0.5,
    in_kernels=lambda dy, x: dy * 0.5 * lax.rsqrt(x),
)
# In newer versions of JAX, `jnp.abs` has the slope 1 at 0, not 0.
_ABS = Elementwise("abs", lambda x: x * jnp.sign(x), lambda dy, x: dy * jnp.sign(x))
_SIN = Elementwise("sin", jnp.sin, lambda dy, x: dy * jnp.cos(x))
_COS = Elementwise("cos", jnp.cos, lambda dy, x: -dy * jnp.sin(x))
# If the forward were a minimum of a maximum, autodiff would give dy / 2 at a bound.
_CLIP = Elementwise(
    "clip",
    lambda arr, *, min, max: jnp.where(arr < min, min, jnp.where(arr > max, max, arr)),
    lambda dy, arr, *, min, max: jnp.where((arr < min) | (arr > max), 0.0, dy),
)


def exp(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Exponential, `y = eˣ`."""
    return _EXP.of(implementation, {"x": x})


def exp_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `exp`: `dx = dy eˣ`."""
    return _EXP.backward_of(implementation, dy, {"x": x})


def log(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Natural logarithm, `y = ln x`."""
    return _LOG.of(implementation, {"x": x})


def log_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `log`: `dx = dy / x`."""
    return _LOG.backward_of(implementation, dy, {"x": x})


def sqrt(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Square root, `y = √x`."""
    return _SQRT.of(implementation, {"x": x})


def sqrt_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `sqrt`: `dx = dy / (2 √x)`."""
    return _SQRT.backward_of(implementation, dy, {"x": x})


def abs(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Absolute value, `y = |x|`."""
    return _ABS.of(implementation, {"x": x})


def abs_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `abs`: `dx = dy sign(x)`, with sign(0) = 0."""
    return _ABS.backward_of(implementation, dy, {"x": x})


def sin(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Sine, `y = sin x`."""
    return _SIN.of(implementation, {"x": x})


def sin_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `sin`: `dx = dy cos x`."""
    return _SIN.backward_of(implementation, dy, {"x": x})


def cos(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Cosine, `y = cos x`."""
    return _COS.of(implementation, {"x": x})


def cos_backward(dy: AnyFloats, x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `cos`: `dx = -dy sin x`."""
    return _COS.backward_of(implementation, dy, {"x": x})


def clip(
    arr: AnyFloats, min: float | None = None, max: float | None = None, *, implementation: Implementation = None
) -> Floats:
    """Clip to bounds, `y = min(max(arr, lower), upper)`, where the argument `min` is lower, and `max` is upper. None
    means no bound."""
    return _CLIP.of(implementation, {"arr": arr}, **_bounds("clip", min, max))


def clip_backward(
    dy: AnyFloats,
    arr: AnyFloats,
    min: float | None = None,
    max: float | None = None,
    *,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `clip`: `dy` where arr is between the bounds or equal to a bound, else 0."""
    return _CLIP.backward_of(implementation, dy, {"arr": arr}, **_bounds("clip_backward", min, max))


def _bounds(op, low, high):
    low = -math.inf if low is None else checks.number(op, "min", low)
    return {"min": low, "max": math.inf if high is None else checks.number(op, "max", high, low)}
