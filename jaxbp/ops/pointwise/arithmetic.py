"""Arithmetic, with NumPy's broadcasting.

x1 and x2 are arrays or numbers, promoted as in `jax.numpy`. A backward returns (dx1, dx2), each summed over
the axes along which its argument is broadcast.
"""

import functools
import math

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, SMOOTH, Argument, case_of, hidden_entries, pair_entries
from jaxbp.common.checks import AnyArray, AnyFloats, Floats
from jaxbp.ops._defaults import AUTODIFF_EVERYWHERE, AUTODIFF_ON_CPU, fused_pair, xla_and_pallas
from jaxbp.ops.pointwise._elementwise import Elementwise
from jaxbp.pairing import Implementation

X1 = Float[AnyArray, "*shape1"] | float
X2 = Float[AnyArray, "*shape2"] | float
Gradients = tuple[Float[Array, "*shape1"], Float[Array, "*shape2"]]


def _power(x1, x2):
    at_zero = x1 == 0
    steep = at_zero & (x2 <= 0)
    # 0 ** 0 has the derivative 0 with respect to the base.
    base = jnp.where(at_zero & (x2 == 0), 1.0, x1)
    y = jnp.power(base, jnp.where(steep, lax.stop_gradient(x2), x2))
    # Where `steep`, the square root is 0, but gives y the derivative -inf with respect to x2.
    gap = jnp.where(steep, x2 - lax.stop_gradient(x2), 1.0)
    return y - jnp.where(steep, jnp.sqrt(gap), 0.0)


def _power_in_kernels(base, exponent):
    # In exp(exponent * log(base)), the exponent multiplies the logarithm's rounding error, so two numbers represent it.
    log, rest = _log_in_two(jnp.abs(base))
    product, rest_of_product = _product_in_two(exponent, log)
    in_range = jnp.abs(product) < 128
    rest = jnp.where(in_range, rest_of_product + exponent * rest, 0.0)
    total = product + rest
    size = jnp.exp(total)
    size = jnp.where(in_range, size + size * (rest - (total - product)), size)
    size = jnp.where(exponent == 0, 1.0, size)
    half = exponent * 0.5
    whole, even = exponent == _rounded(exponent), half == _rounded(half)
    return jnp.where((base >= 0) | even, size, jnp.where(whole, -size, jnp.nan))


def _log_in_two(x):
    """Return `ln x = n ln 2 + 2 atanh((m - 1) / (m + 1))`, with `x = m 2ⁿ`, as a sum of two float32 numbers."""
    is_normal = (x >= float(jnp.finfo(jnp.float32).tiny)) & (x < jnp.inf)
    normal = jnp.where(is_normal, x, 1.0)
    power = _with_bits(normal, 0x7F800000)
    m, n = normal / power, _rounded(jnp.log(power) * (1 / math.log(2)))
    m, n = jnp.where(m > math.sqrt(2), 0.5 * m, m), jnp.where(m > math.sqrt(2), n + 1, n)
    below = m + 1
    s = (m - 1) / below
    product, rest_of_product = _product_in_two(s, below)
    left = ((m - 1) - product) - rest_of_product - s * (m - (below - 1))
    square = s * s
    series = 2 * s * square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square / 11))))
    most_of_log_2 = 355 / 512  # n times this number is exact
    large, small = n * most_of_log_2, 2 * s
    log = large + small
    rest = (large - (log - (log - large))) + (small - (log - large))
    rest += n * (math.log(2) - most_of_log_2) + (2 * left / below + series)
    return jnp.where(is_normal, log, jnp.log(x)), jnp.where(is_normal, rest, 0.0)


def _product_in_two(a, b):
    """Return `a * b` as two float32 numbers to add. The first is exact: a times b, each truncated to 12 bits."""
    a_high, b_high = _with_bits(a, ~0xFFF), _with_bits(b, ~0xFFF)
    a_low, b_low = a - a_high, b - b_high
    return a_high * b_high, a_high * b_low + (a_low * b_high + a_low * b_low)


def _with_bits(x, mask):
    bits = lax.bitcast_convert_type(x, jnp.int32) & mask
    return lax.bitcast_convert_type(bits, jnp.float32)


def _rounded(x):
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _power_gradient(power):
    def gradient(dy, x1, x2):
        # Where `constant`, d1 is 0, and base 1 avoids 0 times an infinite slope. Elsewhere, second derivatives need the
        # slope of the factor x2.
        constant, at_zero = (x2 == 0) & ((x1 == 0) | (x1 != x1)), x1 == 0
        d1 = jnp.where(constant, 0.0, x2 * power(jnp.where(constant, 1.0, x1), x2 - 1))
        base = jnp.where(at_zero, 1.0, x1)
        d2 = jnp.where(at_zero, jnp.where(x2 > 0, 0.0, -jnp.inf), power(base, x2) * jnp.log(base))
        return dy * d1, dy * d2

    return gradient


def _gradient_of_larger(dy, x1, x2):
    return jnp.where(x1 > x2, dy, jnp.where(x1 == x2, 0.5 * dy, 0.0))


