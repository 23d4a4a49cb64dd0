"""The GPT of `jaxbp.nn`, written with Flax NNX and JAX's attention, and differentiated by JAX's autodiff."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from pallas_kernels.core.device import gpu


class Block(nnx.Module):
    def __init__(self, features: int, heads: tuple[int, int], hidden: int, norm: Any, use_bias: bool, **options: Any):
        (num_heads, num_key_value_heads), head_dim = heads, features // heads[0]
        dense = lambda inputs, outputs: nnx.Linear(inputs, outputs, use_bias=use_bias, **options)  # noqa: E731
        self.attention_norm, self.mlp_norm = (norm(features, epsilon=1e-5, **options) for _ in range(2))
        self.query_key_value = dense(features, (num_heads + 2 * num_key_value_heads) * head_dim)
        self.output, self.up, self.down = dense(features, features), dense(features, hidden), dense(hidden, features)
        self.gate = nnx.data(None if use_bias else dense(features, hidden))
        self.heads = num_key_value_heads, head_dim

    def __call__(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        key_heads, head_dim = self.heads
        heads = self.query_key_value(self.attention_norm(x)).reshape(*x.shape[:2], key_heads, -1, head_dim)
        query, key, value = heads[..., :-2, :].reshape(*x.shape[:2], -1, head_dim), heads[..., -2, :], heads[..., -1, :]
        if rotation is not None:
            query, key = rotated(query, *rotation), rotated(key, *rotation)
        is_half = gpu() is not None and x.dtype.itemsize == 2
        options = dict(is_causal=True, implementation="cudnn" if is_half else None)
        x = x + self.output(jax.nn.dot_product_attention(query, key, value, **options).reshape(x.shape))
        y = self.mlp_norm(x)
        hidden = nnx.gelu(self.up(y)) if self.gate is None else nnx.silu(self.gate(y)) * self.up(y)
        return x + self.down(hidden)


class FlaxGPT(nnx.Module):
    """`jaxbp.nn.GPT` in plain Flax, with the same parameters. It supports the options of GPT in `GPT_SIZES`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        num_layers: int,
        features: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        hidden_features: int,
        normalization: str = "layer_norm",
        gate: str | None = None,
        position_embedding: str = "rotary",
        max_length: int | None = None,
        use_bias: bool = True,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        norm = {"layer_norm": nnx.LayerNorm, "rms_norm": nnx.RMSNorm}[normalization]
        options, heads = dict(dtype=dtype, rngs=rngs), (num_heads, num_key_value_heads or num_heads)
        self.embed = nnx.Embed(vocab_size, features, **options)
        is_learned = position_embedding == "learned"
        self.position_embed = nnx.data(nnx.Embed(max_length, features, **options) if is_learned else None)
        blocks = features, heads, hidden_features, norm, use_bias
        self.blocks = nnx.List(Block(*blocks, **options) for _ in range(num_layers))
        self.norm = norm(features, epsilon=1e-5, **options)
        self.head_dim = features // num_heads

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x, positions, rotation = self.embed(tokens), jnp.arange(tokens.shape[1]), None
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        else:
            angles = positions[:, None] * 10_000.0 ** (-jnp.arange(0, self.head_dim, 2) / self.head_dim)
            rotation = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.embed.attend(self.norm(x))
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
