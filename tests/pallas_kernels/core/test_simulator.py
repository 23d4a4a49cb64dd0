import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from planted import FIRST, double, rows, run

from pallas_kernels.core import simulator
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulated

pytestmark = pytest.mark.usefixtures("in_an_interpreter")


def test_a_right_kernel_passes_the_simulator():
    with simulated():
        y = run(double, rows())
    np.testing.assert_array_equal(y, 2 * rows())


def casts_the_layout(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = plgpu.layout_cast(2 * x_ref[i, FIRST], plgpu.Layout.WG_STRIDED((LANES,), vec_size=1))


def test_the_simulator_casts_layouts():
    with simulated():
        y = run(casts_the_layout, rows())
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


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators order the CTAs of a grid")
def test_the_simulator_raises_on_a_race():
    with pytest.raises((jax.errors.JaxRuntimeError, RuntimeError), match=r"(?i)race"), simulated():
        jax.block_until_ready(run(all_write_the_same_place, rows()))


def test_a_simulator_that_finds_no_race_says_so(monkeypatch):
    monkeypatch.setattr(simulator, "FINDS_RACES", False)
    with pytest.raises(NotImplementedError, match=r"finds no race; wants JAX 0.12 or newer"), simulated(True):
        pass
