"""LayerNorm, RMSNorm, and LayerNorm with a dense layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    cuda_program,
    every_implementation,
    gradients_of,
    in_float64,
    normal,
    ours,
    relative_error,
    results_and_gradients,
)
from jax.test_util import check_grads

import jaxbp
from jaxbp import (
    layer_norm,
    layer_norm_backward,
    layer_norm_linear,
    layer_norm_linear_backward,
    rms_norm,
)
from jaxbp import rms_norm_backward as rms_backward
from jaxbp.ops._numerics import widen
from pallas_kernels.dense import linear_sm90 as linear_kernels
from pallas_kernels.norm import layer_norm_linear_sm90 as narrow_kernels

pytestmark = pytest.mark.once

ALL = [(layer_norm, ((3, 5), (5,), (5,))), (rms_norm, ((3, 5), (5,)))]
ALL.append((layer_norm_linear, ((3, 5), (5,), (5,), (2, 5), (2,))))
every_op = pytest.mark.parametrize(("op", "shapes"), ALL, ids=[op.__name__ for op, _ in ALL])


def reference(op, arrays, cotangents):
    """(results, gradients) by JAX's own differentiation in float64."""
    run = functools.partial(results_and_gradients, op, implementation="autodiff")
    return in_float64(run, arrays, cotangents)


@every_implementation
def test_the_classic_case_4_4_8_to_4_4_16(implementation):
    arrays = normal((4, 4, 8), (8,), (8,), (16, 8), (16,))
    dy = normal((4, 4, 16), seed=1)
    z, gradients = results_and_gradients(layer_norm_linear, arrays, dy, implementation=implementation)
    (expected,), expected_gradients = reference(layer_norm_linear, arrays, dy)
    assert z[0].shape == (4, 4, 16)
    assert [g.shape for g in gradients] == [a.shape for a in arrays]
    assert_close([*z, *gradients], [expected, *expected_gradients], 2e-6)


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@every_op
def test_gradients_and_their_gradients_pass_check_grads_in_float64(op, shapes, implementation):
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(a, np.float64)) for a in normal(*shapes)]
        check_grads(functools.partial(op, implementation=implementation), arrays, order=2, modes=("rev",))


@every_implementation
def test_the_forward_is_the_textbooks(implementation):
    x, scale, bias = normal((3, 4, 5), (5,), (5,))
    rows = np.asarray(x, np.float64)
    deviations = rows - rows.mean(-1, keepdims=True)
    expected = deviations / np.sqrt(rows.var(-1, keepdims=True) + 0.1) * scale + bias
    assert_close(layer_norm(x, scale, bias, 0.1, implementation=implementation), expected, "float32")
    expected = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + 0.1) * scale
    assert_close(rms_norm(x, scale, 0.1, implementation=implementation), expected, "float32")


@every_implementation
def test_the_gradient_in_a_row_is_not_the_jacobians_diagonal_alone(implementation):
    x, scale, dy = normal((3, 64), (64,), (3, 64))
    dx, *_ = layer_norm_backward(dy, x, scale, 0.0, implementation=implementation)
    # Adding to a whole row, or scaling it, changes no output.
    normalised = layer_norm(x, jnp.ones(64), jnp.zeros(64), 0.0, implementation="autodiff")
    np.testing.assert_allclose(jnp.sum(dx, axis=-1), 0, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(dx * normalised, axis=-1), 0, atol=1e-5)
    assert np.linalg.norm(dx) > 1


@pytest.mark.parametrize("batch", [(), (2, 1, 3)], ids=str)
@ours
def test_scales_and_biases_gradients_sum_over_all_leading_axes(batch, implementation):
    x, scale, bias, w, b, dy = normal((*batch, 5), (5,), (5,), (2, 5), (2,), (*batch, 2))
    whole = reference(layer_norm_linear, [x, scale, bias, w, b], [dy])[1]
    actual = layer_norm_linear_backward(dy, x, scale, bias, w, implementation=implementation)
    assert_close(actual, whole, "float32")
    x, dy = x.reshape(-1, 5), dy @ w
    normalised = layer_norm(x, jnp.ones(5), jnp.zeros(5))
    expected = (dy.reshape(-1, 5) * normalised).sum(0), dy.reshape(-1, 5).sum(0)
    assert_close(actual[1:3], expected, "float32")


@every_implementation
def test_a_constant_row_gives_the_bias_and_a_finite_gradient(implementation):
    scale, bias, dy = normal((5,), (5,), (2, 5))
    x = jnp.full((2, 5), 3.0)
    (y,), (dx, dscale, dbias) = results_and_gradients(layer_norm, (x, scale, bias), [dy], implementation=implementation)
    t = np.asarray(dy, np.float64) * scale
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (2, 5)))
    assert_close(dx, (t - t.mean(-1, keepdims=True)) / np.sqrt(1e-5), "float32")
    assert_close((dscale, dbias), (np.zeros(5), dy.sum(0)), "float32")


