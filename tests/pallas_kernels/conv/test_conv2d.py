import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_the_cpu

from pallas_kernels.conv.conv2d import CorrelateConfig, correlate, correlate_batch, sum_batch
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, targeting
from pallas_kernels.core.layouts import LANES


def integers(*shape):
    """Sums of small integers are exact in float32 in any order."""
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), jnp.float32)


def lax_correlate(x, w, stride):
    return jax.lax.conv_general_dilated(x, w, stride, "VALID", dimension_numbers=("CHWN", "OIHW", "CHWN"))


SIZES = [
    (2, 1, (13, 13), (13, 14), (1, 1)),
    (1, 2, (1, 200), (2, 201), (1, 1)),
    (1, 1, (200, 1), (203, 1), (2, 1)),
    (11, 13, (1, 1), (2, 2), (1, 1)),
    (7, 3, (2, 2), (5, 4), (3, 2)),
]
every_size = pytest.mark.parametrize(("K", "C", "window", "size", "stride"), SIZES, ids=str)


@every_size
def test_correlate_of_any_size_is_that_of_lax(K, C, window, size, stride):
    x, w = integers(C, *size, LANES), integers(K, C, *window)
    with on_the_cpu():
        expected = lax_correlate(x, w, stride)
    actual = jax.jit(correlate, static_argnames="stride")(x, w, stride=stride)
    np.testing.assert_array_equal(actual, expected)


@every_size
def test_correlate_batch_of_any_size_is_the_gradient_of_lax(K, C, window, size, stride):
    size = [(n - f) // s * s + f for n, f, s in zip(size, window, stride, strict=True)]
    x, w = integers(C, *size, LANES), integers(K, C, *window)
    with on_the_cpu():
        y, vjp = jax.vjp(lambda w: lax_correlate(x, w, stride), w)
        dy = integers(*y.shape)
        (expected,) = vjp(dy)
    actual = jax.jit(correlate_batch, static_argnames="stride")(dy, x, stride=stride)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "channels", "lane_block"),
    [((6, 1, 5, 5), "float32", 6, 512), ((16, 6, 5, 5), "float32", 8, 512), ((11, 2, 3, 3), "bfloat16", 1, 512)],
)
def test_correlate_takes_up_to_eight_channels_that_divide_them_all(shape, dtype, channels, lane_block):
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((shape[1], 12, 12, 1024), shape))
    assert correlate.plan(x, w) == CorrelateConfig(channels, lane_block)


@pytest.mark.parametrize(("stride", "filter_size"), [((1, 1), (5, 5)), ((2, 3), (9, 1))])
def test_correlate_batch_splits_filters_that_registers_do_not_hold_and_the_batch(stride, filter_size):
    rows = [(n - 1) * s + f for n, s, f in zip((4, 4), stride, filter_size, strict=True)]
    dy, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 4, 4, 1024), (6, *rows, 1024)))
    config = correlate_batch.plan(dy, x, stride=stride)
    assert (config.rows, config.columns) == filter_size
    assert 16 % config.out_channels == 6 % config.in_channels == 0
    assert math.prod(config[:4]) <= 160
    assert config.splits == 32


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
def test_they_are_kernels_of_later_gpus_too(gpu):
    x, w, dy = (jax.ShapeDtypeStruct(s, "float32") for s in ((6, 12, 12, 1024), (16, 6, 5, 5), (16, 8, 8, 1024)))
    with targeting(gpu):
        assert not any(
            kernel.unsupported(*arrays)
            for kernel, *arrays in ((correlate, x, w), (correlate_batch, dy, x), (sum_batch, dy))
        )
