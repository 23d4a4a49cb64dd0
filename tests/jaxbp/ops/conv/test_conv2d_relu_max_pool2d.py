import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    cuda_program,
    draw_cotangents,
    every_implementation,
    gradients_of,
    in_float64,
    launching_program,
    normal,
    on_the_cpu,
    value_and_gradients,
)

from jaxbp import (
    conv2d,
    conv2d_relu_max_pool2d,
    conv2d_relu_max_pool2d_backward,
    conv2d_relu_max_pool2d_with_indices,
    max_pool2d,
    relu,
)
from jaxbp.ops.conv.conv2d_relu_max_pool2d import band_pays, banded_input_gradient
from pallas_kernels.conv.conv2d_relu_max_pool2d_forward_tf32_sm90 import MIN_JAX
from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient import input_gradient
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES


def three_ops(x, w, b, *, window, **options):
    x = conv2d(x, w, b, **options, implementation="autodiff")
    return max_pool2d(relu(x, implementation="autodiff"), window, implementation="autodiff")


@pytest.mark.parametrize("options", [dict(window=2), dict(window=(1, 3), padding=(2, 1))], ids=str)
@every_implementation
def test_values_and_gradients_are_those_of_the_three_ops(options, implementation):
    arrays = normal((2, 1, 6, 7), (2, 1, 2, 3), (2,))
    cotangents = draw_cotangents(functools.partial(three_ops, **options), arrays)
    expected = in_float64(value_and_gradients(functools.partial(three_ops, **options)), arrays, cotangents)
    op = functools.partial(conv2d_relu_max_pool2d, **options, implementation=implementation)
    assert_close(value_and_gradients(op)(arrays, cotangents), expected, "float32")


def pooled(x, implementation):
    x, w = jnp.asarray(x, jnp.float32)[None, None], jnp.ones((1, 1, 1, 1))
    y, places = conv2d_relu_max_pool2d_with_indices(x, w, window=2, implementation=implementation)
    dy = jnp.arange(1.0, y.size + 1).reshape(y.shape)
    dx, _, _ = conv2d_relu_max_pool2d_backward(dy, places, x, w, window=2, implementation=implementation)
    return y[0, 0], places[0, 0], dx[0, 0]


@every_implementation
def test_a_window_where_relu_is_off_gets_nothing(implementation):
    y, places, dx = pooled([[-1, -2, 0, -1, -1, 3], [-3, -4, -1, 0, -1, -1]], implementation)
    np.testing.assert_array_equal(y, [[0, 0, 3]])
    np.testing.assert_array_equal(places, [[4, 4, 1]])
    np.testing.assert_array_equal(dx, [[0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 0, 0]])


@every_implementation
def test_of_equal_maxima_the_first_in_row_major_order_gets_the_gradient(implementation):
    _, places, dx = pooled([[7, 7, 0, 5], [7, 7, 5, 5]], implementation)
    np.testing.assert_array_equal(places, [[0, 1]])
    np.testing.assert_array_equal(dx, [[1, 0, 0, 2], [0, 0, 0, 0]])


@every_implementation
def test_nan_comes_out(implementation):
    y, _, _ = pooled([[1, np.nan, -1, -2], [3, 4, -3, np.nan]], implementation)
    np.testing.assert_array_equal(y, [[np.nan, np.nan]])


@every_implementation
def test_an_empty_batch_has_zero_gradients_in_the_parameters(implementation):
    arrays = (jnp.zeros((0, 1, 5, 5)), *normal((2, 1, 2, 2), (2,)))
    dy = jnp.zeros((0, 2, 2, 2))
    dx, dw, db = gradients_of(conv2d_relu_max_pool2d, arrays, [dy], window=2, implementation=implementation)
    assert dx.shape == (0, 1, 5, 5)
    np.testing.assert_array_equal(dw, np.zeros((2, 1, 2, 2)))
    np.testing.assert_array_equal(db, np.zeros(2))


