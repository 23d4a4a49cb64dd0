import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_implementation

from jaxbp import avg_pool2d, avg_pool2d_backward, global_avg_pool2d, global_avg_pool2d_backward


def image(*rows):
    return jnp.asarray(rows, jnp.float32)[None, None]


@every_implementation
def test_a_position_gets_its_share_of_every_window_that_it_is_in(implementation):
    x, options = image([1, 2, 3], [4, 5, 6], [7, 8, 9]), dict(window=2, stride=1, implementation=implementation)
    np.testing.assert_allclose(avg_pool2d(x, **options), image([3, 4], [6, 7]), rtol=1e-6)
    dx = avg_pool2d_backward(image([4, 8], [12, 16]), (3, 3), **options)
    np.testing.assert_allclose(dx, image([1, 3, 2], [4, 10, 6], [3, 7, 4]), rtol=1e-6)


@every_implementation
def test_zeros_of_the_padding_count_and_what_no_window_reaches_gets_nothing(implementation):
    options = dict(window=2, stride=3, padding=(1, 0), implementation=implementation)
    x = image([4, 8, 2], [1, 1, 1], [8, 4, 6])
    np.testing.assert_allclose(avg_pool2d(x, **options), image([3], [3]), rtol=1e-6)
    dx = avg_pool2d_backward(image([4], [8]), (3, 3), **options)
    np.testing.assert_allclose(dx, image([1, 1, 0], [0, 0, 0], [2, 2, 0]), rtol=1e-6)


@every_implementation
def test_a_global_pool_is_the_mean_of_a_channels_image(implementation):
    x = jnp.arange(12.0).reshape(1, 2, 2, 3)
    np.testing.assert_allclose(global_avg_pool2d(x, implementation=implementation), [[2.5, 8.5]], rtol=1e-6)
    dx = global_avg_pool2d_backward(jnp.array([[6.0, 12.0]]), (2, 3), implementation=implementation)
    np.testing.assert_allclose(dx, np.repeat([1.0, 2.0], 6).reshape(1, 2, 2, 3), rtol=1e-6)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"avg_pool2d: .*padding"):
        avg_pool2d(jnp.ones((1, 1, 4, 4)), 2, padding=2)
    with pytest.raises(ValueError, match="avg_pool2d_backward: dy has shape"):
        avg_pool2d_backward(jnp.ones((1, 1, 3, 3)), (4, 4), 2)
