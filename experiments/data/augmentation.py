import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def shift(
    key: PRNGKeyArray, images: Float[Array, "batch channels height width"], pixels: int
) -> Float[Array, "batch channels height width"]:
    """Shift each image at random by up to `pixels` rows and columns, filled with zeros."""
    sides = (pixels, pixels)
    padded = jnp.pad(images, ((0, 0), (0, 0), sides, sides))
    corners = jax.random.randint(key, (len(images), 2), 0, 2 * pixels + 1)
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (0, *at), images.shape[1:]))(padded, corners)


def distort(
    key: PRNGKeyArray, images: Float[Array, "batch channels height width"], pixels: float, knots: int = 4
) -> Float[Array, "batch channels height width"]:
    """Distort each image by a smooth random field of displacements.

    Displacements at `knots * knots` points have the standard deviation `pixels`, and are interpolated cubically. Simard
    et al. (ICDAR 2003) smooth noise per pixel instead.
    """
    batch, _, *size = images.shape
    at_knots = pixels * jax.random.normal(key, (batch, 2, knots, knots))
    places = jnp.indices(size) + jax.image.resize(at_knots, (batch, 2, *size), "cubic")
    read = functools.partial(jax.scipy.ndimage.map_coordinates, order=1)
    return jax.vmap(jax.vmap(read, in_axes=(0, None)))(images, places).astype(images.dtype)


def flip(
    key: PRNGKeyArray, images: Float[Array, "batch channels height width"]
) -> Float[Array, "batch channels height width"]:
    """Mirror each image left to right with probability 1/2."""
    chosen = jax.random.bernoulli(key, shape=(len(images), 1, 1, 1))
    return jnp.where(chosen, images[..., ::-1], images)
