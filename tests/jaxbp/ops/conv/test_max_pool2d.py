import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_numerical_gradients_agree,
    every_implementation,
    gradients_of,
    kernel_results,
    ours,
    results_and_gradients,
    results_of,
)

from jaxbp import max_pool2d, max_pool2d_backward, max_pool2d_with_indices


def pool(x, implementation, **options):
    x, options = jnp.asarray(x, jnp.float32)[None, None], options | dict(implementation=implementation)
    (y,) = results_of(functools.partial(max_pool2d, **options), [x])
    dy = np.arange(1, y.size + 1, dtype=y.dtype).reshape(y.shape)
    (y,), (dx,) = results_and_gradients(max_pool2d, (x,), [dy], **options)
    return np.asarray(y[0, 0]), np.asarray(dx[0, 0])


@every_implementation
def test_numerical_gradients_agree_to_a_thousandth(implementation):
    # No step of 0.04 moves a maximum, because values are at least 0.1 apart.
    x = jax.random.permutation(jax.random.key(0), jnp.arange(2 * 5 * 6) / 10).reshape(1, 2, 5, 6)
    assert_numerical_gradients_agree(
        max_pool2d, (x,), step=0.04, window=(3, 2), stride=(2, 1), padding=(1, 0), implementation=implementation
    )


@every_implementation
def test_of_equal_maxima_the_first_in_row_major_order_gets_the_gradient(implementation):
    _, dx = pool([[7, 7, 0, 5], [7, 7, 5, 5]], implementation, window=2)
    np.testing.assert_array_equal(dx, [[1, 0, 0, 2], [0, 0, 0, 0]])


@every_implementation
def test_a_maximum_of_overlapping_windows_gets_the_sum_of_their_gradients(implementation):
    _, dx = pool([[1, 2, 3], [4, 9, 5], [6, 7, 8]], implementation, window=2, stride=1)
    np.testing.assert_array_equal(dx, [[0, 0, 0], [0, 1 + 2 + 3 + 4, 0], [0, 0, 0]])


@ours
def test_gradients_of_overlapping_windows_are_added_up_in_float32(implementation):
    x = jnp.zeros((1, 1, 5, 5), jnp.bfloat16).at[0, 0, 2, 2].set(1)
    dy = jnp.ones((1, 1, 3, 3), jnp.bfloat16).at[0, 0, [0, 2], [0, 2]].set(256)
    (_,), (dx,) = results_and_gradients(max_pool2d, (x,), [dy], window=3, stride=1, implementation=implementation)
    assert dx[0, 0, 2, 2] == 520  # 519, rounded once


@ours
def test_a_window_of_minus_infinity_never_routes_to_padding(implementation):
    y, dx = pool(np.full((3, 3), -np.inf), implementation, window=2, padding=1)
    np.testing.assert_array_equal(y, np.full((2, 2), -np.inf))
    np.testing.assert_array_equal(dx, [[1, 2, 0], [3, 4, 0], [0, 0, 0]])


@ours
def test_nan_comes_out_and_gets_the_gradient(implementation):
    nan, inf = np.nan, np.inf
    y, dx = pool([[1, nan, 3, inf], [5, 6, nan, nan]], implementation, window=2)
    np.testing.assert_array_equal(y, [[nan, nan]])
    np.testing.assert_array_equal(dx, [[0, 1, 0, 0], [0, 0, 2, 0]])


@every_implementation
def test_positions_in_no_window_get_zero(implementation):
    _, dx = pool(np.arange(30).reshape(5, 6), implementation, window=(2, 1), stride=(3, 4))
    np.testing.assert_array_equal(np.argwhere(dx != 0), [[1, 0], [1, 4], [4, 0], [4, 4]])


@every_implementation
def test_indices_are_places_in_row_major_order_of_the_window(implementation):
    x = jnp.array([[0.0, 1, 0, 0, 9, 0], [0, 0, 0, 0, 0, 0], [0, 0, 5, 3, 0, 0]])[None, None]
    y, indices = max_pool2d_with_indices(x, (3, 2), implementation=implementation)
    np.testing.assert_array_equal(y[0, 0], [[1, 5, 9]])
    np.testing.assert_array_equal(indices[0, 0], [[1, 4, 0]])


