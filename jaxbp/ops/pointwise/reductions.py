"""Reductions over any axes.

Results have the dtype of the reduced array `a` if it is floating. `axis` is one int, several ints, or None for all
axes. The boolean array `where` broadcasts to `a`. An element where it is False is excluded, and has the gradient 0,
even if it is NaN.
"""

from collections.abc import Sequence

from jax import Array
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray, AnyFloats, AnyMask, Floats
from jaxbp.common.numerics import cast_like, select, upcast
from jaxbp.ops.pointwise._reductions import LOGSUMEXP, MAX, MEAN, MIN, SUM, VAR, count_of, included_count
from jaxbp.pairing import Implementation
from jaxbp.pairing.gradients import in_dtypes_of

Axis = int | Sequence[int] | None
AnyReduced = Float[AnyArray, "*reduced"]
Reduced = Float[Array, "*reduced"]


def _reduce(op, implementation, a, axis, keepdims, where, **options):
    (a,) = (checks.floating if op is LOGSUMEXP else checks.numeric)(op.name, a=a)
    axis, where = checks.axes(op.name, axis, a.ndim), checks.mask(op.name, where, a.shape)
    if op in (MAX, MIN, LOGSUMEXP) and count_of(a.shape, axis) == 0:
        raise ValueError(f"{op.name}: a has shape {a.shape}; wants at least one element along axis {axis}")
    options = dict(axis=axis, keepdims=bool(keepdims), shape=a.shape, implementation=implementation) | options
    if op not in (SUM, MEAN):
        return op(a, where, **options)
    if where is None:
        return op(a, **options)
    total = SUM.named(op.name)(select(where, upcast(a), 0), **options)
    return cast_like(total if op is SUM else total / included_count(where, a.shape, axis, keepdims), a)


def _backward(op, implementation, dy, a, axis, keepdims, where, **options):
    given = a
    dy, a = checks.floating(op.name, dy=dy, a=a)
    axis, where = checks.axes(op.name, axis, a.ndim), checks.mask(op.name, where, a.shape)
    reduced = (1 if i in axis else size for i, size in enumerate(a.shape) if keepdims or i not in axis)
    checks.shape(op.name, "dy", dy, *reduced)
    options = dict(axis=axis, keepdims=bool(keepdims), shape=a.shape, implementation=implementation) | options
    if op not in (SUM.vjp, MEAN.vjp):
        da = op(dy, a, where, **options)
    elif where is None:
        da = op(dy, **options)
    else:
        share = upcast(dy) / (1 if op is SUM.vjp else included_count(where, a.shape, axis, keepdims))
        da = select(where, SUM.vjp.named(op.name)(share, **options).astype(dy.dtype), 0)
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
    return _reduce(SUM, implementation, a, axis, keepdims, where)


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
    return _backward(SUM.vjp, implementation, dy, a, axis, keepdims, where)


def mean(
    a: AnyFloats,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    where: AnyMask | None = None,
    implementation: Implementation = None,
) -> Reduced:
    """Mean of n included elements, `y = 1/n Σᵢ aᵢ`."""
    return _reduce(MEAN, implementation, a, axis, keepdims, where)


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
    return _backward(MEAN.vjp, implementation, dy, a, axis, keepdims, where)


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
    return _reduce(VAR, implementation, a, axis, keepdims, where, ddof=_ddof("var", ddof))


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
    return _backward(VAR.vjp, implementation, dy, a, axis, keepdims, where, ddof=_ddof("var_backward", ddof))


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
    return _reduce(MAX, implementation, a, axis, keepdims, where, initial=_initial("max", initial))


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
    return _backward(MAX.vjp, implementation, dy, a, axis, keepdims, where, initial=initial)


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
    return _reduce(MIN, implementation, a, axis, keepdims, where, initial=_initial("min", initial))


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
    return _backward(MIN.vjp, implementation, dy, a, axis, keepdims, where, initial=initial)


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
    return _reduce(LOGSUMEXP, implementation, a, axis, keepdims, where)


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
    return _backward(LOGSUMEXP.vjp, implementation, dy, a, axis, keepdims, where)


def _ddof(op, ddof):
    if not checks.is_int(ddof):
        raise ValueError(f"{op}: ddof is {ddof!r}; wants an int")
    return ddof


def _initial(op, initial):
    return None if initial is None else checks.number(op, "initial", initial)
