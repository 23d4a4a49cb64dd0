import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    BROADCASTING,
    ENTRIES,
    drawn,
    floats,
    normal,
    op_of,
    results_of,
    value_and_gradients,
    with_floats,
)

import jaxbp


@pytest.mark.parametrize("name", BROADCASTING)
def test_arrays_of_different_ranks_are_refused_as_by_jax(name):
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="could not be broadcast together"):
        getattr(jaxbp, name)(jnp.ones((2, 3)), jnp.ones(3), implementation="xla")


HALF, FULL = jnp.dtype("bfloat16"), jnp.dtype("float32")
LOGIC = ("gate_layer", "lut_layer", "wire_layer", "logic_conv2d", "automaton")
"""Ops whose results have the dtype of x or of the state."""
CONVERTED = ("sigmoid_binary_cross_entropy",)
"""Ops that convert labels to the dtype of the logits, as Optax does."""
OF_FLOAT32_LOSS = ("linear_softmax_cross_entropy_backward",)
"""Backwards whose dy is float32 if the other arguments are in half precision."""
WITHOUT_ARGUMENT = ("conv2d_backward_input", "conv2d_backward_weights")
"""Backwards that do not take the array whose gradient they return."""


def mixed(tree, *dtypes):
    arrays = floats(tree)
    dtypes = (*dtypes, *dtypes[-1:] * len(arrays))
    return with_floats(tree, [_of_dtype(a, dtype) for a, dtype in zip(arrays, dtypes, strict=False)])


def _of_dtype(a, dtype):
    return jax.ShapeDtypeStruct(a.shape, dtype) if isinstance(a, jax.ShapeDtypeStruct) else a.astype(dtype)


def dtypes_of(tree):
    return [a.dtype for a in floats(tree)]


def assert_dtypes(name, results, arrays):
    """Gradients must have the dtypes of the arguments after dy. The gradient of an omitted bias must have the dtype of
    the argument before it."""
    if "_backward" not in name or name in WITHOUT_ARGUMENT:
        assert set(dtypes_of(results)) == {FULL}
    else:
        _, *dtypes = dtypes_of(arrays)
        assert dtypes_of(results) == (dtypes + dtypes[-1:])[: len(floats(results))]


SEVERAL = [name for name, entry in ENTRIES.items() if len(entry.small.floats) > 1]
several = pytest.mark.parametrize("name", SEVERAL)


@pytest.mark.parametrize("name", [name for name in SEVERAL if not name.startswith(LOGIC + CONVERTED)])
def test_arrays_of_two_dtypes_are_promoted_as_if_by_hand(name):
    op, arrays = op_of(name, None, "xla"), mixed(drawn(name)[0], HALF, FULL, HALF)
    results, by_hand = floats(op(*arrays)), floats(op(*mixed(arrays, FULL)))
    assert_dtypes(name, results, arrays)
    for result, wanted in zip(results, by_hand, strict=True):
        np.testing.assert_array_equal(result, wanted.astype(result.dtype))


@several
def test_each_gradient_has_the_dtype_of_its_argument(name):
    op, arrays = op_of(name, None, None), mixed(ENTRIES[name].small.structs(), FULL, HALF)
    results = results_of(op, arrays)
    if not name.startswith(LOGIC) or "_backward" in name:
        assert_dtypes(name, results, arrays)
    _, gradients = jax.eval_shape(value_and_gradients(op), arrays, results)
    assert dtypes_of(gradients) == dtypes_of(arrays)


@several
def test_two_dtypes_are_refused_as_by_jax_under_strict_promotion(name):
    arrays = mixed(ENTRIES[name].small.structs(), FULL, HALF)
    op = functools.partial(jax.eval_shape, op_of(name, None, "xla"), *arrays)
    with jax.numpy_dtype_promotion("strict"):
        if name in OF_FLOAT32_LOSS or (name.startswith(LOGIC + CONVERTED) and len(floats(arrays)) == 2):
            op()
        else:
            with pytest.raises(jax.dtypes.TypePromotionError, match="no available implicit dtype promotion path"):
                op()


def test_gradients_are_those_of_promoted_arguments_under_jit_and_vmap():
    x, w, b, dy = normal((2, 3, 4), (5, 4), (5,), (2, 3, 5))
    x, b = x.astype(HALF), b.astype(jnp.float16)

    def gradients(x, w, b, dy):
        return jax.vjp(functools.partial(jaxbp.linear, implementation="xla"), x, w, b)[1](dy)

    mapped = jax.jit(jax.vmap(gradients, in_axes=(0, None, None, 0)))
    found, by_hand = mapped(x, w, b, dy), mapped(x.astype(FULL), w, b.astype(FULL), dy)
    assert dtypes_of(found) == [HALF, FULL, jnp.float16]
    for gradient, wanted in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (gradient, wanted)), rtol=1e-2)
