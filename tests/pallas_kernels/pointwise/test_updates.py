import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, targeting
from pallas_kernels.core.launch import CHANGES_IN_PLACE
from pallas_kernels.core.simulator import simulated
from pallas_kernels.pointwise.updates import ARRAYS, Config, updates

SHAPES = [(), (1,), (5,), (127,), (128,), (0, 3), (129,), (10, 100), (1024,), (2050,)]
LARGE = [(70000,), (3, 5), (513, 1025)]
HALVES = [("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "bfloat16"), ("float16", "float16", "float32")]


def formula(scalars, p, m, g):
    m = 0.5 * m + scalars[1] * g
    return p - scalars[0] * m, m


def drawn(shapes=SHAPES, dtypes=("float32",) * 3):
    p, m, g = ([a.astype(d) for a in normal(*shapes, seed=i)] for i, d in enumerate(dtypes))
    return jnp.array([0.25, 2.0]), (p, m), (g,)


run = functools.partial(updates, formula)


def simulate(*arrays, **options):
    with on_the_cpu(), simulated():
        return jax.block_until_ready(jax.jit(functools.partial(run, **options))(*arrays))


def check(results, scalars, changed, constant):
    tolerances = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
    for i in range(len(changed[0])):
        exact = formula(np.asarray(scalars), *(np.asarray(a[i], np.float64) for a in (*changed, *constant)))
        for new, old, reference in zip(results, changed, exact, strict=True):
            assert new[i].dtype == old[i].dtype and new[i].shape == old[i].shape
            tolerance = tolerances[new[i].dtype.name]
            np.testing.assert_allclose(np.asarray(new[i], np.float64), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accesses", [1, 2])
def test_every_element_of_every_array_is_updated_in_the_simulator(accesses):
    arrays = drawn()
    check(simulate(*arrays, config=Config(accesses)), *arrays)


@pytest.mark.parametrize("dtypes", HALVES, ids="-".join)
def test_lists_of_half_precisions_are_computed_in_float32(dtypes):
    arrays = drawn([(), (7,), (1030,)], dtypes)
    check(simulate(*arrays, config=Config()), *arrays)


def test_arrays_of_no_elements_need_no_kernel():
    scalars, changed, constant = drawn([(0,), (2, 0)])
    assert [a.shape for a in run(scalars, changed, constant, config=Config())[0]] == [(0,), (2, 0)]


def test_all_arrays_are_one_launch_in_their_own_memory():
    program = cuda_program(functools.partial(run, config=Config()), *drawn())
    assert program.count("@mosaic_gpu") == 1
    filled = sum(0 not in shape for shape in SHAPES)
    assert program.count("#stablehlo.output_operand_alias") == 2 * filled * CHANGES_IN_PLACE


def test_more_arrays_than_a_launch_takes_are_several():
    program = cuda_program(functools.partial(run, config=Config()), *drawn([(3,)] * (ARRAYS + 1)))
    assert program.count("@mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("accesses", [1, 2])
@pytest.mark.parametrize("dtypes", [("float32",) * 3, *HALVES], ids="-".join)
def test_every_element_is_updated_on_a_gpu(dtypes, accesses):
    arrays = drawn(SHAPES + LARGE, dtypes)
    jitted = jax.jit(functools.partial(run, config=Config(accesses)))
    results = jitted(*arrays)
    check(results, *arrays)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(jitted(*arrays)), strict=True):
        np.testing.assert_array_equal(a, b)


def structs(*shapes, dtype="float32"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def test_enough_elements_are_several_accesses():
    scalars = jax.ShapeDtypeStruct((1,), "float32")

    def plan(*shapes, dtype="float32"):
        arrays = structs(*shapes, dtype=dtype)
        return updates.plan(formula, scalars, [arrays] * 2, [arrays])

    assert [plan((0,), *[(4,)] * n) for n in (2, 3)] == [Config(1), Config(1)]
    assert [plan(*[(2**n, 2)] * 3) for n in (17, 18)] == [Config(1), Config(2)]
    assert plan(*[(2**19,)] * 3, dtype="bfloat16") == Config(1)


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_dtypes_are_refused(dtype):
    with jax.enable_x64(True):
        lists = [structs((3,), dtype=dtype)]
        assert updates.unsupported(formula, None, lists, lists) == f"dtype {dtype}"
        with pytest.raises(NotImplementedError, match=f"^updates.updates: does not take dtype {dtype}"):
            updates(formula, None, lists, lists)


def test_lists_of_several_dtypes_and_arrays_too_long_for_an_index_are_refused():
    mixed = [structs((3,)) + structs((3,), dtype="bfloat16")]
    assert updates.unsupported(formula, None, mixed, mixed) == "lists of several dtypes"
    long = [structs((2**16, 2**15))]
    assert updates.unsupported(formula, None, long, long) == "2^31 or more elements"


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=lambda gpu: gpu.kind)
def test_newer_gpus_are_supported(gpu):
    with targeting(gpu):
        assert updates.unsupported(formula, None, [structs((3,))], [structs((3,))]) is None
