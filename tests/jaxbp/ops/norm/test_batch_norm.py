import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every_implementation, normal, ours

from jaxbp import batch_norm, batch_norm_backward


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (2, 3, 4, 4)], ids=str)
def test_each_channel_has_mean_bias_and_the_variance_of_scale_squared(shape):
    x = 5 + 2 * normal(shape)[0]
    scale, bias = jnp.array([1.0, 2.0, 0.5]), jnp.array([0.0, 1.0, -1.0])
    y, mean, var = batch_norm(x, scale, bias, epsilon=0.0)
    axes = (0, *range(2, x.ndim))
    assert_close((mean, var), (jnp.mean(x, axes), jnp.var(x, axes)), "float32")
    assert_close((jnp.mean(y, axes) + 2, jnp.var(y, axes)), (bias + 2, scale**2), "float32")


@ours
def test_the_gradient_has_no_part_along_what_normalizing_removes(implementation):
    # Shifting or scaling a channel does not change y.
    x, dy, scale = normal((8, 3, 5), (8, 3, 5), (3,))
    dx, _, _ = batch_norm_backward(dy, x, scale, epsilon=0.0, implementation=implementation)
    np.testing.assert_allclose(jnp.sum(dx, (0, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(dx * x, (0, 2)), 0, atol=1e-5)


@ours
def test_the_gradient_stays_accurate_far_from_zero(implementation):
    x, dy, scale = normal((8, 3, 5), (8, 3, 5), (3,))
    near = batch_norm_backward(dy, x, scale, implementation=implementation)
    far = batch_norm_backward(dy, x + 64, scale, implementation=implementation)
    assert_close(far, near, 1e-4)


@ours
def test_one_value_a_channel_has_no_gradient(implementation):
    dx, dscale, dbias = batch_norm_backward(
        jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.ones(2), implementation=implementation
    )
    np.testing.assert_array_equal((dx[0], dscale, dbias), [[0, 0], [0, 0], [1, 1]])


@every_implementation
def test_a_channel_whose_squares_overflow_is_nan(implementation):
    x = jnp.array([[1e20, 1.0], [-1e20, 2.0]])
    y, _, var = batch_norm(x, jnp.ones(2), jnp.zeros(2), implementation=implementation)
    np.testing.assert_array_equal(jnp.isnan(y), [[True, False]] * 2)
    assert var[0] == jnp.inf
    dx, _, _ = batch_norm_backward(jnp.ones((2, 2)), x, jnp.ones(2), implementation=implementation)
    np.testing.assert_array_equal(jnp.isnan(dx), [[True, False]] * 2)


def test_the_statistics_have_gradients():
    x, scale, bias = normal((8, 3), (3,), (3,))
    found = jax.grad(lambda x: jnp.sum(jnp.stack(batch_norm(x, scale, bias, implementation="xla")[1:])))(x)
    assert_close(found, (1 + 2 * (x - jnp.mean(x, 0))) / 8, "float32")


@every_implementation
@pytest.mark.parametrize("fast", [False, True])
def test_an_empty_batch_changes_neither_running_averages_nor_parameters(fast, implementation):
    running = jnp.arange(3.0), jnp.arange(1.0, 4.0)
    options = dict(use_fast_variance=fast, implementation=implementation)
    for x in (jnp.zeros((0, 3)), jnp.zeros((2, 3, 0))):
        for given in (running, None):
            run = lambda x, *a, given=given: batch_norm(x, *a, given, **options)  # noqa: E731
            (y, *averages), vjp = jax.vjp(run, x, jnp.ones(3), jnp.ones(3))
            assert y.shape == x.shape
            np.testing.assert_array_equal(averages, np.full((2, 3), np.nan) if given is None else running)
            _, dscale, dbias = vjp((y, *map(jnp.zeros_like, averages)))
            np.testing.assert_array_equal((dscale, dbias), np.zeros((2, 3)))
        dx, dscale, dbias = batch_norm_backward(x, x, jnp.ones(3), implementation=implementation)
        assert dx.shape == x.shape
        np.testing.assert_array_equal((dscale, dbias), np.zeros((2, 3)))
