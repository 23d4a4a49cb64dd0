import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array

from jaxbp.common import checks
from jaxbp.nnx._layer import Layer, falls_back
from jaxbp.ops.attention import dot_product_attention as op
from jaxbp.pairing import Implementation


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    implementation: Implementation = None,
) -> Array:
    """`flax.nnx.dot_product_attention`, computed by `jaxbp.dot_product_attention`.

    Args:
      query, key, value: `(..., positions, heads, head_dim)`, with any number of batch axes.
      bias, mask: broadcast to `(..., heads, queries, keys)`. A pair is valid where the mask is True, or not 0.
      Other arguments: as in Flax.

    Raises:
      NotImplementedError: the implementation is "pallas" or "xla", and the call uses dropout, `precision`, or `module`.
        With other implementations, Flax computes such a call.
    """
    drops = dropout_rate > 0 and not deterministic
    lacking = dict(dropout=drops, precision=precision is not None, module=module is not None)
    if falls_back("dot_product_attention", implementation, **lacking):
        options = dict(dtype=dtype, precision=precision, module=module, promote_dtype=promote_dtype)
        options |= dict(dropout_rng=dropout_rng, dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout)
        options |= dict(deterministic=deterministic, is_causal=is_causal)
        return nnx.dot_product_attention(query, key, value, bias, mask, **options)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch = query.shape[:-3]
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    arrays = dict(query=query, key=key, value=value, bias=bias, mask=mask)
    arrays = (_with_one_batch_axis(name, a, batch) for name, a in arrays.items())
    y = op.dot_product_attention(*arrays, is_causal=is_causal, implementation=implementation)
    return y.reshape(*batch, *y.shape[-3:])


def _with_one_batch_axis(name: str, a: Any, batch: tuple[int, ...]) -> Any:
    if a is None:
        return None
    a = checks.array("dot_product_attention", name, a)
    lead = a.shape[:-3]
    if name in ("query", "key", "value"):
        if lead != batch:
            raise ValueError(
                f"dot_product_attention: {name} has shape {a.shape}; wants the batch axes {batch} of query"
            )
    elif all(size == 1 for size in lead):
        return a.reshape(*(1,) * bool(lead), *a.shape[-3:])
    elif len(batch) > 1:
        a = jnp.broadcast_to(a, (*batch, *a.shape[-3:]))
    return a if len(batch) < 2 else a.reshape(math.prod(batch), *a.shape[-3:])


class MultiHeadAttention(Layer, nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention`, whose `attention_fn` is by default `jaxbp.nnx.dot_product_attention`. Flax
    computes the projections.

    The argument `implementation` is for attention. With `decode=True`, keys and values come from Flax's cache.
    """

    @property
    def attention_fn(self) -> Callable:
        if self._attention_fn is nnx.dot_product_attention:
            return functools.partial(dot_product_attention, implementation=self.implementation)
        return self._attention_fn

    @attention_fn.setter
    def attention_fn(self, function: Callable) -> None:
        self._attention_fn = function

    def _only_in_flax(self) -> dict[str, bool]:
        return {"attention_fn": self._attention_fn is not nnx.dot_product_attention}
