"""Correlations of sizes that do not unroll into registers, and as matrix products, against lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_the_cpu

from pallas_kernels.conv.conv2d import correlate, correlate_batch, filter_matrix, matrix_pays, times_matrix
from pallas_kernels.core.layouts import LANES


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


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"),
    [((1, 1), (0, 0), (1, 1)), ((2, 1), (1, 0), (1, 1)), ((1, 3), (0, 2), (2, 1)), ((3, 2), (2, 1), (2, 3))],
    ids=str,
)
def test_a_product_with_the_filter_matrix_is_the_convolution_of_lax_and_its_gradient(stride, padding, dilation):
    x, w = integers(2, 3, 6, 7), integers(4, 3, 3, 2)
    convolution = lambda x: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, stride, [(p, p) for p in padding], rhs_dilation=dilation, dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    y, vjp = jax.vjp(convolution, x)
    dy = integers(*y.shape)
    sizes = dict(input_size=(6, 7), output_size=y.shape[2:])
    matrix = filter_matrix(w, **sizes, stride=stride, before=padding, dilation=dilation)
    np.testing.assert_array_equal(times_matrix(x, matrix).reshape(y.shape), y)
    np.testing.assert_array_equal(times_matrix(dy, matrix, transposed=True).reshape(x.shape), vjp(dy)[0])


@pytest.mark.parametrize(
    ("w_shape", "input_size", "output_size", "pays"),
    [
        ((16, 6, 5, 5), (12, 12), (8, 8), True),
        ((6, 1, 5, 5), (28, 28), (24, 24), True),
        ((16, 6, 5, 5), (28, 28), (24, 24), False),  # too large
        ((4, 1, 3, 3), (20, 20), (18, 18), False),  # mostly zeros
        ((32, 32, 1, 1), (5, 5), (5, 5), False),  # of one tap
    ],
)
def test_the_filter_matrix_pays_for_small_images(w_shape, input_size, output_size, pays):
    assert matrix_pays(w_shape, input_size, output_size) == pays
