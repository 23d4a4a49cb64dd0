import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import in_float64, put, relative_error

from jaxbp.nn import GPT

VOCABULARY, LENGTH = 13, 9
SIZES = {
    "gpt2": dict(position_embedding="learned", max_length=LENGTH, hidden_features=12),
    "llama": dict(num_key_value_heads=2, normalization="rms_norm", gate="silu", hidden_features=12)
    | dict(use_bias=False, tied=False),
}
"""All options in two forms."""


@functools.cache
def parts(form, **options):
    model = GPT(VOCABULARY, num_layers=2, features=16, num_heads=4, **SIZES[form], **options, rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(model, nnx.Param)
    random = np.random.default_rng(0)
    # Biases of 0 and scales of 1 would hide some mistakes.
    noise = jax.tree.map(lambda a: put(np.float32(0.2 * random.standard_normal(a.shape))), parameters)
    return graph, jax.tree.map(jnp.add, parameters, noise)


def model_of(form, parameters=None, **options):
    graph, given = parts(form, **options)
    return nnx.merge(graph, given if parameters is None else parameters)


@functools.cache
def text(seed=0, batch=2, length=LENGTH + 1):
    return put(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)).astype(np.int32))


SEGMENTS = np.array([[0] * 4 + [1] * 5, [3] * LENGTH], np.int32)


def loss_and_gradients(form, **options):
    graph, _ = parts(form, **options)

    def loss(parameters, tokens, segments):
        model = nnx.merge(graph, parameters)
        return model.loss(tokens[:, :-1], tokens[:, 1:], segments)

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def reference(form):
    return in_float64(loss_and_gradients(form, implementation="autodiff"), parts(form)[1], text(), SEGMENTS)


def errors_by_parameter(gradients, expected):
    """Return the relative error in norm per parameter."""
    found = jax.tree_util.tree_leaves_with_path(gradients)
    return {
        jax.tree_util.keystr(path): relative_error(a, b)
        for (path, a), b in zip(found, jax.tree.leaves(expected), strict=True)
    }


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff"])
def test_the_gradient_of_every_parameter_agrees_with_float64(form, implementation):
    loss, gradients = loss_and_gradients(form, implementation=implementation)(parts(form)[1], text(), SEGMENTS)
    expected_loss, expected = reference(form)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    errors = errors_by_parameter(gradients, expected)
    assert {path: error for path, error in errors.items() if not error < 1e-5} == {}
    print(errors)
