import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_the_cpu

from pallas_kernels.conv.conv2d_relu_max_pool2d_forward import forward as exact_forward
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
BLOCKS = {
    "lenet1": (6, 12, 12, 1, 5),
    "lenet2": (16, 4, 4, 6, 5),
    "small": (6, 2, 4, 2, 5),
    "one row": (3, 1, 4, 2, 3),
    "eight channels": (8, 1, 4, 4, 3),
}
"""K, P, Q, C, F: filters, rows and columns of windows, channels, filter size."""


def shapes(block, N=LANES, window=(2, 2), spare=0):
    """No window covers the last `spare` rows and columns of x."""
    (K, P, Q, C, F), (R, S) = BLOCKS[block], window
    return (C, P * R + F - 1 + spare, Q * S + F - 1 + spare, N), (K, C, F, F), (K,)


def structs(block, dtype, N=4096, window=(2, 2)):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(block, N, window)]


def integers(*shapes, dtype):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.integers(-2, 3, shape), dtype) for shape in shapes]


def with_exact(forward, window=(2, 2), config=None):
    kernel = functools.partial(forward, window=window, config=config)
    return jax.jit(kernel), jax.jit(functools.partial(exact_forward, window=window))


def simulate(kernel, *arrays):
    """Run a kernel for two multiprocessors, so that a CTA computes several tiles."""
    with on_the_cpu(), targeting(dataclasses.replace(HOPPER, multiprocessors=2)), simulated():
        return jax.block_until_ready(kernel(*arrays))


def assert_equals_exact(forward, window, config, arrays):
    kernel, exact = with_exact(forward, window, config)
    with on_the_cpu():
        expected = exact(*arrays)
    jax.tree.map(np.testing.assert_array_equal, simulate(kernel, *arrays), expected)


def assert_a_nan_stays_with_its_example(forward, config, dtype):
    x, w, b = integers(*shapes("small"), dtype=dtype)
    kernel, exact = with_exact(forward, config=config)
    with on_the_cpu():
        expected = exact(x, w, b)
    y, place = simulate(kernel, x.at[1, 2, 3, 5].set(jnp.nan), w, b)
    assert np.isnan(y[:, :, 0, 5]).all() and (place[:, :, 0, 5] == 4).all()
    for actual, of in zip((y, place), expected, strict=True):
        np.testing.assert_array_equal(np.delete(actual, 5, axis=3), np.delete(of, 5, axis=3))
