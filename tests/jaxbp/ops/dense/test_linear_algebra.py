import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, draw_cotangents, in_float64, normal, results_and_gradients, value_and_gradients

import jaxbp

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
def _drawn(name):
    arrays = [normal(*shapes, seed=i) for i, shapes in enumerate(SHAPES[name])]
    return arrays, [draw_cotangents(getattr(jnp, name), a) for a in arrays]


@functools.cache
def _reference(name):
    native = value_and_gradients(getattr(jnp, name))
    run = jax.jit(lambda arrays, cotangents: [native(*each)[1] for each in zip(arrays, cotangents, strict=True)])
    return in_float64(run, *_drawn(name))


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_every_shape_are_those_of_jnp(name, implementation):
    rule = functools.partial(getattr(jaxbp, f"{name}_backward"), implementation=implementation)
    each_rule = jax.jit(lambda arrays, dys: [rule(dy, *a) for a, (dy,) in zip(arrays, dys, strict=True)])
    for gradients, reference in zip(each_rule(*_drawn(name)), _reference(name), strict=True):
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


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff"])
def test_a_batch_may_be_empty(implementation):
    dy, a, b = jnp.zeros((0, 2, 4)), jnp.zeros((0, 2, 3)), jnp.zeros((0, 3, 4))
    da, db = jaxbp.matmul_backward(dy, a, b, precision="highest", implementation=implementation)
    assert (da.shape, db.shape) == (a.shape, b.shape)


@pytest.mark.parametrize("axes", [None, (1, 2, 0), (-1, 0, 1)], ids=str)
def test_the_backward_of_a_transpose_undoes_it(axes):
    (a,) = normal((2, 3, 4))
    y = jaxbp.transpose(a, axes)
    np.testing.assert_array_equal(y, jnp.transpose(a, axes))
    np.testing.assert_array_equal(jaxbp.transpose_backward(y, axes), a)


@pytest.mark.parametrize("name", ["transpose", "transpose_backward"])
def test_pallas_is_refused_with_the_reason_because_a_transpose_has_no_kernel(name):
    reason = "any array, because no kernel is faster than XLA's transpose; wants 'xla', 'autodiff', or None"
    with pytest.raises(NotImplementedError, match=f"^{name}: implementation='pallas' does not take {reason}"):
        getattr(jaxbp, name)(jnp.ones((2, 3)), implementation="pallas")


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff"])
def test_a_sum_over_the_batch_is_of_products_that_are_not_rounded(implementation):
    # Float16 rounds 2049 to 2048.
    dy, b = jnp.array([[[3.0]], [[-1.0]]], "float16"), jnp.array([[[683.0]], [[2048.0]]], "float16")
    da, _ = jaxbp.matmul_backward(dy, jnp.ones((1, 1, 1), "float16"), b, implementation=implementation)
    assert da.ravel().tolist() == [1.0]
