"""Convolutions of small images as products with a matrix of the filters, on the tensor cores."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import PrecisionLike

_MAX_ELEMENTS = 1 << 22
_MAX_POSITIONS_PER_TAP = 32
"""A tap is a position of the filter. Up to 2.6 million elements and 31 input positions per tap, the product was faster
than cuDNN."""


def pays(w_shape: tuple[int, ...], input_size: tuple[int, int], output_size: tuple[int, int]) -> bool:
    # A convolution with 1 x 1 filters already is a matrix product.
    K, C, F, G = w_shape
    positions = math.prod(input_size)
    elements = C * positions * K * math.prod(output_size)
    return F * G > 1 and elements <= _MAX_ELEMENTS and positions <= _MAX_POSITIONS_PER_TAP * F * G


def filter_matrix(
    w: Array,
    *,
    input_size: tuple[int, int],
    output_size: tuple[int, int],
    stride: tuple[int, int],
    before: tuple[int, int],
    dilation: tuple[int, int],
) -> Array:
    """Return the `matrix[(c, h, l), (k, i, j)]` with `y = x matrix` for flattened images x and their convolutions y.

    An element is `w[k, c, u, v]` if `h = i * stride + u * dilation - before`, and the same for l, j, and v, else 0.
    """
    K, C, *window = w.shape
    taps, exists = [], []
    for size, out, f, s, p, d in zip(input_size, output_size, window, stride, before, dilation, strict=True):
        ahead = np.arange(size)[:, None] + p - np.arange(out) * s
        exists.append((ahead >= 0) & (ahead < f * d) & (ahead % d == 0))
        taps.append(np.where(exists[-1], ahead // d, 0))
    (u, v), (in_rows, in_columns) = taps, exists
    meet = in_rows[:, None, :, None] & in_columns[None, :, None, :]
    matrix = jnp.where(meet, w[:, :, u[:, None, :, None], v[None, :, None, :]], 0)  # (K, C, H, W, I, J)
    return matrix.transpose(1, 2, 3, 0, 4, 5).reshape(C * math.prod(input_size), K * math.prod(output_size))


_MAX_BAND_ELEMENTS = 1 << 20
_MIN_FLOAT32_PRODUCTS = 100_000_000
"""In float32, the four launches of `banded_input_gradient` pay only from this number of multiplications on."""
_MAX_BAND_RATIO = {4: 4, 2: 8}
"""Maps bytes per element to the most multiplications of the band per multiplication of the exact kernel. Only float32
is measured."""


def band_pays(w: Any, dy: Any, width: int, window: tuple[int, int]) -> bool:
    """Return whether `banded_input_gradient` is faster than the Pallas kernel that does not use tensor cores
    (docs/lab/2026-11-25-lenet.md). `width` is the width of x."""
    (K, C, F, G), (_, P, Q, N), (R, S) = w.shape, dy.shape, window
    if dy.dtype.itemsize not in _MAX_BAND_RATIO:
        return False
    # Multiplications per example and per row of windows.
    exact = K * C * F * G * R * S * Q
    band = C * (F + R - 1) * width * K * R * S * Q
    if dy.dtype == jnp.float32 and exact * P * N < _MIN_FLOAT32_PRODUCTS:
        return False
    return band <= min(_MAX_BAND_ELEMENTS, _MAX_BAND_RATIO[dy.dtype.itemsize] * exact)


def banded_input_gradient(
    dy: Array,
    place: Array,
    w: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    precision: PrecisionLike = None,
) -> Array:
    """Gradient of `conv2d_relu_max_pool2d` with respect to x, `(C, H, W, N)`.

    dy and `place`, the position of the maximum in each of P x Q pooling windows, are `(K, P, Q, N)`. For each row of
    Q windows, dy is put at the maxima, and one matrix product convolves it with the filters.
    """
    K, P, Q, N = dy.shape
    C, (R, S), (H, W) = w.shape[1], window, input_size
    matrix, height = _band(w, Q, W, window)
    places = jnp.arange(R * S, dtype=place.dtype)[None, None, :, None, None]
    dy, place = dy.swapaxes(0, 1)[:, :, None], place.swapaxes(0, 1)[:, :, None]
    routed = jnp.where(place == places, dy, 0).reshape(P, K * R * S * Q, N)
    products = lax.dot_general(
        jnp.broadcast_to(matrix, (P, *matrix.shape)),
        routed,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    ).reshape(P, C, height, W, N)
    below = [(p * R, H - height - p * R) for p in range(P)]
    rows = [jnp.pad(products[p], ((0, 0), below[p], (0, 0), (0, 0))) for p in range(P)]
    return sum(rows[1:], rows[0]).astype(dy.dtype)


def _band(w, Q, W, window):
    """Return the matrix that maps dy in one row of Q pooling windows to rows of dx, and their number.

    The axes are (c, i, j) of dx, and (k, r, s, q) of dy: channel k, row r, and column s of window q. Elements are
    `w[k, c, i - r, j - (q * S + s)]`, or 0 outside of the filter. Windows have S columns.
    """
    (K, C, F, G), (R, S) = w.shape, window
    height = F + R - 1
    i, j = np.arange(height)[:, None, None, None, None], np.arange(W)[None, :, None, None, None]
    r, s, q = np.arange(R)[:, None, None], np.arange(S)[:, None], np.arange(Q)
    u, v = np.broadcast_arrays(i - r, j - (q * S + s))
    inside = (u >= 0) & (u < F) & (v >= 0) & (v < G)
    taps = w[:, :, np.where(inside, u, 0), np.where(inside, v, 0)]
    matrix = jnp.where(inside, taps, 0).transpose(1, 2, 3, 0, 4, 5, 6)
    return matrix.reshape(C * height * W, K * R * S * Q), height
