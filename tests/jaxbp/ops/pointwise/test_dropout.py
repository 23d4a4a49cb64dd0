import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_implementation, ours

from jaxbp import dropout, dropout_backward

KEY = jax.random.key(3)


@every_implementation
def test_the_backward_drops_what_the_forward_dropped(implementation):
    x = jnp.ones((40, 7))
    y = dropout(x, KEY, 0.25, implementation=implementation)
    np.testing.assert_array_equal(np.unique(y), np.float32([0, 1 / 0.75]))
    np.testing.assert_array_equal(dropout_backward(x, KEY, 0.25, implementation=implementation), y)


def test_the_share_that_is_kept_is_that_asked_for_and_the_mean_stays():
    y = dropout(jnp.ones(100_000), KEY, 0.3)
    assert abs(float(jnp.mean(y == 0)) - 0.3) < 0.01
    assert abs(float(jnp.mean(y)) - 1) < 0.01


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (1.0, 0.0)])
@every_implementation
def test_nothing_or_everything_is_dropped(rate, expected, implementation):
    x = jnp.ones(5)
    np.testing.assert_array_equal(dropout(x, KEY, rate, implementation=implementation), expected)
    np.testing.assert_array_equal(dropout_backward(x, KEY, rate, implementation=implementation), expected)


def test_an_element_that_is_dropped_hides_nan():
    y = dropout(jnp.full(50, jnp.nan), KEY, 0.5)
    assert 0 < jnp.sum(y == 0) < 50


def test_raw_keys_are_the_same_keys():
    x = jnp.ones(50)
    np.testing.assert_array_equal(dropout(x, jax.random.key_data(KEY), 0.5), dropout(x, KEY, 0.5))


def test_another_key_drops_others():
    x = jnp.ones(50)
    assert (dropout(x, jax.random.key(4), 0.5) != dropout(x, KEY, 0.5)).any()


@ours
def test_nothing_but_the_key_is_saved(implementation):
    _, vjp = jax.vjp(lambda x: dropout(x, KEY, 0.5, implementation=implementation), jnp.ones((64, 64)))
    assert sum(leaf.size for leaf in jax.tree.leaves(vjp)) <= 2
