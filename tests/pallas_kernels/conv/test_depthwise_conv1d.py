import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, last_program_first, normal, on_the_cpu, poison_memory, skipped_outputs

from pallas_kernels.conv import depthwise_conv1d as kernels
from pallas_kernels.conv.depthwise_conv1d import Config, convolve, gradients
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.core.simulator import simulated

# name -> (batch, width, channels), filter width, padding before and after, tile
SIZES = {
    "causal": ((2, 21, 128), 4, 3, 0, Config(128, 8)),
    "one element per filter": ((1, 9, 256), 1, 0, 0, Config(128, 16)),
    "the widest filter": ((1, 11, 128), 8, 3, 4, Config(128, 8)),
    "more padding than the filter reaches": ((1, 3, 256), 2, 5, 9, Config(256, 8)),
    "one output": ((2, 3, 128), 3, 0, 0, Config(128, 8)),
}
every_size = pytest.mark.parametrize("size", SIZES)


def drawn(size, dtype="float32"):
    (batch, width, channels), taps, before, after, config = SIZES[size]
    shapes = (batch, width + before + after - taps + 1, channels), (batch, width, channels)
    dy, *arrays = (a.astype(dtype) for a in normal(*shapes, (taps, channels), (channels,)))
    return dy, arrays, dict(before=before, after=after, config=config)


def exact(dy, x, w, b, *, before, after, config=None):
    dy, x, w, b = (np.asarray(a, np.float64) for a in (dy, x, w, b))
    padded, outputs = np.pad(x, ((0, 0), (before, after), (0, 0))), dy.shape[1]
    shifts = [slice(u, u + outputs) for u in range(len(w))]
    y, dpadded = np.zeros(dy.shape) + b, np.zeros(padded.shape)
    for tap, shift in zip(w, shifts, strict=True):
        y += tap * padded[:, shift]
        dpadded[:, shift] += tap * dy
    dw = np.stack([(dy * padded[:, shift]).sum((0, 1)) for shift in shifts])
    return y, dpadded[:, before : before + x.shape[1]], dw, dy.sum((0, 1))


def computed(dy, arrays, options):
    return convolve(*arrays, **options), *gradients(dy, *arrays, **options)


@every_size
def test_results_and_gradients_of_any_size_match_float64(size):
    dy, arrays, options = drawn(size)
    assert_close(computed(dy, arrays, options), exact(dy, *arrays, **options), "float32")


def test_half_precisions_are_summed_in_float32():
    dy, arrays, options = drawn("causal", "bfloat16")
    y, dx, dw, db = computed(dy, arrays, options)
    assert [a.dtype for a in (y, dx, dw, db)] == ["bfloat16", "bfloat16", "float32", "float32"]
    exact_y, exact_dx, *sums = exact(dy, *arrays, **options)
    assert_close((y, dx), (exact_y, exact_dx), "bfloat16")
    assert_close((dw, db), sums, "float32")


def test_without_a_bias_there_is_no_gradient_of_it():
    dy, (x, w, b), options = drawn("one output")
    y, dx, dw, _ = exact(dy, x, w, 0 * b, **options)
    found_y, found_dx, found_dw, db = computed(dy, (x, w, None), options)
    assert db is None
    assert_close((found_y, found_dx, found_dw), (y, dx, dw), "float32")


def test_the_bits_do_not_depend_on_the_order_of_the_ctas():
    dy, arrays, options = drawn("causal")
    with on_the_cpu():
        in_order = gradients(dy, *arrays, **options)
        with last_program_first():
            last_first = gradients(dy, *arrays, **options)
    for a, b in zip(last_first, in_order, strict=True):
        np.testing.assert_array_equal(a, b)


def test_accesses_stay_in_bounds_and_every_element_is_written_in_the_simulator():
    dy, arrays, options = drawn("more padding than the filter reaches")
    with on_the_cpu(), simulated():
        assert_close(computed(dy, arrays, options), exact(dy, *arrays, **options), "float32")


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["dx", "dw", "db"])
def test_a_gradient_does_not_depend_on_which_others_are_computed(wanted):
    dy, arrays, options = drawn("one output")
    with on_the_cpu():
        every = gradients(dy, *arrays, **options)
        with simulated(), skipped_outputs(kernels, *{0, 1, 2} - {wanted}):
            alone = gradients(dy, *arrays, **options)
    assert_close(alone[wanted], every[wanted], "float32")
    assert all((a == 0).all() for i, a in enumerate(alone) if i != wanted)


def test_nan_reaches_only_the_outputs_that_read_it():
    _, (x, w, b), options = drawn("causal")
    y = convolve(x.at[0, 9, 5].set(jnp.nan), w, b, **options)
    expected = np.zeros(y.shape, bool)
    expected[0, 9:13, 5] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_they_lower_for_cuda_without_transposes(dtype):
    x = jax.ShapeDtypeStruct((8, 2048, 2560), dtype)
    w, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, 2560), (2560,)))
    program = cuda_program(
        lambda *a: (convolve(*a[1:], before=7, after=0), gradients(*a, before=7, after=0)), x, x, w, b
    )
    assert program.count("@mosaic_gpu_v2") == 2 and "transpose" not in program


def structs(batch, width, channels, taps=4, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((batch, width, channels), (taps, channels), (channels,))]


def test_wide_filters_and_channels_that_are_no_vectors_are_unsupported():
    assert convolve.unsupported(*structs(2, 5, 128), before=3, after=0) is None
    assert convolve.unsupported(*structs(2, 5, 128, taps=9), before=3, after=0) == "filters of width 9, only up to 8"
    assert convolve.unsupported(*structs(2, 5, 100), before=3, after=0) == "x of shape (2, 5, 100)"
    assert gradients.unsupported(None, *structs(0, 5, 128), before=3, after=0) == "x of shape (0, 5, 128)"


@pytest.mark.parametrize(
    ("dtype", "size", "config"),
    [
        ("bfloat16", (8, 2045, 2048), Config(512, 64)),
        ("float32", (8, 2045, 2048), Config(256, 128)),
        ("float32", (8, 2045, 1152), Config(128, 144)),
        ("bfloat16", (32, 8189, 5120), Config(512, 256)),
        ("bfloat16", (1, 2, 128), Config(128, 8)),
    ],
    ids=str,
)
def test_the_plan_divides_positions_among_the_multiprocessors(dtype, size, config):
    with targeting(HOPPER):
        assert convolve.plan(*structs(*size, dtype=dtype), before=3, after=0) == config


def test_more_multiprocessors_have_fewer_rows_each():
    with targeting(dataclasses.replace(HOPPER, multiprocessors=4 * HOPPER.multiprocessors)):
        assert convolve.plan(*structs(8, 2045, 2048), before=3, after=0) == Config(512, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_size
def test_gpu_results_and_gradients_of_any_size_match_float64(size, dtype):
    dy, arrays, options = drawn(size, dtype)
    poison_memory()
    assert_close(computed(dy, arrays, options), exact(dy, *arrays, **options), dtype)
