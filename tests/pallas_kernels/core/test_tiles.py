import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import pytest
from helpers import normal

from pallas_kernels.conv.conv2d_relu_max_pool2d_weights_gradient import WeightsGradientConfig, weights_gradient
from pallas_kernels.core import tiles
from pallas_kernels.core.device import HOPPER, targeting


class Config(NamedTuple):
    rows: int


RULE = Config(rows=8)


@tiles.kernel(plan=lambda x, *, window: f"window={window}" if window == (3, 3) else RULE)
def kernel(x, *, window, config):
    """Return the config."""
    return config


X = jnp.zeros((4, 128))


def test_the_config_is_the_planned_one_or_the_one_that_is_asked_for():
    assert kernel.plan(X, window=(2, 2)) == kernel(X, window=(2, 2)) == RULE
    assert kernel.unsupported(X, window=(2, 2)) is None
    assert kernel(X, window=(2, 2), config=Config(1)) == Config(1)


def test_what_a_kernel_does_not_take_is_refused_by_name():
    assert kernel.unsupported(X, window=(3, 3)) == kernel.plan(X, window=(3, 3)) == "window=(3, 3)"
    with pytest.raises(NotImplementedError, match=r"^test_tiles.kernel: does not take window=\(3, 3\)$"):
        kernel(X, window=(3, 3), config=RULE)


@pytest.mark.parametrize(
    ("written_for", "found", "reason"),
    [
        (None, (9, 0), None),
        (None, (12, 0), None),
        (None, (8, 0), "compute capability 8.0, at least 9.0"),
        ((9, 0), (9, 0), None),
        ((9, 0), (10, 0), "compute capability 10.0, only 9.0"),
        ((9, 0), (8, 9), "compute capability 8.9, only 9.0"),
    ],
)
def test_a_kernel_refuses_architectures_that_it_is_not_written_for(written_for, found, reason):
    kernel = tiles.kernel(plan=lambda x: RULE, capability=written_for)(lambda x, *, config: config)
    with targeting(dataclasses.replace(HOPPER, capability=found)):
        assert kernel.unsupported(X) == reason


def test_a_kernel_has_the_name_and_docstring_of_its_function():
    assert (kernel.name, kernel.__name__, kernel.__doc__) == ("test_tiles.kernel", "kernel", "Return the config.")


def test_a_tile_that_does_not_divide_is_refused():
    dy, x = normal((4, 1, 1, 128), (1, 2, 2, 128))
    place = jnp.zeros(dy.shape, jnp.uint8)
    config = WeightsGradientConfig(channels=3, windows=1, programs_per_multiprocessor=1)
    with pytest.raises(ValueError, match="weights_gradient: channels is 3; wants a divisor of 4"):
        weights_gradient(dy, place, x, window=(1, 1), config=config)
