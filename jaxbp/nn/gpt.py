"""A language model: a transformer that predicts the next token."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, PyTree

from jaxbp.common import barriers, checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast, wide
from jaxbp.nnx.linear import Embed, Linear
from jaxbp.nnx.normalization import LayerNorm, RMSNorm
from jaxbp.ops.attention._formulas import separate
from jaxbp.ops.attention.dot_product_attention import dot_product_attention
from jaxbp.ops.dense.linear_softmax_cross_entropy import Reduction, linear_softmax_cross_entropy
from jaxbp.ops.norm.layer_norm_linear import layer_norm_linear
from jaxbp.ops.pointwise.activations import gelu
from jaxbp.ops.pointwise.gated_linear_unit import Activation, gated_linear_unit
from jaxbp.ops.pointwise.rotary_embedding import rotary_embedding
from jaxbp.pairing import Implementation

AnyTokens = Int[AnyArray, "batch length"]
Logits = Float[Array, "batch length vocabulary"]
Normalization = Literal["layer_norm", "rms_norm"]
PositionEmbedding = Literal["rotary", "learned"]

GPT_SIZES: dict[str, dict[str, Any]] = {
    "124M": dict(vocab_size=50_304, num_layers=12, features=768, num_heads=12, hidden_features=3072)
    | dict(position_embedding="learned", max_length=1024),
    "1.3B": dict(vocab_size=128_256, num_layers=24, features=2048, num_heads=16, num_key_value_heads=4)
    | dict(hidden_features=5632, normalization="rms_norm", gate="silu", use_bias=False),
}
"""Arguments of `GPT` by the number of parameters. "124M" is the smallest GPT-2, whose vocabulary of 50,257 tokens is
padded. "1.3B" has the form of Llama."""

_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
INITIAL_STD = 0.02
"""The standard deviation of GPT-2's initial weights."""


class KeyValueCache(NamedTuple):
    """The keys and values of the positions that `GPT.decode` has read.

    Attributes:
      keys, values: per layer, an array `(batch, length, num_key_value_heads, head_dim)`.
      index: the number of positions that were read.
    """

    keys: tuple[Float[Array, "batch length heads head_dim"], ...]
    values: tuple[Float[Array, "batch length heads head_dim"], ...]
    index: Int[Array, ""]


class GPTBlock(nnx.Module):
    """A block that computes `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    The outputs of `query_key_value` are grouped by key head: the queries that attend to a key, the key, and the value.
    The arguments are as in `GPT`, but `rotary_base` is None if there is no rotary embedding. The layers get `options`.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        num_key_value_heads: int,
        hidden_features: int,
        normalization: Normalization,
        gate: Activation | None,
        rotary_base: float | None,
        epsilon: float,
        residual_std: float,
        use_bias: bool,
        **options: Any,
    ):
        def linear(inputs: int, outputs: int, std: float = INITIAL_STD) -> Linear:
            return Linear(inputs, outputs, use_bias=use_bias, kernel_init=nnx.initializers.normal(std), **options)

        self.attention_norm, self.mlp_norm = (
            _NORMS[normalization](features, epsilon=epsilon, **options) for _ in range(2)
        )
        head_dim = features // num_heads
        self.query_key_value = linear(features, (num_heads + 2 * num_key_value_heads) * head_dim)
        self.output = linear(features, features, residual_std)
        self.gate = nnx.data(None if gate is None else linear(features, hidden_features))
        self.up = linear(features, hidden_features)
        self.down = linear(hidden_features, features, residual_std)
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        self.gate_activation, self.rotary_base = gate, rotary_base
        self.implementation = options["implementation"]

    def __call__(
        self,
        x: Float[AnyArray, "batch length features"],
        positions: Int[AnyArray, "batch_or_1 length"],
        segment_ids: AnyTokens | None = None,
    ) -> Float[Array, "batch length features"]:
        y = self._attention(self._heads(x, positions), is_causal=True, segment_ids=segment_ids)
        return self._after_attention(x, y)

    def decode(
        self, x: Array, positions: Array, keys: Array, values: Array, index: Array
    ) -> tuple[Array, Array, Array]:
        """Return the block's result, and the cache's keys and values, with the keys and values of x from `index` on."""
        query, key, value = separate(self._heads(x, positions), None, None)
        keys, values = (
            lax.dynamic_update_slice_in_dim(all_, new.astype(all_.dtype), index, axis=1)
            for all_, new in ((keys, key), (values, value))
        )
        mask = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
        return self._after_attention(x, self._attention(query, keys, values, mask=mask)), keys, values

    def _heads(self, x: Array, positions: Array) -> Array:
        """Return the packed queries, keys, and values of `dot_product_attention`."""
        heads = _normalized_linear(self.attention_norm, self.query_key_value, x)
        members = heads.shape[2] // (self.num_key_value_heads * self.head_dim)
        heads = heads.reshape(*x.shape[:2], self.num_key_value_heads, members, self.head_dim)
        if self.rotary_base is None:
            return heads
        # A rotation by the angle 0 does not change a value.
        is_rotated = jnp.arange(heads.shape[-2]) < heads.shape[-2] - 1
        options = dict(base=self.rotary_base, implementation=self.implementation)
        return rotary_embedding(heads, jnp.where(is_rotated, positions[..., None, None], 0), **options)

    def _attention(self, query: Array, *arrays: Array, **options: Any) -> Array:
        # The kernels of attention need half precision.
        by_formula = self.implementation == "pallas" and wide(query.dtype) == query.dtype
        options |= dict(implementation="xla" if by_formula else self.implementation)
        return dot_product_attention(query, *arrays, **options)

    def _after_attention(self, x: Array, y: Array) -> Array:
        x = x + self.output(y.reshape(x.shape))
        if self.gate is None:
            hidden = gelu(_normalized_linear(self.mlp_norm, self.up, x), implementation=self.implementation)
        else:
            y = self.mlp_norm(x)
            options = dict(implementation=self.implementation)
            hidden = gated_linear_unit(self.gate(y), self.up(y), self.gate_activation, **options)
        return x + self.down(hidden)


def _normalized_linear(norm: LayerNorm | RMSNorm, linear: Linear, x: Array) -> Array:
    """Return `linear(norm(x))`. If `norm` is a LayerNorm, one op computes both layers."""
    if not isinstance(norm, LayerNorm):
        return linear(norm(x))
    bias = None if linear.bias is None else linear.bias[...]
    arrays = x, norm.scale[...], norm.bias[...], linear.kernel[...].T, bias
    arrays = dtypes.promote_dtype(arrays, dtype=linear.dtype)
    return layer_norm_linear(*arrays, norm.epsilon, implementation=linear.implementation)


_DIVIDED_AXES = {"embed": 0, "head": 0, "query_key_value": 1, "output": 0, "gate": 1, "up": 1, "down": 0}
"""The axis of a layer's matrix that tensor parallelism divides."""


