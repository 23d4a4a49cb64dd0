import jax.numpy as jnp
from jax import Array, lax


def inverse_root(mean_square: Array, epsilon: float) -> Array:
    """Return `1 / sqrt(mean_square + epsilon)`, or NaN instead of 0 if `mean_square` has overflowed to infinity."""
    return jnp.where(mean_square < jnp.inf, lax.rsqrt(mean_square + epsilon), jnp.nan)
