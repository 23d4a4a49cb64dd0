import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal, ours

import jaxbp

NAMES = ("sum", "mean", "var", "max", "min", "logsumexp")


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 1, -1, (0, 2), [2, 1], ()], ids=str)
def test_every_axis_is_that_of_jnp(axis, keepdims):
    (a,) = normal((2, 3, 4))
    native = {name: getattr(jax.nn if name == "logsumexp" else jnp, name) for name in NAMES}
    axes = tuple(axis) if isinstance(axis, list) else axis
    options = dict(axis=axes, keepdims=keepdims)

    @jax.jit
    def both(a):
        results = {}
        for name in NAMES:
            y, vjp = jax.vjp(functools.partial(native[name], **options), a)
            ours, ours_vjp = jax.vjp(functools.partial(getattr(jaxbp, name), axis=axis, keepdims=keepdims), a)
            results[name] = (ours, ours_vjp(jnp.cos(y))), (y, vjp(jnp.cos(y)))
        return results

    for name, (actual, expected) in both(a).items():
        assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, expected), name
        assert_close(actual, expected, 1e-5)


@ours
def test_the_first_of_equal_extremes_gets_the_gradient(implementation):
    a = jnp.array([[1.0, 3.0, 3.0], [3.0, 0.0, 0.0]])
    one, five = jnp.array(1.0), jnp.array([1.0, 5.0])
    expected = {
        ("max", None): [[0, 1, 0], [0, 0, 0]],
        ("min", None): [[0, 0, 0], [0, 1, 0]],
        ("max", 1): [[0, 1, 0], [5, 0, 0]],
        ("min", 1): [[1, 0, 0], [0, 5, 0]],
    }
    for (name, axis), gradient in expected.items():
        backward = getattr(jaxbp, f"{name}_backward")
        found = backward(one if axis is None else five, a, axis, implementation=implementation)
        np.testing.assert_array_equal(found, gradient)


def test_over_several_axes_the_first_is_that_in_row_major_order():
    a = jnp.zeros((2, 3, 2))
    da = jaxbp.max_backward(jnp.ones(3), a, (0, 2))
    np.testing.assert_array_equal(np.argwhere(da), [[0, 0, 0], [0, 1, 0], [0, 2, 0]])


@ours
def test_nan_is_the_maximum_and_the_first_one_gets_the_gradient(implementation):
    a = jnp.array([1.0, jnp.nan, 5.0, jnp.nan])
    assert jnp.isnan(jaxbp.max(a, implementation=implementation))
    np.testing.assert_array_equal(jaxbp.max_backward(jnp.array(1.0), a, implementation=implementation), [0, 1, 0, 0])


@ours
def test_the_first_of_equals_has_the_second_derivative_alone(implementation):
    square = lambda a: jaxbp.max(a, implementation=implementation) ** 2  # noqa: E731
    np.testing.assert_array_equal(jax.hessian(square)(jnp.ones(3)), [[2, 0, 0], [0, 0, 0], [0, 0, 0]])


def test_native_autodiff_divides_the_gradient_among_equals():
    da = jaxbp.max_backward(jnp.array(1.0), jnp.ones(4), implementation="autodiff")
    np.testing.assert_array_equal(da, [0.25] * 4)


def test_an_extreme_saves_its_place_and_not_its_array():
    (a,) = normal((64, 32))
    _, vjp = jax.vjp(lambda a: jaxbp.max(a, 1, implementation="xla"), a)
    assert sum(leaf.size for leaf in jax.tree.leaves(vjp)) <= 64


@ours
def test_the_gradient_of_a_variance_of_too_few_is_nan_whatever_dy_is(implementation):
    backward = functools.partial(jaxbp.var_backward, axis=(), ddof=1, implementation=implementation)
    dy, a = normal((3,), (3,))
    da, vjp = jax.vjp(lambda dy: backward(dy, a), dy)
    assert jnp.isnan(da).all()
    np.testing.assert_array_equal(vjp(dy)[0], jnp.zeros(3))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.parametrize("name", ["max", "min", "sum", "mean", "var"])
def test_integers_are_reduced_as_by_jnp(name, dtype):
    a, where = jnp.array([[3, 0, 7], [1, 5, 4]]).astype(dtype), jnp.array([[False, True, False]] * 2)
    limits = dict(initial=1) if name in ("max", "min") else {}
    for options in ({}, dict(where=where, **limits), limits):
        found, expected = (getattr(module, name)(a, axis=1, **options) for module in (jaxbp, jnp))
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    if limits:  # unlike `jnp`, no `initial` is needed
        np.testing.assert_array_equal(getattr(jaxbp, name)(a, axis=1, where=where), a[:, 1])
