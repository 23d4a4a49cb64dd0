"""The exact gradient of the weights, whose sums over lanes use shared memory on a GPU, and the tiles of the kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu

from pallas_kernels.conv import conv2d_relu_max_pool2d as kernels
from pallas_kernels.conv.conv2d_relu_max_pool2d import ForwardConfig, InputGradientConfig, WeightsGradientConfig
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated

WINDOW = (2, 2)
BLOCKS = {
    "lenet1": (6, 12, 12, 1, 5),
    "lenet2": (16, 4, 4, 6, 5),
    "small": (3, 2, 2, 2, 3),
    "wide": (2, 1, 4, 1, 3),
}
"""K, P, Q, C, F."""


def operands(block, N=LANES, dtype="float32"):
    """Draw dy, indices and x of a block whose windows fill its input."""
    K, P, Q, C, F = BLOCKS[block]
    dy, x = normal((K, P, Q, N), (C, 2 * P + F - 1, 2 * Q + F - 1, N))
    place = np.random.default_rng(2).integers(0, 5, (K, P, Q, N), np.uint8)
    return dy.astype(dtype), jnp.asarray(place), x.astype(dtype)


def routed(dy, place, window=WINDOW):
    """Return the gradient with respect to the convolution's output, as the pool's backward computes it, in float64."""
    dy, place, (R, S) = np.asarray(dy, np.float64), np.asarray(place), window
    K, P, Q, N = dy.shape
    dz = np.where(place[..., None] == np.arange(R * S), dy[..., None], 0).reshape(K, P, Q, N, R, S)
    return dz.transpose(0, 1, 4, 2, 5, 3).reshape(K, R * P, S * Q, N)


def in_float64(dy, place, x):
    """Return the gradients with respect to the weights and the bias, in float64."""
    dz, x = routed(dy, place), np.asarray(x, np.float64)
    patches = np.lib.stride_tricks.sliding_window_view(x, dz.shape[1:3], axis=(1, 2))
    return np.einsum("kijn,cuvnij->kcuv", dz, patches, optimize=True), dz.sum((1, 2, 3))


def input_gradient_in_float64(dy, place, w, window=WINDOW):
    dz, w = routed(dy, place, window), np.asarray(w, np.float64)
    (_, H, W, N), (_, C, F, G) = dz.shape, w.shape
    dx = np.zeros((C, H + F - 1, W + G - 1, N))
    for u, v in np.ndindex(F, G):
        dx[:, u : u + H, v : v + W] += np.einsum("kijn,kc->cijn", dz, w[:, :, u, v])
    return dx


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack layouts of shared memory")
@pytest.mark.parametrize(
    ("channels", "windows", "splits"), [(None, None, None), (1, 1, 1), (1, 2, 1), (3, 1, 2), (3, 2, 2)]
)
def test_the_simulator_finds_it_right(channels, windows, splits):
    arrays, gpu = operands("small"), dataclasses.replace(HOPPER, multiprocessors=3)
    config = None if channels is None else WeightsGradientConfig(channels, windows, programs_per_multiprocessor=2)
    with targeting(gpu):
        assert config is None or config.splits(arrays[0], arrays[2]) == splits
    gradient = jax.jit(functools.partial(kernels.weights_gradient, window=WINDOW, config=config))
    with on_the_cpu(), targeting(gpu), simulated():
        actual = jax.block_until_ready(gradient(*arrays))
    assert_close(actual, in_float64(*arrays), "float32")


@pytest.mark.parametrize(("block", "windows"), [("small", None), ("wide", 1), ("wide", 2), ("wide", 4)])
def test_the_interpreter_computes_the_same(block, windows):
    arrays = operands(block)
    config = windows and WeightsGradientConfig(1, windows, programs_per_multiprocessor=1)
    with on_the_cpu(), targeting(dataclasses.replace(HOPPER, multiprocessors=2)):
        actual = kernels.weights_gradient_interpreted(*arrays, window=WINDOW, config=config)
    assert_close(actual, in_float64(*arrays), "float32")


def test_windows_that_do_not_divide_a_row_are_refused(on_hopper):
    config = WeightsGradientConfig(1, 3, programs_per_multiprocessor=1)
    with pytest.raises(ValueError, match="windows is 3; wants a divisor of 4"):
        jax.eval_shape(functools.partial(kernels.weights_gradient, window=WINDOW, config=config), *operands("wide"))


@pytest.mark.parametrize(
    ("channels", "cells", "ahead"), [(2, 3, 1), (1, 3, 3), (2, 2, 1), (2, 1, 1), (1, 1, 3)]
)  # the block has 2 input channels, 3 cells per row, and 3 output channels
def test_the_input_gradient_is_right_for_rows_of_cells_and_parts_of_them(channels, cells, ahead):
    (dy, place, x), (w,) = operands("small", 2 * LANES), normal((3, 2, 3, 3), seed=3)
    config = InputGradientConfig(channels, cells, ahead)
    gradient = functools.partial(kernels.input_gradient, input_size=x.shape[1:3], window=WINDOW, config=config)
    with on_the_cpu(), targeting(HOPPER):
        dx = jax.jit(gradient)(dy, place, w)
    assert_close(dx, input_gradient_in_float64(dy, place, w), "float32")


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(
    ("window", "windows", "filters", "beyond"),
    [
        ((1, 2), (2, 7), (3, 3), (0, 0)),  # the parts of a row repeat
        ((3, 2), (2, 2), (2, 5), (1, 4)),  # filters are lower than windows, and no window reaches some cells
        ((2, 3), (1, 5), (4, 1), (0, 1)),
        ((2, 2), (3, 1), (1, 1), (2, 0)),
    ],
)
def test_the_input_gradient_is_right_for_other_windows_and_filters(window, windows, filters, beyond, multiprocessors):
    (R, S), (P, Q), (F, G) = window, windows, filters
    dy, w = normal((4, P, Q, LANES), (4, 3, F, G))
    place = jnp.asarray(np.random.default_rng(2).integers(0, R * S + 1, dy.shape, np.uint8))
    reached = P * R + F - 1, Q * S + G - 1
    size = tuple(n + more for n, more in zip(reached, beyond, strict=True))
    gradient = functools.partial(kernels.input_gradient, input_size=size, window=window)
    with on_the_cpu(), targeting(dataclasses.replace(HOPPER, multiprocessors=multiprocessors)):
        dx = jax.jit(gradient)(dy, place, w)
    wanted = np.pad(input_gradient_in_float64(dy, place, w, window), [(0, 0), *((0, n) for n in beyond), (0, 0)])
    assert_close(dx, wanted, "float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (InputGradientConfig(4, 3, 1), "channels is 4; wants a divisor of 2"),
        (InputGradientConfig(2, 3, 2), "ahead is 2; wants a divisor of 3"),
    ],
)
def test_tiles_of_the_input_gradient_that_do_not_divide_are_refused(config, message, on_hopper):
    dy, place, x = operands("small")
    gradient = functools.partial(kernels.input_gradient, input_size=x.shape[1:3], window=WINDOW, config=config)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(gradient, dy, place, jnp.zeros((3, 2, 3, 3)))


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


@pytest.mark.gpu
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 1024, 8192])
@pytest.mark.parametrize("block", BLOCKS)
def test_gpu_input_gradients_match_float64_and_repeat_their_bits(block, N):
    (dy, place, x), (K, _, _, C, F) = operands(block, N), BLOCKS[block]
    (w,) = normal((K, C, F, F), seed=3)
    gradient = jax.jit(functools.partial(kernels.input_gradient, input_size=x.shape[1:3], window=WINDOW))
    dx = gradient(dy, place, w)
    np.testing.assert_array_equal(dx, gradient(dy, place, w))
    assert_close(dx, input_gradient_in_float64(dy, place, w), "float32")


def shapes(block, N):
    """Return the shapes and dtypes of x, w, b, dy and the indices of a block."""
    K, P, Q, C, F = BLOCKS[block]
    sizes = (C, 2 * P + F - 1, 2 * Q + F - 1, N), (K, C, F, F), (K,), (K, P, Q, N)
    return *(jax.ShapeDtypeStruct(size, "float32") for size in sizes), jax.ShapeDtypeStruct(sizes[-1], "uint8")


@pytest.mark.parametrize(
    ("block", "N", "config"),
    [
        ("lenet1", 1024, ForwardConfig(3, 4, 2 * LANES, 4)),
        ("lenet2", 1024, ForwardConfig(4, 2, LANES, 1)),
        ("lenet2", 2048, ForwardConfig(2, 4, 2 * LANES, 3)),
    ],
)
def test_the_forward_has_short_vectors_where_there_are_fewer_programs_than_multiprocessors(block, N, config, on_hopper):
    x, w, b, *_ = shapes(block, N)
    assert kernels.forward.heuristic(x, w, b, window=WINDOW) == config


@pytest.mark.parametrize(
    ("block", "N", "channels", "splits"),
    [("lenet1", 128, 1, 36), ("lenet1", 1024, 2, 144), ("lenet2", 128, 1, 4), ("lenet2", 1024, 2, 16)],
)
def test_the_weights_gradient_is_split_by_channels_too_where_windows_are_few(block, N, channels, splits, on_hopper):
    x, _, _, dy, place = shapes(block, N)
    config = kernels.weights_gradient.heuristic(dy, place, x, window=WINDOW)
    assert (config.channels, config.windows, config.splits(dy, x)) == (channels, 4, splits)


@pytest.mark.parametrize(
    ("N", "channels", "cells", "ahead"),
    [(128, 1, 1, 4), (512, 1, 3, 2), (1024, 1, 6, 1), (2048, 1, 6, 1), (8192, 2, 6, 1)],
)
def test_the_input_gradient_has_whole_rows_where_the_batch_keeps_the_gpu_busy(N, channels, cells, ahead, on_hopper):
    _, w, _, dy, place = shapes("lenet2", N)
    config = kernels.input_gradient.heuristic(dy, place, w, input_size=(12, 12), window=WINDOW)
    assert config == InputGradientConfig(channels, cells, ahead)


@pytest.mark.parametrize("N", [LANES, 2048])
@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("filters", [1, 3, 5, 8])
@pytest.mark.parametrize("Q", [4, 13, 32])
def test_the_code_of_the_input_gradient_stays_short_and_its_registers_few(Q, filters, window, N, on_hopper):
    dy, w = jax.ShapeDtypeStruct((16, Q, Q, N), "float32"), jax.ShapeDtypeStruct((16, 6, filters, filters), "float32")
    size = Q * window + filters - 1
    config = kernels.input_gradient.heuristic(dy, dy, w, input_size=(size, size), window=(window, window))
    columns, products = -(-size // window), 0
    parts = {}
    for first in range(0, columns, config.cells):
        cells = range(first * window, min(first + config.cells, columns) * window)
        reaching = [q for q in range(Q) if q * window < cells.stop and q * window + window + filters - 1 > cells.start]
        parts[len(cells), tuple(q - first for q in reaching)] = cells, reaching
    for cells, reaching in parts.values():
        taps = ((q * window + s + v) in cells for q in reaching for s in range(window) for v in range(filters))
        products += filters * window * sum(taps)
        registers = window**2 * config.cells * config.channels + len(reaching) * (window**2 + 4 * config.ahead)
        assert registers <= 200
    # With the largest filters and windows, a single cell takes 1,024 products.
    assert config.ahead * config.channels * products <= (2000 if filters < 8 else 6000)


def test_rows_are_launched_from_the_middle_outwards():
    assert [int(kernels.outwards(n, 5)) for n in range(5)] == [2, 3, 1, 4, 0]
    assert [int(kernels.outwards(n, 4)) for n in range(4)] == [1, 2, 0, 3]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shared_bytes", [232_448, 101_376, 49_152, 20_000])
def test_the_weights_gradient_fits_shared_memory_or_is_refused(block, shared_bytes):
    x, _, _, dy, place = shapes(block, 1024)
    with targeting(dataclasses.replace(HOPPER, shared_bytes=shared_bytes)):
        if reason := kernels.weights_gradient.unsupported(dy, place, x, window=WINDOW):
            assert shared_bytes == 20_000 and "do not fit shared memory" in reason
            return
        channels = kernels.weights_gradient.heuristic(dy, place, x, window=WINDOW).channels
    taps = BLOCKS[block][-1] ** 2
    assert -(-channels * (taps + 1) // 32) * 32 * LANES * 4 + 2048 <= shared_bytes


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
@pytest.mark.parametrize("block", BLOCKS)
def test_they_are_kernels_of_later_gpus_too(block, gpu):
    x, w, b, dy, place = shapes(block, 1024)
    with targeting(gpu):
        assert kernels.forward.pays(x, w, b, window=WINDOW)
        assert kernels.weights_gradient.pays(dy, place, x, window=WINDOW)
        assert kernels.input_gradient.pays(dy, place, w, window=WINDOW, input_size=x.shape[1:3])


def test_what_does_not_unroll_is_refused_by_every_kernel():
    x, w, b, dy, place = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((1, 10, 9, LANES), (2, 1, 9, 8), (2,), (2, 1, 1, LANES), (2, 1, 1, LANES))
    )
    reason, size = "filters of 9 x 8, more than 64 positions", dict(input_size=(10, 9))
    assert kernels.forward.unsupported(x, w, b, window=WINDOW) == reason
    assert kernels.weights_gradient.unsupported(dy, place, x, window=WINDOW) == reason
    assert kernels.input_gradient.unsupported(dy, place, w, window=WINDOW, **size) == reason
    w = jax.ShapeDtypeStruct((2, 1, 2, 2), "float32")
    assert kernels.forward.unsupported(x, w, b, window=(5, 4)) == "window=(5, 4), more than 16 positions"
