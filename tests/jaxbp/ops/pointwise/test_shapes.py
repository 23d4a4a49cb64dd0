import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp import flatten


@pytest.mark.parametrize(
    ("shape", "flat"), [((2, 3, 4), (2, 12)), ((5,), (5, 1)), ((0, 3, 2), (0, 6)), ((2, 0), (2, 0))]
)
def test_each_example_becomes_a_row(shape, flat):
    assert flatten(jnp.zeros(shape)).shape == flat


def test_elements_keep_their_row_major_order():
    np.testing.assert_array_equal(flatten(jnp.arange(12).reshape(2, 2, 3)), np.arange(12).reshape(2, 6))


def test_the_gradient_gets_the_shape_back():
    dy = jnp.arange(12.0).reshape(2, 6)
    _, vjp = jax.vjp(flatten, jnp.zeros((2, 2, 3)))
    np.testing.assert_array_equal(vjp(dy)[0], np.arange(12.0).reshape(2, 2, 3))
