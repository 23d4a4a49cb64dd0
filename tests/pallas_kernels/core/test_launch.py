"""Launching kernels: the interpreter, what mistakes show as, and the batch-last layout."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import last_program_first, on_the_cpu
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import batch_first, batch_last, launch
from pallas_kernels.core.layouts import LANES, largest_divisor, vector_length
from pallas_kernels.core.simulator import simulated

ROOT = Path(__file__).parents[3]
FIRST, SECOND = pl.ds(0, LANES), pl.ds(LANES, LANES)


@pytest.fixture(autouse=True)
def _in_an_interpreter():
    with on_the_cpu():
        yield


def run(body, *arrays, shape=(2, LANES), dtype=jnp.float32, programs=2):
    return launch(body, *arrays, out=jax.ShapeDtypeStruct(shape, dtype), grid={"i": programs}, name="planted")


def rows():
    return jnp.arange(2.0 * LANES).reshape(2, LANES)


def double(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = 2 * x_ref[i, FIRST]


# ----------------------------------------------------------------------------------------------------- the interpreter


SCRIPT = """
import jax, jax.numpy as jnp, jaxbp
x = jnp.ones((2, 3))
jaxbp.relu(x)
print("before")
for _ in range(2):
    jax.grad(lambda x: jaxbp.relu(x, implementation="pallas").sum())(x)
    jax.grad(lambda x: jaxbp.linear(x, x, implementation="pallas").sum())(x)
"""


def test_the_interpreter_warns_once_per_process_and_only_when_it_runs():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-W", "always", "-c", SCRIPT]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.returncode == 0, process.stdout
    before, after = process.stdout.split("before\n")
    assert "no GPU found" not in before
    assert after.count("jaxbp: no GPU found, so Pallas kernels run in an interpreter: right, but slow.") == 1


# ------------------------------------------------------------------------------------------------ what mistakes show as


def test_a_right_kernel_passes_the_simulator():
    with simulated():
        y = run(double, rows())
    np.testing.assert_array_equal(y, 2 * rows())


def reads_behind_the_end(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = x_ref[i + 1, FIRST]


def reads_a_vector_half_outside(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = x_ref[i, pl.ds(i, LANES)]


def writes_behind_the_end(x_ref, y_ref, *, i):
    y_ref[i + 1, FIRST] = x_ref[i, FIRST]


@pytest.mark.parametrize("body", [reads_behind_the_end, reads_a_vector_half_outside, writes_behind_the_end])
def test_the_simulator_raises_on_an_access_out_of_bounds(body):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Out-of-bounds|AssertionError"), simulated():
        jax.block_until_ready(run(body, rows()))


def test_the_simulator_works_again_after_it_raised():
    with pytest.raises(jax.errors.JaxRuntimeError), simulated():
        jax.block_until_ready(run(reads_behind_the_end, rows()))
    with simulated():
        np.testing.assert_array_equal(run(double, rows()), 2 * rows())


def writes_the_first_row(x_ref, y_ref, *, i):
    y_ref[0, FIRST] = x_ref[0, FIRST]


@pytest.mark.parametrize(("dtype", "unwritten"), [("float32", np.nan), ("bfloat16", np.nan), ("uint8", 255)])
def test_an_unwritten_output_shows_in_the_simulator(dtype, unwritten):
    with simulated():
        y = run(writes_the_first_row, rows().astype(dtype), dtype=dtype, programs=1)
    np.testing.assert_array_equal(y[1].astype(jnp.float32), np.full(LANES, unwritten))


def all_write_the_same_place(x_ref, y_ref, *, i):
    y_ref[0, FIRST] = x_ref[i, FIRST]
    y_ref[1, FIRST] = x_ref[1, FIRST]


def write_over_each_other_in_turn(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = x_ref[i, FIRST]
    y_ref[1 - i, FIRST] = x_ref[i, FIRST]


def reads_what_another_wrote(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = jnp.where(i == 0, x_ref[0, FIRST], y_ref[0, FIRST])


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="its simulator puts the programs of a grid in an order")
def test_the_simulator_raises_on_a_race():
    with pytest.raises((jax.errors.JaxRuntimeError, RuntimeError), match=r"(?i)race"), simulated():
        jax.block_until_ready(run(all_write_the_same_place, rows()))


@pytest.mark.parametrize("body", [all_write_the_same_place, write_over_each_other_in_turn, reads_what_another_wrote])
def test_running_the_last_program_first_shows_a_race(body):
    in_order = run(body, rows())
    with last_program_first():
        last_first = run(body, rows())
    assert not np.array_equal(in_order, last_first)


def test_running_the_last_program_first_changes_nothing_in_a_right_kernel():
    with last_program_first():
        np.testing.assert_array_equal(run(double, rows()), 2 * rows())


# --------------------------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize("shape", [(), (3, 2)], ids=str)
@pytest.mark.parametrize(("batch", "lanes"), [(0, 128), (1, 128), (127, 128), (128, 128), (129, 256)])
def test_batch_last_fills_up_with_zeros_and_batch_first_gives_it_back(batch, lanes, shape):
    x = 1 + jnp.arange(batch * int(np.prod(shape)), dtype=jnp.float32).reshape(batch, *shape)
    last = batch_last(x)
    assert last.shape == (*shape, lanes)
    assert jnp.all(last[..., batch:] == 0)
    np.testing.assert_array_equal(batch_first(last, batch), x)


@pytest.mark.parametrize(
    ("lanes", "dtypes", "length"),
    [
        (128, ["float32"], 128),
        (256, ["float32"], 256),
        (384, ["float32"], 128),
        (512, ["float32"], 512),
        (1024, ["float32", "float32"], 512),
        (1024, ["float32", "uint8"], 256),
        (1024, ["bfloat16", "int32"], 256),
    ],
)
def test_vectors_are_the_longest_that_divide_the_lanes_and_load_at_once(lanes, dtypes, length):
    assert vector_length(*(jax.ShapeDtypeStruct((3, lanes), dtype) for dtype in dtypes)) == length


@pytest.mark.parametrize(
    ("n", "at_most", "divisor"), [(12, 8, 6), (7, 8, 7), (13, 8, 1), (1, 8, 1), (8, 0, 1), (0, 8, 1)]
)
def test_largest_divisor(n, at_most, divisor):
    assert largest_divisor(n, at_most) == divisor
