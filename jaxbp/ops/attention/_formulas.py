"""The formula of attention, and its masks.

Arrays are `(batch, queries or keys, heads, head_dim)`, scores `(batch, heads, queries, keys)`, and statistics of the
queries `(batch, heads, queries)`.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.common.numerics import cast, upcast, wide
from pallas_kernels.attention.tiles import Masks


def separate(q: Array, k: Array | None, v: Array | None) -> tuple[Array, Array, Array]:
    """Return queries, keys, and values. If k is None, q is packed: it has the shape `(batch, positions, heads of k,
    group + 2, head_dim)`, and for each head of k the queries that attend to it, the key, and the value."""
    if k is not None:
        return q, k, v
    # The gradient of `jnp.split` joins the parts in one pass. Slices would be padded and added.
    parts = jnp.split(q, [q.shape[-2] - 2, q.shape[-2] - 1], axis=-2)
    return tuple(a.reshape(*a.shape[:-3], a.shape[-3] * a.shape[-2], a.shape[-1]) for a in parts)


def as_given(k: Array | None, dq: Array, dk: Array, dv: Array) -> tuple[Array, Array | None, Array | None]:
    """Return the gradients of q, k, and v, with None for k and v if q is packed."""
    if k is not None:
        return dq, dk, dv
    dq, dk, dv = (grouped(a, dk) for a in (dq, dk, dv))
    return jnp.concatenate([dq, dk, dv], axis=3), None, None


def valid_pairs(keys: Array, bias: Array | None, masks: Masks) -> Array | None:
    """Return whether each pair is valid, as booleans that broadcast to the scores, or None if all pairs are valid.

    `keys` has the int32 positions of the keys in `bias` and `masks`. If `masks` has no intervals, they exclude no key.
    """
    conditions = [] if masks.mask is None else [masks.mask]
    if bias is not None:
        conditions.append(bias != -jnp.inf)
    if masks.first is not None:
        first, end = (a[:, None, :, None] for a in (masks.first, masks.end))
        conditions += [keys[None, None, None, :] >= first, keys[None, None, None, :] < end]
    if masks.query_segments is not None:
        conditions.append(masks.query_segments[:, None, :, None] == masks.key_segments[:, None, None, :])
    return functools.reduce(operator.and_, conditions) if conditions else None


def without_unpaired(
    q: Array, k: Array | None, v: Array | None, masks: Masks, *, intervals_pair_all: bool
) -> tuple[Array, Array | None, Array | None]:
    """Set queries, keys, and values to 0 if one of the masks excludes them from all pairs, because a product of 0 and
    NaN would be NaN.

    `intervals_pair_all` is whether the intervals exclude no query and no key from all pairs.
    """
    if masks.mask is None and intervals_pair_all and masks.query_segments is masks.key_segments:
        return q, k, v
    given, (q, k, v) = k, separate(q, k, v)
    of_queries, of_keys = [], []
    if masks.mask is not None:
        of_queries.append(jnp.swapaxes(jnp.any(masks.mask, axis=3), 1, 2))
        valid = jnp.swapaxes(jnp.any(masks.mask, axis=2), 1, 2)
        of_keys.append(valid if valid.shape[2] == 1 else jnp.any(grouped(valid, k), axis=3))
    if not intervals_pair_all:
        masks = masks.with_intervals(q.shape[1], k.shape[1])
        has_key = masks.first < masks.end
        of_queries.append(has_key[:, :, None])
        # Intervals of consecutive queries overlap, and the first one starts at 0.
        end = jnp.max(jnp.where(has_key, masks.end, 0), axis=1)
        of_keys.append((jnp.arange(k.shape[1], dtype=jnp.int32)[None] < end[:, None])[:, :, None])
    if masks.query_segments is not masks.key_segments:
        segments = masks.query_segments, masks.key_segments
        of_queries.append(_are_among(*segments)[:, :, None])
        of_keys.append(_are_among(*segments[::-1])[:, :, None])

    def only(conditions, a):
        return jnp.where(functools.reduce(operator.and_, conditions)[..., None], a, 0) if conditions else a

    return as_given(given, only(of_queries, q), only(of_keys, k), only(of_keys, v))


def _are_among(ids: Array, others: Array) -> Array:
    """For each id `(batch, positions)`, return whether `others` contains the id in the same example."""
    others = jnp.sort(others, axis=1)
    at = jax.vmap(jnp.searchsorted)(others, ids)
    return jnp.take_along_axis(others, jnp.minimum(at, others.shape[1] - 1), axis=1) == ids


def scores_and_slope(
    q: Array, k: Array, bias: Array | None, valid: Array | None, *, scale: float, softcap: float | None
) -> tuple[Array, Any]:
    """Return the scores, -inf for pairs that are not valid, and their derivatives with respect to the products of q and
    k, in float32 or wider."""
    batch, queries, heads, _ = q.shape
    z = product("btkgh,bskh->bkgts", grouped(q, k), k).reshape(batch, heads, queries, k.shape[1]) * scale
    slope = scale
    if softcap is not None:
        t = jnp.tanh(z / softcap)
        z, slope = softcap * t, scale * (1 - t) * (1 + t)  # 1 - t² would lose digits near the cap
    z = z if bias is None else z + cast(bias, z.dtype)
    return z if valid is None else jnp.where(valid, z, -jnp.inf), slope


def product(subscripts: str, a: Array, b: Array) -> Array:
    """Return the product in float32 or wider. The arguments are upcast first only if their dtypes differ."""
    a, b = (a, b) if a.dtype == b.dtype else (upcast(a), upcast(b))
    return jnp.einsum(subscripts, a, b, preferred_element_type=wide(a.dtype))


def grouped(a: Array, k: Array, axis: int = 2) -> Array:
    """Split an axis of query heads into two axes: the heads of k, and the query heads of each head of k."""
    heads = k.shape[2]
    return a.reshape(*a.shape[:axis], heads, a.shape[axis] // heads, *a.shape[axis + 1 :])


def weighted_values(weights: Array, v: Array) -> Array:
    """Return `Σ_s weights_ts v_s` per query and head, in float32 or wider."""
    sums = product("bkgts,bskh->btkgh", grouped(weights, v, axis=1), v)
    return sums.reshape(*sums.shape[:2], weights.shape[1], v.shape[3])


def weighted_queries(weights: Array, a: Array, k: Array) -> Array:
    """Return `Σ_t weights_ts a_t` per key and head of k, in float32 or wider, also summed over the query heads of each
    head of k."""
    return product("bkgts,btkgh->bskh", grouped(weights, k, axis=1), grouped(a, k))


def where_key(has_key: Array, a: Array) -> Array:
    """Return `a (batch, queries, heads, ...)`, but 0 for queries without a valid key."""
    return jnp.where(jnp.swapaxes(has_key, 1, 2)[..., None], a, jnp.zeros((), a.dtype))


def attention_by_autodiff(
    q: Array,
    k: Array | None,
    v: Array | None,
    bias: Array | None,
    masks: Masks,
    *,
    scale: float,
    softcap: float | None,
    return_residual: bool,
) -> Any:
    """Return the result, and with `return_residual` also the log-sum-exp of the scores. This function stores all
    scores. It calls `jax.nn.dot_product_attention` if that function has all the options that are given."""
    q, k, v = separate(q, k, v)
    if masks.known.before is not None or masks.known.after is not None:
        masks = masks.with_intervals(q.shape[1], k.shape[1])
    valid = valid_pairs(jnp.arange(k.shape[1], dtype=jnp.int32), bias, masks)
    bias = None if bias is None else upcast(bias)
    has_key = None if valid is None else jnp.any(valid, axis=3, keepdims=True)
    residual = None
    if softcap is None and not return_residual and k.shape == v.shape and q.dtype in (jnp.float32, jnp.bfloat16):
        with jax.numpy_dtype_promotion("standard"):  # it promotes bfloat16 to float32
            y = jax.nn.dot_product_attention(q, k, v, bias, valid, scale=scale, implementation="xla")
    else:
        scores, _ = scores_and_slope(q, k, bias, valid, scale=scale, softcap=softcap)
        scores = scores if valid is None else jnp.where(has_key, scores, 0.0)
        y = cast(weighted_values(cast(jax.nn.softmax(scores), v.dtype), v), q.dtype)
        residual = jax.nn.logsumexp(scores, axis=3, keepdims=True)
    if valid is not None:
        y = where_key(has_key[..., 0], y)
        residual = None if residual is None else jnp.where(has_key, residual, -jnp.inf)
    return (y, residual[..., 0]) if return_residual else y
