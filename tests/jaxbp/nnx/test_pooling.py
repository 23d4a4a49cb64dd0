import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_twins import IMAGES
from helpers import assert_close, draw_cotangents, value_and_gradients

import jaxbp

CALLS = [
    (IMAGES, ((2, 3),), True),
    (IMAGES, ((3, 2), (2, 1), "SAME"), False),
    (IMAGES, ((3, 3), (2, 2), ((1, 1), (0, 2))), True),
    (IMAGES[0], ((2, 2), (2, 2)), False),
    (IMAGES[0], ((3,), (2,), ((1, 1),)), False),
    (IMAGES[None], ((2, 2), None, "SAME"), True),
    (IMAGES[None], ((1, 2, 2),), True),
]
every_call = pytest.mark.parametrize(
    ("x", "arguments", "counted"), CALLS, ids=[f"{x.ndim} axes, {arguments}" for x, arguments, _ in CALLS]
)


def assert_pools_agree(ours, twin, x):
    cotangents = draw_cotangents(twin, (x,))
    assert_close(value_and_gradients(ours)((x,), cotangents), value_and_gradients(twin)((x,), cotangents), 1e-5)


@every_call
def test_max_pool_agrees_with_flax(x, arguments, counted):
    assert_pools_agree(lambda x: jaxbp.nnx.max_pool(x, *arguments), lambda x: nnx.max_pool(x, *arguments), x)


@every_call
def test_avg_pool_agrees_with_flax(x, arguments, counted):
    options = dict(count_include_pad=counted)
    ours, twin = (lambda x, pool=pool: pool(x, *arguments, **options) for pool in (jaxbp.nnx.avg_pool, nnx.avg_pool))
    assert_pools_agree(ours, twin, x)


@pytest.mark.parametrize("pool", [jaxbp.nnx.max_pool, jaxbp.nnx.avg_pool])
def test_the_implementation_reaches_the_op(pool):
    lowered = jax.jit(lambda x: pool(x, (2, 2), implementation="xla")).lower(IMAGES)
    assert "/xla/" in lowered.as_text(debug_info=True)


def test_windows_of_three_axes_are_only_in_flax():
    with pytest.raises(NotImplementedError, match=r"^max_pool: implementation='xla' does not take 3 spatial axes"):
        jaxbp.nnx.max_pool(IMAGES[None], (1, 2, 2), implementation="xla")


def test_an_input_without_channels_is_an_error():
    with pytest.raises(TypeError, match=r"^max_pool: window_shape is 2; wants a tuple with one int per spatial axis"):
        jaxbp.nnx.max_pool(jnp.ones((1, 4, 4, 1)), 2)
    with pytest.raises(TypeError, match=r"^max_pool: padding is 1; wants 'SAME', 'VALID', or one pair of ints per"):
        jaxbp.nnx.max_pool(jnp.ones((1, 4, 4, 1)), (2, 2), padding=1)
    with pytest.raises(ValueError, match=r"^avg_pool: inputs has shape \(4, 5\), .*; wants at least 3 axes"):
        jaxbp.nnx.avg_pool(jnp.ones((4, 5)), (2, 2))


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff", None])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_pools_of_integer_images_agree_with_flax(dtype, implementation):
    x = (jnp.arange(32).reshape(1, 4, 4, 2) % 7 - 3 * (dtype == "int32")).astype(dtype)  # Flax's sums of bytes overflow
    arguments = (3, 3), (2, 2), "SAME"
    for name in ("max_pool", *(["avg_pool"] if dtype != "bool" else [])):
        found = getattr(jaxbp.nnx, name)(x, *arguments, implementation=implementation)
        expected = getattr(nnx, name)(x, *arguments)
        assert found.dtype == expected.dtype
        assert_close(found, expected, 1e-6)
