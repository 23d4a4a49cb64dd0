"""Scaled dot-product attention.

Sizes are T queries, S keys, N heads of queries, K heads of keys, and H features per head.
"""

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, Case, case_of, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import cast, clipped_to_int32, wide
from jaxbp.ops._defaults import AUTODIFF_EVERYWHERE
from jaxbp.ops.attention._chunks import attend, gradients
from jaxbp.ops.attention._formulas import as_given, attention_by_autodiff, separate, without_unpaired
from jaxbp.ops.attention._kernels import attend_kernel, gradients_kernel, unsupported
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, by_autodiff, in_dtypes_of
from pallas_kernels.attention.tiles import Known, Masks, intervals

AnyQueries = Float[AnyArray, "*batch T N H"]
AnyKeys = Float[AnyArray, "*batch S K H"]
AnyValues = Float[AnyArray, "*batch S K value_features"]
AnyResults = Float[AnyArray, "*batch T N value_features"]
AnyLengths = Int[AnyArray, "batch"]
AnySegments = Int[AnyArray, "*batch positions"]
Results = Float[Array, "*batch T N value_features"]
Gradients = Float[Array, "..."] | tuple[Float[Array, "..."], ...]


def _save(q, k, v, *others, return_residual, **options):
    y, largest, total = attend(*separate(q, k, v), *others, **options)
    y = cast(y, q.dtype)
    return (y, largest + jnp.log(total)) if return_residual else y, (q, k, v, *others, largest, total)


def _save_kernel(*arrays, return_residual, **options):
    y, error, logsumexp = attend_kernel(*arrays, **options)
    return (y, logsumexp) if return_residual else y, (*arrays, y, error, logsumexp)


def _forward(save, *arrays, **options):
    return save(*arrays, **options)[0]


def _backward(gradients, dy, *saved, return_residual, **options):
    dy, dlogsumexp = dy if return_residual else (dy, None)
    return *gradients(dy, dlogsumexp, *saved, **options), None


def _gradients(dy, dlogsumexp, q, k, v, *others, **options):
    *of_qkv, dbias = gradients(dy, dlogsumexp, *separate(q, k, v), *others, **options)
    return *as_given(k, *of_qkv), dbias


def _default(*arrays, **options):
    *_, q, _, _, _, _ = arrays
    if wide(q.dtype) != q.dtype:  # autodiff rounds the gradients of the probabilities
        return DefaultImplementation()
    return AUTODIFF_EVERYWHERE


# One pair per implementation, because they also differ in their forwards.
_PAIRS = {
    name: Pair(
        functools.partial(_forward, save),
        {name: functools.partial(_backward, backward)},
        save=save,
        name="dot_product_attention",
    )
    for name, save, backward in (("xla", _save, _gradients), ("pallas", _save_kernel, gradients_kernel))
}
_public_op = functools.partial(Op, default=_default, partitioned=True, jit=True)


def _definition_backward(dy, *arrays, **options):
    return by_autodiff(functools.partial(attention_by_autodiff, **options), dy, *arrays)


_DOT_PRODUCT_ATTENTION = _public_op(
    "dot_product_attention",
    {"autodiff": attention_by_autodiff}
    | {name: functools.partial(pair, implementation=name) for name, pair in _PAIRS.items()},
    unsupported=unsupported,
)
_DOT_PRODUCT_ATTENTION_BACKWARD = _public_op(
    "dot_product_attention_backward",
    {"autodiff": _definition_backward}
    | {name: functools.partial(pair.vjp, implementation=name) for name, pair in _PAIRS.items()},
    unsupported=lambda dy, *arrays, **options: unsupported(*arrays, **options),
)


@overload
def dot_product_attention(
    query: AnyQueries,
    key: AnyKeys | None = None,
    value: AnyValues | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Any,
) -> Results: ...


@overload
def dot_product_attention(
    query: AnyQueries,
    key: AnyKeys | None = None,
    value: AnyValues | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    *,
    return_residual: Literal[True],
    **options: Any,
) -> tuple[Results, Float[Array, "*batch T N"]]: ...