IN_TF32 = jax.__version_info__ >= MIN_JAX
LARGE, LARGER = (((N, 16, 1, 4), (N, 2, 6, 12), (16, 2, 5, 5)) for N in (2048, 8192))


def backward(implementation=None, precision="default"):
    options = dict(window=2, precision=precision, implementation=implementation)
    return functools.partial(conv2d_relu_max_pool2d_backward, **options)


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=["H200", "B200", "RTX"])
def test_only_hopper_gets_kernels_with_its_own_tensor_core_instructions(gpu):
    dy, x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in LARGER)
    arrays = dy, jax.ShapeDtypeStruct(dy.shape, jnp.uint8), x, w
    with targeting(gpu):
        program = cuda_program(backward("pallas"), *arrays)
        of_pallas, of_none = (products_of(launching_program(backward(name), *arrays)) for name in ("pallas", None))
    assert ("wgmma" in program) == (gpu is HOPPER)
    has_kernel = gpu is HOPPER and IN_TF32
    assert program.count("custom_call @mosaic_gpu") == 1 + has_kernel
    assert ("dot_general" in program) != has_kernel
    assert of_none == of_pallas


def products_of(program):
    return re.findall(r"@kernel\.(\w+)|(dot_general)", program)


EXACT, ON_TENSOR_CORES, BAND = "backward_input(", "backward_input_tensor_cores(", "dot_general"


@pytest.mark.parametrize(
    ("batch", "dtype", "precision", "wanted"),
    [
        (512, "float32", "default", EXACT),
        (2048, "float32", "default", BAND),
        (4096, "float32", "default", ON_TENSOR_CORES),
        (4096, "float32", "highest", EXACT),
        (128, "bfloat16", "default", BAND),
        (4096, "bfloat16", "default", ON_TENSOR_CORES),
    ],
)
def test_the_input_gradient_of_lenet_is_the_fastest_of_three(batch, dtype, precision, wanted):
    dy, x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((batch, 16, 4, 4), (batch, 6, 12, 12), (16, 6, 5, 5)))
    with targeting(HOPPER):
        places = jax.ShapeDtypeStruct(dy.shape, jnp.uint8)
        program = launching_program(backward("pallas", precision), dy, places, x, w)
    if wanted == ON_TENSOR_CORES and jax.__version_info__ < MIN_JAX:
        wanted = BAND
    assert [way for way in (EXACT, ON_TENSOR_CORES, BAND) if way in program] == [wanted]


@pytest.mark.parametrize(
    ("gpu", "implementation"),
    [(HOPPER, "pallas"), (HOPPER, None), (BLACKWELL, "pallas"), (BLACKWELL_RTX, None)],
    ids=["H200, pallas", "H200", "B200, pallas", "RTX"],
)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "default"), ("float32", "highest"), ("bfloat16", "default"), ("float16", "highest")],
)
def test_only_hopper_has_a_forward_on_the_tensor_cores_but_for_exact_float32(implementation, dtype, precision, gpu):
    program = _program_of_forward(launching_program, implementation, dtype, precision, gpu)
    of_float32 = "_tf32" if IN_TF32 and precision == "default" else ""
    of_hopper = of_float32 if dtype == "float32" else "_tensor_cores"
    assert products_of(program) == [("conv2d_relu_max_pool2d" + of_hopper * (gpu is HOPPER), "")]


@pytest.mark.parametrize(
    ("dtype", "precision", "gpu", "wgmma"),
    [
        ("float32", "default", HOPPER, IN_TF32),
        ("float32", "highest", HOPPER, False),
        ("bfloat16", "default", HOPPER, True),
        ("bfloat16", "default", BLACKWELL, False),
    ],
    ids=["TF32", "float32", "bfloat16", "B200"],
)
def test_each_forward_has_the_instructions_of_its_name(dtype, precision, gpu, wgmma):
    program = _program_of_forward(cuda_program, "pallas", dtype, precision, gpu)
    assert program.count("custom_call @mosaic_gpu") == 1
    assert ("wgmma" in program) == wgmma


