import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, last_program_first, normal, on_the_cpu

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.pointwise.reductions import Config, sum_over

SUMS = {
    "short rows": [(3, 4), (4,), (1,)],
    "short columns": [(3, 4), (4,), (0,)],
    "everything, short": [(3, 4), (4,), (0, 1)],
    "everything, long": [(3, 700), (1,), (0, 1)],
    "long rows and their remainders": [(3, 130), (3, 1), (1,)],
    "long columns": [(5, 132), (132,), (0,)],
    "long unaligned columns": [(5, 130), (5, 130), (0,)],
    "few columns": [(200, 10), (10,), (0,)],
    "channels of large images": [(2, 3, 12, 12), (3, 1, 1), (0, 2, 3)],
    "channels of small images": [(2, 3, 4, 4), (3, 1, 1), (0, 2, 3)],
    "channels of many small images": [(40, 3, 8, 8), (3, 1, 1), (0, 2, 3)],
    "the middle": [(2, 5, 130), (2, 1, 130), (1,)],
    "every other": [(2, 5, 3, 128), (5, 1, 1), (0, 2)],
    "nothing": [(4,), (4,), ()],
}


def two(a, b):
    return a * b, a + jnp.where(b > 0, b, 0.0)


def arrays_of(name, dtype="float32"):
    *shapes, axes = SUMS[name]
    return [a.astype(dtype) for a in normal(*shapes)], axes


def check(results, arrays, axes):
    expected = two(*(np.asarray(a, np.float64) for a in arrays))
    assert all(y.dtype == jnp.float32 for y in results)
    assert_close(results, [y.sum(axes, keepdims=True) for y in expected], "float32")


def test_every_sum_stays_in_bounds_and_is_written_in_the_simulator():
    for i, name in enumerate(SUMS):
        arrays, axes = arrays_of(name, ("float32", "bfloat16")[i % 2])
        with on_the_cpu(), simulated():
            results = jax.block_until_ready(jax.jit(functools.partial(sum_over, two, axes=axes))(*arrays))
        check(results, arrays, axes)


def test_every_sum_is_the_same_in_the_interpreter_whichever_program_runs_first():
    given = {name: arrays_of(name)[0] for name in SUMS}
    run = jax.jit(lambda given: {name: sum_over(two, *a, axes=SUMS[name][-1]) for name, a in given.items()})
    with on_the_cpu():
        in_order = run(given)
        with last_program_first():
            last_first = run(given)
    for name, results in in_order.items():
        check(results, given[name], SUMS[name][-1])
        assert all((a == b).all() for a, b in zip(results, last_first[name], strict=True)), name


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((16384, 1024), (0,)), ((16384, 1024), (1,)), ((16384, 1023), (0, 1)), ((512, 64, 7, 7), (0, 2, 3))],
)
def test_large_sums_lower_for_cuda(shape, axes):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert "mosaic_gpu" in cuda_program(lambda x: sum_over(lambda v: v, x, axes=axes), x)


@pytest.mark.parametrize(("shape", "axes"), [((0, 3), (0,)), ((3, 0), (0,))])
def test_sums_of_nothing_are_zero(shape, axes):
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    np.testing.assert_array_equal(sum_over(lambda v: v, jnp.ones(shape), axes=axes), np.zeros(kept))


def structs(*shapes, dtypes=("float32", "float32")):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("arrays", "axes", "config"),
    [
        (structs((16384, 1024), (1024,)), (1,), Config(1024, 1)),
        (structs((16384, 1024), (1024,)), (0,), Config(512, 1024)),  # two vectors of columns, split 1024-fold
        (structs((3, 700), (1,)), (0, 1), Config(2048, 1)),  # one vector
        (structs((5, 130), (5, 130)), (0,), Config(128, 5)),  # unaligned rows
        (structs((64, 4096), (64, 4096), dtypes=("bfloat16", "float32")), (1,), Config(256, 16)),
        (structs((3, 4), (4,)), (0,), Config(128, 3)),  # padded to one vector
        (structs((0, 3), (3,)), (0,), Config(128, 1)),
    ],
    ids=str,
)
def test_sums_are_split_into_as_many_parts_as_make_enough_programs(arrays, axes, config):
    assert sum_over.plan(two, *arrays, axes=axes) == config


@pytest.mark.parametrize("config", [Config(128, 1), Config(128, 4), Config(256, 2)], ids=str)
@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_the_config_asked_for_is_taken(axes, config):
    arrays = normal((9, 700), (700,))
    with on_the_cpu():
        check(sum_over(two, *arrays, axes=axes, config=config), arrays, axes)


def test_more_elements_than_an_index_reaches_are_refused():
    assert sum_over.unsupported(two, *structs((2**16, 1), (2**15,)), axes=(0,)) == "2^31 or more elements"
    assert sum_over.unsupported(two, *structs((2**16, 1), (2**15 - 1,)), axes=(0,)) is None


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=lambda gpu: gpu.kind)
def test_newer_gpus_are_supported(gpu):
    with targeting(gpu):
        assert sum_over.unsupported(two, *structs((700,), (700,)), axes=(0,)) is None
