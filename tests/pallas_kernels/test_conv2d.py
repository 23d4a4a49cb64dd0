"""Correlations of sizes that do not unroll into registers, against lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_the_cpu

from pallas_kernels.conv2d import correlate, correlate_batch
from pallas_kernels.launch import LANES


def integers(*shape):
    """Small whole numbers, whose sums are exact in float32 in any order."""
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), jnp.float32)


def lax_correlate(x, w, stride):
    """The same as `correlate`, batch last, by lax."""
    return jax.lax.conv_general_dilated(x, w, stride, "VALID", dimension_numbers=("CHWN", "OIHW", "CHWN"))


# (filters, channels, filter's size, input's size, stride): long filters, tall ones, large ones, prime channel counts.
SIZES = [
    (2, 1, (13, 13), (13, 14), (1, 1)),
    (1, 2, (1, 200), (2, 201), (1, 1)),
    (1, 1, (200, 1), (203, 1), (2, 1)),
    (11, 13, (1, 1), (2, 2), (1, 1)),
    (7, 3, (2, 2), (5, 4), (3, 2)),
]
every_size = pytest.mark.parametrize(("K", "C", "window", "size", "stride"), SIZES, ids=str)


@every_size
def test_correlate_of_any_size_is_that_of_lax(K, C, window, size, stride):
    x, w = integers(C, *size, LANES), integers(K, C, *window)
    with on_the_cpu():
        expected = lax_correlate(x, w, stride)
    actual = jax.jit(correlate, static_argnames="stride")(x, w, stride=stride)
    np.testing.assert_array_equal(actual, expected)


@every_size
def test_correlate_batch_of_any_size_is_the_gradient_of_lax(K, C, window, size, stride):
    size = [(n - f) // s * s + f for n, f, s in zip(size, window, stride, strict=True)]
    x, w = integers(C, *size, LANES), integers(K, C, *window)
    with on_the_cpu():
        y, vjp = jax.vjp(lambda w: lax_correlate(x, w, stride), w)
        dy = integers(*y.shape)
        (expected,) = vjp(dy)
    actual = jax.jit(correlate_batch, static_argnames="stride")(dy, x, stride=stride)
    np.testing.assert_array_equal(actual, expected)