_NEGATIVE = fused_pair(
    lambda x, *, shape: -x,
    xla_and_pallas(lambda elementwise, sum_over, dy, *, shape: elementwise(jnp.negative, dy)),
    linear=True,
    name="negative",
)
_ADD = Elementwise("add", jnp.add, lambda dy, x1, x2: (dy, dy))
_SUBTRACT = Elementwise("subtract", jnp.subtract, lambda dy, x1, x2: (dy, -dy))
_MULTIPLY = Elementwise("multiply", jnp.multiply, lambda dy, x1, x2: (dy * x2, dy * x1))
_DIVIDE = Elementwise("divide", jnp.divide, lambda dy, x1, x2: (dy / x2, -(dy / x2) * (x1 / x2)))
_POWER = Elementwise(
    "power",
    _power,
    _power_gradient(jnp.power),
    in_kernels=_power_gradient(_power_in_kernels),
    default=AUTODIFF_EVERYWHERE,
    default_vjp=AUTODIFF_ON_CPU,
)
_MAXIMUM = Elementwise(
    "maximum", jnp.maximum, lambda dy, x1, x2: (_gradient_of_larger(dy, x1, x2), _gradient_of_larger(dy, x2, x1))
)
_MINIMUM = Elementwise(
    "minimum", jnp.minimum, lambda dy, x1, x2: (_gradient_of_larger(dy, x2, x1), _gradient_of_larger(dy, x1, x2))
)


def add(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Sum, `y = x1 + x2`."""
    return _ADD.of(implementation, {"x1": x1, "x2": x2})


def add_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `add`: `dx1 = dy`, `dx2 = dy`."""
    return _ADD.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def subtract(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Difference, `y = x1 - x2`."""
    return _SUBTRACT.of(implementation, {"x1": x1, "x2": x2})


def subtract_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `subtract`: `dx1 = dy`, `dx2 = -dy`."""
    return _SUBTRACT.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def multiply(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Product, `y = x1 x2`."""
    return _MULTIPLY.of(implementation, {"x1": x1, "x2": x2})


def multiply_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `multiply`: `dx1 = dy x2`, `dx2 = dy x1`."""
    return _MULTIPLY.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def divide(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Quotient, `y = x1 / x2`."""
    return _DIVIDE.of(implementation, {"x1": x1, "x2": x2})


def divide_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `divide`: `dx1 = dy / x2`, `dx2 = -dy x1 / x2²`."""
    return _DIVIDE.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def power(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Power, `y = x1 ** x2`. `0 ** 0` is 1."""
    arrays = {name: checks.array("power", name, a) for name, a in (("x1", x1), ("x2", x2))}
    if all(map(checks.is_discrete, arrays.values())):
        checks.broadcast("power", **arrays)
        return jnp.power(x1, x2)  # in the dtype of x1
    return _POWER.of(implementation, {"x1": x1, "x2": x2})


def power_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `power`: `dx1 = dy x2 x1 ** (x2 - 1)`, `dx2 = dy x1 ** x2 ln x1`.

    If x1 is 0, dx2 is dy times 0 for x2 > 0, else dy times -inf. For negative x1, dx2 is NaN.
    """
    return _POWER.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def maximum(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Element-wise maximum, `y = max(x1, x2)`."""
    return _MAXIMUM.of(implementation, {"x1": x1, "x2": x2})


def maximum_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `maximum`: `dx1 = dy` where x1 > x2, else 0, and `dx2 = dy` where x2 > x1, else 0. Where x1 equals
    x2, both are dy / 2."""
    return _MAXIMUM.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def minimum(x1: X1, x2: X2, *, implementation: Implementation = None) -> Floats:
    """Element-wise minimum, `y = min(x1, x2)`."""
    return _MINIMUM.of(implementation, {"x1": x1, "x2": x2})


def minimum_backward(dy: AnyFloats, x1: X1, x2: X2, *, implementation: Implementation = None) -> Gradients:
    """Gradients of `minimum`: `dx1 = dy` where x1 < x2, else 0, and `dx2 = dy` where x2 < x1, else 0. Where x1 equals
    x2, both are dy / 2."""
    return _MINIMUM.backward_of(implementation, dy, {"x1": x1, "x2": x2})


def negative(x: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Negative, `y = -x`."""
    checks.refuse_booleans("negative", "x", x)
    (x,) = checks.numeric("negative", x=x)
    return _NEGATIVE(x, implementation=implementation, shape=x.shape)


def negative_backward(dy: AnyFloats, *, implementation: Implementation = None) -> Floats:
    """Gradient of `negative`: `dx = -dy`."""
    (dy,) = checks.floating("negative_backward", dy=dy)
    return _NEGATIVE.vjp(dy, implementation=implementation, shape=dy.shape)


def _entries(function, **of):
    x1, x2 = (functools.partial(Argument, **of.get(name, {})) for name in ("x1", "x2"))
    rows = 2 if function is divide else 1
    small = case_of((3, 2, 4), x1((3, rows, 4)), x2((2, 1)))
    real = case_of((BATCH, 1024), x1((BATCH, 1024)), x2((1024,)))
    return pair_entries(function, small, {"bias": real}, like="divide")


ENTRIES = (
    *_entries(add),
    *_entries(subtract),
    *_entries(multiply),
    *_entries(divide, x2=dict(positive=True)),
    *_entries(power, x1=dict(positive=True)),
    *_entries(maximum),
    *_entries(minimum),
    *hidden_entries(negative, SMOOTH, takes=slice(0)),
)
