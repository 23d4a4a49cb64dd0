"""The input's gradient on the tensor cores: in the simulator, lowered for CUDA, and on a GPU at LeNet's shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, on_the_cpu, relative_error

from pallas_kernels.conv import conv2d_relu_max_pool2d
from pallas_kernels.conv import input_gradient_sm90 as tensor_cores
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
# Channels out, rows and columns of windows, channels in, filter.
LENET, SMALL, ONE_GROUP = (16, 4, 4, 6, 5), (16, 1, 4, 2, 5), (32, 2, 1, 4, 3)


def operands(draw, K, P, Q, C, F, N=LANES):
    """dy, places and w, and the input's size."""
    dy, w = draw((K, P, Q, N), (K, C, F, F))
    place = np.random.default_rng(2).integers(0, 5, (K, P, Q, N), np.uint8)
    return (dy, jnp.asarray(place), w), (2 * P + F - 1, 2 * Q + F - 1)


def integers(*shapes):
    """Small whole numbers, whose products and sums are exact on the tensor cores too."""
    random = np.random.default_rng(0)
    return [jnp.asarray(random.integers(-3, 4, shape), jnp.float32) for shape in shapes]


def gradients(input_size):
    options = dict(window=(2, 2), input_size=input_size)
    kernels = tensor_cores.input_gradient, conv2d_relu_max_pool2d.input_gradient
    return [jax.jit(functools.partial(kernel, **options)) for kernel in kernels]


@can_simulate
@pytest.mark.parametrize("block", [SMALL, ONE_GROUP], ids=["two groups", "one group"])
def test_the_simulator_finds_it_right(block):
    arrays, input_size = operands(integers, *block)
    here, exact = gradients(input_size)
    with on_the_cpu():
        expected = exact(*arrays)
        with simulated():
            actual = jax.block_until_ready(here(*arrays))
    np.testing.assert_array_equal(actual, expected)


def test_without_a_gpu_the_exact_kernel_takes_its_place():
    arrays, input_size = operands(normal, *SMALL)
    with on_the_cpu():
        here, exact = (kernel(*arrays) for kernel in gradients(input_size))
    np.testing.assert_array_equal(here, exact)


def test_groups():
    assert tensor_cores.group((16, 4, 4, 128), (16, 6, 5, 5), (2, 2)) == 2
    assert tensor_cores.group((32, 2, 1, 128), (32, 4, 3, 3), (2, 2)) == 1
    assert tensor_cores.group((6, 12, 12, 128), (6, 1, 5, 5), (2, 2)) is None  # 6 channels fill no tile
    assert tensor_cores.group((64, 4, 4, 128), (64, 32, 5, 5), (2, 2)) is None  # more weights than shared memory


def test_it_pays_for_large_batches():
    w_shape = (16, 6, 5, 5)
    assert tensor_cores.pays((16, 4, 4, 2048), w_shape, (2, 2))
    assert not tensor_cores.pays((16, 4, 4, 1024), w_shape, (2, 2))


@pytest.mark.parametrize("block", [LENET, SMALL, ONE_GROUP])
def test_it_lowers_for_cuda(block):
    arrays, input_size = operands(normal, *block)
    program = gradients(input_size)[0].trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in program


@pytest.mark.gpu
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 4096])
def test_gpu_gradients_match_the_exact_kernel_and_repeat_their_bits(N):
    arrays, input_size = operands(normal, *LENET, N=N)
    here, exact = gradients(input_size)
    once, again = here(*arrays), here(*arrays)
    np.testing.assert_array_equal(once, again)
    assert relative_error(once, exact(*arrays)) < 1e-3
