import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.verify.arguments import take_apart
from jaxbp.verify.points import USER_DATA, Point
from jaxbp.verify.reference import Reference

C = np.array([0.7, -1.3])


def first_orders(function, x):
    reference = Reference(function, take_apart(function, (x,)), {})
    return reference.first_orders(Point(USER_DATA, [np.asarray(x, np.float64)], [C]), [None], most=2)


def test_values_and_gradients_are_those_of_calculus():
    x = np.float32([0.5, -2.0])
    values, gradients = first_orders(jnp.sin, x)
    assert (values.order, gradients.order, gradients.against) == (0, 1, "finite differences")
    np.testing.assert_allclose(values.arrays[0], np.sin(x, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(gradients.arrays[0], C * np.cos(x, dtype=np.float64), rtol=1e-12)


def test_a_kink_has_autodiffs_gradient():
    _, gradients = first_orders(jnp.abs, np.float32([0.0, 3.0]))
    assert gradients.against == "finite differences; autodiff where there is a kink"
    np.testing.assert_allclose(gradients.arrays[0], [C[0] * jax.grad(jnp.abs)(0.0), C[1]])
    assert not gradients.contradicted[0].any()


@jax.custom_vjp
def wrong_sine(x):
    return jnp.sin(x)


wrong_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x) * 1.01,))


def test_differences_that_agree_with_each_other_contradict_a_wrong_rule():
    x = np.array([0.5, -2.0])
    _, gradients = first_orders(wrong_sine, x)
    assert gradients.contradicted[0].all()
    np.testing.assert_allclose(gradients.arrays[0], C * np.cos(x), rtol=1e-7)


@pytest.mark.parametrize("forward", [jnp.square, jnp.abs])
def test_a_wrong_rule_is_contradicted_where_the_slope_is_0_and_at_a_kink(forward):
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), x), lambda x, dy: (dy * (1000 + 2 * x),))
    _, gradients = first_orders(function, np.array([0.0, 1.0]))
    assert gradients.contradicted[0].all()


@pytest.mark.parametrize("function", [lambda x: jnp.log(jnp.abs(x)), jnp.cbrt])
def test_slopes_that_grow_at_a_singularity_contradict_nothing(function):
    _, gradients = first_orders(function, np.array([1e-30, 1.0]))
    assert not gradients.contradicted[0].any()


def test_steps_are_those_that_a_large_number_takes():
    x = np.array([1234.5678, 4321.1234])
    reference = Reference(jnp.sin, take_apart(jnp.sin, (x,)), {})
    _, gradients = reference.first_orders(Point(USER_DATA, [x], [C]), [1e-7], most=2)
    assert not gradients.contradicted[0].any()


def test_what_is_too_small_to_see_contradicts_nothing():
    x, y = np.array([1e-4, 2e-4]), np.array([200.0, 300.0])
    reference = Reference(jnp.hypot, take_apart(jnp.hypot, (x, y)), {})
    _, gradients = reference.first_orders(Point(USER_DATA, [x, y], [C]), [None, None], most=2)
    assert not gradients.contradicted[0].any()
    np.testing.assert_allclose(gradients.arrays[0], C * x / np.hypot(x, y), rtol=1e-6)


def test_constants_are_those_of_the_program():
    function = lambda x: jnp.clip(x, -0.7, 0.5) * jnp.where(x > 3.0, x, 0.0)  # noqa: E731
    assert set(Reference(function, take_apart(function, (np.ones(2),)), {}).constants) >= {-0.7, 0.5, 3.0}


def test_a_rule_of_ones_own_is_not_independent():
    x = np.ones(2)
    assert Reference(jnp.sin, take_apart(jnp.sin, (x,)), {}).independent
    assert not Reference(wrong_sine, take_apart(wrong_sine, (x,)), {}).independent
