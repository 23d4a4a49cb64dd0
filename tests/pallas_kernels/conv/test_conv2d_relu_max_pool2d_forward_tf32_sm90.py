import dataclasses
import functools

import jax
import numpy as np
import pytest
from fused_blocks import (
    assert_a_nan_stays_with_its_example,
    assert_equals_exact,
    can_simulate,
    integers,
    shapes,
    simulate,
    structs,
    with_exact,
)
from helpers import cuda_program, normal, on_the_cpu, relative_error
from jax import lax

from pallas_kernels.conv import conv2d_relu_max_pool2d_forward_tf32_sm90 as forward_tf32_sm90
from pallas_kernels.conv.conv2d_relu_max_pool2d_forward_tf32_sm90 import MIN_JAX, Config, forward
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES

pytestmark = pytest.mark.skipif(jax.__version_info__ < MIN_JAX, reason="older versions transpose no swizzled memory")


@can_simulate
@pytest.mark.parametrize(
    ("block", "window", "config", "spare"),
    [
        ("small", (2, 2), Config(2, 2, 1, 2), 1),
        ("eight channels", (2, 2), Config(1, 1, 2, 3), 0),
        ("eight channels", (1, 2), Config(1, 4, 4, 1), 0),
    ],
    ids=["rows and columns", "channels in turn", "windows of a row"],
)
def test_the_simulator_finds_it_right(block, window, config, spare):
    arrays = integers(*shapes(block, LANES, window, spare), dtype="float32")
    assert_equals_exact(forward, window, config, arrays)


@can_simulate
def test_operands_are_rounded_to_tf32_and_not_cut_off():
    x, w, b = normal(*shapes("eight channels"))
    kernel, exact = with_exact(forward, config=Config(1, 1, 2, 2))
    with on_the_cpu():
        expected, _ = exact(*(lax.reduce_precision(a, 8, 10) for a in (x, w)), b)
    assert relative_error(simulate(kernel, x, w, b)[0], expected) < 1e-6


@can_simulate
def test_a_nan_stays_with_its_example():
    assert_a_nan_stays_with_its_example(forward, Config(2, 2, 1, 2), "float32")


@pytest.mark.parametrize(("block", "config"), [("lenet1", Config(2, 2, 1, 4)), ("lenet2", Config(1, 1, 2, 4))])
def test_tiles_leave_room_for_four_warpgroups(block, config, on_hopper):
    assert forward.plan(*structs(block, "float32"), window=(2, 2)) == config


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (structs("lenet1", "bfloat16"), "dtype bfloat16"),
        ([jax.ShapeDtypeStruct(s, "float32") for s in ((1, 8, 8, 128), (65, 1, 5, 5), (65,))], "no tile"),
    ],
    ids=["bfloat16", "no eight results"],
)
def test_what_it_does_not_take_is_refused(arrays, reason, on_hopper):
    assert reason in forward.unsupported(*arrays, window=(2, 2))


def test_older_versions_of_jax_are_refused(monkeypatch, on_hopper):
    monkeypatch.setattr(forward_tf32_sm90, "MIN_JAX", (99, 0, 1))
    assert forward.unsupported(*structs("lenet2", "float32"), window=(2, 2)).endswith("at least 99.0.1")


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
def test_other_architectures_are_refused(gpu):
    with targeting(gpu):
        assert forward.unsupported(*structs("lenet2", "float32"), window=(2, 2)).startswith("compute capability")


def test_less_shared_memory_than_a_tile_needs_is_refused():
    with targeting(dataclasses.replace(HOPPER, shared_bytes=40_000)):
        assert "shared memory" in forward.unsupported(*structs("lenet2", "float32"), window=(2, 2))


@pytest.mark.parametrize("config", [Config(3, 3, 1, 2), Config(5, 1, 1, 2), Config(2, 2, 1, 8)])
def test_tiles_that_do_not_fit_raise(config, on_hopper):
    with pytest.raises(ValueError, match="does not fit"):
        jax.eval_shape(with_exact(forward, config=config)[0], *structs("lenet1", "float32"))


@pytest.mark.parametrize("block", ["lenet1", "lenet2", "small"])
def test_it_lowers_for_cuda(block, on_hopper):
    assert "mosaic_gpu" in cuda_program(functools.partial(forward, window=(2, 2)), *structs(block, "float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 4096])
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_gpu_results_match_the_exact_kernel_and_repeat_their_bits(block, N):
    arrays = normal(*shapes(block, N))
    kernel, exact = with_exact(forward, config=forward.plan(*structs(block, "float32"), window=(2, 2)))
    once, again, (y, place) = kernel(*arrays), kernel(*arrays), exact(*arrays)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert relative_error(once[0], y) < 1e-3
    # The indices of nearly equal maxima may differ.
    assert np.mean(np.asarray(once[1]) != np.asarray(place)) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_gpu_windows_of_equal_maxima_give_the_first(block):
    arrays = integers(*shapes(block, 4096), dtype="float32")
    kernel, exact = with_exact(forward)
    jax.tree.map(np.testing.assert_array_equal, kernel(*arrays), exact(*arrays))
