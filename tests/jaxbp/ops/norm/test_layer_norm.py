import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    cuda_program,
    every_implementation,
    in_float64,
    kernel_results,
    launching_program,
    normal,
    on_the_cpu,
    ours,
    relative_error,
    results_and_gradients,
    skipped_outputs,
)

import jaxbp
from jaxbp import layer_norm, layer_norm_backward, rms_norm
from jaxbp import rms_norm_backward as rms_backward
from pallas_kernels.core.device import BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.norm import layer_norm_streamed

ALL = [(layer_norm, ((3, 5), (5,), (5,))), (rms_norm, ((3, 5), (5,)))]
every_op = pytest.mark.parametrize(("op", "shapes"), ALL, ids=[op.__name__ for op, _ in ALL])


def reference(op, arrays, cotangents):
    run = functools.partial(results_and_gradients, op, implementation="autodiff")
    return in_float64(run, arrays, cotangents)


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
    # Shifting or scaling a row does not change y.
    normalized = layer_norm(x, jnp.ones(64), jnp.zeros(64), 0.0, implementation="autodiff")
    np.testing.assert_allclose(jnp.sum(dx, axis=-1), 0, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(dx * normalized, axis=-1), 0, atol=1e-5)
    assert np.linalg.norm(dx) > 1


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


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack bulk copies")
@pytest.mark.parametrize("backward", [layer_norm_backward, rms_backward])
def test_without_an_eps_no_row_that_only_fills_a_group_joins_the_sums(backward):
    dy, x, scale = normal((5, 128), (5, 128), (128,))
    expected = in_float64(functools.partial(backward, epsilon=0.0, implementation="autodiff"), dy, x, scale)
    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=2)):
        run = jax.jit(functools.partial(backward, epsilon=0.0, implementation="pallas"))
        actual = jax.block_until_ready(run(dy, x, scale))
    assert_close(actual, expected, "float32")


def test_half_precisions_are_summed_in_float32():
    # In bfloat16, a sum of ones would stop at 256.
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


def test_the_backwards_of_rms_norm_and_of_layer_norm_agree_on_centered_rows():
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
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((7, hidden), (hidden,)))
    assert ("@kernel." in launching_program(layer_norm_backward, x, x, scale)) == kernel
    assert ("@kernel." in launching_program(lambda x, scale: jax.vjp(rms_norm, x, scale)[0], x, scale)) == kernel


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", True), ("float32", False)])
def test_on_a_gpu_with_less_shared_memory_none_takes_the_kernels_for_rows_that_fit(dtype, kernel):
    x, scale = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((7, 8192), (8192,)))
    with targeting(BLACKWELL_RTX):
        assert ("mosaic_gpu" in cuda_program(layer_norm_backward, x, x, scale)) == kernel
        assert "mosaic_gpu" in cuda_program(
            functools.partial(layer_norm_backward, implementation="pallas"), x, x, scale
        )


@pytest.mark.parametrize("backward", [layer_norm_backward, rms_backward])
def test_a_backward_by_itself_runs_one_kernel_and_no_forward(backward, on_hopper):
    x, scale = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((7, 256), (256,)))
    assert cuda_program(backward, x, x, scale).count("@mosaic_gpu") == 1


FROZEN = {
    "grad": lambda f: jax.grad(f),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "scan": lambda f: jax.grad(lambda x, *p: jnp.sum(jax.lax.scan(lambda c, _: (c + f(c, *p), None), x, None, 2)[0])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("how", FROZEN)
@pytest.mark.parametrize("hidden", [256, 200])
@every_op
def test_with_frozen_parameters_the_backward_writes_no_partial_sums(op, shapes, hidden, how):
    arrays = normal((4, hidden), *[(hidden,)] * (len(shapes) - 1))
    total = lambda *arrays: jnp.sum(op(*arrays, implementation="pallas"))  # noqa: E731
    *_, backward = kernel_results(FROZEN[how](total), *arrays)
    assert backward == 1
    *_, backward = kernel_results(jax.grad(total, tuple(range(len(arrays)))), *arrays)
    assert backward > 1


@pytest.mark.parametrize("backward", [layer_norm_backward, rms_backward])
def test_a_backward_called_for_dx_alone_writes_no_partial_sums(backward):
    x, scale = normal((4, 256), (256,))
    assert kernel_results(lambda x, s: backward(x, x, s, implementation="pallas")[0], x, scale) == [1]


def test_with_frozen_parameters_the_gradient_is_the_same():
    x, scale, bias = normal((3, 200), (200,), (200,))
    gradients = [
        jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(layer_norm(*a, implementation="pallas"))), argnums))(x, scale, bias)
        for argnums in (0, (0, 1, 2))
    ]
    np.testing.assert_array_equal(gradients[0], gradients[1][0])


