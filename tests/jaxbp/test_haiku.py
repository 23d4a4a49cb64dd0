import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jaxbp.haiku

X, IMAGES = normal((2, 4, 6), (2, 5, 4, 6), seed=4)
IDS = jnp.array([[0, 1, 2, 3], [3, 2, 1, 0]])


def program(layers, **options):
    """Return a transformed program with every layer."""

    def forward(x, images):
        images = layers.Conv2D(4, 3, stride=2, rate=1, padding="VALID", **options)(images)
        images = layers.GroupNorm(2, **options)(images)
        images = layers.Conv2D(3, (2, 1), with_bias=False, data_format="NCHW", name="first", **options)(images)
        x = x + layers.Embed(5, 6, **options)(IDS) + images.mean()
        x = layers.Conv1D(6, 2, mask=jnp.tri(6)[None].repeat(2, 0), **options)(x)
        x = layers.LayerNorm(-1, True, True, **options)(x[0])  # one example
        x = layers.RMSNorm(-1, **options)(layers.Conv1D(6, 3, feature_group_count=2, **options)(x))
        return layers.Linear(3, **options)(x)

    return hk.without_apply_rng(hk.transform(forward))


def test_a_program_keeps_its_parameters_and_its_values_and_gradients_and_calls_the_ops():
    theirs, ours = program(hk), program(jaxbp.haiku, implementation="xla")
    init = jax.jit(lambda key: (ours.init(key, X, IMAGES), theirs.init(key, X, IMAGES)))
    found, parameters = init(jax.random.key(0))
    assert jax.tree.structure(found) == jax.tree.structure(parameters)
    jax.tree.map(np.testing.assert_array_equal, found, parameters)

    def step(apply, parameters):
        return jax.value_and_grad(lambda parameters: jnp.sum(jnp.sin(apply(parameters, X, IMAGES))))(parameters)

    lowered = jax.jit(lambda parameters: (step(ours.apply, parameters), step(theirs.apply, parameters))).lower(found)
    text = lowered.as_text(debug_info=True)
    for op in ("conv2d", "group_norm", "embedding", "conv1d", "layer_norm", "rms_norm", "linear", "linear_backward"):
        assert f"{op}/xla/" in text, op
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(compare, *lowered.compile()(parameters))


@pytest.mark.parametrize(
    ("make", "call", "lacking"),
    [
        (lambda layers: layers.LayerNorm(1, False, False), {}, "other axes than the last in axis"),
        (lambda layers: layers.RMSNorm(slice(1, None)), {}, "other axes than the last in axis"),
        (lambda layers: layers.GroupNorm(2, create_scale=False), dict(scale=jnp.ones(6)), "scale"),
    ],
    ids=["layer_norm", "rms_norm", "group_norm"],
)
def test_options_that_only_haiku_has_are_reported(make, call, lacking):
    transform = lambda layers: hk.without_apply_rng(hk.transform(lambda x: make(layers)(x, **call)))  # noqa: E731
    theirs, ours = transform(hk), transform(jaxbp.haiku)
    parameters = theirs.init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match=f"Haiku computes this layer, because jaxbp does not take {lacking}"):
        np.testing.assert_array_equal(ours.apply(parameters, X), theirs.apply(parameters, X))


def test_other_lookups_of_embeddings_are_refused_with_an_implementation():
    layer = hk.transform(lambda ids: jaxbp.haiku.Embed(5, 6, lookup_style="ONE_HOT", implementation="xla")(ids))
    with pytest.raises(ValueError, match=r"^Linear: implementation is 'cuda'; wants 'pallas', 'xla'"):
        hk.transform(lambda x: jaxbp.haiku.Linear(3, implementation="cuda")(x)).init(jax.random.key(0), X)
    with pytest.raises(NotImplementedError, match="Embed: implementation='xla' does not take lookup_style; wants"):
        layer.init(jax.random.key(0), IDS)
