import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.qa.references import REFERENCES

NAN = np.nan
VALUES = [[2.0, 1.0, 2.0], [1.0, NAN, NAN], [-np.inf, -np.inf, -np.inf]]


@pytest.mark.parametrize(
    ("name", "values", "gradient"),
    [
        ("max", [2, NAN, -np.inf], [[1, 0, 0], [0, 1, 0], [1, 0, 0]]),
        ("min", [1, NAN, -np.inf], [[0, 1, 0], [0, 1, 0], [1, 0, 0]]),
    ],
)
def test_of_equal_numbers_the_first_has_the_gradient(name, values, gradient):
    y, vjp = jax.vjp(lambda a: REFERENCES[name](a, axis=(-1,)), jnp.array(VALUES))
    np.testing.assert_array_equal(y, values)
    np.testing.assert_array_equal(vjp(jnp.ones(3))[0], gradient)
    dy = jnp.ones((3, 1))
    np.testing.assert_array_equal(
        REFERENCES[f"{name}_backward"](dy, jnp.array(VALUES), axis=1, keepdims=True), gradient
    )


@pytest.mark.parametrize("name", ["max_pool2d", "max_pool2d_with_indices", "logic_or_pool2d"])
def test_pools_never_send_a_gradient_to_padding(name):
    x = jnp.full((1, 1, 3, 3), -jnp.inf).at[0, 0, 2, 1:].set(jnp.nan)
    dx = jax.vjp(lambda x: REFERENCES[name](x, 2, padding=1), x)[1](jnp.ones((1, 1, 2, 2)))[0]
    np.testing.assert_array_equal(dx[0, 0], [[1, 1, 0], [1, 0, 0], [0, 1, 0]])
