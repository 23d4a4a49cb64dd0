import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import gathers
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, load
from pallas_kernels.core.simulator import simulated

WIDTH, ROWS = 4, 40


def run(rows, places, table, values):
    def body(rows_ref, places_ref, table_ref, values_ref, *results, one):
        del one
        gathered, mirrored, elements, scattered, sums, again, shared = results
        lane, column = gathers.lane_and_column(LANES, WIDTH)
        layout = gathers.block_layout(LANES, WIDTH)
        block, indices = load(table_ref, layout), load(rows_ref, gathers.vector_layout(LANES), optimized=False)
        shared[...] = block
        plgpu.commit_smem()
        gathered[...] = gathers.gather_rows(shared, indices)
        mirrored[...] = gathers.computed_here(gathers.gather_rows(table_ref, LANES - 1 - gathers.lane_numbers(LANES)))
        places = load(places_ref, layout)
        elements[...] = gathers.gather_elements(values_ref, places)
        gathers.scatter_elements(scattered, block, column * LANES + lane)
        sums[...] = gathers.sums_of_rows(block, block * 2.0)
        again[...] = gathers.spread(gathers.columns(block)[1], WIDTH)

    block = jax.ShapeDtypeStruct((LANES, WIDTH), jnp.float32)
    out = (block, block, block, jax.ShapeDtypeStruct((LANES * WIDTH,), jnp.float32))
    out += (jax.ShapeDtypeStruct((LANES, 2), jnp.float32), block)
    scratch = [plgpu.SMEM((LANES, WIDTH), jnp.float32)]
    arrays = rows, places, table, values
    return launch(body, *arrays, out=out, grid={"one": 1}, scratch=scratch, name="gathers", barriers=False)


def check(results, rows, places, table, values):
    gathered, mirrored, elements, scattered, sums, again = map(np.asarray, results)
    np.testing.assert_array_equal(gathered, table[rows])
    np.testing.assert_array_equal(mirrored, table[::-1])
    np.testing.assert_array_equal(elements, values[places])
    np.testing.assert_array_equal(scattered.reshape(WIDTH, LANES).T, table)
    np.testing.assert_allclose(sums, np.stack([table.sum(1), 2 * table.sum(1)], axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(again, np.repeat(table[:, 1:2], WIDTH, axis=1))


def operands():
    random = np.random.default_rng(0)
    rows = random.integers(LANES, size=LANES).astype(np.int32)
    places = random.integers(ROWS, size=(LANES, WIDTH)).astype(np.int32)
    return rows, places, *(random.standard_normal(shape).astype(np.float32) for shape in ((LANES, WIDTH), (ROWS,)))


def test_simulated_blocks_are_numpys():
    arrays = operands()
    with simulated():
        results = jax.block_until_ready(run(*map(jnp.asarray, arrays)))
    check(results, *arrays)


@pytest.mark.gpu
def test_blocks_are_numpys_on_a_gpu():
    arrays = operands()
    check(jax.jit(run)(*map(jnp.asarray, arrays)), *arrays)