def test_under_checkpoint_the_first_forward_writes_no_statistics():
    x, scale, bias = normal((4, 256), (256,), (256,))
    layer = jax.checkpoint(lambda x: jnp.sin(layer_norm(x, scale, bias, implementation="pallas")))
    assert kernel_results(jax.value_and_grad(lambda x: jnp.sum(layer(x))), x) == [1, 3, 1]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack bulk copies")
def test_the_streamed_kernels_without_sums_and_statistics_are_right_in_the_simulator():
    x, dy, scale, bias = normal((4, 256), (4, 256), (256,), (256,))
    statistics = jnp.mean(x, axis=1) - x[:, 0], jax.lax.rsqrt(jnp.var(x, axis=1) + 1e-5)
    with simulated(), skipped_outputs(layer_norm_streamed, 1):
        y, *skipped = layer_norm_streamed.normalize(x, scale, bias, epsilon=1e-5, center=True)
        dx, *sums, _ = layer_norm_streamed.gradients(dy, x, scale, None, *statistics, epsilon=1e-5, center=True)
    assert not np.any([np.any(a) for a in (*skipped, *sums)])
    assert_close(y, layer_norm(x, scale, bias, implementation="xla"), "float32")
    assert_close(dx, layer_norm_backward(dy, x, scale, implementation="xla")[0], "float32")


@every_op
def test_eps_may_be_a_numpy_scalar_or_a_concrete_array_but_not_a_traced_one(op, shapes):
    arrays = normal(*shapes)
    for epsilon in (np.float32(0.5), np.float64(0.5), np.asarray(0.5), jnp.float32(0.5)):
        np.testing.assert_array_equal(op(*arrays, epsilon=epsilon), op(*arrays, epsilon=0.5))
    with pytest.raises(ValueError, match=f"^{op.__name__}: epsilon is a traced array; wants a Python number$"):
        jax.jit(lambda epsilon: op(*arrays, epsilon=epsilon))(0.5)
    with pytest.raises(ValueError, match=rf"^{op.__name__}: epsilon has shape \(1,\); wants a Python number$"):
        op(*arrays, epsilon=np.ones(1))


@ours
def test_gradients_in_half_precision_are_rounded_once(implementation):
    dy, *arrays = (a.astype(jnp.bfloat16) for a in normal((6, 5), (6, 5), (5,), (5,)))

    def gradients(implementation, dy, *arrays):
        return jax.vjp(functools.partial(layer_norm, implementation=implementation), *arrays)[1](dy)

    run, reference = (jax.jit(functools.partial(gradients, of)) for of in (implementation, "autodiff"))
    for found, exact in zip(run(dy, *arrays), in_float64(reference, dy, *arrays), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1.001 * 2**-8, atol=1e-5)


@pytest.mark.parametrize("backward", [layer_norm_backward, rms_backward])
def test_second_derivatives_in_half_precision_are_rounded_once(backward):
    dy, x, scale, v = (a.astype(jnp.bfloat16) for a in normal((6, 5), (6, 5), (5,), (6, 5)))

    def second(dy, x, scale, v):
        return jax.grad(lambda x: jnp.vdot(backward(dy, x, scale, implementation="xla")[0], v))(x)

    found, exact = jax.jit(second)(dy, x, scale, v), in_float64(jax.jit(second), dy, x, scale, v)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1.001 * 2**-8, atol=1e-5)
