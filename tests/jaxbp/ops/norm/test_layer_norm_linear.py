import functools
import importlib

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
    launching_program,
    normal,
    on_the_cpu,
    ours,
    results_and_gradients,
)

from jaxbp import layer_norm, layer_norm_linear, layer_norm_linear_backward
from jaxbp.common.numerics import upcast
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.launch import launch
from pallas_kernels.norm import layer_norm_linear_sm90


def reference(arrays, cotangents):
    run = functools.partial(results_and_gradients, layer_norm_linear, implementation="autodiff")
    return in_float64(run, arrays, cotangents)


@every_implementation
def test_the_classic_case_4_4_8_to_4_4_16(implementation):
    arrays = normal((4, 4, 8), (8,), (8,), (16, 8), (16,))
    dy = normal((4, 4, 16), seed=1)
    z, gradients = results_and_gradients(layer_norm_linear, arrays, dy, implementation=implementation)
    (expected,), expected_gradients = reference(arrays, dy)
    assert z[0].shape == (4, 4, 16)
    assert [g.shape for g in gradients] == [a.shape for a in arrays]
    assert_close([*z, *gradients], [expected, *expected_gradients], 2e-6)


@pytest.mark.parametrize("batch", [(), (2, 1, 3)], ids=str)
@ours
def test_scales_and_biases_gradients_sum_over_all_leading_axes(batch, implementation):
    x, scale, bias, w, b, dy = normal((*batch, 5), (5,), (5,), (2, 5), (2,), (*batch, 2))
    whole = reference([x, scale, bias, w, b], [dy])[1]
    actual = layer_norm_linear_backward(dy, x, scale, bias, w, implementation=implementation)
    assert_close(actual, whole, "float32")
    x, dy = x.reshape(-1, 5), dy @ w
    normalized = layer_norm(x, jnp.ones(5), jnp.zeros(5))
    expected = (dy.reshape(-1, 5) * normalized).sum(0), dy.reshape(-1, 5).sum(0)
    assert_close(actual[1:3], expected, "float32")


@every_implementation
def test_nan_stays_in_its_row(implementation):
    x, *rest = normal((3, 5), (5,), (5,), (2, 5), (2,))
    z = layer_norm_linear(x.at[1, 2].set(jnp.nan), *rest, implementation=implementation)
    np.testing.assert_array_equal(jnp.isnan(z).any(-1), [False, True, False])


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


def kept_shapes(implementation, *shapes, dtype="float32"):
    op = functools.partial(layer_norm_linear, implementation=implementation)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    backward = jax.eval_shape(lambda *arrays: jax.vjp(op, *arrays)[1], *arrays)
    return sorted(a.shape for a in jax.tree.leaves(backward))


@ours
def test_two_numbers_a_row_are_kept_beside_the_arguments(implementation):
    shapes = (32, 64), (64,), (64,), (16, 64), (16,)
    assert kept_shapes(implementation, *shapes) == sorted([*shapes, (32,), (32,)])


@pytest.mark.parametrize(
    ("dtype", "rows", "out", "numbers"),
    [
        ("bfloat16", 65536, 1024, 1),
        ("bfloat16", 16384, 4096, 2),
        ("float16", 65536, 1024, 2),
        ("float32", 65536, 1024, 2),
    ],
)
def test_many_rows_in_bfloat16_are_kept_normalized_in_place_of_x(dtype, rows, out, numbers, on_hopper):
    shapes = (rows, 1024), (1024,), (1024,), (out, 1024), (out,)
    assert kept_shapes("pallas", *shapes, dtype=dtype) == sorted([*shapes, *[(rows,)] * numbers])


@pytest.mark.parametrize(("hidden", "kernel"), [(256, True), (4096, True), (100, False), (1152, False), (16384, False)])
def test_on_a_gpu_none_takes_the_kernels_where_they_stream_the_rows(hidden, kernel, on_hopper):
    shapes = (7, 3), (7, hidden), (hidden,), (hidden,), (3, hidden)
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    assert ("@kernel." in launching_program(layer_norm_linear_backward, *structs)) == kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_the_bias_of_half_precisions_is_summed_in_float32(dtype):
    arrays = [a.astype(dtype) for a in normal((3, 2), (3, 5), (5,), (5,), (2, 5))]
    for implementation in ("xla", None):
        program = cuda_program(functools.partial(layer_norm_linear_backward, implementation=implementation), *arrays)
        sums = [line for line in program.splitlines() if "stablehlo.reduce(" in line]
        assert sums and all("xf32>, tensor<f32>)" in line for line in sums)


MODULE = importlib.import_module("jaxbp.ops.norm.layer_norm_linear")


def structs(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "pays"),
    [(65536, 128, 384, True), (8200, 128, 640, True), (128, 1024, 1024, False), (65536, 128, 1000, False)],
)
def test_the_kernel_of_the_weights_gradient_is_for_many_rows_and_whole_tiles(rows, outputs, inputs, pays, on_hopper):
    assert MODULE._weights_gradient_pays(*structs((rows, outputs), (rows, inputs), dtype="float16")) == pays


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "pays"),
    [(8200, 128, 576, True), (65536, 256, 256, False), (128, 1024, 1024, False), (8192, 1000, 4096, False)],
)
def test_the_kernel_of_the_forward_is_for_many_rows_and_inputs(rows, outputs, inputs, pays, on_hopper):
    assert MODULE._forward_pays(*structs((rows, inputs), (outputs, inputs), (outputs,))) == pays


