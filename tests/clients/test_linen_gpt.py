"""A GPT in Linen, with `pmap`, rematerialized blocks, and accumulated gradients."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clients.namespaces import (
    STEPS,
    Namespace,
    assert_same_losses,
    every_dtype,
    needs_eight_devices,
    ours,
    theirs,
    tokens,
)
from flax import linen
from helpers import normal

import jaxbp

VOCABULARY, WIDTH, HEADS = 16, 16, 2

pytestmark = needs_eight_devices


class Block(linen.Module):
    n: Namespace

    @linen.compact
    def __call__(self, x):
        dense = functools.partial(linen.Dense, dtype=x.dtype)
        y = linen.LayerNorm(epsilon=1e-5, dtype=x.dtype, name="ln_1")(x)
        y = dense(3 * WIDTH, name="c_attn")(y).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = y.transpose(2, 0, 3, 1, 4)
        weights = self.n.matmul(q, k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
        weights = jnp.where(jnp.tri(x.shape[1], dtype=bool), weights, jnp.finfo(x.dtype).min)
        y = self.n.matmul(self.n.softmax(weights), v).swapaxes(1, 2).reshape(x.shape)
        x += dense(WIDTH, name="c_proj")(y)
        y = linen.LayerNorm(epsilon=1e-5, dtype=x.dtype, name="ln_2")(x)
        y = self.n.gelu(dense(4 * WIDTH, name="c_fc")(y), approximate=True)
        return x + dense(WIDTH, name="c_mlp")(y)


class GPT(linen.Module):
    n: Namespace
    dtype: str

    @linen.compact
    def __call__(self, indices):
        embed = functools.partial(linen.Embed, features=WIDTH, dtype=self.dtype)
        x = embed(VOCABULARY, name="wte")(indices) + embed(indices.shape[1], name="wpe")(jnp.arange(indices.shape[1]))
        policy = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
        x = linen.remat(Block, policy=policy)(self.n, name="0")(x)
        x = linen.LayerNorm(epsilon=1e-5, dtype=x.dtype, name="ln_f")(x)
        return linen.Dense(VOCABULARY, dtype=x.dtype, name="head")(x)


def losses(n, dtype, layers=contextlib.nullcontext):
    text = tokens(8, 9, VOCABULARY).reshape(8, 1, 9)
    model = GPT(n, dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2, momentum=0.9), optax.apply_every(2))

    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0), text[0, :, :-1]))
    parameters = tree.unflatten(0.3 * a for a in normal(*(leaf.shape for leaf in leaves)))
    state = optimizer.init(parameters)
    parameters, state = jax.tree.map(lambda a: np.broadcast_to(a, (8, *a.shape)), (parameters, state))

    @functools.partial(jax.pmap, axis_name="batch")
    def step(parameters, state, text):
        def loss(parameters):
            with layers():
                logits = model.apply(parameters, text[:, :-1])
            return n.softmax_cross_entropy(logits, jax.nn.one_hot(text[:, 1:], VOCABULARY, dtype=logits.dtype)).mean()

        value, gradients = jax.lax.pmean(jax.value_and_grad(loss)(parameters), "batch")
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    found = []
    for _ in range(STEPS):
        parameters, state, value = step(parameters, state, text)
        found.append(value[0])
    return found


@functools.cache
def expected(dtype):
    return losses(theirs(), dtype)


@every_dtype
def test_losses_are_those_of_linen(dtype, implementation):
    layers = functools.partial(jaxbp.linen.intercept_layers, implementation)
    assert_same_losses(losses(ours(implementation), dtype, layers), expected(dtype), dtype)
