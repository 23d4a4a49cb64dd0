import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal

import jaxbp.equinox
from jaxbp.equinox import replace_layers

SEQUENCE, IMAGE = normal((3, 6), (2, 5, 4), seed=2)


class Program(eqx.Module):
    """Every layer once, and the modules of Equinox that contain them."""

    images: eqx.nn.Sequential
    embedding: eqx.nn.Embedding
    norms: tuple
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    conv: eqx.nn.Conv1d

    def __init__(self):
        keys = iter(jax.random.split(jax.random.key(0), 20))
        layers = [
            eqx.nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, key=next(keys)),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.LayerNorm((4, 3, 2)),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(24, 6, key=next(keys)),
        ]
        self.images = eqx.nn.Sequential(layers)
        self.embedding = eqx.nn.Embedding(5, 6, key=next(keys))
        self.norms = (eqx.nn.RMSNorm(6), eqx.nn.LayerNorm(6, use_bias=False))
        self.attention = eqx.nn.MultiheadAttention(2, 6, key=next(keys))
        self.mlp = eqx.nn.MLP(6, "scalar", 4, depth=1, key=next(keys))
        self.conv = eqx.nn.Conv1d(6, 6, 3, padding="SAME", use_bias=False, key=next(keys))

    def __call__(self, x, image, indices):
        x = x + self.images(image) + jax.vmap(self.embedding)(indices)
        for norm in self.norms:
            x = jax.vmap(norm)(self.conv(x.T).T)
        return jax.vmap(self.mlp)(self.attention(x, x, x))


@pytest.fixture(scope="module")
def equinox_program():
    return Program()


def loss(program, x):
    return jnp.sum(jnp.sin(program(x, IMAGE, jnp.array([0, 4, 1]))))


def test_a_program_keeps_its_arrays_and_its_values_and_gradients_and_calls_the_ops(equinox_program):
    ours = replace_layers(equinox_program, "xla")
    assert isinstance(ours.mlp.layers[0], jaxbp.equinox.Linear) and isinstance(ours.conv, eqx.nn.Conv1d)
    assert all(a is b for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(equinox_program), strict=True))
    step = lambda program, x: eqx.filter_value_and_grad(loss)(program, x)  # noqa: E731
    both = eqx.filter_jit(lambda ours, program, x: (step(ours, x), step(program, x)))
    text = eqx.filter_jit(step).lower(ours, SEQUENCE).lowered.as_text(debug_info=True).replace(")", "")
    for op in ("conv2d", "group_norm", "layer_norm", "linear", "embedding", "rms_norm", "conv1d", "linear_backward"):
        assert f"{op}/xla/" in text, op
    found, wanted = (
        jax.tree.leaves(eqx.filter(result, eqx.is_array)) for result in both(ours, equinox_program, SEQUENCE)
    )
    assert len(found) > 15
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_another_call_changes_the_implementation(equinox_program):
    again = replace_layers(replace_layers(equinox_program.mlp, "xla"), "autodiff")
    assert [layer.implementation for layer in again.layers] == ["autodiff", "autodiff"]
    with pytest.raises(ValueError, match=r"^replace_layers: implementation is 'cuda'; wants 'pallas', 'xla'"):
        replace_layers(equinox_program, "cuda")
    assert jaxbp.equinox.Linear(6, 3, key=jax.random.key(0)).implementation is None


def test_layers_keep_dtypes_and_states_and_refuse_other_shapes(equinox_program):
    norm, state = replace_layers(eqx.nn.LayerNorm(6), "xla"), object()
    y, same = norm(SEQUENCE[0].astype(jnp.bfloat16), state)
    assert y.dtype == jnp.bfloat16 and same is state
    assert_close(y, eqx.nn.LayerNorm(6)(SEQUENCE[0].astype(jnp.bfloat16)), 1e-2)
    for layer, wanted in (
        (equinox_program.mlp.layers[0], "(6,)"),
        (norm, "(6,)"),
        (equinox_program.conv, "(in_channels, width)"),
    ):
        with pytest.raises(ValueError, match=rf"x has shape \(1, 3, 6\); wants {wanted[:-1]}".replace("s (", r"s \(")):
            replace_layers(layer)(SEQUENCE[None])


def test_a_padding_that_only_equinox_has_is_reported_and_refused_with_an_implementation():
    layer = eqx.nn.Conv2d(2, 3, 3, padding=1, padding_mode="REFLECT", key=jax.random.key(0))
    with pytest.warns(UserWarning, match="Conv2d: Equinox computes this layer, because .* padding_mode='REFLECT'"):
        np.testing.assert_array_equal(replace_layers(layer)(IMAGE), layer(IMAGE))
    with pytest.raises(NotImplementedError, match="Conv2d: implementation='xla' does not take padding_mode='REFLECT'"):
        replace_layers(layer, "xla")(IMAGE)
