"""The dtypes in which ops compute, and sums that keep their digits.

Ops in half precision compute in float32. Products of float32 arrays run on the tensor cores, in TF32, or in full
float32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike


def upcast(a: Array) -> Array:
    """Convert half precisions to float32, the dtype of all computations. Integers are unchanged."""
    return a.astype(wide(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a


def select(where: Array | None, a: Array, other: float | Array) -> Array:
    """Return `a` where `where` is true, and `other` elsewhere, in a's dtype. If `where` is None, return `a`.

    Excluded elements of `a` get a gradient of 0, even if they are NaN.
    """
    return a if where is None else jnp.where(where, a, jnp.asarray(other, a.dtype))


def exclude(where: Array | None, a: Array, axis: int | Sequence[int] | None) -> Array:
    """Return `a` for a softmax over the axis, with -inf in place of each element that `where` excludes.

    If all elements of a softmax are excluded, they become 0, because a softmax of only -inf would be NaN.
    """
    if where is None:
        return a
    where = jnp.broadcast_to(where, a.shape)
    return select(where, a, jnp.where(jnp.any(where, axis=axis, keepdims=True), -jnp.inf, 0.0))


def wide(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype in which elements of a floating dtype are summed."""
    # This promotion is meant, so that it also takes place where `jax.numpy_dtype_promotion` is "strict".
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def mean_and_rest(a: Array, axis: int | Sequence[int] | None, where: Array | None = None) -> tuple[Array, Array]:
    """Return the mean, rounded to float32 or wider, and its rounding error `rest`. Reduced axes have size 1.

    If `where` is given, the mean is over the elements that it includes.

    Deviations computed as `(a - mean) - rest` keep their digits if the numbers are far from zero.
    """
    # The sum of mean and rest is the same for any value of `mean`, so it needs no gradient.
    mean = lax.stop_gradient(jnp.mean(upcast(a), axis=axis, keepdims=True, where=where))
    return mean, jnp.mean(upcast(a) - mean, axis=axis, keepdims=True, where=where)


def largest_and_total(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """Return the largest element and `total = Σ exp(a - largest)` over the axis, in float32 or wider. The softmax is
    `exp(a - largest) / total`.

    Reduced axes have size 1. A softmax computed as `exp(a - logsumexp)` would be less accurate, because the log-sum-exp
    of numbers far from zero is rounded.
    """
    largest = lax.stop_gradient(jnp.max(upcast(a), axis=axis, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return largest, jnp.sum(jnp.exp(upcast(a) - largest), axis=axis, keepdims=True)


def exponentials(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """Return `exp(a - largest)` and its sum, in float32 or wider. Their quotient is a softmax.

    The sum has size 1 along reduced axes. If the exponentials are multiplied by a factor, divide the factor by the sum.
    This takes one division per sum instead of one per element.

    XLA compiles the function to one kernel, provided that the code does not test whether the largest element is finite.
    """
    largest = lax.stop_gradient(jnp.max(upcast(a), axis=axis, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(upcast(a) - largest)
    return e, jnp.sum(e, axis=axis, keepdims=True)


def on_tensor_cores(dtype: DTypeLike, precision: PrecisionLike) -> bool:
    """Return whether products may run on the tensor cores.

    Products in half precision may run on them. Products of float32 arrays may, too, and are then rounded to TF32,
    unless the precision requests exact products.
    """
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    asked = precision if isinstance(precision, tuple | list) else (precision,)
    return dtype != jnp.float32 or not any(p in ("highest", "float32", lax.Precision.HIGHEST) for p in asked)