def dot_product_attention(
    query: AnyQueries,
    key: AnyKeys | None = None,
    value: AnyValues | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: AnyLengths | None = None,
    key_value_seq_lengths: AnyLengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: AnySegments | None = None,
    query_segment_ids: AnySegments | None = None,
    key_value_segment_ids: AnySegments | None = None,
    softcap: float | None = None,
    return_residual: bool = False,
    implementation: Implementation = None,
) -> Any:
    """Attention per head, `y[t] = Σ_s p[t, s] v[s]`, with `p[t] = softmax(z[t])` and

        z[t, s] = softcap tanh(scale q[t]·k[s] / softcap) + bias[t, s].

    Without `softcap`, `z[t, s] = scale q[t]·k[s] + bias[t, s]`. The softmax is over the valid pairs (t, s): the pairs
    that no mask excludes, and whose bias is not -inf. A query without a valid key has the result 0 and gradients of 0.
    Queries, keys, and values that one mask excludes from all pairs are never read.

    Args:
      query: `(batch, T, N, H)`, or `(T, N, H)` without a batch axis.
      key: `(batch, S, K, H)`. N is a multiple of K, and query head n attends to key head `n // (N // K)`.
      value: `(batch, S, K, value_features)`. If key and value are None, `query` is packed: it has the shape
        `(batch, T, K, N // K + 2, H)`, and for each key head the queries that attend to it, the key, and the value.
        With "pallas", XLA then makes no arrays of the parts, and for heads of at most 128 features, it does not join
        the parts of the gradient.
      bias: broadcasts to `(batch, N, T, S)`. It is not promoted with the other arrays.
      mask: True for valid pairs; broadcasts to `(batch, N, T, S)`.
      scale: by default, `1 / sqrt(H)`.
      is_causal: whether a query attends only to keys with `s <= t`, also if T and S differ.
      query_seq_lengths, key_value_seq_lengths: integers `(batch,)`, or `(1,)` without a batch axis. Queries or keys
        from these positions on are excluded.
      local_window_size: a pair (before, after), or one number for both. A query attends only to keys with
        `t - before <= s <= t + after`.
      segment_ids: integers `(batch, T)`, if T and S are equal. A query attends only to keys of its segment. The ids
        need not be sorted.
      query_segment_ids, key_value_segment_ids: instead of `segment_ids`, integers `(batch, T)` and `(batch, S)`.
      softcap: if given, the largest absolute value of scores before the bias is added.
      return_residual: whether to return the log-sum-exp, too.
      implementation: "xla" computes one tile of scores at a time, and skips tiles without a valid pair. "autodiff"
        stores all scores. It calls `jax.nn.dot_product_attention` if that function has all the options that are given.
        "pallas" runs kernels for bfloat16 and float16 on compute capability 9.0.

    Returns:
      y `(batch, T, N, value_features)`, in the promoted dtype of query, key, and value. With `return_residual`, also
      the log-sum-exp of `z[t]`, `(batch, T, N)`, in float32 or wider, which is -inf for a query without a valid key.

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017. In tiles: T. Dao, "FlashAttention-2",
    ICLR 2024.
    """
    op, lengths = "dot_product_attention", (query_seq_lengths, key_value_seq_lengths)
    segments = segment_ids, query_segment_ids, key_value_segment_ids
    q, k, v, *others = _arrays(op, query, key, value, bias, mask, is_causal, lengths, local_window_size, segments)
    options = _options(op, q, scale, softcap) | dict(implementation=implementation)
    return_residual = checks.boolean(op, "return_residual", return_residual)
    found = _DOT_PRODUCT_ATTENTION(q, k, v, *others, **options, return_residual=return_residual)
    y, residual = found if return_residual else (found, None)
    residual = None if residual is None else jnp.swapaxes(residual, 1, 2)
    if jnp.ndim(query) == 3 + (key is None):
        y, residual = y[0], None if residual is None else residual[0]
    return (y, residual) if return_residual else y


def dot_product_attention_backward(
    dy: AnyResults,
    query: AnyQueries,
    key: AnyKeys | None = None,
    value: AnyValues | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: AnyLengths | None = None,
    key_value_seq_lengths: AnyLengths | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: AnySegments | None = None,
    query_segment_ids: AnySegments | None = None,
    key_value_segment_ids: AnySegments | None = None,
    softcap: float | None = None,
    implementation: Implementation = None,
) -> Gradients:
    """Gradients of `dot_product_attention`. With `dz[t, s] = p[t, s] (dy[t]·v[s] - dy[t]·y[t])`,

        dq[t] = scale Σ_s dz[t, s] k[s],    dk[s] = scale Σ_t dz[t, s] q[t],    dv[s] = Σ_t p[t, s] dy[t].

    dk and dv are also summed over the query heads of each key head. The gradient of the bias is dz, summed over the
    axes along which the bias broadcasts. With `softcap`, dz in dq and dk is multiplied by `1 - tanh²`.

    Arguments and errors are as in `dot_product_attention`, after dy, which has the shape of y.

    Returns:
      dq, dk, dv, or if `query` is packed, its gradient; and if bias is given, dbias.
    """
    op, lengths = "dot_product_attention_backward", (query_seq_lengths, key_value_seq_lengths)
    segments = segment_ids, query_segment_ids, key_value_segment_ids
    masks = mask, is_causal, lengths, local_window_size, segments
    dy, q, k, v, *others = _arrays(op, query, key, value, bias, *masks, dy=dy)
    options = _options(op, q, scale, softcap) | dict(return_residual=False, implementation=implementation)
    found = _DOT_PRODUCT_ATTENTION_BACKWARD(dy, q, k, v, *others, **options)
    given = [checks.array(op, "", a) for a in (query, key, value, bias) if a is not None]
    found = [a.reshape(b.shape) for a, b in zip(jax.tree.leaves(found), given, strict=True)]
    return in_dtypes_of(*(of if len(given) > 1 else of[0] for of in (tuple(given), tuple(found))))


