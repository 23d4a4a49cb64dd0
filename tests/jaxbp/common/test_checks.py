import functools
import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.catalogue import CATALOGUE
from jaxbp.common import checks


def refuses(error, message, check, *args, **kwargs):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check("op", *args, **kwargs)


def test_floating_arrays_are_promoted_and_a_bias_may_be_none():
    x, b = checks.floating("op", x=np.ones(2, np.float32), b=None)
    assert isinstance(x, jax.Array) and b is None
    one, half, whole = jnp.ones(2), jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int32)
    assert [a.dtype for a in checks.floating("op", x=half, w=one)] == [jnp.float32] * 2
    assert [a.dtype for a in checks.floating("op", x=half, w=half.astype(jnp.float16))] == [jnp.float32] * 2
    number = jnp.asarray(2.0)  # weakly typed
    assert [a.dtype for a in checks.floating("op", x=half, w=number)] == [jnp.bfloat16] * 2
    assert [a.dtype for a in checks.floating("op", x=half, w=whole)] == [jnp.bfloat16] * 2
    assert [a.dtype for a in checks.floating("op", x=whole, w=whole > 0)] == [jnp.float32] * 2
    for x in (None, "1", [1.0], 1j):
        refuses(TypeError, f"op: x is a {type(x).__name__}; wants an array", checks.floating, x=x)
    message = "op: x has dtype {}; wants a floating dtype, say x.astype(jnp.float32)"
    refuses(TypeError, message.format("complex64"), checks.floating, x=one * 1j)
    refuses(TypeError, message.format("int32"), checks.only_floating, x=whole)


def test_integers_stay_only_without_a_floating_argument():
    whole, byte, weak = jnp.ones(2, jnp.int32), jnp.ones(2, jnp.uint8), jnp.full(2, 0.5)
    assert [a.dtype for a in checks.numeric("op", x=whole, w=byte)] == [jnp.int32] * 2
    for numbers in ((whole, weak), (3, weak), (3, 0.5)):
        promoted = checks.numeric("op", x=numbers[0], w=numbers[1])
        assert [(a.dtype, jax.typeof(a).weak_type) for a in promoted] == [(jnp.float32, True)] * 2


def test_a_batch_and_features_may_be_empty_and_other_sizes_may_not():
    checks.shape("op", "x", np.ones((0, 3)), "batch", 3)
    checks.shape("op", "w", np.ones((0, 0)), "out_features", "in_features")
    sizes = np.ones((2, 0)), "batch", "hidden"
    refuses(
        ValueError, "op: x has shape (2, 0); wants (batch, hidden) with hidden of at least 1", checks.shape, "x", *sizes
    )
    refuses(ValueError, "op: x has shape (2, 0); wants (batch, 1, hidden)", checks.shape, "x", *sizes[:2], 1, "hidden")
    refuses(ValueError, "op: x has shape (2,); wants (3,)", checks.shape, "x", np.ones(2), 3)


@pytest.mark.parametrize(("value", "both"), [(2, (2, 2)), ([1, 3], (1, 3))])
def test_an_int_stands_for_rows_and_columns(value, both):
    assert checks.pair("op", "stride", value, at_least=1) == both


@pytest.mark.parametrize("value", [0, (1, 0), (1, 2, 3), 1.0, (True, 1)])
def test_what_is_no_pair_is_refused(value):
    message = f"op: stride is {value!r}; wants an int of at least 1, or a pair of such ints"
    refuses(ValueError, message, checks.pair, "stride", value, at_least=1)


PRECISIONS = [
    None,
    jax.lax.Precision.HIGH,
    jax.lax.DotAlgorithmPreset.F32_F32_F32,
    *jax.lax.DotAlgorithmPreset.__members__,
]
PRECISIONS += ["default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32", "highest", "float32"]
PRECISIONS += [
    "hi",
    "HIGHEST",
    "",
    3,
    1.0,
    True,
    ("high", "highest"),
    (None, "high"),
    ("high",),
    ("high", "hi"),
    ["high"],
]


@pytest.mark.parametrize("value", PRECISIONS, ids=str)
def test_a_precision_is_what_jax_takes_for_one(value):
    try:
        jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=value), jnp.ones(2))
    except (ValueError, TypeError):
        message = (
            f"op: precision is {value!r}; wants None, 'default', 'high', 'highest', another precision of jax.lax.dot"
        )
        refuses(ValueError, f"{message}, or a pair of these values", checks.precision, value)
    else:
        assert checks.precision("op", value) is value


