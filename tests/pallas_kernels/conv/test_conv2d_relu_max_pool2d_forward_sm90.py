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
    structs,
    with_exact,
)
from helpers import cuda_program, normal, relative_error

from pallas_kernels.conv.conv2d_relu_max_pool2d_forward_sm90 import Config, forward
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES

HALVES = ["bfloat16", "float16"]


@can_simulate
@pytest.mark.parametrize(
    ("block", "window", "config", "dtype", "spare"),
    [
        ("small", (2, 2), Config(2, 2, 64, 2, 1), "bfloat16", 0),
        ("small", (2, 2), Config(1, 2, 32, 2, 2), "float16", 1),
        ("small", (2, 2), Config(1, 4, 128, 1, 2), "bfloat16", 0),
        ("small", (1, 1), Config(2, 4, 64, 1, 1), "bfloat16", 0),
        ("one row", (3, 1), Config(1, 2, 128, 2, 1), "float16", 0),
    ],
    ids=["patches with a tail", "a stage ahead", "wide patches", "no pool", "high windows"],
)
def test_the_simulator_finds_it_right(block, window, config, dtype, spare):
    arrays = integers(*shapes(block, LANES, window, spare), dtype=dtype)
    assert_equals_exact(forward, window, config, arrays)


@can_simulate
def test_a_nan_stays_with_its_example():
    assert_a_nan_stays_with_its_example(forward, Config(2, 2, 64, 2, 1), "bfloat16")


@pytest.mark.parametrize(("block", "config"), [("lenet1", Config(4, 2, 64, 2, 4)), ("lenet2", Config(2, 2, 64, 2, 1))])
@pytest.mark.parametrize("dtype", HALVES)
def test_tiles_fill_the_tensor_cores_and_shared_memory(block, config, dtype, on_hopper):
    arrays = structs(block, dtype)
    assert forward.plan(*arrays, window=(2, 2)) == config


@pytest.mark.parametrize(
    ("arrays", "window", "reason"),
    [
        (structs("lenet1", "float32"), (2, 2), "dtype float32"),
        (structs("lenet1", "bfloat16", window=(3, 2)), (3, 2), "more than 4 positions"),
        ([jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1, 8, 8, 128), (65, 1, 5, 5), (65,))], (2, 2), "no tile"),
        ([jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1, 7, 7, 128), (8, 1, 4, 4), (8,))], (2, 2), "no tile"),
    ],
    ids=["float32", "large windows", "more channels than rows of a tile", "no patch whose rows come in eights"],
)
def test_what_it_does_not_take_is_refused(arrays, window, reason, on_hopper):
    assert reason in forward.unsupported(*arrays, window=window)


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
def test_other_architectures_are_refused(gpu):
    with targeting(gpu):
        assert forward.unsupported(*structs("lenet2", "bfloat16"), window=(2, 2)).startswith("compute capability")


def test_less_shared_memory_than_a_tile_needs_is_refused():
    with targeting(dataclasses.replace(HOPPER, shared_bytes=40_000)):
        assert "shared memory" in forward.unsupported(*structs("lenet2", "bfloat16"), window=(2, 2))


@pytest.mark.parametrize("config", [Config(3, 3, 64, 2, 1), Config(5, 2, 64, 2, 1), Config(4, 2, 64, 2, 64)])
def test_tiles_that_do_not_fit_raise(config, on_hopper):
    with pytest.raises(ValueError, match="does not fit"):
        jax.eval_shape(with_exact(forward, config=config)[0], *structs("lenet1", "bfloat16"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", ["lenet1", "lenet2", "small"])
def test_it_lowers_for_cuda(block, dtype, on_hopper):
    assert "mosaic_gpu" in cuda_program(functools.partial(forward, window=(2, 2)), *structs(block, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 4096])
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_gpu_results_match_the_exact_kernel_and_repeat_their_bits(block, N, dtype):
    arrays = [a.astype(dtype) for a in normal(*shapes(block, N))]
    kernel, exact = with_exact(forward, config=forward.plan(*structs(block, "bfloat16"), window=(2, 2)))
    once, again, (y, place) = kernel(*arrays), kernel(*arrays), exact(*arrays)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    # The indices of nearly equal maxima may differ.
    assert relative_error(once[0], y) < (5e-3 if dtype == "bfloat16" else 1e-3)
    assert np.mean(np.asarray(once[1]) != np.asarray(place)) < 1e-4


@pytest.mark.gpu
def test_gpu_windows_of_equal_maxima_give_the_first():
    arrays = integers(*shapes("lenet2", 4096), dtype="bfloat16")
    kernel, exact = with_exact(forward)
    jax.tree.map(np.testing.assert_array_equal, kernel(*arrays), exact(*arrays))
