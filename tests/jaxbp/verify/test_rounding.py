import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.verify.derivatives import float64
from jaxbp.verify.differences import EPS
from jaxbp.verify.rounding import rounded_otherwise, rounding


def moved(function, *args, **settings):
    with float64():
        (found,) = rounding(function, *(np.asarray(a, np.float64) for a in args), **settings)
    return found


def test_a_product_moves_by_one_rounding_of_itself():
    assert moved(jnp.multiply, [3.0, -1e-5], [7.0, 2.0]) == pytest.approx(np.array([21.0, 2e-5]) * EPS, rel=1)


def with_a_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), *tangents))
    return wrapped


def with_a_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: (function(x), None), lambda _, dy: (dy,))
    return wrapped


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, with_a_jvp, with_a_vjp, jax.checkpoint])
def test_what_cancels_moves_by_the_rounding_of_what_it_cancels_from(wrapped):
    off = moved(wrapped(lambda x: 1 - jax.nn.sigmoid(x)), [28.0])
    assert EPS / 4 < off[0] < 4 * EPS


def test_roundings_are_those_of_a_dtype():
    off = moved(lambda x: 1 - jax.nn.sigmoid(x), [8.0], dtype=np.float32)
    eps = float(np.finfo(np.float32).eps)
    assert eps / 4 < off[0] < 4 * eps


def test_what_only_chooses_does_not_round():
    assert not moved(lambda x: jnp.sort(jnp.maximum(x, 0.1))[::-1], [0.3, -0.7, 0.1]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_jump_where_a_tie_is_broken_counts_for_little(dtype):
    slope = jax.grad(lambda x: jnp.maximum(2 * x, 4 * x - 2))
    assert 0 < moved(slope, 1.0, dtype=dtype) < 2e-3


def test_a_number_that_is_not_finite_does_not_move():
    assert (moved(jnp.log, [0.0, -1.0, 1.0]) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounded_otherwise_what_is_alike_stays_alike_and_what_is_exact_stays(dtype):
    x = np.array([0.1, 0.1, -0.1, 0.5], dtype).astype(np.float64)
    with float64():
        (found,) = rounded_otherwise(lambda x: 3 * x, x, dtype=dtype, roundings=4, runs=5)
    assert found.shape == (6, 4) and (found[0] == 3 * x).all()
    assert (found[:, 0] == found[:, 1]).all() and (found[:, 0] == -found[:, 2]).all() and (found[:, 3] == 1.5).all()
    assert len(set(found[:, 0])) > 2 and np.abs(found / found[0] - 1).max() < 5 * np.finfo(dtype).eps
