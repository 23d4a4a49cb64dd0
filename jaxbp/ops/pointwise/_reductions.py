"""Reductions with their backwards. `axis` is a tuple, and `shape` is the shape of the argument a."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxbp.common import checks
from jaxbp.common.numerics import cast_like, largest_and_total, limit, mean_and_rest, select, upcast
from jaxbp.ops._defaults import AUTODIFF_ON_CPU, fused_pair
from pallas_kernels.pointwise.elementwise import elementwise


def count_of(shape, axis):
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
    def formula(dy, *, axis, keepdims, shape):
        scaled = upcast(_keep_axes(dy, shape, axis)) * scale(count_of(shape, axis))
        return jnp.broadcast_to(scaled, shape).astype(dy.dtype)

    def kernel(dy, *, axis, keepdims, shape):
        factor = scale(count_of(shape, axis))
        return elementwise(lambda dy: dy * factor, _keep_axes(dy, shape, axis), shape=shape)

    return {"xla": formula, "pallas": kernel}


def _elementwise_gradient(formula, statistics, excluded):
    # `statistics(a, axis)` are recomputed from a, because the forward's result is rounded.

    def in_jnp(dy, a, where, *, axis, keepdims, shape, **options):
        wide, wide_dy = upcast(select(where, a, excluded)), upcast(_keep_axes(dy, shape, axis))
        da = formula(wide_dy, wide, *statistics(wide, axis), **options)
        return select(where, da.astype(dy.dtype), 0), None

    def kernel(dy, a, where, *, axis, keepdims, shape, **options):
        bound, a = functools.partial(formula, **options), select(where, a, excluded)
        da = elementwise(bound, _keep_axes(dy, shape, axis), a, *statistics(a, axis), shape=shape)
        return select(where, da, 0), None

    return {"xla": in_jnp, "pallas": kernel}


def _share(count):
    # The gradient of a mean of no elements is NaN.
    return 1.0 / count if count else math.inf


SUM = fused_pair(_reduced(jnp.sum), _spread(lambda count: 1.0), linear=True, name="sum")
MEAN = fused_pair(_reduced(jnp.mean), _spread(_share), linear=True, name="mean")


def _var(a, where, *, axis, keepdims, shape, ddof):
    var = functools.partial(jnp.var, axis=axis, keepdims=keepdims, ddof=ddof, where=where)
    return cast_like(var(upcast(select(where, a, 0))), a)


def _var_formula(dy, a, where, *, axis, keepdims, shape, ddof):
    wide = upcast(select(where, a, 0))
    count = count_of(shape, axis) if where is None else included_count(where, shape, axis, True)
    da = _var_gradient(
        upcast(_keep_axes(dy, shape, axis)), wide, *mean_and_rest(wide, axis, where), _weight(count, ddof)
    )
    return select(where, da.astype(dy.dtype), 0), None


def _var_kernel(dy, a, where, *, axis, keepdims, shape, ddof):
    formula = functools.partial(_var_gradient, weight=_weight(count_of(shape, axis), ddof))
    return elementwise(formula, _keep_axes(dy, shape, axis), a, *mean_and_rest(a, axis), shape=shape), None


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


def included_count(where, shape, axis, keepdims):
    included = jnp.broadcast_to(where, shape)
    return jnp.sum(included, axis=axis, keepdims=keepdims).astype(jnp.result_type(float))


def _largest_and_positive_total(a, axis):
    largest, total = largest_and_total(a, axis)
    # If all elements are -inf, a total of 1 makes the gradient 0.
    return largest, jnp.where(total == 0, 1.0, total)


def _logsumexp(a, axis, keepdims):
    largest, total = largest_and_total(a, axis)
    is_empty = total == 0
    y = jnp.where(is_empty, -jnp.inf, jnp.log(jnp.where(is_empty, 1.0, total)) + largest)
    return y if keepdims else jnp.squeeze(y, axis)


def _logsumexp_gradient(dy, a, largest, total):
    return jnp.exp(a - largest) * (dy / total)


VAR = fused_pair(_var, {"xla": _var_formula, "pallas": _var_kernel}, name="var", unsupported=_unsupported_var)
LOGSUMEXP = fused_pair(
    _reduced_where(_logsumexp, -math.inf),
    _elementwise_gradient(_logsumexp_gradient, _largest_and_positive_total, -math.inf),
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
            return jnp.min(jnp.where(is_extreme, _places(shape, axis), count_of(shape, axis)), axis=axis, keepdims=True)

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


def _to_place(dy, index, *, axis, keepdims, shape, initial):
    selected = _places(shape, axis) == _keep_axes(index, shape, axis)
    return jnp.where(selected, _keep_axes(dy, shape, axis), jnp.zeros((), dy.dtype)), None


def _to_place_kernel(dy, index, *, axis, keepdims, shape, initial):
    def formula(dy, index, place):
        return jnp.where(place == index, dy, 0.0)

    arrays = _keep_axes(dy, shape, axis), _keep_axes(index, shape, axis), _places(shape, axis)
    return elementwise(formula, *arrays, shape=shape), None


_max, _min = _extreme(jnp.max, -math.inf, jnp.greater), _extreme(jnp.min, math.inf, jnp.less)
_TO_PLACE = {"xla": _to_place, "pallas": _to_place_kernel}
MAX = fused_pair(_max, _TO_PLACE, save=_save_first(_max), name="max")
MIN = fused_pair(_min, _TO_PLACE, save=_save_first(_min), name="min")
