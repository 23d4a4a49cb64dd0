import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_implementation

import jaxbp

INF, NAN = np.inf, np.nan

# name, x1, x2 -> y, dx1, dx2 for dy = 2
BY_HAND = [
    ("add", 3, 4, 7, 2, 2),
    ("subtract", 3, 4, -1, 2, -2),
    ("multiply", 3, 4, 12, 8, 6),
    ("divide", 3, 4, 0.75, 0.5, -0.375),
    ("divide", 3, 0, INF, INF, -INF),
    ("divide", 0, 0, NAN, INF, NAN),
    ("power", 3, 2, 9, 12, 18 * np.log(3)),
    ("power", 0, 2, 0, 0, 0),
    ("power", 0, 1, 0, 2, 0),
    ("power", 0, 0.5, 0, INF, 0),
    ("power", 0, 0, 1, 0, -INF),
    ("power", -2, 3, -8, 24, NAN),
    ("maximum", 3, 4, 4, 0, 2),
    ("maximum", 4, 4, 4, 1, 1),
    ("minimum", 3, 4, 3, 2, 0),
    ("minimum", 4, 4, 4, 1, 1),
]


@every_implementation
def test_values_and_gradients_are_those_computed_by_hand(implementation):
    for name, x1, x2, y, *gradients in BY_HAND:
        x1, x2, dy = (jnp.full(1, value, jnp.float32) for value in (x1, x2, 2))
        got = getattr(jaxbp, name)(x1, x2, implementation=implementation)
        np.testing.assert_allclose(got, [y], rtol=1e-5, err_msg=name)
        if implementation == "autodiff" and not np.isfinite(gradients).all():
            continue  # JAX's rules differ where a gradient is not finite
        got = getattr(jaxbp, f"{name}_backward")(dy, x1, x2, implementation=implementation)
        np.testing.assert_allclose(np.ravel(got), gradients, rtol=1e-5, err_msg=f"{name} of {x1}, {x2}")


@every_implementation
def test_a_gradient_has_its_arguments_shape_and_sums_what_was_broadcast(implementation):
    x1, x2, dy = jnp.ones((4, 1, 3)), jnp.full((2, 1), 5.0), jnp.arange(24.0).reshape(4, 2, 3)
    dx1, dx2 = jaxbp.multiply_backward(dy, x1, x2, implementation=implementation)
    np.testing.assert_allclose(dx1, 5 * dy.sum(axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(dx2, dy.sum(axis=(0, 2))[:, None], rtol=1e-6)


@every_implementation
def test_the_negative_of_a_gradient_is_its_gradient(implementation):
    x = jnp.array([1.0, -0.0, INF])
    np.testing.assert_array_equal(jaxbp.negative(x, implementation=implementation), -x)
    np.testing.assert_array_equal(jaxbp.negative_backward(x, implementation=implementation), -x)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"add: .*\(2,\).*\(3,\)"):
        jaxbp.add(jnp.ones(2), jnp.ones(3))
    with pytest.raises(ValueError, match="add_backward: dy has shape"):
        jaxbp.add_backward(jnp.ones(3), jnp.ones(2), jnp.ones(2))


def test_numbers_are_promoted_as_by_jax():
    x = jnp.ones(2, jnp.bfloat16)
    for number in (2, 2.0, np.float64(2), np.float32(2), jnp.float32(2), jnp.asarray(2.0)):
        for add in (jaxbp.add, jax.jit(jaxbp.add)):
            assert add(x, number).dtype == jnp.add(x, number).dtype, repr(number)