@pytest.mark.parametrize(
    "entry", [e for e in CATALOGUE if "precision" in inspect.signature(e.function).parameters], ids=lambda e: e.name
)
def test_every_op_refuses_a_precision_that_is_none(entry):
    with pytest.raises(ValueError, match=f"^{entry.name}: precision is 'hi'; wants None"):
        jax.eval_shape(
            functools.partial(entry.function, **entry.small.options | {"precision": "hi"}), *entry.small.structs(2)
        )


def test_axes_are_counted_from_the_front_in_order():
    assert checks.axes("op", None, 2) == (0, 1)
    assert checks.axes("op", (-1, 0), 3) == (0, 2)
    for axis in (2, (0, -2), 0.0, True):
        refuses(
            ValueError,
            f"op: axis is {axis!r}; wants None, or one or more different ints in [-2, 2)",
            checks.axes,
            axis,
            2,
        )


def test_a_number_lies_within_its_bounds():
    for value in (1, np.float32(1), np.ones(()), jnp.ones(())):
        assert type(number := checks.number("op", "rate", value, 0, 1)) is float and number == 1.0
    refuses(ValueError, "op: rate has shape (2,); wants a Python number", checks.number, "rate", np.ones(2))
    with pytest.raises(ValueError, match=r"^op: rate is a traced array; wants a Python number$"):
        jax.jit(lambda rate: checks.number("op", "rate", rate))(1.0)
    for value in (1.5, float("nan"), True, "1"):
        refuses(ValueError, f"op: rate is {value!r}; wants a number in [0, 1]", checks.number, "rate", value, 0, 1)


def test_an_array_in_place_of_a_number_has_no_axes_and_a_real_dtype():
    wants = {
        "has shape (2,)": "a Python number or an array of shape ()",
        "has dtype bool": "a floating or integer dtype",
    }
    for value, (came, wanted) in zip((np.ones(2), np.array(True)), wants.items(), strict=True):
        refuses(ValueError, f"op: rate {came}; wants {wanted}", checks.number_or_array, "rate", value)


def test_shapes_broadcast_from_the_right():
    assert checks.broadcast("op", x=np.ones((2, 3)), w=np.ones(3)) == (2, 3)
    message = "op: x has shape (2, 3) and w has shape (2,); wants shapes that broadcast"
    refuses(ValueError, message, checks.broadcast, x=np.ones((2, 3)), w=np.ones(2))


def test_kernels_take_half_precisions_and_fewer_elements_than_an_index_counts():
    struct = jax.ShapeDtypeStruct
    assert checks.unsupported(struct((2,), jnp.float16), struct((2,), jnp.int32)) is None
    assert checks.unsupported(struct((2**31,), jnp.int8)) == "2^31 or more elements"
    assert checks.unsupported_dtype(None, struct((2,), np.float64)) == "dtype float64, only float32, bfloat16, float16"


def test_a_numpy_scalar_is_a_number():
    assert checks.pair("op", "stride", np.int64(2), at_least=1) == (2, 2)
    assert checks.pair("op", "stride", (np.int32(1), 3), at_least=1) == (1, 3)
    assert checks.axes("op", np.int64(-1), 2) == (1,)
    assert checks.number("op", "rate", np.float32(0.5), 0, 1) == 0.5
    assert type(checks.axes("op", np.int64(0), 2)[0]) is int
    refuses(ValueError, "op: rate is np.True_; wants a number in [0, 1]", checks.number, "rate", np.True_, 0, 1)


def test_floats_of_8_bits_are_refused_alike():
    message = "op: x has dtype float8_e4m3fn; wants a floating dtype of at least 16 bits, say x.astype(jnp.bfloat16)"
    refuses(TypeError, message, checks.floating, x=jnp.ones(2, jnp.float8_e4m3fn))


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_the_types_say_that_ops_take_arrays_of_numpy_and_give_those_of_jax(entry):
    hints = typing.get_type_hints(entry.function)
    given = _array_types(hints.pop("return"))
    taken = {name: types for name, hint in hints.items() if (types := _array_types(hint))}
    assert given <= {jax.Array} and taken
    assert all(types == {jax.Array, np.ndarray} for types in taken.values()), taken


def _array_types(hint):
    return set().union({getattr(hint, "array_type", None)} - {None}, *map(_array_types, typing.get_args(hint)))
