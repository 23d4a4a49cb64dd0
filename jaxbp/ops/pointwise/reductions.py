"""Reductions over any axes.

Results have the dtype of the reduced array `a` if it is floating. `axis` is one int, several ints, or None for all
axes. The boolean array `where` broadcasts to `a`. An element where it is False is excluded, and has the gradient 0,
even if it is NaN.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import APART, BATCH, SMOOTH, case_of, pair_entries
from jaxbp.common.checks import AnyArray, AnyFloats, AnyMask, Floats
from jaxbp.common.numerics import cast_like, largest_and_total, limit, mean_and_rest, select, upcast
from jaxbp.ops._defaults import AUTODIFF_ON_CPU, fused_pair, xla_and_pallas
from jaxbp.pairing import Implementation, in_dtypes_of

Axis = int | Sequence[int] | None
AnyReduced = Float[AnyArray, "*reduced"]
Reduced = Float[Array, "*reduced"]


# Below, `axis` is a tuple, and `shape` is the shape of the argument a.


def _count(shape, axis):
    return math.prod(shape[i] for i in axis)


def _keep_axes(y, shape, axis):
    return y.reshape([1 if i in axis else size for i, size in enumerate(shape)])


def _reduced(function):
    def forward(a, *, axis, keepdims, shape, **options):
        return cast_like(function(upcast(a), axis=axis, keepdims=keepdims, **options), a)

    return forward


def _reduced_where(function, excluded):
    def forward(a, where, **options):
        return _reduced(function)(select(where, a, excluded), **options)

    return forward


def _spread(scale):
    def backward(elementwise, sum_over, dy, *, axis, keepdims, shape):
        factor = scale(_count(shape, axis))
        return elementwise(lambda dy: dy * factor, _keep_axes(dy, shape, axis), shape=shape)

    return xla_and_pallas(backward)


def _share(count):
    # The gradient of a mean of no elements is NaN.
    return 1.0 / count if count else math.inf


_SUM = fused_pair(_reduced(jnp.sum), _spread(lambda count: 1.0), linear=True, name="sum")
_MEAN = fused_pair(_reduced(jnp.mean), _spread(_share), linear=True, name="mean")


def _var(a, where, *, axis, keepdims, shape, ddof):
    var = functools.partial(jnp.var, axis=axis, keepdims=keepdims, ddof=ddof, where=where)
    return cast_like(var(upcast(select(where, a, 0))), a)


def _var_backward(elementwise, sum_over, dy, a, where, *, axis, keepdims, shape, ddof):
    a = select(where, a, 0)
    count = _count(shape, axis) if where is None else _included_count(where, shape, axis, True)
    formula = functools.partial(_var_gradient, weight=_weight(count, ddof))
    da = elementwise(formula, _keep_axes(dy, shape, axis), a, *mean_and_rest(a, axis, where), shape=shape)
    return select(where, da, 0), None


def _weight(count, ddof):
    if isinstance(count, int):
        return 2.0 / (count - ddof) if count > ddof else math.nan
    return jnp.where(count > ddof, 2.0 / (count - ddof), math.nan)


def _var_gradient(dy, a, mean, rest, weight):
    if isinstance(weight, float) and math.isnan(weight):  # the gradient is NaN for every dy
        return jnp.full_like(a, math.nan)
    return dy * ((a - mean) - rest) * weight


def _unsupported_var(a, where, **options):
    return "where" if where is not None else checks.unsupported(a)


def _included_count(where, shape, axis, keepdims):
    included = jnp.broadcast_to(where, shape)
    return jnp.sum(included, axis=axis, keepdims=keepdims).astype(jnp.result_type(float))


def _logsumexp(a, axis, keepdims):
    largest, total = largest_and_total(a, axis)
    is_empty = total == 0
    y = jnp.where(is_empty, -jnp.inf, jnp.log(jnp.where(is_empty, 1.0, total)) + largest)
    return y if keepdims else jnp.squeeze(y, axis)


def _logsumexp_backward(elementwise, sum_over, dy, a, where, *, axis, keepdims, shape):
    a = select(where, a, -math.inf)
    # The backward starts from a, because the forward's result is rounded.
    largest, total = largest_and_total(a, axis)
    # If all elements are -inf, a total of 1 makes the gradient 0.
    arrays = _keep_axes(dy, shape, axis), a, largest, jnp.where(total == 0, 1.0, total)
    da = elementwise(functools.partial(_logsumexp_gradient), *arrays, shape=shape)  # the kernel's name: `elementwise`
    return select(where, da, 0), None


def _logsumexp_gradient(dy, a, largest, total):
    return jnp.exp(a - largest) * (dy / total)


_VAR = fused_pair(_var, xla_and_pallas(_var_backward), name="var", unsupported=_unsupported_var)
_LOGSUMEXP = fused_pair(
    _reduced_where(_logsumexp, -math.inf),
    xla_and_pallas(_logsumexp_backward),
    name="logsumexp",
    default=AUTODIFF_ON_CPU,
)


def _places(shape, axis):
    wide = [size if i in axis else 1 for i, size in enumerate(shape)]
    return lax.iota(jnp.int32, math.prod(wide)).reshape(wide)


def _extreme(reduction, neutral, exceeds):

    def forward(a, where, *, initial, **options):
        if checks.is_discrete(a):
            initial = limit(a.dtype, neutral) if initial in (None, neutral) else initial
            return _reduced(functools.partial(reduction, initial=initial, where=where))(a, **options)
        y = _reduced_where(reduction, neutral)(a, where, **options)
        return y if initial in (None, neutral) else jnp.where(exceeds(initial, y), jnp.asarray(initial, y.dtype), y)

    return forward


def _save_first(forward):
    def save(a, where, *, axis, keepdims, shape, initial):
        @jax.custom_jvp
        def extreme(a, where):
            return forward(a, where, axis=axis, keepdims=True, shape=shape, initial=initial)

        def index_of(a, where, y):
            # A minimum of indices is faster than argmax. If y is NaN, it is the first NaN's index.
            is_extreme = select(where, (a == y) | (jnp.isnan(a) & jnp.isnan(y)), False)
            return jnp.min(jnp.where(is_extreme, _places(shape, axis), _count(shape, axis)), axis=axis, keepdims=True)

        @extreme.defjvp
        def _(primals, tangents):
            # Second derivatives use this rule. Autodiff would average over all elements that equal y.
            y = extreme(*primals)
            selected = _places(shape, axis) == index_of(*primals, y)
            return y, jnp.sum(jnp.where(selected, tangents[0], 0), axis=axis, keepdims=True)

        y = extreme(a, where)
        index = jnp.squeeze(index_of(a, where, y), axis)
        return y if keepdims else y.reshape(index.shape), (index,)

    return save


def _to_place(elementwise, sum_over, dy, index, *, axis, keepdims, shape, initial):
    def formula(dy, index, place):
        return jnp.where(place == index, dy, 0.0)

    arrays = _keep_axes(dy, shape, axis), _keep_axes(index, shape, axis), _places(shape, axis)
    return elementwise(formula, *arrays, shape=shape), None


_max, _min = _extreme(jnp.max, -math.inf, jnp.greater), _extreme(jnp.min, math.inf, jnp.less)
_TO_PLACE = xla_and_pallas(_to_place)
_MAX = fused_pair(_max, _TO_PLACE, save=_save_first(_max), name="max")
_MIN = fused_pair(_min, _TO_PLACE, save=_save_first(_min), name="min")


def _reduce(op, implementation, a, axis, keepdims, where, **options):
    (a,) = (checks.floating if op is _LOGSUMEXP else checks.numeric)(op.name, a=a)
    axis, where = checks.axes(op.name, axis, a.ndim), checks.mask(op.name, where, a.shape)
    if op in (_MAX, _MIN, _LOGSUMEXP) and _count(a.shape, axis) == 0:
        raise ValueError(f"{op.name}: a has shape {a.shape}; wants at least one element along axis {axis}")
    options = dict(axis=axis, keepdims=bool(keepdims), shape=a.shape, implementation=implementation) | options
    if op not in (_SUM, _MEAN):
        return op(a, where, **options)
    if where is None:
        return op(a, **options)
    total = _SUM.named(op.name)(select(where, upcast(a), 0), **options)
    return cast_like(total if op is _SUM else total / _included_count(where, a.shape, axis, keepdims), a)


def _backward(op, implementation, dy, a, axis, keepdims, where, **options):
    given = a
    dy, a = checks.floating(op.name, dy=dy, a=a)
    axis, where = checks.axes(op.name, axis, a.ndim), checks.mask(op.name, where, a.shape)
    reduced = (1 if i in axis else size for i, size in enumerate(a.shape) if keepdims or i not in axis)
    checks.shape(op.name, "dy", dy, *reduced)
    options = dict(axis=axis, keepdims=bool(keepdims), shape=a.shape, implementation=implementation) | options
    if op not in (_SUM.vjp, _MEAN.vjp):
        da = op(dy, a, where, **options)
    elif where is None:
        da = op(dy, **options)
    else:
        share = upcast(dy) / (1 if op is _SUM.vjp else _included_count(where, a.shape, axis, keepdims))
        da = select(where, _SUM.vjp.named(op.name)(share, **options).astype(dy.dtype), 0)
    return in_dtypes_of(given, da)


def sum(
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Reduced:
    """Sum, `y = Σᵢ aᵢ`."""
    return _reduce(_SUM, implementation, a, axis, keepdims, where)


def sum_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `sum`: `daᵢ = dy`."""
    return _backward(_SUM.vjp, implementation, dy, a, axis, keepdims, where)