XLA_ON_GPU = pytest.mark.parametrize(("hidden", "out"), [(128, 128), (512, 128)], ids=["narrow", "wide"])


@pytest.mark.parametrize(("rows", "fused"), [(65536, True), (16384, False), (0, False)])
def test_the_fused_kernels_are_for_many_rows(rows, fused, monkeypatch, on_hopper):
    names = []

    def recording(*arrays, name, **options):
        names.append(name)
        return launch(*arrays, name=name, **options)

    monkeypatch.setattr(layer_norm_linear_sm90, "launch", recording)
    x, *others = structs((rows, 256), (256,), (256,), (256, 256), (256,))
    run = {"epsilon": 1e-5, "precision": None}
    jax.eval_shape(functools.partial(MODULE._results_kernel, **run), x, *others)
    jax.eval_shape(functools.partial(MODULE._backward_kernel, **run), x, x, *others, None, None, None)
    assert names == ["layer_norm_linear", "layer_norm_linear_backward_input"] * fused


def of_kernels(monkeypatch):
    for name in ("_MIN_FUSED_ROWS", "_MIN_PRODUCT_ROWS"):
        monkeypatch.setattr(MODULE, name, 64)


def rows_normalized(monkeypatch):
    of_kernels(monkeypatch)
    monkeypatch.setattr(MODULE, "_MIN_ROWS_AN_OUTPUT", 0)


@pytest.mark.parametrize("prepare", [of_kernels, rows_normalized])
@pytest.mark.parametrize("bias_of_outputs", [True, False])
@XLA_ON_GPU
def test_products_that_are_kernels_agree_with_the_formula_and_so_do_their_derivatives(
    hidden, out, bias_of_outputs, prepare, monkeypatch
):
    prepare(monkeypatch)
    shapes = (2, 64, hidden), (hidden,), (hidden,), (out, hidden), (out,)
    arrays = [(a / 4).astype("bfloat16") for a in normal(*shapes)]
    arrays = arrays if bias_of_outputs else arrays[:-1]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *arrays):
        op = functools.partial(layer_norm_linear, implementation=implementation)
        loss = lambda *arrays: jnp.sum(jnp.sin(upcast(op(*arrays))))  # noqa: E731
        gradients = jax.grad(loss, range(len(arrays)))
        return op(*arrays), *jax.jvp(gradients, arrays, arrays)

    assert_close(run("pallas", *arrays), in_float64(functools.partial(run, "autodiff"), *arrays), 2e-2)


@XLA_ON_GPU
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


@XLA_ON_GPU
@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
def test_none_programs_the_tensor_cores_on_hopper_alone(device, hidden, out):
    shapes = (65536, out), (65536, hidden), (hidden,), (hidden,), (out, hidden), (out,)
    dy, *arrays = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    with targeting(device):
        program = launching_program(lambda dy, *arrays: jax.vjp(layer_norm_linear, *arrays)[1](dy), dy, *arrays)
    assert "@kernel." in program
    assert ("linear_backward_weights" in program) == (device is HOPPER)
    assert ("layer_norm_linear_backward_input" in program) == (device is HOPPER and hidden == 128)


@pytest.mark.parametrize("device", [HOPPER, BLACKWELL], ids=lambda device: device.kind)
def test_many_rows_in_bfloat16_have_the_kernels_of_normalized_rows_on_hopper_alone(device):
    shapes = (65536, 1024), (65536, 1024), (1024,), (1024,), (1024, 1024), (1024,)
    dy, *arrays = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    with targeting(device):
        by_forward = cuda_program(lambda dy, *arrays: jax.vjp(layer_norm_linear, *arrays)[1](dy), dy, *arrays)
        by_itself = cuda_program(layer_norm_linear_backward, dy, *arrays[:-1])
    for program in (by_forward, by_itself):
        for kernel in ("layer_norm_backward_input", "layer_norm_linear_backward_parameters"):
            assert (kernel in program) == (device is HOPPER)


@pytest.mark.parametrize("shift", [0, 100], ids=["", "far from zero"])
def test_without_a_gpu_separate_kernels_take_the_place_of_one(shift, monkeypatch):
    of_kernels(monkeypatch)
    x, *parameters = [a.astype("bfloat16") for a in normal((64, 128), (128,), (128,), (128, 128), (128,))]
    arrays, dy = [x + shift, *parameters], [a.astype("bfloat16") for a in normal((64, 128), seed=1)]
    backward = jax.jit(functools.partial(layer_norm_linear_backward, implementation="pallas"))
    results, expected = reference(arrays, dy)
    with on_the_cpu():
        actual = results_and_gradients(layer_norm_linear, arrays, dy, implementation="pallas")
        assert_close(actual, (results, expected), 5e-3)
        assert_close(backward(*dy, *arrays[:4]), expected, 5e-3)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 100], ids=["", "far from zero"])
@pytest.mark.parametrize(("hidden", "out"), [(256, 256), (128, 256), (256, 128)])
def test_gpu_results_of_one_kernel_match_float64_and_repeat_their_bits(hidden, out, shift, dtype):
    x, *parameters, b = normal((64 * 1025, hidden), (hidden,), (hidden,), (out, hidden), (out,))
    arrays = [a.astype(dtype) for a in (x + shift, *parameters, b)]
    dy = [a.astype(dtype) for a in normal((64 * 1025, out), seed=1)]
    first, second = (results_and_gradients(layer_norm_linear, arrays, dy, implementation="pallas") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(first, reference(arrays, dy), 5e-3)
