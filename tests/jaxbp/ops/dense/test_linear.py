import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_numerical_gradients_agree,
    every_implementation,
    gradients_of,
    launching_program,
    normal,
)

from jaxbp import linear, linear_backward
from jaxbp.ops.dense._products import parameter_gradients_in_float32
from jaxbp.ops.dense.linear import forward_in_float32


@every_implementation
def test_numerical_gradients_agree_to_a_thousandth(implementation):
    # A large step is exact, because the op is linear in each argument.
    assert_numerical_gradients_agree(linear, normal((3, 5), (2, 5), (2,)), step=0.5, implementation=implementation)


@pytest.mark.parametrize("batch", [(), (4,), (2, 1, 3)], ids=str)
@every_implementation
def test_gradients_sum_over_all_leading_axes(batch, implementation):
    x, w, b, dy = normal((*batch, 5), (2, 5), (2,), (*batch, 2))
    rows_dy, rows_x = np.asarray(dy, np.float64).reshape(-1, 2), np.asarray(x, np.float64).reshape(-1, 5)
    expected = (np.reshape(rows_dy @ w, x.shape), rows_dy.T @ rows_x, rows_dy.sum(0))
    assert_close(gradients_of(linear, (x, w, b), [dy], implementation=implementation), expected, "float32")
    assert_close(linear_backward(dy, x, w, implementation=implementation), expected, "float32")


@every_implementation
def test_without_a_bias_the_other_gradients_are_the_same(implementation):
    x, w, dy = normal((3, 5), (2, 5), (3, 2))
    expected = gradients_of(linear, (x, w, jnp.zeros(2)), [dy], implementation=implementation)[:2]
    assert_close(gradients_of(linear, (x, w), [dy], implementation=implementation), expected, "float32")


@pytest.mark.parametrize("batch", [(0,), (2, 0)], ids=str)
@every_implementation
def test_an_empty_batch_has_zero_gradients_in_the_parameters(batch, implementation):
    arrays = (jnp.zeros((*batch, 5)), *normal((2, 5), (2,)))
    dx, dw, db = gradients_of(linear, arrays, [jnp.zeros((*batch, 2))], implementation=implementation)
    assert dx.shape == (*batch, 5)
    np.testing.assert_array_equal(dw, np.zeros((2, 5)))
    np.testing.assert_array_equal(db, np.zeros(2))


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 2), (5, 0), (0, 0)])
@pytest.mark.parametrize("precision", ["default", "highest"])
@every_implementation
def test_without_features_results_and_gradients_are_those_of_jax(implementation, precision, inputs, outputs):
    x, w, b, dy = normal((3, inputs), (outputs, inputs), (outputs,), (3, outputs))
    options = dict(precision=precision, implementation=implementation)
    y, vjp = jax.vjp(functools.partial(linear, **options), x, w, b)
    expected, expected_vjp = jax.vjp(lambda x, w, b: x @ w.T + b, x, w, b)
    np.testing.assert_array_equal(y, expected)
    assert_close(vjp(dy), expected_vjp(dy), "float32")


@pytest.mark.parametrize(
    ("dtype", "default", "precision", "kernels", "rounds"),
    [
        ("float32", "highest", None, 3, False),
        ("float32", None, "highest", 3, False),
        ("float32", "highest", "default", 3, True),
        ("float32", "tensorfloat32", None, 3, True),
        ("float32", None, None, 3, True),
        ("bfloat16", "highest", None, 2, False),  # one kernel computes dw and db
    ],
)
def test_kernels_compute_all_gradients_and_round_to_tf32_where_it_is_allowed(
    dtype, default, precision, kernels, rounds
):
    arrays = [a.astype(dtype) for a in normal((3, 2), (3, 5), (2, 5))]
    with jax.default_matmul_precision(default):
        backward = functools.partial(linear_backward, precision=precision, implementation="pallas")
        program = launching_program(backward, *arrays)
    assert program.count("@kernel.") == kernels
    assert ("reduce_precision" in program) == rounds
    assert "dot_general" not in program


@pytest.mark.parametrize("implementation", ["pallas", "xla", None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_half_precisions_are_summed_in_float32(dtype, implementation):
    x, w, b, dy = [a.astype(dtype) for a in normal((3, 5), (2, 5), (2,), (3, 2))]
    forward = functools.partial(linear, implementation=implementation)
    for gradients in (
        lambda: linear_backward(dy, x, w, implementation=implementation),
        lambda: jax.vjp(forward, x, w, b)[1](dy),
    ):
        sums = [line for line in launching_program(gradients).splitlines() if "stablehlo.reduce(" in line]
        assert sums and all("xf32>, tensor<f32>)" in line for line in sums)


@every_implementation
def test_products_on_the_tensor_cores_compute_the_same(implementation):
    x, w, dy = normal((3, 5), (2, 5), (3, 2))
    options = dict(precision="default", implementation=implementation)
    assert_close(linear_backward(dy, x, w, **options), (dy @ w, dy.T @ x, dy.sum(0)), 1e-2)


def test_in_float32_half_precisions_are_rounded_once():
    x, w, b, dy = (a.astype("bfloat16") for a in normal((100, 64), (128, 64), (128,), (100, 128)))
    wide_x, wide_w, wide_b, wide_dy = (np.asarray(a, np.float64) for a in (x, w, b, dy))
    z = forward_in_float32(x, w, b)
    assert z.dtype == jnp.bfloat16
    assert_close(z, wide_x @ wide_w.T + wide_b, 4e-3)
    for dtype, tolerance in ((None, 4e-3), (jnp.float32, 1e-6)):
        dw, db = parameter_gradients_in_float32(dy, x, dtype=dtype)
        assert dw.dtype == (dtype or x.dtype) and db.dtype == jnp.float32
        assert_close(dw, wide_dy.T @ wide_x, tolerance)
        assert_close(db, wide_dy.sum(0), 1e-6)