def mean(
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Reduced:
    """Mean of n included elements, `y = 1/n Σᵢ aᵢ`."""
    return _reduce(_MEAN, implementation, a, axis, keepdims, where)


def mean_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `mean`: `daᵢ = dy / n`, for n included elements."""
    return _backward(_MEAN.vjp, implementation, dy, a, axis, keepdims, where)


def var(
    a: AnyFloats,
    axis: Axis = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Reduced:
    """Variance of n included elements, `y = Σᵢ (aᵢ - mean)² / (n - ddof)`.

    The kernel does not support `where`.
    """
    return _reduce(_VAR, implementation, a, axis, keepdims, where, ddof=_ddof("var", ddof))


def var_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `var`: `daᵢ = 2 dy (aᵢ - mean) / (n - ddof)`, for n included elements."""
    return _backward(_VAR.vjp, implementation, dy, a, axis, keepdims, where, ddof=_ddof("var_backward", ddof))


def max(
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    initial: float | None = None,
    where: AnyMask | None = None,
    *,
    implementation: Implementation = None,
) -> Reduced:
    """Maximum, `y = maxᵢ aᵢ`.

    y is at least `initial`. If `where` excludes all elements, y is `initial`, or -inf if `initial` is None.
    """
    return _reduce(_MAX, implementation, a, axis, keepdims, where, initial=_initial("max", initial))


def max_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    initial: float | None = None,
    where: AnyMask | None = None,
    *,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `max`: `daᵢ = dy` at the first maximum in row-major order, else 0.

    If y is NaN, the first NaN gets dy. If `initial` is larger than all elements, da is 0.
    """
    initial = _initial("max_backward", initial)
    return _backward(_MAX.vjp, implementation, dy, a, axis, keepdims, where, initial=initial)


def min(
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    initial: float | None = None,
    where: AnyMask | None = None,
    *,
    implementation: Implementation = None,
) -> Reduced:
    """Minimum, `y = minᵢ aᵢ`.

    y is at most `initial`. The rest is as in `max`, with inf instead of -inf.
    """
    return _reduce(_MIN, implementation, a, axis, keepdims, where, initial=_initial("min", initial))


def min_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    initial: float | None = None,
    where: AnyMask | None = None,
    *,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `min`: `daᵢ = dy` at the first minimum in row-major order, else 0.

    Other cases are as in `max_backward`.
    """
    initial = _initial("min_backward", initial)
    return _backward(_MIN.vjp, implementation, dy, a, axis, keepdims, where, initial=initial)


def logsumexp(
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Reduced:
    """Logarithm of the sum of exponentials, `y = ln Σᵢ exp(aᵢ)`.

    If every element is -inf or excluded, y is -inf, and the gradient is 0.
    """
    return _reduce(_LOGSUMEXP, implementation, a, axis, keepdims, where)


def logsumexp_backward(
    dy: AnyReduced,
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `logsumexp`: `daᵢ = dy exp(aᵢ - y)`, with y as in `logsumexp`."""
    return _backward(_LOGSUMEXP.vjp, implementation, dy, a, axis, keepdims, where)


def _ddof(op, ddof):
    if not checks.is_int(ddof):
        raise ValueError(f"{op}: ddof is {ddof!r}; wants an int")
    return ddof


def _initial(op, initial):
    return None if initial is None else checks.number(op, "initial", initial)


def _entries(function, axis, keepdims, dy, a=SMOOTH, kink_convention=True, **options):
    small = case_of(dy, a, axis=axis, keepdims=keepdims, **options)
    real = case_of((BATCH,), dataclasses.replace(a, shape=(BATCH, 1024)), axis=-1, **options)
    return pair_entries(function, small, {"rows": real}, like="divide", kink_convention=kink_convention)


ENTRIES = (
    *_entries(sum, (0, 2), True, (1, 3, 1)),
    *_entries(mean, 1, False, (2, 4)),
    *_entries(var, (-1, 0), False, (3,), ddof=1),
    # The whole gradient goes to the first of equal numbers. Autodiff divides it among them.
    *_entries(max, (0, 2), False, (3,), APART, kink_convention=False),
    *_entries(min, None, False, (), APART, kink_convention=False),
    *_entries(logsumexp, (0, 1), True, (1, 1, 4)),
)
