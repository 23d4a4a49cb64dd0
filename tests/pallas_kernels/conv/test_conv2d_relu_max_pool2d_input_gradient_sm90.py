import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, on_the_cpu, relative_error

from pallas_kernels.conv import conv2d_relu_max_pool2d_input_gradient_sm90 as input_gradient_sm90
from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient import input_gradient as exact_input_gradient
from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient_sm90 import MIN_JAX, Config, input_gradient
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated

pytestmark = pytest.mark.skipif(jax.__version_info__ < MIN_JAX, reason="older versions concatenate no registers")
can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
# Output channels, rows and columns of windows, input channels, filter size.
LENET, SMALL, ONE_GROUP = (16, 4, 4, 6, 5), (16, 1, 4, 2, 5), (32, 2, 1, 4, 3)


def operands(draw, K, P, Q, C, F, N=LANES, dtype="float32"):
    dy, w = (a.astype(dtype) for a in draw((K, P, Q, N), (K, C, F, F)))
    place = np.random.default_rng(2).integers(0, 5, (K, P, Q, N), np.uint8)
    return (dy, jnp.asarray(place), w), (2 * P + F - 1, 2 * Q + F - 1)


def integers(*shapes):
    """The tensor cores compute with small integers exactly."""
    random = np.random.default_rng(0)
    return [jnp.asarray(random.integers(-3, 4, shape), jnp.float32) for shape in shapes]


def gradients(input_size, windows):
    options = dict(window=(2, 2), input_size=input_size)
    kernel = functools.partial(input_gradient, config=Config(windows), **options)
    return jax.jit(kernel), jax.jit(functools.partial(exact_input_gradient, **options))


def asked(dy_shape, w_shape, dtype="float32"):
    structs = (jax.ShapeDtypeStruct(shape, dtype) for shape in (dy_shape, dy_shape, w_shape))
    arrays, options = list(structs), dict(window=(2, 2), input_size=(12, 12))
    return input_gradient.plan(*arrays, **options)


@can_simulate
@pytest.mark.parametrize(
    ("block", "windows", "dtype"),
    [(SMALL, 2, "bfloat16"), (ONE_GROUP, 1, "float32")],
    ids=["two groups in half precision", "one group"],
)
def test_the_simulator_finds_it_right(block, windows, dtype):
    arrays, input_size = operands(integers, *block, dtype=dtype)
    kernel, exact = gradients(input_size, windows)
    with on_the_cpu():
        expected = exact(*arrays)
        with simulated():
            actual = jax.block_until_ready(kernel(*arrays))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("dy_shape", "w_shape", "windows"),
    [((16, 4, 4, 4096), (16, 6, 5, 5), 2), ((32, 2, 1, 4096), (32, 4, 3, 3), 1)],
)
def test_groups_are_the_smallest_that_fill_tiles(dy_shape, w_shape, windows):
    assert asked(dy_shape, w_shape) == Config(windows)


@pytest.mark.parametrize(
    ("dy_shape", "w_shape"),
    [
        ((6, 12, 12, 4096), (6, 1, 5, 5)),  # 6 channels fill no tile
        ((4, 8, 8, 4096), (4, 6, 5, 5)),  # rows of 4 channels
        ((64, 4, 4, 4096), (64, 32, 5, 5)),  # more weights than shared memory
    ],
)
def test_shapes_without_a_group_are_refused(dy_shape, w_shape):
    assert "no group of them fits" in asked(dy_shape, w_shape)


def test_double_precision_is_refused():
    with jax.enable_x64(True):
        found = asked((16, 4, 4, 4096), (16, 6, 5, 5), "float64")
    assert found == "dtype float64, only float32 and half precisions"


def test_versions_that_concatenate_no_registers_are_refused(monkeypatch):
    monkeypatch.setattr(input_gradient_sm90, "MIN_JAX", (99, 0, 1))
    assert "at least 99.0.1" in asked((16, 4, 4, 4096), (16, 6, 5, 5))


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
def test_other_architectures_are_refused(gpu):
    with targeting(gpu):
        assert asked((16, 4, 4, 4096), (16, 6, 5, 5)).startswith(f"compute capability {gpu.capability[0]}.0")


def test_less_shared_memory_than_a_group_needs_is_refused():
    with targeting(dataclasses.replace(HOPPER, shared_bytes=101_376)):
        assert "shared memory" in asked((16, 4, 4, 4096), (16, 6, 5, 5))


@pytest.mark.parametrize(
    ("block", "windows", "dtype"),
    [(LENET, 2, "float32"), (SMALL, 2, "float32"), (ONE_GROUP, 1, "float32"), (LENET, 2, "bfloat16")],
)
def test_it_lowers_for_cuda(block, windows, dtype):
    arrays, input_size = operands(normal, *block, dtype=dtype)
    program = gradients(input_size, windows)[0].trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in program


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "dtype"),
    [(LANES, "float32"), (5 * LANES, "float32"), (4096, "float32"), (4096, "bfloat16"), (5 * LANES, "float16")],
)
def test_gpu_gradients_match_the_exact_kernel_and_repeat_their_bits(N, dtype):
    arrays, input_size = operands(normal, *LENET, N=N, dtype=dtype)
    kernel, exact = gradients(input_size, 2)
    once, again = kernel(*arrays), kernel(*arrays)
    np.testing.assert_array_equal(once, again)
    assert relative_error(once, exact(*arrays)) < (5e-3 if dtype == "bfloat16" else 1e-3)
