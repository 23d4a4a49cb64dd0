import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every_implementation, gradients_of, normal, on_the_cpu, ours

from jaxbp import embedding, embedding_backward

INDICES = jnp.array([[0, 3, 3], [-1, 2, -5]])


def value_and_gradient(function, indices, table, dy):
    y, vjp = jax.vjp(functools.partial(function, indices), table)
    return y, vjp(dy)[0]


def take(indices, table):
    return jnp.take(table, indices, axis=0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
@every_implementation
def test_it_is_take_along_the_first_axis(implementation, dtype):
    table, dy = normal((300, 4), (2, 3, 4))
    indices = INDICES.astype(dtype) if dtype.startswith("int") else jnp.abs(INDICES).astype(dtype)
    found = value_and_gradient(functools.partial(embedding, implementation=implementation), indices, table, dy)
    assert_close(found, value_and_gradient(take, indices.astype(jnp.int32), table, dy), "float32")


@every_implementation
def test_an_index_out_of_range_gives_nan_and_adds_nothing_to_the_gradient(implementation):
    table, dy = normal((5, 4), (4, 4))
    indices = jnp.array([5, -6, 4, 2**31 - 1])
    op = functools.partial(embedding, implementation=implementation)
    y, dtable = value_and_gradient(op, indices, table, dy)
    np.testing.assert_array_equal(jnp.isnan(y).all(axis=1), [True, True, False, True])
    np.testing.assert_array_equal(dtable, np.zeros((5, 4)) + np.eye(5, 1, -4) * dy[2])
    np.testing.assert_array_equal(y, take(indices, table))


@ours
def test_runs_of_every_length_are_added(implementation):
    lengths = np.array([0, 1, 2, 3, 7, 8, 9, 17, 40, 0])
    indices = np.random.default_rng(0).permutation(np.repeat(np.arange(len(lengths)), lengths))
    table, dy = normal((len(lengths), 3), (indices.size, 3))
    expected = np.zeros(table.shape)
    np.add.at(expected, indices, np.asarray(dy, np.float64))
    assert_close(embedding_backward(dy, indices, table, implementation=implementation), expected, "float32")


@ours
def test_half_precisions_are_summed_in_float32(implementation):
    # In bfloat16, 256 + 1 is 256.
    indices, table = jnp.zeros(1000, jnp.int32), jnp.zeros((2, 1), jnp.bfloat16)
    dtable = embedding_backward(jnp.ones((1000, 1), jnp.bfloat16), indices, table, implementation=implementation)
    np.testing.assert_array_equal(dtable, [[1000], [0]])


@ours
def test_the_backward_has_no_scatter_that_adds(implementation):
    table, dy = normal((5, 4), (2, 3, 4))
    backward = functools.partial(embedding_backward, implementation=implementation)
    assert "scatter-add" not in str(jax.make_jaxpr(backward)(dy, INDICES, table))
    autodiff = functools.partial(embedding_backward, implementation="autodiff")
    assert "scatter-add" in str(jax.make_jaxpr(autodiff)(dy, INDICES, table))


@ours
def test_nan_in_one_gradient_reaches_only_its_row(implementation):
    dy, table = jnp.ones((6, 2)).at[1].set(jnp.nan), jnp.ones((4, 2))
    dtable = embedding_backward(dy, jnp.array([2, 1, 2, 1, 0, 2]), table, implementation=implementation)
    np.testing.assert_array_equal(dtable[:, 0], [1, np.nan, 3, 0])


@ours
def test_only_the_indices_are_saved(implementation):
    op = functools.partial(embedding, implementation=implementation)
    _, vjp = jax.vjp(functools.partial(op, INDICES), jnp.ones((500, 40)))
    assert sum(leaf.size for leaf in jax.tree.leaves(vjp)) <= INDICES.size


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
@every_implementation
def test_any_shape_of_indices_works(shape, implementation):
    indices, table = jnp.full(shape, 1), jnp.ones((3, 2))
    (dtable,) = gradients_of(embedding, (indices, table), [jnp.ones((*shape, 2))], implementation=implementation)
    np.testing.assert_array_equal(dtable[:, 0], [0, indices.size, 0])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 2)], ids=str)
@every_implementation
def test_vmap_maps_indices_and_tables(axes, implementation):
    (table,) = normal((5, 4, 3))
    indices, table = INDICES if axes[0] is not None else INDICES[0], table if axes[1] is not None else table[:, :, 0]

    def gradient(function):
        return jax.grad(lambda indices, table: jnp.sum(jnp.sin(jax.vmap(function, axes)(indices, table))), 1)

    op = functools.partial(embedding, implementation=implementation)
    assert_close(gradient(op)(indices, table), gradient(take)(indices, table), "float32")


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_the_gradient_is_exported_for_any_number_of_tokens(implementation):
    (batch,) = jax.export.symbolic_shape("batch")
    table = normal((5, 4))[0]
    op = functools.partial(embedding, implementation=implementation)
    gradient = jax.jit(lambda indices: jax.grad(lambda table: jnp.sum(jnp.sin(op(indices, table))))(table))
    with on_the_cpu():
        exported = jax.export.export(gradient)(jax.ShapeDtypeStruct((batch, 3), INDICES.dtype))
        for indices in (INDICES[:1], INDICES):
            assert_close(exported.call(indices), gradient(indices), "float32")


TABLE, DY = jnp.zeros((5, 4)), jnp.zeros((2, 3, 4))
REFUSED = {
    "indices": (TypeError, lambda: embedding(DY, TABLE), "embedding: indices has dtype float32; wants integers"),
    "booleans": (TypeError, lambda: embedding(DY > 0, TABLE), "embedding: indices has dtype bool; wants integers"),
    "a list": (TypeError, lambda: embedding([0], TABLE), "embedding: indices is a list; wants an array"),
    "complex table": (TypeError, lambda: embedding(INDICES, TABLE * 1j), "embedding: table has dtype complex64; wants"),
    "a vector as table": (
        ValueError,
        lambda: embedding(INDICES, TABLE[0]),
        r"embedding: table has shape \(4,\); wants \(num_embeddings, features\)",
    ),
    "no row": (ValueError, lambda: embedding(INDICES, TABLE[:0]), r"embedding: table has shape \(0, 4\); wants"),
    "dy": (
        ValueError,
        lambda: embedding_backward(DY[0], INDICES, TABLE),
        r"embedding_backward: dy has shape \(3, 4\); wants \(2, 3, 4\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    error, call, message = REFUSED[case]
    with pytest.raises(error, match=f"^{message}"):
        call()