def _program_of_forward(lowered, implementation, dtype, precision, gpu):
    _, x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in LARGE)
    options = dict(window=2, precision=precision, implementation=implementation)
    forward = functools.partial(conv2d_relu_max_pool2d, **options)
    with targeting(gpu):
        return lowered(lambda *arrays: jax.vjp(forward, *arrays)[0], x, w)


@pytest.mark.skipif(jax.__version_info__ < MIN_JAX, reason="older versions have fewer kernels on the tensor cores")
@pytest.mark.parametrize(
    ("dtype", "batch", "forward", "weights", "inputs"),
    [
        ("float32", 896, False, False, False),
        ("float32", 1024, True, False, False),
        ("float32", 1920, True, False, False),
        ("float32", 2048, True, True, True),
        ("bfloat16", 1920, False, False, False),
        ("bfloat16", 2048, True, True, False),  # the product with the band pays
    ],
)
def test_the_tensor_cores_pay_for_large_batches(dtype, batch, forward, weights, inputs, on_hopper):
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((batch, 2, 6, 12), (16, 2, 5, 5)))
    op = functools.partial(conv2d_relu_max_pool2d, window=2, precision="default", implementation="pallas")
    program = str(jax.make_jaxpr(lambda *arrays: jax.vjp(op, *arrays)[1](jnp.ones((batch, 16, 1, 4), dtype)))(x, w))
    names = ["tf32" if dtype == "float32" else "tensor_cores"]
    names += [f"backward_{name}_tensor_cores" for name in ("weights", "input")]
    found = [f"=conv2d_relu_max_pool2d_{name}\n" in program for name in names]
    assert found == [forward, weights, inputs]


def test_without_a_gpu_the_exact_kernels_take_the_place_of_those_on_the_tensor_cores():
    dy, x, w = normal(*LARGE)
    places = jnp.asarray(np.random.default_rng(2).integers(0, 5, dy.shape, np.uint8))
    with on_the_cpu():
        rounded, exact = (
            jax.jit(backward("pallas", precision))(dy, places, x, w) for precision in ("default", "highest")
        )
    jax.tree.map(np.testing.assert_array_equal, rounded, exact)


def integers(*shape):
    """Sums of small integers are exact in float32 in any order."""
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), jnp.float32)


@pytest.mark.parametrize("window", [(2, 2), (1, 3)], ids=str)
def test_products_with_the_band_are_the_exact_kernels_gradient(window):
    (P, Q), (F, G) = (2, 3), (3, 2)
    dy, w = integers(3, P, Q, LANES), integers(3, 2, F, G)
    place = jnp.asarray(np.random.default_rng(2).integers(0, window[0] * window[1] + 1, dy.shape, np.uint8))
    options = dict(window=window, input_size=(P * window[0] + F - 1, Q * window[1] + G - 1))
    banded = banded_input_gradient(dy, place, w, **options)
    np.testing.assert_array_equal(banded, input_gradient(dy, place, w, **options))


@pytest.mark.parametrize(
    ("w_shape", "dy_shape", "width", "dtype", "pays"),
    [
        ((16, 6, 5, 5), (16, 4, 4, 1024), 12, "float32", True),
        ((16, 6, 5, 5), (16, 4, 4, 512), 12, "float32", False),  # too few products for four launches
        ((16, 6, 5, 5), (16, 4, 4, 128), 12, "bfloat16", True),
        ((32, 16, 5, 5), (32, 5, 5, 128), 14, "float32", True),
        ((6, 1, 5, 5), (6, 12, 12, 2048), 28, "float32", False),  # mostly zeros
        ((6, 1, 5, 5), (6, 12, 12, 2048), 28, "bfloat16", True),
        ((64, 32, 5, 5), (64, 12, 12, 1024), 28, "bfloat16", False),  # too large
    ],
)
def test_the_band_pays_for_small_images(w_shape, dy_shape, width, dtype, pays):
    w, dy = (jax.ShapeDtypeStruct(shape, dtype) for shape in (w_shape, dy_shape))
    assert band_pays(w, dy, width, (2, 2)) == pays
