import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every_implementation, in_float64, normal, ours

from jaxbp import batch_norm, batch_norm_backward, group_norm, group_norm_backward, layer_norm


@every_implementation
def test_one_group_is_a_layer_norm_over_all_axes_but_the_first(implementation):
    (x,) = normal((4, 6, 3))
    y = group_norm(x, num_groups=1, implementation=implementation)
    assert_close(y, layer_norm(x, epsilon=1e-6, axis=(1, 2)), "float32")


@every_implementation
def test_one_channel_per_group_is_a_batch_norm_of_each_example(implementation):
    x, scale, bias = normal((4, 6, 3), (6,), (6,))
    y = group_norm(x, scale, bias, num_groups=6, implementation=implementation)
    each = jax.vmap(lambda x: batch_norm(x[None], scale, bias, epsilon=1e-6)[0][0])
    assert_close(y, each(x), "float32")


@ours
@pytest.mark.parametrize("channel_axis", [1, 2, -1])
def test_any_axis_may_be_the_channels(channel_axis, implementation):
    x, dy, scale = normal((2, 4, 3, 5), (2, 4, 3, 5), (4,))
    move = lambda a: jnp.moveaxis(a, 1, channel_axis)  # noqa: E731
    options = dict(num_groups=2, implementation=implementation)
    dx, *parameters = group_norm_backward(move(dy), move(x), scale, channel_axis=channel_axis, **options)
    expected, *expected_parameters = group_norm_backward(dy, x, scale, **options)
    assert_close((dx, parameters), (move(expected), expected_parameters), "float32")


@ours
def test_the_gradient_has_no_part_along_what_normalizing_removes(implementation):
    # Shifting or scaling a group does not change y.
    x, dy, scale = normal((3, 4, 5), (3, 4, 5), (4,))
    dx, _, _ = group_norm_backward(dy, x, scale, 2, epsilon=0.0, implementation=implementation)
    of_groups = lambda a: jnp.sum(a.reshape(3, 2, 10), -1)  # noqa: E731
    np.testing.assert_allclose(of_groups(dx), 0, atol=1e-5)
    np.testing.assert_allclose(of_groups(dx * x), 0, atol=1e-5)


@ours
def test_the_gradient_stays_accurate_far_from_zero(implementation):
    x, dy, scale = normal((3, 4, 5), (3, 4, 5), (4,))
    near = group_norm_backward(dy, x, scale, 2, implementation=implementation)
    assert_close(group_norm_backward(dy, x + 64, scale, 2, implementation=implementation), near, 1e-4)


@every_implementation
def test_a_group_whose_squares_overflow_is_nan_and_no_other(implementation):
    x = jnp.array([[1e20, -1e20, 1.0, 2.0]])
    y = group_norm(x, num_groups=2, implementation=implementation)
    np.testing.assert_array_equal(jnp.isnan(y), [[True, True, False, False]])


@ours
@pytest.mark.parametrize("backward", [functools.partial(group_norm_backward, num_groups=2), batch_norm_backward])
def test_derivatives_of_the_backward_in_half_precision_are_rounded_once(backward, implementation):
    # Groups and channels of few elements, in which the gradients of the statistics nearly cancel the others.
    dy, x, scale, v = (a.astype(jnp.bfloat16) for a in normal((3, 4, 1), (3, 4, 1), (4,), (3, 4, 1)))

    def second(implementation, *arrays):
        dx_v = lambda *arrays: jnp.vdot(backward(*arrays, implementation=implementation)[0], v)  # noqa: E731
        return jax.grad(dx_v, argnums=(0, 1, 2))(*arrays)

    run, reference = (jax.jit(functools.partial(second, of)) for of in (implementation, "autodiff"))
    for found, exact in zip(run(dy, x, scale), in_float64(reference, dy, x, scale), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1.001 * 2**-8, atol=1e-5)