@pytest.mark.parametrize(("window", "dtype"), [((2, 2), "uint8"), ((16, 16), "uint8"), ((1, 257), "int32")])
@every_implementation
def test_indices_take_a_byte_for_up_to_256_places(window, dtype, implementation):
    x = jax.ShapeDtypeStruct((1, 1, 16, 300), jnp.float32)
    _, indices = jax.eval_shape(lambda x: max_pool2d_with_indices(x, window, implementation=implementation), x)
    assert indices.dtype == dtype


@ours
def test_places_beyond_a_byte_get_their_gradient(implementation):
    _, dx = pool(np.arange(257).reshape(1, 257), implementation, window=(1, 257))
    np.testing.assert_array_equal(dx, [[0] * 256 + [1]])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
@every_implementation
def test_backward_takes_indices_of_any_integer_dtype(dtype, implementation):
    dy, indices = jnp.ones((1, 1, 1, 2)), jnp.array([3, 0], dtype)[None, None, None]
    dx = max_pool2d_backward(dy, indices, (2, 4), 2, implementation=implementation)
    np.testing.assert_array_equal(dx[0, 0], [[0, 0, 1, 0], [0, 1, 0, 0]])


@every_implementation
def test_an_index_of_no_place_sends_its_gradient_nowhere(implementation):
    dy, indices = jnp.ones((1, 1, 1, 3)), jnp.array([4, 255, 2], jnp.uint8)[None, None, None]
    dx = max_pool2d_backward(dy, indices, (2, 6), 2, implementation=implementation)
    np.testing.assert_array_equal(dx[0, 0], [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]])


WINDOWS = [
    dict(window=(2, 3)),
    dict(window=(2, 3), stride=(2, 3), padding="SAME"),
    dict(window=2, stride=1),
    dict(window=1, stride=3),
    dict(window=2, padding=1),
    dict(window=4),
    dict(window=4, ceil_mode=True),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_every_window_has_a_kernel(options, dtype):
    options |= dict(implementation="pallas")
    (dy,) = results_of(functools.partial(max_pool2d, **options), [jax.ShapeDtypeStruct((2, 3, 6, 6), dtype)])
    backward = functools.partial(max_pool2d_backward, input_size=(6, 6), **options)
    assert kernel_results(backward, dy, jnp.zeros(dy.shape, jnp.uint8)) == [1]


@pytest.mark.parametrize("channel_axis", [1, -1])
def test_the_backward_for_adjacent_windows_transposes_no_array(channel_axis):
    dy = jax.ShapeDtypeStruct((2, 4, 4, 4), jnp.float32)
    options = dict(input_size=(8, 8), window=2, channel_axis=channel_axis, implementation="pallas")
    program = jax.jit(functools.partial(max_pool2d_backward, **options)).lower(dy, dy.update(dtype=jnp.uint8))
    assert " transpose(" not in program.compile().as_text()


@pytest.mark.parametrize("options", [dict(window=2), dict(window=4, ceil_mode=True)], ids=str)
def test_channels_last_have_the_gradients_of_channels_first(options):
    first = jax.random.permutation(jax.random.key(0), jnp.arange(2 * 8 * 6 * 6) / 10).reshape(2, 8, 6, 6)
    last = jnp.moveaxis(first, 1, -1)

    @jax.jit
    def gradients(*images):
        sums = lambda x, axis: jnp.sum(max_pool2d(x, channel_axis=axis, implementation="pallas", **options) ** 2)  # noqa: E731
        return [jax.grad(sums)(x, axis) for x, axis in zip(images, (1, -1), strict=True)]

    of_first, of_last = gradients(first, last)
    np.testing.assert_array_equal(jnp.moveaxis(of_last, -1, 1), of_first)


@pytest.mark.parametrize(("padding", "meaning"), [("SAME", "SAME"), ("VALID", "VALID"), ((1, 0), [(1, 1), (0, 0)])])
def test_paddings_mean_what_they_mean_to_lax(padding, meaning):
    x = jax.random.normal(jax.random.key(0), (1, 1, 6, 7))
    pads = meaning if isinstance(meaning, str) else [(0, 0), (0, 0), *meaning]
    expected = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 2), (1, 1, 2, 2), pads)
    assert_close(max_pool2d(x, (3, 2), stride=2, padding=padding), expected, "float32")


@every_implementation
def test_an_empty_batch_works(implementation):
    x, dy = jnp.zeros((0, 2, 4, 4)), jnp.zeros((0, 2, 2, 2))
    (dx,) = gradients_of(max_pool2d, (x,), [dy], window=2, implementation=implementation)
    assert dx.shape == x.shape
