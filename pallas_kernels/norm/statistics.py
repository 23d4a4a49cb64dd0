"""The statistic that all kernels of normalisation share."""

import jax.numpy as jnp
from jax import Array, lax


def inverse_root(mean_square: Array, eps: float) -> Array:
    """`1 / sqrt(mean_square + eps)`, but NaN where the sum of the squares has overflowed: its inverse would be 0."""
    return jnp.where(mean_square < jnp.inf, lax.rsqrt(mean_square + eps), jnp.nan)
