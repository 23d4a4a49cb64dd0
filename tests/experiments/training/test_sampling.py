import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.data.text import START
from experiments.training.sampling import sample
from jaxbp.nn import GPT

PROMPTS = np.array([[100, 101, 102], [100, 103, 104]])
LENGTH = 6


@pytest.fixture(scope="module")
def model():
    model = GPT(256, num_layers=2, features=16, num_heads=2, implementation="autodiff", rngs=nnx.Rngs(0))
    # Larger weights than the initial ones, so that the next byte depends on the bytes before it.
    nnx.update(model, jax.tree.map(lambda p: 8 * p, nnx.state(model, nnx.Param)))
    return model


def test_the_most_likely_bytes_are_the_same_as_without_a_cache(model):
    drawn = sample(model, PROMPTS, LENGTH, temperature=0, top_k=256, seed=0)
    assert drawn.shape == (2, LENGTH) and len(np.unique(drawn)) > 2
    rows = np.concatenate([np.full((2, 1), START), PROMPTS, drawn], axis=1)
    logits = jax.jit(lambda tokens: model(tokens))(jnp.asarray(rows))
    before = logits[:, PROMPTS.shape[1] : -1].at[..., START].set(-jnp.inf)
    np.testing.assert_array_equal(drawn, before.argmax(axis=-1))


def test_a_seed_gives_the_same_text_and_another_seed_another(model):
    first, again, other = (sample(model, PROMPTS, LENGTH, 1.0, 256, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert not np.isin(START, (first, other))


def test_only_the_likeliest_bytes_are_drawn(model):
    greedy = sample(model, PROMPTS, LENGTH, temperature=0, top_k=256, seed=0)
    np.testing.assert_array_equal(sample(model, PROMPTS, LENGTH, temperature=2.0, top_k=1, seed=5), greedy)
    many = np.repeat(PROMPTS[:1], 64, axis=0)
    first_bytes = sample(model, many, 1, temperature=100.0, top_k=3, seed=0)
    assert len(np.unique(first_bytes)) == 3
