import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu, skipped_outputs

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.norm import layer_norm_linear_sm90 as kernels

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
WIDTHS = pytest.mark.parametrize(("hidden", "out"), [(256, 256), (128, 256), (256, 128)])


def draw(rows, hidden, out, dtype="bfloat16", shift=0):
    x, *others = normal(*shapes(rows, hidden, out))
    return [a.astype(dtype) for a in (x + shift, *others)]


def shapes(rows, hidden, out):
    return (rows, hidden), (hidden,), (hidden,), (out, hidden), (out,), (rows, out)


def structs(rows, hidden, out, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(rows, hidden, out)]


CONFIGS = kernels.ForwardConfig(columns=128), kernels.InputGradientConfig(stages=2)


@jax.jit
def both(x, scale, bias, w, b, dz):
    z, *statistics = kernels.forward(x, scale, bias, w, b, epsilon=1e-5, config=CONFIGS[0])
    return (z, *statistics), kernels.input_gradient(dz, x, scale, w, *statistics, config=CONFIGS[1])


def expected(x, scale, bias, w, b, dz):
    first = np.asarray(x[:, 0], np.float64)
    x, scale, bias, w, b, dz = (np.asarray(a, np.float64) for a in (x, scale, bias, w, b, dz))
    mean = lambda a: a.mean(-1, keepdims=True)  # noqa: E731
    centered = x - mean(x)
    inv_std = 1 / np.sqrt(mean(centered**2) + 1e-5)
    hat, t = centered * inv_std, dz @ w * scale
    dx = inv_std * (t - mean(t) - hat * mean(t * hat))
    return ((hat * scale + bias) @ w.T + b, mean(x)[:, 0] - first, inv_std[:, 0]), (dx, hat)


@can_simulate
@pytest.mark.parametrize("shift", [0, 100], ids=["", "far from zero"])
@WIDTHS
def test_the_simulator_finds_them_right(hidden, out, shift):
    arrays = draw(320, hidden, out, shift=shift)
    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=1)):
        actual = jax.block_until_ready(both(*arrays))
    assert_close(actual, expected(*arrays), 5e-3)


@can_simulate
def test_dx_is_the_same_if_the_normalized_rows_are_not_wanted():
    x, scale, _, w, _, dz = draw(192, 128, 128)  # three blocks for one CTA
    (statistics,) = normal((192,))
    run = functools.partial(kernels.input_gradient, dz, x, scale, w, statistics, abs(statistics), config=CONFIGS[1])
    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=1)):
        expected, _ = run()
        with skipped_outputs(kernels, 1):
            dx, normalized = run()
    assert not normalized.any()
    np.testing.assert_array_equal(dx, expected)


@can_simulate
def test_a_row_whose_squares_overflow_is_nan_and_no_other():
    x, *others = draw(64, 128, 128)
    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=1)):
        (z, _, inv_std), gradients = jax.block_until_ready(both(x.at[3, 5].set(1e20), *others))
    for rows in (z, inv_std[:, None], *gradients):
        assert np.isnan(rows).any(axis=1).nonzero()[0].tolist() == [3]


def answers(question, rows, hidden, out, dtype="bfloat16"):
    x, scale, bias, w, b, dz = structs(rows, hidden, out, dtype)
    forward = getattr(kernels.forward, question)(x, scale, bias, w, b, epsilon=1e-5)
    return [forward, getattr(kernels.input_gradient, question)(dz, x, scale, w, None, None)]


def test_they_take_narrow_layers_of_half_precisions(on_hopper):
    for sizes in ((65536, 256, 256), (65536, 128, 256, "float16")):
        assert answers("unsupported", *sizes) == [None, None]
        assert answers("plan", *sizes) == list(CONFIGS)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((65536, 256, 384), "widths 256 and 384, only 128 and 256"),
        ((65536, 96, 256), "widths 96 and 256, only 128 and 256"),
        ((65536, 256, 256, "float32"), "dtypes float32 and float32, only one half precision"),
        ((65540, 256, 256), "65540 rows, only multiples of 64"),
    ],
    ids=str,
)
def test_they_say_what_they_do_not_take(sizes, reason, on_hopper):
    assert answers("unsupported", *sizes) == [reason, reason]


@pytest.mark.parametrize("device", [BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
def test_a_gpu_without_wgmma_is_refused(device):
    with targeting(device):
        assert all("only 9.0" in reason for reason in answers("unsupported", 65536, 128, 128))


def test_less_shared_memory_takes_narrower_layers():
    with targeting(dataclasses.replace(HOPPER, shared_bytes=128 * 1024)):
        assert answers("unsupported", 65536, 128, 128) == [None, None]
        assert all("bytes of shared memory" in reason for reason in answers("unsupported", 65536, 256, 256))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@WIDTHS
def test_they_lower_for_cuda(hidden, out, dtype):
    assert "mosaic_gpu" in cuda_program(both, *structs(65536, hidden, out, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 100], ids=["", "far from zero"])
@WIDTHS
def test_gpu_results_match_float64_and_repeat_their_bits(hidden, out, shift, dtype):
    arrays = draw(64 * 1001, hidden, out, dtype, shift)
    first, second = both(*arrays), both(*arrays)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(first, expected(*arrays), 5e-3)