@every_implementation
def test_a_row_far_from_zero_loses_no_digits(implementation):
    x, scale, bias, dy = normal((3, 200), (200,), (200,), (3, 200))
    arrays = x + 1e4, scale, bias
    actual = results_and_gradients(layer_norm, arrays, [dy], implementation=implementation)
    assert_close(actual, reference(layer_norm, arrays, [dy]), "float32")


@every_implementation
def test_an_outlier_at_the_start_of_a_row_costs_no_digits(implementation):
    x, scale, bias, dy = normal((3, 200), (200,), (200,), (3, 200))
    arrays = x.at[:, 0].set(1e4), scale, bias
    actual = results_and_gradients(layer_norm, arrays, [dy], implementation=implementation)
    assert_close(actual, reference(layer_norm, arrays, [dy]), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@ours
def test_half_precisions_far_from_zero_match_float64(dtype, implementation):
    x, scale, bias, dy = (a.astype(dtype) for a in normal((3, 200), (200,), (200,), (3, 200)))
    arrays = x + 100, scale, bias
    actual = results_and_gradients(layer_norm, arrays, [dy], implementation=implementation)
    assert {a.dtype.name for a in jax.tree.leaves(actual)} == {dtype}
    assert_close(actual, reference(layer_norm, arrays, [dy]), dtype)


def test_half_precisions_are_summed_in_float32():
    # In bfloat16 a sum of ones would end at 256.
    dy, scale = jnp.ones((320, 4), jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    x = jnp.broadcast_to(jnp.asarray([-1, 1, -1, 1], jnp.bfloat16), dy.shape)
    for implementation in jaxbp.IMPLEMENTATIONS:
        _, dscale, dbias = layer_norm_backward(dy, x, scale, implementation=implementation)
        np.testing.assert_array_equal(dbias.astype(jnp.float32), np.full(4, 320.0))
        np.testing.assert_allclose(dscale.astype(jnp.float32), [-320, 320, -320, 320], rtol=1e-2)


@every_implementation
@every_op
def test_nan_stays_in_its_row(op, shapes, implementation):
    x, *rest = normal(*shapes)
    y = op(x.at[1, 2].set(jnp.nan), *rest, implementation=implementation)
    np.testing.assert_array_equal(jnp.isnan(y).any(-1), [False, True, False])


@every_implementation
def test_without_a_bias_of_the_outputs_the_other_gradients_are_the_same(implementation):
    arrays, dy = normal((3, 5), (5,), (5,), (2, 5)), normal((3, 2), seed=1)
    expected = gradients_of(layer_norm_linear, (*arrays, jnp.zeros(2)), dy, implementation=implementation)[:4]
    assert_close(gradients_of(layer_norm_linear, arrays, dy, implementation=implementation), expected, "float32")


@every_implementation
def test_an_empty_batch_has_zero_gradients_in_the_parameters(implementation):
    scale, bias, w, b = normal((5,), (5,), (2, 5), (2,))
    arrays, dy = (jnp.zeros((2, 0, 5)), scale, bias, w, b), [jnp.zeros((2, 0, 2))]
    dx, *gradients = gradients_of(layer_norm_linear, arrays, dy, implementation=implementation)
    assert dx.shape == (2, 0, 5)
    assert all(np.array_equal(g, np.zeros(g.shape)) for g in gradients)


def test_two_numbers_a_row_are_kept_beside_the_arguments():
    arrays = normal((32, 64), (64,), (64,), (16, 64), (16,))
    op = functools.partial(layer_norm_linear, implementation="xla")
    backward = jax.eval_shape(lambda *arrays: jax.vjp(op, *arrays)[1], *arrays)
    shapes = [a.shape for a in jax.tree.leaves(backward)]
    assert sorted(shapes) == sorted([*(a.shape for a in arrays), (32,), (32,)])


def test_the_backwards_of_rms_norm_and_of_layer_norm_agree_on_centred_rows():
    x, scale, dy = normal((3, 64), (64,), (3, 64))
    x -= x.mean(-1, keepdims=True)
    dx, dscale, _ = layer_norm_backward(dy, x, scale)
    rms_dx, rms_dscale = rms_backward(dy, x, scale)
    assert_close(dscale, rms_dscale, "float32")
    t, inv_std = dy * scale, jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    assert_close(dx, rms_dx - inv_std * t.mean(-1, keepdims=True), "float32")
    assert relative_error(dx, rms_dx) > 1e-3


@pytest.mark.parametrize("rows", [1, 129])
@pytest.mark.parametrize("hidden", [1, 96, 256, 1000, 1152, 4096, 8192, 16384])
def test_kernels_lower_for_cuda_at_any_size(hidden, rows):
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, hidden), (rows, hidden), (hidden,))]
    program = cuda_program(functools.partial(layer_norm_backward, implementation="pallas"), *structs)
    assert "mosaic_gpu" in program


