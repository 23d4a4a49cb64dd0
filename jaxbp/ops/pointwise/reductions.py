"""Reductions over any axes.

Every function takes `a`, of any shape and floating dtype, and, as in `jax.numpy`, `axis` (one int, several, or None for
all) and `keepdims` (whether the reduced axes stay, with size 1). It returns an array in a's dtype. Half precisions are
summed in float32. `implementation` is "pallas", "xla", "autodiff", or None for the fastest. Every backward takes `dy`,
the gradient with respect to the result, and returns `da`. Invalid arguments raise a TypeError or a ValueError.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray, AnyFloats, Floats
from jaxbp.common.numerics import largest_and_total, mean_and_rest, upcast
from jaxbp.ops._defaults import AUTODIFF_ON_CPU, fused_pair
from jaxbp.pairing import Implementation
from pallas_kernels.pointwise.elementwise import elementwise

Axis = int | Sequence[int] | None
AnyReduced = Float[AnyArray, "*reduced"]
Reduced = Float[Array, "*reduced"]


def _count(shape, axis):
    return math.prod(shape[i] for i in axis)


def _keep_axes(y, shape, axis):
    """Reshape the result y of a reduction so that the reduced axes exist with size 1."""
    return y.reshape([1 if i in axis else size for i, size in enumerate(shape)])


def _reduced(function):
    """Return a forward that computes the reduction `function` in float32 or wider, and rounds the result to a's
    dtype."""

    def forward(a, *, axis, keepdims, shape, **options):
        return function(upcast(a), axis=axis, keepdims=keepdims, **options).astype(a.dtype)

    return forward


def _spread(scale):
    """Return the backward of a sum of n elements that is multiplied by `scale(n)`: at every position, the gradient is
    `dy * scale(n)`."""

    def formula(dy, *, axis, keepdims, shape):
        scaled = upcast(_keep_axes(dy, shape, axis)) * scale(_count(shape, axis))
        return jnp.broadcast_to(scaled, shape).astype(dy.dtype)

    def kernel(dy, *, axis, keepdims, shape):
        factor = scale(_count(shape, axis))
        return elementwise(lambda dy: dy * factor, _keep_axes(dy, shape, axis), shape=shape)

    return {"xla": formula, "pallas": kernel}


def _elementwise_gradient(formula, statistics):
    """Return the backward `formula(dy, a, *statistics(a, axis), **options)`, where `formula` is an element-wise
    function.

    The backward recomputes the statistics, because the result of the forward is rounded to a's dtype. If the forward is
    in the same program, XLA computes the statistics only once.
    """

    def in_jnp(dy, a, *, axis, keepdims, shape, **options):
        wide, wide_dy = upcast(a), upcast(_keep_axes(dy, shape, axis))
        da = formula(wide_dy, wide, *statistics(wide, axis), count=_count(shape, axis), **options)
        return da.astype(dy.dtype)

    def kernel(dy, a, *, axis, keepdims, shape, **options):
        bound = functools.partial(formula, count=_count(shape, axis), **options)
        return elementwise(bound, _keep_axes(dy, shape, axis), a, *statistics(a, axis), shape=shape)

    return {"xla": in_jnp, "pallas": kernel}


def _share(count):
    """Return the weight of each element in a mean of `count` elements, which is NaN if there are no elements.

    The mean of no elements is NaN, and so is its gradient.
    """
    return 1.0 / count if count else math.inf


_SUM = fused_pair(_reduced(jnp.sum), _spread(lambda count: 1.0), linear=True, name="sum")
_MEAN = fused_pair(_reduced(jnp.mean), _spread(_share), linear=True, name="mean")


# ------------------------------------------------------------------------------------------- variance, and log-sum-exp


def _var_gradient(dy, a, mean, rest, *, count, ddof):
    if count <= ddof:  # the gradient is NaN for every dy, so its derivative with respect to dy is 0
        return jnp.full_like(a, math.nan)
    return dy * ((a - mean) - rest) * (2.0 / (count - ddof))


def _largest_and_positive_total(a, axis):
    """Return the result of `largest_and_total`, but with a total of 1 where all elements are -inf.

    The gradient there is 0 / total, which is then 0.
    """
    largest, total = largest_and_total(a, axis)
    return largest, jnp.where(total == 0, 1.0, total)


def _logsumexp(a, axis, keepdims):
    """Compute the log-sum-exp from the result of `largest_and_total`. The gradient needs it, too, and XLA computes it
    only once."""
    largest, total = largest_and_total(a, axis)
    is_empty = total == 0
    y = jnp.where(is_empty, -jnp.inf, jnp.log(jnp.where(is_empty, 1.0, total)) + largest)
    return y if keepdims else jnp.squeeze(y, axis)


def _logsumexp_gradient(dy, a, largest, total, *, count):
    return jnp.exp(a - largest) * (dy / total)


_VAR = fused_pair(_reduced(jnp.var), _elementwise_gradient(_var_gradient, mean_and_rest), name="var")
_LOGSUMEXP = fused_pair(
    _reduced(_logsumexp),
    _elementwise_gradient(_logsumexp_gradient, _largest_and_positive_total),
    name="logsumexp",
    default=AUTODIFF_ON_CPU,
)


# ---------------------------------------------------------------------------------------------------- maximum, minimum


def _places(shape, axis):
    """Return an integer array of the given shape. Each element has its index, in row-major order, among all elements
    that are reduced to the same result."""
    wide = [size if i in axis else 1 for i, size in enumerate(shape)]
    return lax.iota(jnp.int32, math.prod(wide)).reshape(wide)


def _save_first(forward):
    """Return a function `save` for `Pair` that keeps the index of the first maximum or minimum. The gradient needs only
    dy and this index."""

    def save(a, *, axis, keepdims, shape):
        @jax.custom_jvp
        def extreme(a):
            return forward(a, axis=axis, keepdims=True, shape=shape)

        def index_of(a, y):
            # This reduction is faster than argmax. If y is NaN, it finds the index of the first NaN.
            is_extreme = (a == y) | (jnp.isnan(a) & jnp.isnan(y))
            return jnp.min(jnp.where(is_extreme, _places(shape, axis), _count(shape, axis)), axis=axis, keepdims=True)

        @extreme.defjvp
        def _(primals, tangents):
            # This rule is for second derivatives. Without it, autodiff would split the tangent of y among all elements
            # that equal y.
            y = extreme(*primals)
            selected = _places(shape, axis) == index_of(*primals, y)
            return y, jnp.sum(jnp.where(selected, *tangents, 0), axis=axis, keepdims=True)

        y = extreme(a)
        index = jnp.squeeze(index_of(a, y), axis)
        return y if keepdims else y.reshape(index.shape), (index,)

    return save


def _to_place(dy, index, *, axis, keepdims, shape):
    selected = _places(shape, axis) == _keep_axes(index, shape, axis)
    return jnp.where(selected, _keep_axes(dy, shape, axis), jnp.zeros((), dy.dtype))


def _to_place_kernel(dy, index, *, axis, keepdims, shape):
    def formula(dy, index, place):
        return jnp.where(place == index, dy, 0.0)

    return elementwise(
        formula, _keep_axes(dy, shape, axis), _keep_axes(index, shape, axis), _places(shape, axis), shape=shape
    )


_max, _min = _reduced(jnp.max), _reduced(jnp.min)
_TO_PLACE = {"xla": _to_place, "pallas": _to_place_kernel}
_MAX = fused_pair(_max, _TO_PLACE, save=_save_first(_max), name="max")
_MIN = fused_pair(_min, _TO_PLACE, save=_save_first(_min), name="min")


# ------------------------------------------------------------------------------------------------ the public functions


def _reduce(op, implementation, a, axis, keepdims, **options):
    (a,) = checks.floating(op.name, a=a)
    axis = checks.axes(op.name, axis, a.ndim)
    if op in (_MAX, _MIN, _LOGSUMEXP) and _count(a.shape, axis) == 0:
        raise ValueError(f"{op.name}: a has shape {a.shape}; wants at least one element along axis {axis}")
    return op(a, implementation=implementation, axis=axis, keepdims=bool(keepdims), shape=a.shape, **options)


def _backward(op, implementation, dy, a, axis, keepdims, **options):
    dy, a = checks.floating(op.name, dy=dy, a=a)
    axis = checks.axes(op.name, axis, a.ndim)
    reduced = (1 if i in axis else size for i, size in enumerate(a.shape) if keepdims or i not in axis)
    checks.shape(op.name, "dy", dy, *reduced)
    arrays = (dy,) if op in (_SUM.vjp, _MEAN.vjp) else (dy, a)
    return op(*arrays, implementation=implementation, axis=axis, keepdims=bool(keepdims), shape=a.shape, **options)


def sum(a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None) -> Reduced:
    """Sum, `y = Σᵢ aᵢ`."""
    return _reduce(_SUM, implementation, a, axis, keepdims)


def sum_backward(
    dy: AnyReduced, a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `sum`: `daᵢ = dy`. Only the shape of a is used."""
    return _backward(_SUM.vjp, implementation, dy, a, axis, keepdims)


