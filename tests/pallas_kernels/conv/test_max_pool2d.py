import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kernel_results, on_the_cpu

from pallas_kernels.conv.max_pool2d import WindowsConfig, scatter_to_windows
from pallas_kernels.core.simulator import simulated

CASES = {
    "float32": ((2, 3, 4, 4), (8, 8), (2, 2), "float32", [None, WindowsConfig(1)]),
    "bfloat16": ((2, 3, 4, 4), (8, 8), (2, 2), "bfloat16", [None, WindowsConfig(2)]),
    "columns after the last window": ((3, 2, 2, 3), (5, 11), (2, 3), "float16", [None]),
    "a window beyond the input": ((1, 3, 3, 2), (7, 3), (3, 2), "bfloat16", [None]),
    "more than 256 positions": ((1, 1, 1, 2), (2, 600), (1, 300), "float32", [None]),
}


def operands(shape, window, dtype):
    random = np.random.default_rng(0)
    dy = random.standard_normal(shape).astype(jnp.dtype(dtype))
    positions = window[0] * window[1]
    # An index that is outside of its window selects no position.
    return dy, random.integers(0, positions + 1, shape).astype(np.uint8 if positions < 256 else np.int32)


def scattered(dy, indices, input_size, window):
    dx = np.zeros((*dy.shape[:2], *input_size), dy.dtype)
    for n, c, p, q in np.ndindex(dy.shape):
        u, v = divmod(indices[n, c, p, q], window[1])
        h, w = p * window[0] + u, q * window[1] + v
        if u < window[0] and h < input_size[0] and w < input_size[1]:
            dx[n, c, h, w] = dy[n, c, p, q]
    return dx


def run(dy, indices, channels_last, **options):
    options["channels_last"] = channels_last
    if not channels_last:
        return scatter_to_windows(dy, indices, **options)
    dy, indices = (jnp.moveaxis(a, 1, -1) for a in (dy, indices))
    return jnp.moveaxis(scatter_to_windows(dy, indices, **options), -1, 1)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_sends_each_gradient_to_its_position(case, channels_last):
    shape, input_size, window, dtype, configs = CASES[case]
    dy, indices = operands(shape, window, dtype)
    configs = configs[:1] if channels_last else configs
    functions = [
        functools.partial(run, channels_last=channels_last, input_size=input_size, window=window, config=config)
        for config in configs
    ]
    expected = scattered(dy, indices, input_size, window)
    with on_the_cpu():
        interpreted = jax.jit(lambda *arrays: [function(*arrays) for function in functions])(dy, indices)
        with simulated():
            simulated_results = jax.block_until_ready([function(dy, indices) for function in functions])
    for dx in (*interpreted, *simulated_results):
        np.testing.assert_array_equal(dx, expected)
    assert all(kernel_results(function, dy, indices) == [1] for function in functions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_vector_has_16_bytes_and_its_windows_are_in_one_row(dtype):
    def windows(*shape, window=(2, 2), rest=0, **options):
        input_size = shape[2] * window[0], shape[3] * window[1] + rest
        arrays = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (dtype, jnp.uint8))
        return scatter_to_windows.plan(*arrays, input_size=input_size, window=window, **options).windows

    assert windows(8, 6, 12, 12) == 8 // jnp.dtype(dtype).itemsize
    assert windows(8, 6, 12, 12, window=(3, 3)) == windows(8, 6, 12, 12, rest=1) == windows(8, 6, 5, 5) == 0
    assert windows(8, 6, 12, 12, channels_last=True) == 0


def test_an_input_of_2_to_the_31_elements_is_refused():
    arrays = (jax.ShapeDtypeStruct((2**15, 2**6, 16, 16), dtype) for dtype in (jnp.float32, jnp.uint8))
    reason = scatter_to_windows.unsupported(*arrays, input_size=(32, 32), window=(2, 2))
    assert reason == "2^31 or more elements"
