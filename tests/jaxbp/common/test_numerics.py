import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxbp.common.numerics import on_tensor_cores, upcast, wide


@pytest.mark.parametrize(
    ("dtype", "wider"), [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("int8", "int8")]
)
def test_half_precisions_are_widened_and_integers_are_not(dtype, wider):
    assert upcast(jnp.zeros(3, dtype)).dtype == wider


def test_float64_stays():
    with jax.enable_x64(True):
        assert wide(jnp.float64) == jnp.float64


@pytest.mark.parametrize(
    ("dtype", "precision", "allowed"),
    [
        ("bfloat16", "highest", True),
        ("float32", "default", True),
        ("float32", "tensorfloat32", True),
        ("float32", "highest", False),
        ("float32", lax.Precision.HIGHEST, False),
        ("float32", (lax.Precision.DEFAULT, lax.Precision.HIGHEST), False),
    ],
)
def test_the_precision_says_whether_products_may_be_rounded(dtype, precision, allowed):
    assert on_tensor_cores(jnp.dtype(dtype), precision) == allowed


@pytest.mark.parametrize(("default", "allowed"), [("highest", False), ("default", True)])
def test_without_a_precision_the_default_of_jax_says(default, allowed):
    with jax.default_matmul_precision(default):
        assert on_tensor_cores(jnp.dtype("float32"), None) == allowed
