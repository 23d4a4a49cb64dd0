"""Element-wise functions of one array.

Every function takes x of any shape, and returns x's shape, and x's dtype if it is floating.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import APART, SMOOTH, Argument, hidden_entries
from jaxbp.common.checks import AnyArray, AnyFloats, Floats
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
_ABS = Elementwise(
    "abs", lambda x: jnp.abs(x) if checks.is_discrete(x) else x * jnp.sign(x), lambda dy, x: dy * jnp.sign(x)
)
_SIN = Elementwise("sin", jnp.sin, lambda dy, x: dy * jnp.cos(x))
_COS = Elementwise("cos", jnp.cos, lambda dy, x: -dy * jnp.sin(x))
# If the forward were a minimum of a maximum, autodiff would give dy / 2 at a bound.
_CLIP = Elementwise(
    "clip",
    lambda arr, *, min, max: jnp.where(arr < min, min, jnp.where(arr > max, max, arr)),
    lambda dy, arr, *, min, max: jnp.where((arr < min) | (arr > max), 0.0, dy),
)


def _clipped(arr, *bounds, names):
    """Return `arr`, clipped to each bound in turn, and per bound, a mask of the elements that the bound replaces."""
    y, replaced = arr, []
    for name, bound in zip(names, bounds, strict=True):
        replaced.append((y < bound if name == "min" else y > bound) | (bound != bound))
        y = jnp.where(replaced[-1], bound, y)
    return y, replaced


def _clip_gradients(dy, arr, *bounds, names):
    gradients = []
    for is_replaced in reversed(_clipped(arr, *bounds, names=names)[1]):
        gradients.insert(0, jnp.where(is_replaced, dy, 0.0))
        dy = jnp.where(is_replaced, 0.0, dy)
    return dy, *gradients


_CLIP_TO_ARRAYS = Elementwise("clip", lambda *arrays, names: _clipped(*arrays, names=names)[0], _clip_gradients)


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
    arr: AnyFloats,
    min: Float[AnyArray, "*shape1"] | float | None = None,
    max: Float[AnyArray, "*shape2"] | float | None = None,
    *,
    implementation: Implementation = None,
) -> Floats:
    """Clip to bounds, `y = min(max(arr, lower), upper)`, where the argument `min` is lower, and `max` is upper. None
    means no bound.

    A bound may be a differentiable array, which broadcasts with `arr`. y has the promoted dtype of the arrays.
    """
    arrays, numbers = _bounds("clip", arr, min, max)
    if numbers:
        return _CLIP.of(implementation, arrays, **numbers)
    return _CLIP_TO_ARRAYS.of(implementation, arrays, names=tuple(arrays)[1:])


def clip_backward(
    dy: AnyFloats,
    arr: AnyFloats,
    min: Float[AnyArray, "*shape1"] | float | None = None,
    max: Float[AnyArray, "*shape2"] | float | None = None,
    *,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `clip` with respect to arr: `dy` where arr is between the bounds or equal to a bound, else 0."""
    arrays, numbers = _bounds("clip_backward", arr, min, max)
    if numbers:
        return _CLIP.backward_of(implementation, dy, arrays, **numbers)
    return _CLIP_TO_ARRAYS.backward_of(implementation, dy, arrays, names=tuple(arrays)[1:])[0]


def _bounds(op, arr, low, high):
    """Return the arrays of a call of `clip`, and its bounds as static numbers, or None if the bounds are arrays."""
    given = {name: bound for name, bound in (("min", low), ("max", high)) if bound is not None}
    arr = checks.array(op, "arr", arr)
    if checks.is_discrete(arr) or any(hasattr(bound, "dtype") for bound in given.values()):
        return {"arr": arr, **given}, None
    low = checks.number(op, "min", given.get("min", -math.inf))
    return {"arr": arr}, {"min": low, "max": checks.number(op, "max", given.get("max", math.inf), low)}


_POSITIVE = Argument((2, 3, 4), positive=True)

ENTRIES = (
    *hidden_entries(exp, SMOOTH),
    *hidden_entries(log, _POSITIVE),
    *hidden_entries(sqrt, _POSITIVE),
    *hidden_entries(abs, APART),
    *hidden_entries(sin, SMOOTH),
    *hidden_entries(cos, SMOOTH),
    *hidden_entries(clip, APART, min=-1.1, max=0.5),
)
