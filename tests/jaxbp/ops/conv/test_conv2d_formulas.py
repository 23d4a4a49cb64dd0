import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.ops.conv import _conv2d_formulas as formulas


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
    options = dict(stride=stride, padding=[(p, p) for p in padding], dilation=dilation)
    matrix = formulas.filter_matrix(w, (6, 7), y.shape[2:], **options)
    np.testing.assert_array_equal((x.reshape(2, -1) @ matrix).reshape(y.shape), y)
    np.testing.assert_array_equal((dy.reshape(2, -1) @ matrix.T).reshape(x.shape), vjp(dy)[0])