@pytest.mark.parametrize(("hidden", "kernel"), [(256, True), (4096, True), (100, False), (1152, False), (16384, False)])
def test_on_a_gpu_none_takes_the_kernels_where_they_stream_the_rows(hidden, kernel, on_hopper):
    x, scale, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((7, hidden), (hidden,), (3, hidden)))
    dy = jax.ShapeDtypeStruct((7, 3), jnp.bfloat16)
    assert ("mosaic_gpu" in cuda_program(layer_norm_backward, x, x, scale)) == kernel
    assert ("mosaic_gpu" in cuda_program(lambda x, scale: jax.vjp(rms_norm, x, scale)[0], x, scale)) == kernel
    assert ("mosaic_gpu" in cuda_program(layer_norm_linear_backward, dy, x, scale, scale, w)) == kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_the_bias_of_half_precisions_is_summed_in_float32(dtype):
    arrays = [a.astype(dtype) for a in normal((3, 2), (3, 5), (5,), (5,), (2, 5))]
    for implementation in ("xla", None):
        program = cuda_program(functools.partial(layer_norm_linear_backward, implementation=implementation), *arrays)
        sums = [line for line in program.splitlines() if "stablehlo.reduce(" in line]
        assert sums and all("xf32>, tensor<f32>)" in line for line in sums)


# Narrow and wide layers whose products are kernels.
FUSED = pytest.mark.parametrize(("hidden", "out"), [(128, 128), (512, 128)], ids=["narrow", "wide"])


def of_kernels(monkeypatch):
    for module in (narrow_kernels, linear_kernels):
        monkeypatch.setattr(module, "_LEAST_ROWS", 64)


@pytest.mark.parametrize("bias_of_outputs", [True, False])
@FUSED
def test_products_that_are_kernels_agree_with_the_formula_and_so_do_their_derivatives(
    hidden, out, bias_of_outputs, monkeypatch
):
    of_kernels(monkeypatch)
    shapes = (2, 64, hidden), (hidden,), (hidden,), (out, hidden), (out,)
    arrays = [(a / 4).astype("bfloat16") for a in normal(*shapes)]
    arrays = arrays if bias_of_outputs else arrays[:-1]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *arrays):
        op = functools.partial(layer_norm_linear, implementation=implementation)
        loss = lambda *arrays: jnp.sum(jnp.sin(widen(op(*arrays))))  # noqa: E731
        gradients = jax.grad(loss, range(len(arrays)))
        return op(*arrays), *jax.jvp(gradients, arrays, arrays)

    assert_close(run("pallas", *arrays), in_float64(functools.partial(run, "autodiff"), *arrays), 2e-2)


@FUSED
def test_products_that_are_kernels_lower_for_cuda_with_and_without_statistics(hidden, out, monkeypatch):
    of_kernels(monkeypatch)
    shapes = (64, out), (64, hidden), (hidden,), (hidden,), (out, hidden), (out,)
    dy, *arrays, b = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes)

    def both(dy, *arrays):
        z, vjp = jax.vjp(functools.partial(layer_norm_linear, implementation="pallas"), *arrays)
        return z, vjp(dy), layer_norm_linear_backward(dy, *arrays[:-1], implementation="pallas")

    program = cuda_program(both, dy, *arrays, b)
    assert "linear_backward_weights" in program
    assert ("layer_norm_linear_backward_input" in program) == (hidden == 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "hidden", "out"), [(65536, 256, 256), (65536, 128, 256), (8192, 1024, 4096), (8192, 1024, 1024)]
)
def test_gpu_layer_norm_linear_of_kernels_matches_float32(rows, hidden, out, dtype):
    x, scale, bias, w, b = normal((rows, hidden), (hidden,), (hidden,), (out, hidden), (out,))
    arrays = [a.astype(dtype) for a in (x, scale, bias, w / hidden**0.5, b)]
    dy = [a.astype(dtype) for a in normal((rows, out), seed=1)]
    actual = results_and_gradients(layer_norm_linear, arrays, dy, implementation="pallas")
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (arrays, dy))
    assert_close(actual, results_and_gradients(layer_norm_linear, *wide, implementation="autodiff"), dtype)
