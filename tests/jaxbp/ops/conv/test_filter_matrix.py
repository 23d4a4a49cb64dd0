import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.ops.conv import _filter_matrix
from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient import input_gradient
from pallas_kernels.core.layouts import LANES


def integers(*shape):
    """Sums of small integers are exact in float32 in any order."""
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), jnp.float32)


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
    matrix = _filter_matrix.filter_matrix(w, **sizes, stride=stride, before=padding, dilation=dilation)
    np.testing.assert_array_equal((x.reshape(2, -1) @ matrix).reshape(y.shape), y)
    np.testing.assert_array_equal((dy.reshape(2, -1) @ matrix.T).reshape(x.shape), vjp(dy)[0])


@pytest.mark.parametrize(
    ("w_shape", "input_size", "output_size", "pays"),
    [
        ((16, 6, 5, 5), (12, 12), (8, 8), True),
        ((6, 1, 5, 5), (28, 28), (24, 24), True),
        ((16, 6, 5, 5), (28, 28), (24, 24), False),  # too large
        ((4, 1, 3, 3), (20, 20), (18, 18), False),  # mostly zeros
        ((32, 32, 1, 1), (5, 5), (5, 5), False),  # one tap
    ],
)
def test_the_filter_matrix_pays_for_small_images(w_shape, input_size, output_size, pays):
    assert _filter_matrix.pays(w_shape, input_size, output_size) == pays


@pytest.mark.parametrize("window", [(2, 2), (1, 3)], ids=str)
def test_products_with_the_band_are_the_exact_kernels_gradient(window):
    (P, Q), (F, G) = (2, 3), (3, 2)
    dy, w = integers(3, P, Q, LANES), integers(3, 2, F, G)
    place = jnp.asarray(np.random.default_rng(2).integers(0, window[0] * window[1] + 1, dy.shape, np.uint8))
    options = dict(window=window, input_size=(P * window[0] + F - 1, Q * window[1] + G - 1))
    banded = _filter_matrix.banded_input_gradient(dy, place, w, **options)
    np.testing.assert_array_equal(banded, input_gradient(dy, place, w, **options))


@pytest.mark.parametrize(
    ("w_shape", "dy_shape", "width", "dtype", "pays"),
    [
        ((16, 6, 5, 5), (16, 4, 4, 1024), 12, "float32", True),
        ((16, 6, 5, 5), (16, 4, 4, 512), 12, "float32", False),  # too few products for four launches
        ((16, 6, 5, 5), (16, 4, 4, 128), 12, "bfloat16", True),
        ((32, 16, 5, 5), (32, 5, 5, 128), 14, "float32", True),
        ((6, 1, 5, 5), (6, 12, 12, 2048), 28, "float32", False),  # mostly zeros
        ((6, 1, 5, 5), (6, 12, 12, 2048), 28, "bfloat16", True),
        ((64, 32, 5, 5), (64, 12, 12, 1024), 28, "bfloat16", False),  # too large
    ],
)
def test_the_band_pays_for_small_images(w_shape, dy_shape, width, dtype, pays):
    w, dy = (jax.ShapeDtypeStruct(shape, dtype) for shape in (w_shape, dy_shape))
    assert _filter_matrix.band_pays(w, dy, width, (2, 2)) == pays
