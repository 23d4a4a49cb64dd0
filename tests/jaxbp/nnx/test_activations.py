import inspect

import jax.numpy as jnp
import pytest
from flax import nnx
from flax_twins import ROWS, assert_layers_agree
from helpers import assert_close, draw_cotangents, every_implementation, value_and_gradients

import jaxbp

OPS = [name for name in nnx.nn.activations.__all__ if hasattr(jaxbp, name)]
COMPOSED = ("glu", "logsumexp", "swish")


@pytest.mark.parametrize("name", OPS)
def test_every_activation_that_is_an_op_is_there(name):
    assert getattr(jaxbp.nnx, name) is getattr(jaxbp, name) or name in COMPOSED


@pytest.mark.parametrize("name", [*OPS, "glu", "swish"])
def test_arguments_of_flax_keep_their_places(name):
    wanted = [p.name for p in inspect.signature(getattr(nnx, name)).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = list(inspect.signature(getattr(jaxbp.nnx, name)).parameters)
    assert parameters[: len(wanted)] == wanted
    assert parameters[-1] == "implementation"


@every_implementation
@pytest.mark.parametrize("axis", [-1, 0])
def test_glu_agrees_with_flax(axis, implementation):
    ours = lambda x: jaxbp.nnx.glu(x, axis, implementation=implementation)  # noqa: E731
    twin = lambda x: nnx.glu(x, axis)  # noqa: E731
    cotangents = draw_cotangents(twin, (ROWS,))
    assert_close(value_and_gradients(ours)((ROWS,), cotangents), value_and_gradients(twin)((ROWS,), cotangents), 1e-5)


def test_glu_halves_an_axis_of_even_size():
    with pytest.raises(ValueError, match=r"^glu: x has shape \(2, 3, 6\); wants an even size along axis 1"):
        jaxbp.nnx.glu(ROWS, 1)


def test_logsumexp_takes_weights_and_returns_signs():
    assert_close(jaxbp.nnx.logsumexp(ROWS, -1, keepdims=True), nnx.logsumexp(ROWS, -1, keepdims=True), 1e-6)
    given = ROWS, -1, -jnp.abs(ROWS), False, True
    assert_close(jaxbp.nnx.logsumexp(*given), nnx.logsumexp(*given), 1e-6)
    with pytest.raises(NotImplementedError, match=r"^logsumexp: implementation='xla' does not take b, return_sign"):
        jaxbp.nnx.logsumexp(*given, implementation="xla")


def test_the_slope_of_prelu_gets_the_dtype_of_the_input():
    assert_layers_agree("PReLU", 0.3, x=ROWS.astype(jnp.bfloat16), tolerance=2e-2, implementation="xla")
