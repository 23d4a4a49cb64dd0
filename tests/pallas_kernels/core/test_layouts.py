import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    divisors,
    largest_divisor,
    load,
    quotient,
    remainder,
    rounded_to_tf32,
    vector_length,
)
from pallas_kernels.core.simulator import simulated


@pytest.mark.parametrize(
    ("lanes", "dtypes", "length"),
    [
        (128, ["float32"], 128),
        (256, ["float32"], 256),
        (384, ["float32"], 128),
        (512, ["float32"], 512),
        (1024, ["float32", "float32"], 512),
        (1024, ["float32", "uint8"], 256),
        (1024, ["bfloat16", "int32"], 256),
    ],
)
def test_vectors_are_the_longest_that_divide_the_lanes_and_load_at_once(lanes, dtypes, length):
    assert vector_length(*(jax.ShapeDtypeStruct((3, lanes), dtype) for dtype in dtypes)) == length


@pytest.mark.parametrize(
    ("n", "limit", "divisor"), [(12, 8, 6), (7, 8, 7), (13, 8, 1), (1, 8, 1), (8, 0, 1), (0, 8, 1)]
)
def test_largest_divisor(n, limit, divisor):
    assert largest_divisor(n, limit) == divisor


def test_the_largest_divisor_that_is_accepted_and_all_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert largest_divisor(12, 8, lambda d: d % 3 > 0) == 4
    assert largest_divisor(12, 8, lambda d: d % 2 > 0) == 3
    assert largest_divisor(12, 8, lambda d: False) == 1


@pytest.mark.parametrize("number", [0, 6, 7, 20])
def test_quotients_and_remainders_of_ints_are_ints_and_of_arrays_arrays(number):
    for function, expected in ((quotient, number // 7), (remainder, number % 7)):
        assert isinstance(function(number, 7), int)
        assert function(number, 7) == function(jnp.int32(number), 7) == expected
        assert function(jnp.int32(number), jnp.int32(7)).dtype == jnp.int32


def test_in_64_bit_mode_they_keep_the_number_s_dtype():
    with jax.enable_x64(True):
        results = jax.jit(lambda n: (quotient(n, 7), remainder(n, 7)))(jnp.int32(20))
    assert [(int(a), a.dtype) for a in results] == [(2, jnp.int32), (6, jnp.int32)]


def test_they_are_one_operation_each():
    program = jax.make_jaxpr(lambda n: (quotient(n, 7), remainder(n, 7)))(jnp.int32(0))
    assert [equation.primitive.name for equation in program.eqns] == ["div", "rem"]


def round_in_a_kernel(x):
    def body(x, y, *, one):
        del one
        layout = plgpu.Layout.WG_STRIDED(x.shape, vec_size=2)
        y[...] = rounded_to_tf32(load(x, layout), layout)

    return launch(body, x, out=x, grid={"one": 1}, name="rounds", barriers=False)


def numbers():
    """Return float32 numbers, and the nearest numbers with 10 bits after the first."""
    random = np.random.default_rng(0).standard_normal(2 * LANES - 8)
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11]
    x = np.array([0, np.inf, -np.inf, np.finfo(np.float32).max, *ties, np.nan, *random], np.float32)
    # A GPU's NaN has all bits but the sign set.
    x.view(np.int32)[7] = 0x7FFFFFFF
    mantissa, exponent = np.frexp(x.astype(np.float64))
    with np.errstate(over="ignore"):
        return x, np.ldexp(np.rint(mantissa * 2**11), exponent - 11).astype(np.float32)


def test_simulated_numbers_are_rounded_to_the_nearest_in_tf32():
    x, rounded = numbers()
    with simulated():
        np.testing.assert_array_equal(jax.block_until_ready(round_in_a_kernel(jnp.asarray(x))), rounded)


@pytest.mark.gpu
def test_numbers_are_rounded_to_the_nearest_in_tf32():
    x, rounded = numbers()
    np.testing.assert_array_equal(jax.jit(round_in_a_kernel)(x), rounded)


def test_one_instruction_rounds_a_number_to_tf32_in_a_register_of_bits():
    program = cuda_program(round_in_a_kernel, jax.ShapeDtypeStruct((2 * LANES,), "float32"))
    assert {"cvt.rn.tf32.f32 $0, $1;", "=r,f"} <= set(program.split("\\00"))
