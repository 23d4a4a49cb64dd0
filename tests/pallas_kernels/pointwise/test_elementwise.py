import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, last_program_first, normal, on_the_cpu

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.pointwise.elementwise import Config, elementwise

BROADCASTS = {
    "smaller than a vector": [(3,), (3,)],
    "a vector and part of one": [(700,), (700,)],
    "many vectors and part of one": [(3000,), (1,)],
    "rows and one element per row": [(4, 256), (4, 1)],
    "rows and a row": [(4, 260), (260,)],
    "channels": [(2, 3, 132), (3, 1)],
    "examples": [(2, 3, 132), (2, 1, 1)],
    "a row of each, neither whole": [(5, 1, 128), (1, 6, 1)],
    "rows shorter than a vector": [(9, 4, 16), (4, 1)],
    "unaligned rows": [(3, 130), (3, 1)],
    "columns of one and rows of one": [(5, 1), (1, 6)],
    "a number": [(2, 3, 7), ()],
}


def two(a, b):
    return a * b, a + jnp.where(b > 0, b, 0.0)


def arrays_of(name, dtype):
    return [a.astype(dtype) for a in normal(*BROADCASTS[name])]


def check(results, arrays, dtype):
    expected = two(*(np.asarray(a, np.float64) for a in arrays))
    for y, reference in zip(results, expected, strict=True):
        assert y.dtype == dtype and y.shape == reference.shape
        np.testing.assert_allclose(np.asarray(y, np.float64), reference, rtol=1e-2 if dtype == "bfloat16" else 1e-6)


def test_every_broadcast_stays_in_bounds_and_is_written_in_the_simulator():
    for i, name in enumerate(BROADCASTS):
        dtype = ("float32", "bfloat16")[i % 2]
        arrays = arrays_of(name, dtype)
        with on_the_cpu(), simulated():
            results = jax.block_until_ready(jax.jit(functools.partial(elementwise, two))(*arrays))
        check(results, arrays, dtype)


def test_every_broadcast_is_the_same_in_the_interpreter_whichever_program_runs_first():
    run = jax.jit(lambda given: {name: elementwise(two, *arrays) for name, arrays in given.items()})
    given = {name: arrays_of(name, "float32") for name in BROADCASTS}
    with on_the_cpu():
        for context in (last_program_first(), on_the_cpu()):
            with context:
                for name, results in run(given).items():
                    check(results, given[name], "float32")


@pytest.mark.parametrize(("name", "dtype"), [(n, ("bfloat16", "float32")[i % 2]) for i, n in enumerate(BROADCASTS)])
def test_every_broadcast_lowers_for_cuda(name, dtype):
    program = cuda_program(functools.partial(elementwise, two), *arrays_of(name, dtype))
    assert program.count("mosaic_gpu") and ("pad" in program) == (name in NEED_PADDING)


NEED_PADDING = {"smaller than a vector", "columns of one and rows of one", "a number"}
"""The only cases whose arrays are padded to whole vectors."""


def test_integers_stay_integers():
    places, index = jnp.arange(2**24, 2**24 + 300, dtype=jnp.int32), jnp.full((1,), 2**24 + 1, jnp.int32)
    y = elementwise(lambda x, place, index: jnp.where(place == index, x, 0.0), jnp.ones(300), places, index)
    np.testing.assert_array_equal(np.flatnonzero(y), [1])


def test_a_result_may_be_larger_than_every_array():
    (column,) = normal((4, 1))
    y = elementwise(lambda a: 2 * a, column, shape=(4, 256))
    np.testing.assert_array_equal(y, np.broadcast_to(2 * column, (4, 256)))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_elements_need_no_kernel(shape):
    one, other = elementwise(two, jnp.ones(shape), jnp.ones(shape))
    assert one.shape == other.shape == shape


def structs(*shapes, dtypes=("float32", "float32")):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("arrays", "length"),
    [
        (structs((3,), (3,)), 128),
        (structs((0,), (0,)), 128),
        (structs((700,), (700,)), 512),  # too few CTAs with any length
        (structs((4, 260), (260,)), 256),  # at most one row
        (structs((2**19,), (2**19,)), 512),  # 1024 CTAs of 512 elements
        (structs((2**20,), (2**20,)), 1024),
        (structs((2**20,), (2**20,), dtypes=("bfloat16", "float32")), 256),
    ],
    ids=str,
)
def test_a_program_has_as_many_elements_as_leave_enough_programs(arrays, length):
    assert elementwise.plan(two, *arrays) == Config(length)


@pytest.mark.parametrize("length", [128, 256, 512])
def test_the_config_asked_for_is_taken(length):
    arrays = arrays_of("many vectors and part of one", "float32")
    with on_the_cpu():
        check(elementwise(two, *arrays, config=Config(length)), arrays, "float32")


def test_more_elements_than_an_index_reaches_are_refused():
    too_many = structs((2**16, 1), (2**15,))
    assert elementwise.unsupported(two, *too_many) == "2^31 or more elements"
    assert elementwise.unsupported(two, *structs((2**16, 1), (2**15 - 1,))) is None
    assert elementwise.unsupported(lambda a: a, *structs((1,), dtypes=["float32"]), shape=(2**31,))


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=lambda gpu: gpu.kind)
def test_newer_gpus_are_supported(gpu):
    with targeting(gpu):
        assert elementwise.unsupported(two, *structs((700,), (700,))) is None
