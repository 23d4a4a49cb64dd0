import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, last_program_first, normal, on_the_cpu

from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense.embedding import Config, table_gradient

LENGTHS = np.array([3, 0, 21, 1, 4, 70, 29, 64])
"""The numbers of tokens that select each row of the table. From 64 tokens, a row counts as long."""
STARTS = np.array([0, *np.cumsum(LENGTHS)], np.int32)
ORDER = np.random.default_rng(0).permutation(STARTS[-1]).astype(np.int32)


def drawn(features, dtype="float32"):
    (dy,) = normal((STARTS[-1], features))
    dy = dy.astype(dtype)
    runs = np.split(np.asarray(dy, np.float64)[ORDER], STARTS[1:-1])
    return (dy, jnp.asarray(ORDER), jnp.asarray(STARTS)), np.stack([run.sum(axis=0) for run in runs])


@pytest.mark.parametrize(("features", "length"), [(128, 128), (384, 128), (512, 512), (512, 256)])
def test_each_row_is_the_sum_of_its_run(features, length):
    arguments, expected = drawn(features)
    assert_close(table_gradient(*arguments, config=Config(length)), expected, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_are_summed_in_float32(dtype):
    arguments, expected = drawn(128, dtype)
    dtable = table_gradient(*arguments)
    assert dtable.dtype == dtype
    assert_close(dtable, expected, dtype)


def test_the_bits_do_not_depend_on_the_order_of_the_ctas():
    arguments, _ = drawn(256)
    with on_the_cpu():
        in_order = table_gradient(*arguments)
        with last_program_first():
            np.testing.assert_array_equal(table_gradient(*arguments), in_order)


def test_accesses_stay_in_bounds_and_every_element_is_written_in_the_simulator():
    arguments, expected = drawn(128)
    with on_the_cpu(), simulated():
        assert_close(table_gradient(*arguments), expected, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_lowers_for_cuda_without_atomics(dtype):
    arguments, _ = drawn(640, dtype)
    program = cuda_program(table_gradient, *arguments)
    assert "mosaic_gpu" in program and "scatter" not in program


def test_no_tokens_and_features_that_are_no_vectors_are_unsupported():
    (dy, order, starts), _ = drawn(128)
    assert table_gradient.unsupported(dy, order, starts) is None
    assert table_gradient.unsupported(dy[:, :100], order, starts) == "dy of shape (192, 100)"
    assert table_gradient.unsupported(dy[:0], order[:0], starts) == "dy of shape (0, 128)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_a_table_may_have_more_rows_than_a_grid_takes_along_its_outer_axes(dtype):
    indices = jnp.asarray(np.random.default_rng(0).integers(0, 70_000, 2**14).clip(300), jnp.int32)
    (dy,) = normal((len(indices), 256))
    expected = np.zeros((70_000, 256))
    np.add.at(expected, np.asarray(indices), np.asarray(dy.astype(dtype), np.float64))
    order = jnp.argsort(indices, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(indices[order], jnp.arange(70_001)).astype(jnp.int32)
    assert_close(table_gradient(dy.astype(dtype), order, starts), expected, dtype)
