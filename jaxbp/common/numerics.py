"""Dtypes of computation. Half precisions are computed in float32; float32 products run on the tensor cores or
exactly."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike


def upcast(a: Array) -> Array:
    """Convert half precisions to float32, the dtype of all computations. Integers are unchanged."""
    return a.astype(wide(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a


def wide(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype in which elements of a floating dtype are summed."""
    return jnp.promote_types(dtype, jnp.float32)


def mean_and_rest(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """Return the mean, rounded to float32 or wider, and the rounding error. `(a - mean) - rest` keeps the digits of
    numbers far from zero. Reduced axes have size 1."""
    # The value subtracted first does not change the result, so it needs no gradient.
    mean = lax.stop_gradient(jnp.mean(upcast(a), axis=axis, keepdims=True))
    return mean, jnp.mean(upcast(a) - mean, axis=axis, keepdims=True)


def largest_and_total(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """Return (largest, total), from which a softmax is `exp(a - largest) / total`, in float32 or wider. Reduced axes
    have size 1.

    The log-sum-exp would be rounded, and numbers far from zero would lose their digits.
    """
    largest = lax.stop_gradient(jnp.max(upcast(a), axis=axis, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return largest, jnp.sum(jnp.exp(upcast(a) - largest), axis=axis, keepdims=True)


def exponentials(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """Return `exp(a - largest)` and its sum, in float32 or wider. Their quotient is a softmax. The sum has size 1 along
    reduced axes. Dividing the factor of the exponentials by the sum costs one division per sum, not per element.

    XLA compiles this to one kernel, provided that no code tests whether the largest element is finite.
    """
    largest = lax.stop_gradient(jnp.max(upcast(a), axis=axis, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(upcast(a) - largest)
    return e, jnp.sum(e, axis=axis, keepdims=True)


def on_tensor_cores(dtype: DTypeLike, precision: PrecisionLike) -> bool:
    """Return whether products may run on the tensor cores. Half precisions may; float32 may, rounded to TF32, unless
    exact products are requested."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    asked = precision if isinstance(precision, tuple | list) else (precision,)
    return dtype != jnp.float32 or not any(p in ("highest", "float32", lax.Precision.HIGHEST) for p in asked)
