"""The exact weights' gradient, whose sums over lanes go through shared memory on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu

from pallas_kernels.conv import conv2d_relu_max_pool2d as kernels
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated

WINDOW = (2, 2)
BLOCKS = {"lenet1": (6, 12, 12, 1, 5), "lenet2": (16, 4, 4, 6, 5), "small": (3, 2, 2, 2, 3)}
"""K, P, Q, C, F."""


def operands(block, N=LANES, dtype="float32"):
    """dy, places and x of a block whose windows fill its input."""
    K, P, Q, C, F = BLOCKS[block]
    dy, x = normal((K, P, Q, N), (C, 2 * P + F - 1, 2 * Q + F - 1, N))
    place = np.random.default_rng(2).integers(0, 5, (K, P, Q, N), np.uint8)
    return dy.astype(dtype), jnp.asarray(place), x.astype(dtype)


def in_float64(dy, place, x):
    """The same from the gradient at the convolution's resolution, as the pool's backward makes it."""
    dy, place, x = np.asarray(dy, np.float64), np.asarray(place), np.asarray(x, np.float64)
    K, P, Q, N = dy.shape
    dz = np.where(place[..., None] == np.arange(4), dy[..., None], 0).reshape(K, P, Q, N, 2, 2)
    dz = dz.transpose(0, 1, 4, 2, 5, 3).reshape(K, 2 * P, 2 * Q, N)
    patches = np.lib.stride_tricks.sliding_window_view(x, dz.shape[1:3], axis=(1, 2))
    return np.einsum("kijn,cuvnij->kcuv", dz, patches, optimize=True), dz.sum((1, 2, 3))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack layouts of shared memory")
@pytest.mark.parametrize("tile", [{}, {"ks": 1, "parts": 3}, {"ks": 3, "parts": 100}])
def test_the_simulator_finds_it_right(tile):
    arrays = operands("small")
    gradient = jax.jit(functools.partial(kernels.weights_gradient, window=WINDOW, **tile))
    with on_the_cpu(), simulated():
        actual = jax.block_until_ready(gradient(*arrays))
    assert_close(actual, in_float64(*arrays), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_it_lowers_for_cuda(block, dtype):
    arrays = jax.eval_shape(lambda: operands(block, 1024, dtype))
    assert "mosaic_gpu" in cuda_program(functools.partial(kernels.weights_gradient, window=WINDOW), *arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 1024])
@pytest.mark.parametrize("block", BLOCKS)
def test_gpu_gradients_match_float64_and_repeat_their_bits(block, N):
    arrays = operands(block, N)
    gradient = jax.jit(functools.partial(kernels.weights_gradient, window=WINDOW))
    once, again = gradient(*arrays), gradient(*arrays)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert_close(once, in_float64(*arrays), "float32")