def _arrays(op, query, key, value, bias, mask, is_causal, lengths, window, segments, **dy):
    """Return q, k, v, bias, and masks, after dy if it is given, all with a batch axis."""
    if (key is None) != (value is None):
        missing, given = ("key", "value") if key is None else ("value", "key")
        raise TypeError(f"{op}: {missing} is None, but {given} is given; wants both, or neither for a packed query")
    is_packed = key is None
    given = dict(query=query) | ({} if is_packed else dict(key=key, value=value)) | dy
    q, *others = checks.floating(op, **given)
    k, v, *dy = (None, None, *others) if is_packed else others
    axes = ("T", "K", "N // K + 2", "H") if is_packed else ("T", "N", "H")
    if q.ndim not in (len(axes), len(axes) + 1) or (is_packed and q.shape[-2] < 3):
        wanted = f"(batch, {', '.join(axes)}) or ({', '.join(axes)})"
        raise ValueError(f"{op}: query has shape {q.shape}; wants {wanted}{', without a key' * is_packed}")
    has_batch = q.ndim > len(axes)
    checks.shape(op, "query", q, *["batch"] * has_batch, *axes)
    lead = q.shape[: -len(axes)]
    if is_packed:
        queries, key_heads, members, features = q.shape[-4:]
        keys, heads, value_features = queries, key_heads * (members - 2), features
    else:
        queries, heads, features = q.shape[-3:]
        checks.shape(op, "key", k, *lead, "S", "K", features)
        keys, key_heads = k.shape[-3:-1]
        checks.shape(op, "value", v, *lead, keys, key_heads, "value_features")
        value_features = v.shape[-1]
    if heads % key_heads:
        raise ValueError(f"{op}: query has {heads} heads; wants a multiple of {key_heads}, the number of key heads")
    for a in dy:
        checks.shape(op, "dy", a, *lead, queries, heads, value_features)
    q, k, v, *dy = (a if a is None or has_batch else a[None] for a in (q, k, v, *dy))
    scores = q.shape[0], heads, queries, keys
    if bias is not None:
        checks.refuse_booleans(op, "bias", bias)
        bias = _of_scores(op, "bias", *checks.floating(op, bias=bias), scores)
    if mask is not None:
        mask = _of_scores(op, "mask", checks.array(op, "mask", mask), scores)
        if mask.dtype != bool:
            raise TypeError(f"{op}: mask has dtype {mask.dtype}; wants bool, for example `mask != 0`")
    sizes = dict(query_seq_lengths=queries, key_value_seq_lengths=keys)
    lengths = [_lengths(op, name, a, q.shape[0], size) for (name, size), a in zip(sizes.items(), lengths, strict=True)]
    segments = _segments(op, *segments, (*lead, queries), (*lead, keys))
    query_segments, key_segments = (a if a is None or has_batch else a[None] for a in segments)
    # Without lengths, each query can attend to the key at its position.
    pair_all = queries == keys and lengths == [None, None]
    before, after = _window(op, is_causal, window)
    known = Known(before, after, pair_all and mask is bias is None and query_segments is key_segments)
    masks = Masks(None, None, query_segments, key_segments, mask, known=known)
    if lengths != [None, None]:
        names = "query_lengths", "key_lengths"
        first, end = intervals(queries, keys, known, **dict(zip(names, lengths, strict=True)))
        masks = masks._replace(first=first, end=end)
    pair_all |= before is after is None and lengths == [None, None]
    q, k, v = without_unpaired(q, k, v, masks, intervals_pair_all=pair_all)
    return *dy, q, k, v, bias, masks


def _window(op, is_causal, window):
    """Return the numbers of keys before and after a query's position to which the query attends. None means no
    limit."""
    is_causal = checks.boolean(op, "is_causal", is_causal)
    if window is None:
        return None, 0 if is_causal else None
    # A larger window would overflow.
    before, after = (min(side, 2**30) for side in checks.pair(op, "local_window_size", window, at_least=0))
    return before, 0 if is_causal else after


