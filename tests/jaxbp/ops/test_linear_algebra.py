"""Products of every number of axes: vectors, matrices and batches that broadcast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, draw_cotangents, in_float64, normal, results_and_gradients, value_and_gradients

import jaxbp

pytestmark = pytest.mark.once

SHAPES = {
    "matmul": [
        [(3,), (3,)],
        [(3,), (3, 4)],
        [(2, 3), (3,)],
        [(5, 2, 3), (3,)],
        [(3,), (5, 3, 4)],
        [(2, 3), (5, 3, 4)],
        [(2, 1, 2, 3), (4, 3, 2)],
    ],
    "dot": [[(3,), (3,)], [(2, 3), (3,)], [(3,), (2, 3, 4)], [(2, 2, 3), (5, 3, 4)]],
    "outer": [[(3,), (4,)], [(2, 3), (4, 1)], [(), (3,)]],
}


@functools.cache
def _all_shapes(name, implementation):
    """The public backward of every pair of shapes, and the gradients by JAX in float64."""
    function, backward = (getattr(jaxbp, n) for n in (name, f"{name}_backward"))
    native = value_and_gradients(getattr(jnp, name))
    arrays = [normal(*shapes, seed=i) for i, shapes in enumerate(SHAPES[name])]
    cotangents = [draw_cotangents(function, a) for a in arrays]

    @jax.jit
    def run(arrays, cotangents):
        rule = functools.partial(backward, implementation=implementation)
        return [rule(dy, *a) for a, (dy,) in zip(arrays, cotangents, strict=True)]

    return run(arrays, cotangents), [in_float64(native, *each)[1] for each in zip(arrays, cotangents, strict=True)]


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_every_shape_are_those_of_jnp(name, implementation):
    for gradients, reference in zip(*_all_shapes(name, implementation), strict=True):
        assert_close(gradients, reference, "float32")


@pytest.mark.parametrize("shapes", [SHAPES["matmul"][1], SHAPES["matmul"][-1]], ids=str)
def test_the_exact_kernels_take_vectors_and_batches(shapes):
    arrays = normal(*shapes)
    cotangents = draw_cotangents(jnp.matmul, arrays)
    results = results_and_gradients(jaxbp.matmul, arrays, cotangents, implementation="pallas")
    assert_close(results, in_float64(value_and_gradients(jnp.matmul), arrays, cotangents), "float32")


def test_sums_over_nothing_are_zero():
    a, b = jnp.zeros((2, 0)), jnp.zeros((0, 3))
    for implementation in ("pallas", "xla", "autodiff"):
        da, db = jaxbp.matmul_backward(jnp.ones((2, 3)), a, b, implementation=implementation)
        assert (da.shape, db.shape) == (a.shape, b.shape)
        assert jaxbp.dot_backward(jnp.ones((2, 3)), a, b, implementation=implementation)[1].shape == b.shape


@pytest.mark.parametrize("axes", [None, (1, 2, 0), (-1, 0, 1)], ids=str)
def test_the_backward_of_a_transpose_undoes_it(axes):
    (a,) = normal((2, 3, 4))
    y = jaxbp.transpose(a, axes)
    np.testing.assert_array_equal(y, jnp.transpose(a, axes))
    np.testing.assert_array_equal(jaxbp.transpose_backward(y, axes), a)
