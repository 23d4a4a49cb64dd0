"""Random changes of a training batch, made on the device each time that the batch is drawn."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def shift(
    key: PRNGKeyArray, images: Float[Array, "batch channels height width"], pixels: int
) -> Float[Array, "batch channels height width"]:
    """Moves each image by a random number of rows and of columns, uniform from -pixels to pixels. Edges become 0."""
    sides = (pixels, pixels)
    padded = jnp.pad(images, ((0, 0), (0, 0), sides, sides))
    corners = jax.random.randint(key, (len(images), 2), 0, 2 * pixels + 1)
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (0, *at), images.shape[1:]))(padded, corners)
