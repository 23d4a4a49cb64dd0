import jax
import jax.numpy as jnp
import numpy as np
from helpers import normal

from pallas_kernels.core.layouts import LANES

WINDOW = (2, 2)
BLOCKS = {
    "lenet1": (6, 12, 12, 1, 5),
    "lenet2": (16, 4, 4, 6, 5),
    "small": (3, 2, 2, 2, 3),
    "wide": (2, 1, 4, 1, 3),
}
"""K, P, Q, C, F: filters, rows and columns of windows, channels, filter size."""


def operands(block, N=LANES, dtype="float32"):
    K, P, Q, C, F = BLOCKS[block]
    dy, x = normal((K, P, Q, N), (C, 2 * P + F - 1, 2 * Q + F - 1, N))
    place = np.random.default_rng(2).integers(0, 5, (K, P, Q, N), np.uint8)
    return dy.astype(dtype), jnp.asarray(place), x.astype(dtype)


def shapes(block, N):
    K, P, Q, C, F = BLOCKS[block]
    sizes = (C, 2 * P + F - 1, 2 * Q + F - 1, N), (K, C, F, F), (K,), (K, P, Q, N)
    return *(jax.ShapeDtypeStruct(size, "float32") for size in sizes), jax.ShapeDtypeStruct(sizes[-1], "uint8")


def routed(dy, place, window=WINDOW):
    dy, place, (R, S) = np.asarray(dy, np.float64), np.asarray(place), window
    K, P, Q, N = dy.shape
    dz = np.where(place[..., None] == np.arange(R * S), dy[..., None], 0).reshape(K, P, Q, N, R, S)
    return dz.transpose(0, 1, 4, 2, 5, 3).reshape(K, R * P, S * Q, N)
