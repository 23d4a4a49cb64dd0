import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal

from jaxbp.ops.dense import _products as products
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting

BATCHES = [((), ()), ((2,), (2,)), ((1,), (3,)), ((2, 1), (1, 3))]


def _matrices(batches, transposed, sizes=(4, 5, 6)):
    m, k, n = sizes
    shapes = (k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n)
    return normal(*((*batch, *shape) for batch, shape in zip(batches, shapes, strict=True)))


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_kernel_and_formula_are_the_product_for_every_batch_and_transpose(batches):
    for transposed in itertools.product((False, True), repeat=2):
        a, b = _matrices(batches, transposed)
        wide = [np.asarray(x, np.float64) for x in (a, b)]
        expected = np.matmul(*(x.swapaxes(-1, -2) if t else x for x, t in zip(wide, transposed, strict=True)))
        for multiply in (products.kernel, products.formula):
            assert_close(multiply(a, b, transposed=transposed), expected, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batches", BATCHES[1:], ids=str)
def test_one_kernel_multiplies_the_whole_batch(batches, dtype, on_hopper):
    for transposed in itertools.product((False, True), repeat=2):
        a, b = (x.astype(dtype) for x in _matrices(batches, transposed))
        multiply = functools.partial(products.kernel, transposed=transposed, precision="default")
        program = cuda_program(multiply, a, b)
        assert program.count("custom_call @mosaic_gpu") == 1
        assert "dot_general" not in program


@pytest.mark.parametrize("multiply", [products.kernel, products.formula])
def test_sums_in_half_precision_are_in_float32_and_rounded_once(multiply):
    # Float16 rounds 2049 to 2048.
    a, b = jnp.array([[683.0, 1.0]], "float16"), jnp.array([[3.0], [-2048.0]], "float16")
    for dtype in (jnp.float32, jnp.float16):
        y = multiply(a, b, dtype=dtype)
        assert y.dtype == dtype and y.item() == 1.0


def test_other_gpus_multiply_on_the_cuda_cores():
    a, b = (jax.ShapeDtypeStruct((64, 64), "bfloat16") for _ in range(2))
    for gpu, wgmma in ((HOPPER, True), (BLACKWELL, False)):
        with targeting(gpu):
            program = cuda_program(products.kernel, a, b)
        assert ("wgmma" in program, "mosaic_gpu" in program, "dot_general" in program) == (wgmma, True, False)


@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
def test_exact_gradients_hold_no_products_of_the_tensor_cores(device):
    exact = dict(precision="highest")

    def gradients(dy, x, w):
        return products.kernel(dy, w, **exact), *products.parameter_gradients_kernel(dy, x, **exact)

    with targeting(device):
        program = cuda_program(gradients, *normal((128, 3), (128, 5), (3, 5)))
    assert program.count("custom_call @mosaic_gpu") == 3
    assert "wgmma" not in program and "dot_general" not in program


def test_parameter_gradients_match_float64():
    dy, x = normal((128, 3), (128, 5))
    dy_wide, x_wide = (np.asarray(a, np.float64) for a in (dy, x))
    expected = dy_wide.T @ x_wide, dy_wide.sum(axis=0)
    for actual, wanted in zip(products.parameter_gradients_kernel(dy, x), expected, strict=True):
        assert_close(actual, wanted, "float32")
