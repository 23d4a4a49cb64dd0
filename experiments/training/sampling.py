"""Text from a trained language model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from experiments.data.text import START
from jaxbp.nn import GPT


def sample(
    model: GPT, prompts: Int[np.ndarray, "batch t"], length: int, temperature: float, top_k: int, seed: int
) -> Int[np.ndarray, "batch length"]:
    """Return `length` bytes that follow each prompt.

    Each byte is drawn from the `top_k` most likely bytes, with probabilities `softmax(logits / temperature)`. With the
    temperature 0, it is the most likely byte. `START`, which precedes a text, is never drawn.
    """
    graph, state = nnx.split(model)
    starts = np.full((len(prompts), 1), START)
    tokens = jnp.asarray(np.concatenate([starts, prompts], axis=1), jnp.int32)
    return np.asarray(_sample(graph, state, tokens, jax.random.key(seed), temperature, length=length, top_k=top_k))


@functools.partial(jax.jit, static_argnames=("graph", "length", "top_k"))
def _sample(
    graph: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "batch t"],
    key: PRNGKeyArray,
    temperature: ArrayLike,
    *,
    length: int,
    top_k: int,
) -> Int[Array, "batch length"]:
    model = nnx.merge(graph, state)
    batch, read = tokens.shape
    logits, cache = model.decode(tokens, model.init_cache(batch, read + length))

    def step(carried, key):
        logits, cache = carried
        byte = _draw(key, logits, temperature, top_k)
        logits, cache = model.decode(byte[:, None], cache)
        return (logits[:, -1], cache), byte

    _, bytes_ = jax.lax.scan(step, (logits[:, -1], cache), jax.random.split(key, length))
    return bytes_.T


def _draw(
    key: PRNGKeyArray, logits: Float[Array, "batch bytes"], temperature: ArrayLike, top_k: int
) -> Int[Array, " batch"]:
    largest, bytes_ = jax.lax.top_k(logits.at[:, START].set(-jnp.inf), top_k)
    drawn = jax.random.categorical(key, largest / jnp.where(temperature > 0, temperature, 1))
    index = jnp.where(temperature > 0, drawn, 0)
    return jnp.take_along_axis(bytes_, index[:, None], axis=-1)[:, 0]
