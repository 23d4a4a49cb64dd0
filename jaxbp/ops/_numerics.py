"""What ops compute in: half precisions in float32, and float32 products on the tensor cores or exactly."""

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


def on_tensor_cores(dtype: DTypeLike, precision: PrecisionLike) -> bool:
    """Whether products may run there: half precisions as they are, float32 rounded to TF32 unless asked to be exact."""
    precision = jax.config.jax_default_matmul_precision if precision is None else precision
    asked = precision if isinstance(precision, tuple | list) else (precision,)
    return dtype != jnp.float32 or not any(p in ("highest", "float32", lax.Precision.HIGHEST) for p in asked)