def mean(a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None) -> Reduced:
    """Mean of n elements, `y = 1/n Σᵢ aᵢ`."""
    return _reduce(_MEAN, implementation, a, axis, keepdims)


def mean_backward(
    dy: AnyReduced, a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `mean`: `daᵢ = dy / n`. Only the shape of a is used."""
    return _backward(_MEAN.vjp, implementation, dy, a, axis, keepdims)


def var(
    a: AnyFloats, axis: Axis = None, ddof: int = 0, keepdims: bool = False, *, implementation: Implementation = None
) -> Reduced:
    """Variance of n elements, `y = Σᵢ (aᵢ - mean)² / (n - ddof)`.

    If `ddof` is not less than n, y is NaN or infinite, as in `jax.numpy`.
    """
    return _reduce(_VAR, implementation, a, axis, keepdims, ddof=_ddof("var", ddof))


def var_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `var`: `daᵢ = 2 dy (aᵢ - mean) / (n - ddof)`."""
    return _backward(_VAR.vjp, implementation, dy, a, axis, keepdims, ddof=_ddof("var_backward", ddof))


def max(a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None) -> Reduced:
    """Maximum, `y = maxᵢ aᵢ`; NaN if an element is NaN."""
    return _reduce(_MAX, implementation, a, axis, keepdims)


def max_backward(
    dy: AnyReduced, a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `max`: `daᵢ = dy` at the first maximum (or NaN) in row-major order, else 0.

    JAX's autodiff splits dy among equal maxima.
    """
    return _backward(_MAX.vjp, implementation, dy, a, axis, keepdims)


def min(a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None) -> Reduced:
    """Minimum, `y = minᵢ aᵢ`; NaN if an element is NaN."""
    return _reduce(_MIN, implementation, a, axis, keepdims)


def min_backward(
    dy: AnyReduced, a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `min`: `daᵢ = dy` at the first minimum (or NaN) in row-major order, else 0.

    JAX's autodiff splits dy among equal minima.
    """
    return _backward(_MIN.vjp, implementation, dy, a, axis, keepdims)


def logsumexp(
    a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None
) -> Reduced:
    """Logarithm of the sum of exponentials, `y = ln Σᵢ exp(aᵢ)`. The largest a is subtracted first.

    If all elements are -inf, y is -inf, with a gradient of 0.
    """
    return _reduce(_LOGSUMEXP, implementation, a, axis, keepdims)


def logsumexp_backward(
    dy: AnyReduced, a: AnyFloats, axis: Axis = None, keepdims: bool = False, *, implementation: Implementation = None
) -> Floats:
    """Gradient of `logsumexp`: `daᵢ = dy exp(aᵢ - y)`, which is dy times the softmax.

    The softmax is computed from a, without y, because y is rounded.
    """
    return _backward(_LOGSUMEXP.vjp, implementation, dy, a, axis, keepdims)


def _ddof(op, ddof):
    if not checks.is_int(ddof):
        raise ValueError(f"{op}: ddof is {ddof!r}; wants an int")
    return ddof
