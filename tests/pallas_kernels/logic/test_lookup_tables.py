import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu, skipped_outputs

from jaxbp import Wires
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import lookup_tables as kernels

ROWS = list(itertools.product((0, 1), repeat=4))


def operands(gates, N, dtype="float32"):
    wires = Wires.random(5, 2 * gates, seed=0)
    dy, tables, x = normal((gates, N), (gates, 16), (5, N))
    return dy.astype(dtype), tables, wires.a, wires.b, x.astype(dtype)


def reference(dy, tables, a, b, x):
    """Return y, dreads, and dtables, one row of the tables at a time."""
    dy, tables, x = (np.asarray(array, np.float64) for array in (dy, tables, x))
    inputs = x[np.stack([a, b], axis=1).reshape(-1, 4)]
    y, dreads, dtables = np.zeros_like(dy), np.zeros_like(inputs), np.zeros_like(tables)
    for k, row in enumerate(ROWS):
        factors = np.where(np.array(row)[:, None], inputs, 1 - inputs)
        y += tables[:, k, None] * factors.prod(axis=1)
        dtables[:, k] = (dy * factors.prod(axis=1)).sum(axis=1)
        for v, bit in enumerate(row):
            others = np.delete(factors, v, axis=1).prod(axis=1)
            dreads[:, v] += dy * tables[:, k, None] * others * (2 * bit - 1)
    return y, (dreads.reshape(-1, dy.shape[1]), dtables)


@pytest.mark.parametrize(("gates", "N", "dtype"), [(4, LANES, "float32"), (3, 2 * LANES, "bfloat16")])
def test_the_simulator_finds_them_right(gates, N, dtype):
    if jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    arrays = operands(gates, N, dtype)
    y, gradients = reference(*arrays)
    with on_the_cpu(), simulated():
        assert_close(kernels.lookup_tables(*arrays[1:]), y, dtype)
        assert_close(kernels.lookup_tables_gradients(*arrays), gradients, "float32")


@pytest.mark.parametrize("skipped", [0, 1], ids=["dreads", "dtables"])
def test_one_gradient_alone_is_the_same(skipped):
    arrays = operands(2, LANES)
    with on_the_cpu(), skipped_outputs(kernels, skipped):
        results = kernels.lookup_tables_gradients(*arrays)
    assert_close(results[1 - skipped], reference(*arrays)[1][1 - skipped], "float32")


@pytest.mark.parametrize(("N", "dtype"), [(128, "bfloat16"), (1024, "float32"), (4096, "float16")])
def test_they_lower_for_cuda(N, dtype):
    arrays = operands(8, N, dtype)
    text = cuda_program(lambda *a: (kernels.lookup_tables(*a[1:]), kernels.lookup_tables_gradients(*a)), *arrays)
    assert text.count("custom_call @mosaic_gpu") == 2


def test_a_batch_of_part_of_a_warpgroup_is_refused():
    _, *arrays = operands(2, 130)
    with pytest.raises(NotImplementedError, match=r"does not take a batch of 130, only multiples of 128"):
        kernels.lookup_tables(*arrays)


def test_the_first_input_selects_between_the_halves_of_a_table():
    table, inputs = list(range(16)), [jnp.array([bit]) for bit in (1, 0, 1, 1)]
    assert kernels.interpolated(table, inputs).tolist() == [0b1011]
