import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.core.layouts import divisors, largest_divisor, quotient, remainder, vector_length


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
