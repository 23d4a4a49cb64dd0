import dataclasses
import functools

import jax
import numpy as np
import pytest
from cuda_compiler import missing
from exact_blocks import BLOCKS, WINDOW, operands, routed, shapes
from helpers import assert_close, cuda_program, on_the_cpu

from experiments.ahead_of_time import gpus
from pallas_kernels.conv.conv2d_relu_max_pool2d_weights_gradient import WeightsGradientConfig, weights_gradient
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated


def in_float64(dy, place, x):
    dz, x = routed(dy, place), np.asarray(x, np.float64)
    patches = np.lib.stride_tricks.sliding_window_view(x, dz.shape[1:3], axis=(1, 2))
    return np.einsum("kijn,cuvnij->kcuv", dz, patches, optimize=True), dz.sum((1, 2, 3))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack layouts of shared memory")
@pytest.mark.parametrize(
    ("channels", "windows", "splits"), [(None, None, None), (1, 1, 1), (1, 2, 1), (3, 1, 2), (3, 2, 2)]
)
def test_the_simulator_finds_it_right(channels, windows, splits):
    arrays, gpu = operands("small"), dataclasses.replace(HOPPER, multiprocessors=3)
    config = None if channels is None else WeightsGradientConfig(channels, windows, programs_per_multiprocessor=2)
    with targeting(gpu):
        assert config is None or config.division(arrays[0], arrays[2])[0] == splits
    gradient = jax.jit(functools.partial(weights_gradient, window=WINDOW, config=config))
    with on_the_cpu(), targeting(gpu), simulated():
        actual = jax.block_until_ready(gradient(*arrays))
    assert_close(actual, in_float64(*arrays), "float32")


@pytest.mark.parametrize(("block", "windows"), [("small", None), ("wide", 1), ("wide", 2), ("wide", 4)])
def test_the_interpreter_computes_the_same(block, windows):
    arrays = operands(block)
    config = windows and WeightsGradientConfig(1, windows, programs_per_multiprocessor=1)
    with on_the_cpu(), targeting(dataclasses.replace(HOPPER, multiprocessors=2)):
        actual = weights_gradient(*arrays, window=WINDOW, config=config)
    assert_close(actual, in_float64(*arrays), "float32")


def test_windows_that_do_not_divide_a_row_are_refused(on_hopper):
    config = WeightsGradientConfig(1, 3, programs_per_multiprocessor=1)
    with pytest.raises(ValueError, match="windows is 3; wants a divisor of 4"):
        jax.eval_shape(functools.partial(weights_gradient, window=WINDOW, config=config), *operands("wide"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_it_lowers_for_cuda(block, dtype):
    arrays = jax.eval_shape(lambda: operands(block, 1024, dtype))
    assert "mosaic_gpu" in cuda_program(functools.partial(weights_gradient, window=WINDOW), *arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 1024])
@pytest.mark.parametrize("block", BLOCKS)
def test_gpu_gradients_match_float64_and_repeat_their_bits(block, N):
    arrays = operands(block, N)
    gradient = jax.jit(functools.partial(weights_gradient, window=WINDOW))
    once, again = gradient(*arrays), gradient(*arrays)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert_close(once, in_float64(*arrays), "float32")


@pytest.mark.parametrize(
    ("block", "N", "channels", "splits"),
    [("lenet1", 128, 1, 36), ("lenet1", 1024, 2, 144), ("lenet2", 128, 1, 4), ("lenet2", 1024, 2, 16)],
)
def test_the_weights_gradient_is_split_by_channels_too_where_windows_are_few(block, N, channels, splits, on_hopper):
    x, _, _, dy, place = shapes(block, N)
    config = weights_gradient.plan(dy, place, x, window=WINDOW)
    assert (config.channels, config.windows, config.division(dy, x)[0]) == (channels, 4, splits)


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
@pytest.mark.parametrize(("N", "launches"), [(128, 2), (1024, 3)])
def test_few_splits_are_added_in_the_launches_that_read_the_gradients(N, launches):
    x, w, b, dy, place = shapes("lenet1", N)

    def update(dy, place, x, w, b):
        dw, db = weights_gradient(dy, place, x, window=WINDOW)
        return w - dw, b - db

    with gpus(HOPPER) as (gpu,):
        device = jax.sharding.SingleDeviceSharding(gpu)
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for a in (dy, place, x, w, b)]
        options = {"xla_gpu_autotune_level": 0}
        program = jax.jit(update).lower(*structs).compile(compiler_options=options).as_text()
    # The kernel reads the indices in another order, so one more launch transposes them.
    assert program.count(" fusion(") == launches + 1


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shared_bytes", [232_448, 101_376, 49_152, 20_000])
def test_the_weights_gradient_fits_shared_memory_or_is_refused(block, shared_bytes):
    x, _, _, dy, place = shapes(block, 1024)
    with targeting(dataclasses.replace(HOPPER, shared_bytes=shared_bytes)):
        if reason := weights_gradient.unsupported(dy, place, x, window=WINDOW):
            assert shared_bytes == 20_000 and "do not fit in shared memory" in reason
            return
        channels = weights_gradient.plan(dy, place, x, window=WINDOW).channels
    taps = BLOCKS[block][-1] ** 2
    assert -(-channels * (taps + 1) // 32) * 32 * LANES * 4 + 2048 <= shared_bytes


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_a_kernel_of_later_gpus_too(block, gpu):
    x, _, _, dy, place = shapes(block, 1024)
    with targeting(gpu):
        assert weights_gradient.unsupported(dy, place, x, window=WINDOW) is None