def _of_scores(op, name, a, scores):
    """Return an array with all axes of the scores, which have size 1 where the array broadcasts."""
    shape = (1,) * (4 - a.ndim) + a.shape
    if len(shape) > 4 or any(size not in (1, wanted) for size, wanted in zip(shape, scores, strict=True)):
        raise ValueError(
            f"{op}: {name} has shape {a.shape}; wants a shape that broadcasts to {scores}, (batch, N, T, S)"
        )
    return a.reshape(shape)


def _integers(op, name, a, *shape):
    a = checks.integers(op, name, a)
    checks.shape(op, name, a, *shape)
    return a


def _lengths(op, name, a, batch, size):
    return None if a is None else clipped_to_int32(_integers(op, name, a, batch), size)


def _segments(op, both, of_queries, of_keys, queries, keys):
    if both is not None:
        if of_queries is not None or of_keys is not None:
            raise ValueError(f"{op}: segment_ids is given; wants no query_segment_ids and no key_value_segment_ids")
        if queries != keys:
            raise ValueError(
                f"{op}: segment_ids is given, but T is {queries[-1]} and S is {keys[-1]}; wants query_segment_ids and "
                "key_value_segment_ids"
            )
        return (_in_32_bits(_integers(op, "segment_ids", both, *queries)),) * 2
    if (of_queries is None) != (of_keys is None):
        given, wanted = ("query", "key_value") if of_keys is None else ("key_value", "query")
        raise ValueError(f"{op}: {given}_segment_ids is given; wants {wanted}_segment_ids, too")
    if of_queries is None:
        return None, None
    of_queries = _integers(op, "query_segment_ids", of_queries, *queries)
    of_keys = _integers(op, "key_value_segment_ids", of_keys, *keys)
    of_both = checks.numeric(op, query_segment_ids=of_queries, key_value_segment_ids=of_keys)
    return tuple(map(_in_32_bits, of_both))


def _in_32_bits(ids):
    # Equal integers stay equal, and different ones different.
    return ids.astype(jnp.int32) if ids.dtype.itemsize <= 4 else ids


def _options(op, q, scale, softcap):
    scale = q.shape[-1] ** -0.5 if scale is None else checks.number(op, "scale", scale)
    return dict(scale=scale, softcap=checks.softcap(op, softcap))


def _case(length: int, heads: int, features: int, key_heads: int = 0, bias: bool = False, **options: Any) -> Case:
    queries, keys = ((BATCH, length, n, features) for n in (heads, key_heads or heads))
    return case_of(queries, queries, keys, keys, *[(heads, length, length)] * bias, **options)


_CAUSAL = dict(is_causal=True)
_REAL = {
    "128x4x64": (None, _case(128, 4, 64, key_heads=2, **_CAUSAL)),
    "128x4x64 packed": (None, case_of((BATCH, 128, 4, 64), (BATCH, 128, 2, 4, 64), **_CAUSAL)),
    "8192x16x128": (4, _case(8192, 16, 128)),
    "8192x16x128 causal": (4, _case(8192, 16, 128, **_CAUSAL)),
    "8192x32x64 causal": (2, _case(8192, 32, 64, **_CAUSAL)),
    "1024x12x64 causal": (16, _case(1024, 12, 64, **_CAUSAL)),
    "8192x8x256 causal": (2, _case(8192, 8, 256, **_CAUSAL)),
    "4096x32x128 grouped causal": (2, _case(4096, 32, 128, key_heads=8, **_CAUSAL)),
    "384x4x32 bias": (384, _case(384, 4, 32, bias=True)),
    "8192x16x128 window": (4, _case(8192, 16, 128, **_CAUSAL, local_window_size=1023)),
    "8192x16x128 two-sided window": (4, _case(8192, 16, 128, local_window_size=1023)),
    "65536x16x128 causal": (1, _case(65536, 16, 128, **_CAUSAL)),
}
"""The batch size and the case by length, heads, and features. AlphaFold has a bias, and GPT-2 has 12 heads."""

ENTRIES = pair_entries(
    dot_product_attention,
    case_of(*[(2, 3, 2, 4)] * 2, *[(2, 5, 1, 4)] * 2, (2, 1, 5), local_window_size=(1, 3), softcap=1.5),
    {place: dataclasses.replace(case, batch=batch) for place, (batch, case) in _REAL.items()},
    like="linear",
    kernel_dtypes=("bfloat16", "float16"),
)