class GPT(nnx.Module):
    """A transformer that predicts the next token: embedding, blocks (`GPTBlock`), a norm, and logits.

    The initial weights are normal with the standard deviation 0.02, divided by `sqrt(2 num_layers)` for the two layers
    of each block that add to the residual stream, `output` and `down`. The initial biases are 0.

    Args:
      vocab_size: the number of tokens.
      num_layers: the number of blocks.
      features: the width of the residual stream.
      num_heads: the number of query heads. Each has `features / num_heads` features.
      num_key_value_heads: the number of key heads, a divisor of `num_heads`; by default, `num_heads`.
      hidden_features: the width of the MLPs' hidden layer. By default `4 features`, or with `gate`
        `8/3 features`, rounded up to a multiple of 256.
      normalization: "layer_norm", which is one op with the next dense layer, or "rms_norm".
      gate: None for the MLP `down(gelu(up(x)))`. The name of an activation, such as "silu", for
        `down(activation(gate(x)) * up(x))`.
      position_embedding: "rotary" for the rotation of queries and keys, or "learned" for one vector per position.
      max_length: the number of learned positions.
      rotary_base: as `base` in `jaxbp.rotary_embedding`.
      tied: whether the logits are computed with the matrix of the embedding, instead of a matrix `head`.
      use_bias: whether the dense layers of the blocks have a bias.
      epsilon: as in the norms.
      checkpoint: whether the backward recomputes each block, except what attention saves for its backward.
      dtype: the dtype of the computation, or None for `param_dtype`.
      param_dtype: the dtype of the parameters.
      implementation: as in the ops. "pallas" computes attention by "xla" unless it is in half precision.

    Raises:
      ValueError: a size is not a positive int, or sizes or options do not fit together.

    Sources: A. Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2); H. Touvron et al.,
    "Llama 2", arXiv:2307.09288 (RMSNorm, rotary embedding, gated units, grouped heads).
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        num_layers: int,
        features: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        hidden_features: int | None = None,
        normalization: Normalization = "layer_norm",
        gate: Activation | None = None,
        position_embedding: PositionEmbedding = "rotary",
        max_length: int | None = None,
        rotary_base: float = 10_000.0,
        tied: bool = True,
        use_bias: bool = True,
        epsilon: float = 1e-5,
        checkpoint: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        if hidden_features is None and checks.count("GPT", "features", features):
            hidden_features = 4 * features if gate is None else -(-8 * features // (3 * 256)) * 256
        sizes = dict(vocab_size=vocab_size, num_layers=num_layers, features=features, num_heads=num_heads)
        sizes |= dict(num_key_value_heads=num_key_value_heads, hidden_features=hidden_features)
        choices = dict(normalization=(normalization, get_args(Normalization)))
        choices |= dict(gate=(gate, (None, *get_args(Activation))))
        choices |= dict(position_embedding=(position_embedding, get_args(PositionEmbedding)))
        is_learned = _check(sizes, choices, max_length)
        options = dict(dtype=dtype, param_dtype=param_dtype, implementation=implementation, rngs=rngs)
        blocks = dict(
            normalization=normalization,
            gate=gate,
            rotary_base=None if is_learned else rotary_base,
            epsilon=epsilon,
            residual_std=INITIAL_STD / math.sqrt(2 * num_layers),
            use_bias=use_bias,
        )

        def table(rows: int) -> Embed:
            return Embed(rows, features, embedding_init=nnx.initializers.normal(INITIAL_STD), **options)

        self.embed = table(vocab_size)
        self.position_embed = nnx.data(table(max_length) if is_learned else None)
        self.blocks = nnx.List(
            GPTBlock(features, num_heads, num_key_value_heads, hidden_features, **blocks, **options)
            for _ in range(num_layers)
        )
        self.norm = _NORMS[normalization](features, epsilon=epsilon, **options)
        self.head = nnx.data(None if tied else table(vocab_size))
        self.checkpoint, self.dtype, self.implementation = checkpoint, dtype, implementation

    def __call__(
        self, tokens: AnyTokens, segment_ids: AnyTokens | None = None, positions: AnyTokens | None = None
    ) -> Logits:
        """Return the logits, in float32 or wider. The arguments are as in `hidden`."""
        return self._logits(self.hidden(tokens, segment_ids, positions))

    def hidden(
        self, tokens: AnyTokens, segment_ids: AnyTokens | None = None, positions: AnyTokens | None = None
    ) -> Float[Array, "batch length features"]:
        """Return the result of the last norm.

        Args:
          tokens: integers in [0, vocab_size).
          segment_ids: integers, if a row has several documents. A token attends only to tokens of its segment.
          positions: `(batch, length)` or `(1, length)`; by default, the positions in the row, or with `segment_ids`, in
            each run of equal ids.
        """
        is_limited = positions is None and self.position_embed is not None
        _check_tokens(tokens, self.position_embed.num_embeddings if is_limited else None, "max_length")
        batch, length = tokens.shape
        if segment_ids is not None:
            checks.shape("GPT", "segment_ids", checks.integers("GPT", "segment_ids", segment_ids), batch, length)
        if positions is not None and checks.integers("GPT", "positions", positions).shape != (1, length):
            checks.shape("GPT", "positions", positions, batch, length)
        if positions is None:
            positions = _positions(tokens.shape[1]) if segment_ids is None else segment_positions(segment_ids)
        x = self._embedded(tokens, positions)
        # `lax.scan` would compile faster, but would copy the residuals of all blocks into stacked arrays.
        for block in self.blocks:
            apply = lambda x, block=block: block(x, positions, segment_ids)  # noqa: E731
            if self.checkpoint:
                # The residuals of attention have its name (`jaxbp.Pair`).
                kept = jax.checkpoint_policies.save_only_these_names("dot_product_attention")
                apply = barriers.checkpoint(apply, policy=kept)
            x = apply(x)
        return self.norm(x)

    def loss(
        self,
        tokens: AnyTokens,
        targets: AnyTokens,
        segment_ids: AnyTokens | None = None,
        positions: AnyTokens | None = None,
        *,
        where: Bool[AnyArray, "batch length"] | None = None,
        reduction: Reduction = "mean",
    ) -> Float[Array, "..."]:
        """Return the softmax cross-entropy of the logits with the targets, without storing all logits.

        Args:
          targets: the next tokens, integers in [0, vocab_size).
          segment_ids, positions: as in `hidden`.
          where, reduction: as in `jaxbp.linear_softmax_cross_entropy`. With None, which returns one loss per token, the
            backward computes the logits again.
        """
        x = self.hidden(tokens, segment_ids, positions)
        x, w = dtypes.promote_dtype((x, self._head.embedding[...]), dtype=self.dtype)
        options = dict(where=where, reduction=reduction, implementation=self.implementation)
        return linear_softmax_cross_entropy(x, w, targets, **options)

    def init_cache(self, batch: int, length: int) -> KeyValueCache:
        """Return an empty cache for up to `length` positions."""
        for name, value in dict(batch=batch, length=length).items():
            checks.count("GPT.init_cache", name, value)
        block, dtype = self.blocks[0], self.dtype or self.embed.embedding.dtype
        shape = batch, length, block.num_key_value_heads, block.head_dim
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in self.blocks) for _ in range(2))
        return KeyValueCache(keys, values, jnp.zeros((), jnp.int32))

    def decode(self, tokens: AnyTokens, cache: KeyValueCache) -> tuple[Logits, KeyValueCache]:
        """Return the logits of the next tokens of a text, and the cache after them.

        The logits are equal to the logits of the whole text, up to rounding. They are NaN if the cache or the learned
        positions do not suffice.
        """
        batch, length = cache.keys[0].shape[:2]
        _check_tokens(tokens, length, "length of the cache", batch)
        positions = cache.index + _positions(tokens.shape[1])
        x, keys, values = self._embedded(tokens, positions), [], []
        for block, *kept in zip(self.blocks, cache.keys, cache.values, strict=True):
            x, key, value = block.decode(x, positions, *kept, cache.index)
            keys.append(key)
            values.append(value)
        index = cache.index + tokens.shape[1]
        logits = jnp.where(index <= keys[0].shape[1], self._logits(self.norm(x)), jnp.nan)
        return logits, KeyValueCache(tuple(keys), tuple(values), index)

    def shardings(self, mesh: Mesh, axis: str, tree: PyTree | None = None) -> PyTree[NamedSharding]:
        """Return the sharding of each parameter for tensor parallelism, for `jax.device_put(parameters, shardings)`.

        The mesh axis divides the key heads, the hidden layers of the MLPs, and the vocabulary. Each device has all
        other parameters.

        Args:
          tree: a pytree of arrays with the parameters' paths, such as the state of an optimizer. By default, the
            parameters.
        """

        def sharding(path: tuple[Any, ...], parameter: Array) -> NamedSharding:
            divided = next((_DIVIDED_AXES[key.key] for key in path if getattr(key, "key", None) in _DIVIDED_AXES), None)
            spec = [axis if i == divided else None for i in range(2)]
            # A bias has the axis of the outputs.
            return NamedSharding(mesh, PartitionSpec(*spec[2 - jnp.ndim(parameter) :]))

        return jax.tree_util.tree_map_with_path(sharding, nnx.state(self, nnx.Param) if tree is None else tree)

    @property
    def _head(self) -> Embed:
        return self.embed if self.head is None else self.head

    def _embedded(self, tokens: Array, positions: Array) -> Array:
        x = self.embed(tokens)
        return x if self.position_embed is None else x + self.position_embed(positions)

    def _logits(self, x: Array) -> Array:
        return upcast(self._head.attend(x))


def segment_positions(segment_ids: Int[AnyArray, "batch length"]) -> Int[Array, "batch length"]:
    """Return the position of each token in its run of equal segment ids."""
    index = _positions(segment_ids.shape[1])
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - lax.cummax(jnp.where(is_first, index, 0), axis=1)


def _positions(length: int) -> Array:
    return jnp.arange(length, dtype=jnp.int32)[None]


def _check_tokens(tokens: Any, most: int | None = None, limit: str = "", batch: int | str = "batch") -> None:
    checks.shape("GPT", "tokens", checks.integers("GPT", "tokens", tokens), batch, "length")
    if most is not None and tokens.shape[1] > most:
        raise ValueError(f"GPT: tokens has {tokens.shape[1]} positions; wants at most {most}, the {limit}")


def _check(sizes: dict[str, int], choices: dict[str, tuple[Any, tuple]], max_length: int | None) -> bool:
    """Check the arguments of `GPT`, and return whether the embedding of positions is learned. `choices` has the value
    and the possible values of each option."""
    for name, value in sizes.items():
        checks.count("GPT", name, value)
    features, heads, key_heads = (sizes[name] for name in ("features", "num_heads", "num_key_value_heads"))
    if features % heads:
        raise ValueError(f"GPT: num_heads is {heads}; wants a divisor of {features}, the features")
    if heads % key_heads:
        raise ValueError(f"GPT: num_key_value_heads is {key_heads}; wants a divisor of {heads}, the num_heads")
    for name, (value, possible) in choices.items():
        if value not in possible:
            raise ValueError(f"GPT: {name} is {value!r}; wants one of {', '.join(map(repr, possible))}")
    if choices["position_embedding"][0] == "learned":
        checks.count("GPT", "max_length", max_length)
        return True
    if max_length is not None:
        raise ValueError(
            f"GPT: max_length is {max_length}; wants None, because rotary embedding has no largest position"
        )
    if features // heads % 2:
        raise ValueError(f"GPT: num_heads is {heads}; wants heads with an even number of features for rotary embedding")
    return False
