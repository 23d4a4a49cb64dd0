import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_blocks import BLOCKS, WINDOW, operands, routed, shapes
from helpers import assert_close, normal, on_the_cpu

from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient import InputGradientConfig, input_gradient, outwards
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES


def input_gradient_in_float64(dy, place, w, window=WINDOW):
    dz, w = routed(dy, place, window), np.asarray(w, np.float64)
    (_, H, W, N), (_, C, F, G) = dz.shape, w.shape
    dx = np.zeros((C, H + F - 1, W + G - 1, N))
    for u, v in np.ndindex(F, G):
        dx[:, u : u + H, v : v + W] += np.einsum("kijn,kc->cijn", dz, w[:, :, u, v])
    return dx


@pytest.mark.parametrize(
    "config", [(2, 3, 1, False), (1, 3, 3, True), (2, 2, 1, False), (2, 1, 1, True), (1, 1, 3, False)]
)
def test_the_input_gradient_is_right_for_rows_of_cells_and_parts_of_them(config):
    (dy, place, x), (w,) = operands("small", 2 * LANES), normal((3, 2, 3, 3), seed=3)
    config = InputGradientConfig(*config)
    gradient = functools.partial(input_gradient, input_size=x.shape[1:3], window=WINDOW, config=config)
    with on_the_cpu(), targeting(HOPPER):
        dx = jax.jit(gradient)(dy, place, w)
    assert_close(dx, input_gradient_in_float64(dy, place, w), "float32")


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(
    ("window", "windows", "filters", "beyond"),
    [
        ((1, 2), (2, 7), (3, 3), (0, 0)),
        ((3, 2), (2, 2), (2, 5), (1, 4)),  # no window reaches some cells
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
    gradient = functools.partial(input_gradient, input_size=size, window=window)
    with on_the_cpu(), targeting(dataclasses.replace(HOPPER, multiprocessors=multiprocessors)):
        dx = jax.jit(gradient)(dy, place, w)
    wanted = np.pad(input_gradient_in_float64(dy, place, w, window), [(0, 0), *((0, n) for n in beyond), (0, 0)])
    assert_close(dx, wanted, "float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (InputGradientConfig(4, 3, 1, False), "channels is 4; wants a divisor of 2"),
        (InputGradientConfig(2, 3, 2, False), "ahead is 2; wants a divisor of 3"),
        (InputGradientConfig(2, 2, 1, True), "cells is 2; wants a divisor of 3"),
    ],
)
def test_tiles_of_the_input_gradient_that_do_not_divide_are_refused(config, message, on_hopper):
    dy, place, x = operands("small")
    gradient = functools.partial(input_gradient, input_size=x.shape[1:3], window=WINDOW, config=config)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(gradient, dy, place, jnp.zeros((3, 2, 3, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 1024, 8192])
@pytest.mark.parametrize("block", BLOCKS)
def test_gpu_input_gradients_match_float64_and_repeat_their_bits(block, N):
    (dy, place, x), (K, _, _, C, F) = operands(block, N), BLOCKS[block]
    (w,) = normal((K, C, F, F), seed=3)
    gradient = jax.jit(functools.partial(input_gradient, input_size=x.shape[1:3], window=WINDOW))
    dx = gradient(dy, place, w)
    np.testing.assert_array_equal(dx, gradient(dy, place, w))
    assert_close(dx, input_gradient_in_float64(dy, place, w), "float32")


@pytest.mark.parametrize(
    ("N", "config"),
    [
        (128, (1, 1, 4, True)),
        (512, (1, 3, 2, False)),
        (1024, (1, 6, 1, False)),
        (2048, (1, 6, 1, False)),
        (8192, (2, 6, 1, False)),
    ],
)
def test_the_input_gradient_has_whole_rows_where_the_batch_keeps_the_gpu_busy(N, config, on_hopper):
    _, w, _, dy, place = shapes("lenet2", N)
    planned = input_gradient.plan(dy, place, w, input_size=(12, 12), window=WINDOW)
    assert planned == InputGradientConfig(*config)


@pytest.mark.parametrize("N", [LANES, 2048])
@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("filters", [1, 3, 5, 8])
@pytest.mark.parametrize("Q", [4, 13, 32])
def test_the_code_of_the_input_gradient_stays_short_and_its_registers_few(Q, filters, window, N, on_hopper):
    dy, w = jax.ShapeDtypeStruct((16, Q, Q, N), "float32"), jax.ShapeDtypeStruct((16, 6, filters, filters), "float32")
    size = Q * window + filters - 1
    config = input_gradient.plan(dy, dy, w, input_size=(size, size), window=(window, window))
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
    assert [int(outwards(n, 5)) for n in range(5)] == [2, 3, 1, 4, 0]
    assert [int(outwards(n, 4)) for n in range(4)] == [1, 2, 0, 3]


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_a_kernel_of_later_gpus_too(block, gpu):
    x, w, _, dy, place = shapes(block, 1024)
    with targeting(gpu):
        assert input_gradient.unsupported(dy, place, w, window=WINDOW, input_size=x.shape[1:3]) is None
