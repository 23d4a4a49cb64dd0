"""The dtypes in which ops compute, accurate sums, and losses of invalid labels. Reduced axes keep size 1."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike


def upcast(a: Array) -> Array:
    return cast(a, wide(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a


def cast(a: Array, dtype: DTypeLike) -> Array:
    """Return `a` in `dtype`. Unlike `astype`, keep a weak type if the dtype stays."""
    return a if a.dtype == dtype else a.astype(dtype)


def clipped_to_int32(a: Array, most: int) -> Array:
    """Return integers as int32 between 0 and `most`."""
    # A wider dtype may hold larger numbers, and a narrower dtype may not hold `most`.
    a = a.astype(jnp.int32) if a.dtype.itemsize < 4 else a
    return jnp.clip(a, 0, most).astype(jnp.int32)


def cast_like(y: Array, a: Array) -> Array:
    """Return the result y in the dtype of the argument `a` if this dtype is floating, else y unchanged."""
    return cast(y, a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else y


def limit(dtype: DTypeLike, infinity: float) -> float | np.generic:
    """Return the value of `dtype` that is nearest to `infinity`, inf or -inf."""
    if jnp.issubdtype(dtype, jnp.floating):
        return infinity
    if dtype == jnp.bool_:
        return np.bool_(infinity > 0)
    return jnp.dtype(dtype).type(jnp.iinfo(dtype).max if infinity > 0 else jnp.iinfo(dtype).min)


def weakly_typed(a: Array, dtype: DTypeLike) -> Array:
    """Return `a` in `dtype`, with a weak type, as if it were computed from Python numbers."""
    return lax.convert_element_type_p.bind(a, new_dtype=jnp.dtype(dtype), weak_type=True, sharding=None)


def select(where: Array | None, a: Array, other: float | Array) -> Array:
    """Return `a` where `where` is True or None, else `other`. Where it is False, the gradient of `a` is 0, even if `a`
    is NaN."""
    return a if where is None else jnp.where(where, a, jnp.asarray(other, a.dtype))


def exclude(where: Array | None, a: Array, axis: int | Sequence[int] | None) -> Array:
    """Return `a`, but -inf where `where` is False, so that a softmax over `axis` ignores these elements. If all
    elements along `axis` are excluded, they become 0, because their softmax would be NaN."""
    if where is None:
        return a
    where = jnp.broadcast_to(where, a.shape)
    return select(where, a, jnp.where(jnp.any(where, axis=axis, keepdims=True), -jnp.inf, 0.0))


def wide(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype for sums of a floating dtype: float32, or float64 for float64."""
    # Promote also if `jax.numpy_dtype_promotion` is "strict".
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def mean_and_rest(a: Array, axis: int | Sequence[int] | None, where: Array | None = None) -> tuple[Array, Array]:
    """Return the mean of the elements where `where` is True, and its rounding error, `rest`. Deviations
    `(a - mean) - rest` are accurate even for a large mean."""
    # `mean + rest` does not depend on `mean`, so `mean` needs no gradient.
    mean = lax.stop_gradient(jnp.mean(upcast(a), axis=axis, keepdims=True, where=where))
    return mean, jnp.mean(upcast(a) - mean, axis=axis, keepdims=True, where=where)


def largest_and_total(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    """Return the largest element and `total = Σ exp(a - largest)`, in float32 or wider. `exp(a - largest) / total` is
    more accurate than `exp(a - logsumexp(a))`."""
    largest = lax.stop_gradient(jnp.max(upcast(a), axis=axis, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return largest, jnp.sum(jnp.exp(upcast(a) - largest), axis=axis, keepdims=True)


def elementwise(formula: Callable, *arrays: Array, shape: tuple[int, ...] | None = None) -> Any:
    """Compute `pallas_kernels.pointwise.elementwise` in jnp."""
    values, structure = jax.tree.flatten(formula(*map(upcast, arrays)))
    shape = jnp.broadcast_shapes(*(a.shape for a in arrays)) if shape is None else shape
    return structure.unflatten([jnp.broadcast_to(y, shape).astype(arrays[0].dtype) for y in values])


def sum_over(formula: Callable, *arrays: Array, axes: Sequence[int]) -> Any:
    """Compute `pallas_kernels.pointwise.reductions.sum_over` in jnp, in float32 or wider."""
    shape = jnp.broadcast_shapes(*(a.shape for a in arrays))
    values, structure = jax.tree.flatten(formula(*map(upcast, arrays)))
    return structure.unflatten([jnp.sum(jnp.broadcast_to(y, shape), axis=axes, keepdims=True) for y in values])


def exponentials(a: Array, axis: int | Sequence[int] | None) -> tuple[Array, Array]:
    # XLA compiles this to one kernel, but not with a test of whether `largest` is finite.
    largest = lax.stop_gradient(jnp.max(upcast(a), axis=axis, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(upcast(a) - largest)
    return e, jnp.sum(e, axis=axis, keepdims=True)


def are_valid(labels: Array, classes: Any) -> Array:
    return (labels >= 0) & (labels < classes)


def nan_unless(valid: Array, loss: Array) -> Array:
    """Return the loss where `valid`, else NaN. For invalid losses, the gradient is also NaN, unless dy is 0."""
    # The derivative multiplies the cotangent by the largest number twice, which overflows. Infinity times 0 is NaN.
    zero, largest = (jnp.where(valid, 1.0, factor).astype(loss.dtype) for factor in (0.0, jnp.finfo(loss.dtype).max))
    return loss * zero * largest * largest + jnp.where(valid, 0.0, jnp.nan).astype(loss.dtype)


def dy_of_valid(dy: Array, labels: Array, classes: Any) -> Array:
    return jnp.where(are_valid(labels, classes), dy, jnp.where(dy == 0, 0.0, jnp.nan).astype(dy.dtype))


def on_tensor_cores(dtype: DTypeLike, precision: PrecisionLike) -> bool:
    """Return whether products may run on the tensor cores. Products in float32 may unless `precision` excludes TF32."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    asked = precision if isinstance(precision, tuple | list) else (precision,)
    return dtype != jnp.float32 or not any(p in ("highest", "float32", lax.Precision.HIGHEST) for p in asked)
