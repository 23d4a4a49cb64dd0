"""What ops compute in: half precisions in float32, and float32 products on the tensor cores or exactly."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike


def widen(a: Array) -> Array:
    """Half precisions as float32, in which everything is computed; integers as they are."""
    return a.astype(wide(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a


def wide(dtype: DTypeLike) -> DTypeLike:
    """What numbers of a floating dtype are added up in."""
    return jnp.promote_types(dtype, jnp.float32)


def mean_and_rest(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """The mean, rounded to float32 or wider, and what rounding left out: `(a - mean) - rest` keeps the digits of
    numbers far from zero. Reduced axes have size 1."""
    # What is taken off first changes no result, so it needs no gradient.
    mean = lax.stop_gradient(jnp.mean(widen(a), axis=axis, keepdims=True))
    return mean, jnp.mean(widen(a) - mean, axis=axis, keepdims=True)


def largest_and_total(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """What a softmax is made from, `exp(a - largest) / total`, in float32 or wider. Reduced axes have size 1.

    The logarithm of their sum, the log-sum-exp, would be rounded, and with it the digits of numbers far from zero.
    """
    largest = lax.stop_gradient(jnp.max(widen(a), axis=axis, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return largest, jnp.sum(jnp.exp(widen(a) - largest), axis=axis, keepdims=True)


def exponentials(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """`exp(a - largest)` and its sum, of which a softmax is the quotient, in float32 or wider. The sum has size 1 along
    reduced axes. To divide what it multiplies by the sum is a division for each sum, and not for each element.

    XLA makes one kernel of it, as long as nothing asks whether the largest is finite.
    """
    largest = lax.stop_gradient(jnp.max(widen(a), axis=axis, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(widen(a) - largest)
    return e, jnp.sum(e, axis=axis, keepdims=True)


def on_tensor_cores(dtype: DTypeLike, precision: PrecisionLike) -> bool:
    """Whether products may run there: half precisions as they are, float32 rounded to TF32 unless asked to be exact."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    asked = precision if isinstance(precision, tuple | list) else (precision,)
    return dtype != jnp.float32 or not any(p in ("highest", "float32", lax.Precision.HIGHEST) for p in asked)
