import functools

import jax.numpy as jnp
import optax
from clients.namespaces import STEPS, assert_same_losses, every_dtype, ours, theirs, tokens
from flax import nnx

VOCABULARY, WIDTH, HEADS, HEAD = 16, 16, 2, 8


class Functions:
    def rotary_embedding(x, positions):
        angles = positions[..., None] / 10_000 ** (2 * jnp.arange(HEAD // 2) / HEAD)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    def gated_linear_unit(gate, up, activation):
        assert activation == "gelu"
        return nnx.gelu(gate) * up


class Attention(nnx.Module):
    def __init__(self, n, dtype, rngs):
        self.n = n
        self.qkv = n.Linear(WIDTH, 3 * HEADS * HEAD, use_bias=False, dtype=dtype, rngs=rngs)
        self.query_norm, self.key_norm = (n.RMSNorm(HEAD, dtype=dtype, rngs=rngs) for _ in range(2))
        self.output = n.Linear(HEADS * HEAD, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, HEAD).transpose(2, 0, 3, 1, 4)
        positions = jnp.arange(length)[None, None]
        q = self.n.rotary_embedding(self.query_norm(q), positions)
        k = self.n.rotary_embedding(self.key_norm(k), positions)
        logits = 50 * self.n.tanh(self.n.matmul(q, k.swapaxes(-1, -2)) / (50 * HEAD**0.5))
        weights = self.n.softmax(logits, axis=-1, where=jnp.tri(length, dtype=bool))
        return self.output(self.n.matmul(weights, v).swapaxes(1, 2).reshape(batch, length, -1))


class Block(nnx.Module):
    def __init__(self, n, dtype, rngs):
        self.attention_norm, self.ffw_norm = (n.RMSNorm(WIDTH, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = Attention(n, dtype, rngs)
        self.gate, self.up = (n.Linear(WIDTH, 32, use_bias=False, dtype=dtype, rngs=rngs) for _ in range(2))
        self.down = n.Linear(32, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.gated_linear_unit = functools.partial(n.gated_linear_unit, activation="gelu")

    def __call__(self, x):
        x += self.attention(self.attention_norm(x))
        y = self.ffw_norm(x)
        return x + self.down(self.gated_linear_unit(self.gate(y), self.up(y)))


class Transformer(nnx.Module):
    def __init__(self, n, dtype, rngs):
        self.embedder = n.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(n, dtype, rngs)])
        self.norm = n.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, indices):
        x = self.embedder(indices) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return self.embedder.attend(self.norm(x))


def losses(n, dtype):
    text = tokens(2, 9, VOCABULARY)
    sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.03, momentum=0.9))

    @nnx.jit
    def create():
        model = Transformer(n, jnp.dtype(dtype), nnx.Rngs(0))
        return model, nnx.clone(model), nnx.Optimizer(model, sgd, wrt=nnx.Param)

    def loss(model):
        logits = model(text[:, :-1]).astype(jnp.float32)
        return n.softmax_cross_entropy(logits, nnx.one_hot(text[:, 1:], VOCABULARY)).mean()

    @nnx.jit
    def step(model, average, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))
        parameters = (nnx.state(m, nnx.Param) for m in (model, average))
        nnx.update(average, optax.incremental_update(*parameters, 0.5))
        return loss(average)

    model, average, optimizer = create()
    return [step(model, average, optimizer) for _ in range(STEPS)]


@functools.cache
def expected(dtype):
    return losses(theirs(Functions), dtype)


@every_dtype
def test_losses_are_those_of_flax(dtype, implementation):
    assert_same_losses(losses(ours(implementation), dtype), expected(dtype), dtype)
