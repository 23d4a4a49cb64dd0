import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, last_program_first, normal, on_the_cpu

from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic.readers import Config, sums_over_readers

FAN_OUTS = {
    "no reader, one, and more than at once": [0, 1, 19, 3, 8, 0],
    "pairs": [2] * 8,
    "one row with all readers": [0, 0, 0, 0, 40],
}


def operands(fan_outs, N, dtype="float32"):
    offsets = np.array([0, *np.cumsum(fan_outs)], np.int32)
    readers = np.random.default_rng(0).permutation(offsets[-1]).astype(np.int32)
    (values,) = normal((len(readers), N))
    exact = [run.sum(axis=0) for run in np.split(np.asarray(values.astype(dtype), np.float64)[readers], offsets[1:-1])]
    return (values.astype(dtype), jnp.asarray(readers), jnp.asarray(offsets)), np.stack(exact), max(fan_outs)


@pytest.mark.parametrize(
    ("fan_outs", "N", "dtype"),
    list(zip(FAN_OUTS, (LANES, 512, 2 * LANES), ("float32", "bfloat16", "float32"), strict=True)),
)
def test_each_row_is_the_sum_over_its_readers(fan_outs, N, dtype):
    arrays, exact, max_fan_out = operands(FAN_OUTS[fan_outs], N, dtype)
    with on_the_cpu(), last_program_first():
        sums = sums_over_readers(*arrays, max_fan_out=max_fan_out, dtype=dtype)
    assert_close(sums, exact, dtype)
    assert sums.dtype == dtype


def test_the_simulator_finds_them_right():
    arrays, exact, max_fan_out = operands(FAN_OUTS["no reader, one, and more than at once"], LANES)
    with on_the_cpu(), simulated():
        assert_close(sums_over_readers(*arrays, max_fan_out=max_fan_out, dtype="float32"), exact, "float32")


def test_nan_reaches_only_the_row_of_its_reader():
    (values, readers, offsets), _, max_fan_out = operands([1, 19, 2, 2], LANES)
    values = values.at[readers[5]].set(jnp.nan)
    with on_the_cpu():
        sums = sums_over_readers(values, readers, offsets, max_fan_out=max_fan_out, dtype="float32")
    assert jnp.isnan(sums).all(axis=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("fan_outs", "N", "dtype"), [([2] * 64, 128, "float32"), ([1] * 9 + [70], 4096, "bfloat16")])
def test_it_lowers_for_cuda_without_a_scatter(fan_outs, N, dtype):
    arrays, _, max_fan_out = operands(fan_outs, N)
    program = cuda_program(lambda *a: sums_over_readers(*a, max_fan_out=max_fan_out, dtype=dtype), *arrays)
    assert program.count("custom_call @mosaic_gpu") == 1 and "scatter" not in program


@pytest.mark.parametrize(
    ("fan_out", "N", "config"),
    [(1, 128, Config(8, 1, 128)), (4, 8192, Config(2, 4, 512)), (100, 384, Config(1, 8, 384))],
)
def test_eight_vectors_are_loaded_at_once(fan_out, N, config):
    shapes = ((8000 * fan_out, N), "float32"), ((8000 * fan_out,), "int32"), ((8001,), "int32")
    arrays = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    assert sums_over_readers.plan(*arrays, max_fan_out=fan_out, dtype="float32") == config


def test_a_batch_of_part_of_a_warpgroup_is_refused():
    arrays, _, max_fan_out = operands([1, 2], 130)
    with pytest.raises(NotImplementedError, match=r"does not take a batch of 130, only multiples of 128"):
        sums_over_readers(*arrays, max_fan_out=max_fan_out, dtype="float32")
