"""Attention and its gradients by kernels for Hopper's tensor cores. Without a GPU, the formula computes them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxbp.common.numerics import cast, upcast
from jaxbp.ops.attention._chunks import attend, gradients
from jaxbp.ops.attention._formulas import as_given, separate, where_key
from jaxbp.pairing import Axes, differentiable
from pallas_kernels.attention.backward_bias_sm90 import backward_bias
from pallas_kernels.attention.backward_keys_sm90 import backward_keys
from pallas_kernels.attention.backward_queries_sm90 import backward_queries
from pallas_kernels.attention.backward_sm90 import backward, row_count
from pallas_kernels.attention.forward_sm90 import forward
from pallas_kernels.attention.scores_sm90 import HEADS
from pallas_kernels.attention.tiles import MOST_CONSTANTS, Masks, mean_keys, segments_as_intervals, visited_tiles
from pallas_kernels.core.launch import on_gpu

_DTYPES = jnp.bfloat16, jnp.float16
_BIAS_DTYPES = (*_DTYPES, jnp.float32)
LEAST_TILE = 64
"""The smallest side of a kernel's tile."""
LEAST_ROWS = 1024
LEAST_PAIRS = 900
"""One kernel of five products computes all gradients faster than two kernels of seven, if there are this many rows of
tiles, and on average this many valid pairs per query and per key. On an H200, with as many queries as keys, it was
faster with 1,024 rows and 4,096 pairs, and with 4,096 rows and 960 pairs, and slower with 512 rows and 2,048 pairs, and
with 4,096 rows and 512 pairs. With few pairs per key, rows are short, and may wait for each other (not measured)."""


def unsupported(q: Any, k: Any, v: Any, bias: Any, masks: Masks, *, scale: float, **options: Any) -> str | None:
    """Return why the kernels do not support the arguments, or None."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}, only bfloat16 and float16"
    if k is None:
        k = v = q
    features = max(q.shape[-1], v.shape[-1])
    if features > HEADS[-1]:
        return f"heads of {features} features, at most {HEADS[-1]}"
    if bias is not None and bias.dtype not in _BIAS_DTYPES:
        return f"a bias of dtype {bias.dtype}, only bfloat16, float16, and float32"
    if masks.query_segments is not None and masks.query_segments.dtype != jnp.int32:
        return f"segments of dtype {masks.query_segments.dtype}, only integers of at most 32 bits"
    if any(a.size >= 2**31 for a in jax.tree.leaves((q, k, v, bias, masks))):
        return "2^31 or more elements"
    if q.shape[0] == 0:
        return None
    q, k, v = (jax.ShapeDtypeStruct((*a.shape[:-1], _padded_features(q, v)), a.dtype) for a in (q, k, v))
    return forward.unsupported(q, k, v, scale=scale)


def _with_kernel(kernel: Callable, formula: Callable, *names: str) -> Callable:
    """Return a function of arrays that calls `kernel` on a GPU. Elsewhere, and for an empty q, it calls `formula`, the
    same function in jnp. `names` are the parameters of `formula`, in order, among them "q". On a mesh, the devices
    divide the arrays with the batch size of q, and the heads of keys with their queries."""

    def call(*arrays, **options):
        of_options = [functools.partial(f, **options) for f in (kernel, formula)]
        q = arrays[names.index("q")]
        return of_options[1](*arrays) if q.size == 0 else on_gpu(*of_options, *arrays)

    def axes(*arrays):
        # An array whose batch axis or axis of heads has size 1 is the same for all examples or heads.
        batch = arrays[names.index("q")].shape[0]
        leaves = [(name, jax.tree.leaves(a)) for name, a in zip(names, arrays, strict=True)]
        examples = {name: [0 if a.shape[0] == batch else None for a in of] for name, of in leaves if of}
        heads = {name: [_axis_of_heads(name, a) for a in of] for name, of in leaves if of}
        return Axes(examples, others=(Axes(heads),))

    return differentiable(call, formula, axes)


def _axis_of_heads(name, a):
    if name not in ("bias", "masks"):
        return 1 if name in ("logsumexp", "dlogsumexp") else 2
    # The other leaves of the masks have fewer axes.
    return 1 if a.ndim == 4 and a.shape[1] > 1 else None


def _attend(q, k, v, bias, masks, **options):
    if k is None:
        k = v = q
    arrays, masks = _padded(q, k, v), _masks(q, k, bias, masks)
    config = forward.plan(*arrays, **options)
    visits, _ = visited_tiles(masks, k.shape[1], config.tile)
    y, error, logsumexp = forward(*arrays, masks, visits, config=config, **options)
    return y[..., : v.shape[-1]], error[..., : v.shape[-1]], logsumexp


def _attend_by_formula(q, k, v, bias, masks, **options):
    exact, largest, total = attend(*separate(q, k, v), bias, masks, **options)
    y = cast(exact, q.dtype)
    return y, cast(exact - upcast(y), q.dtype), largest + jnp.log(total)


def _gradients(dy, dlogsumexp, q, k, v, bias, masks, y, error, logsumexp, **options):
    has_key = None if masks.known.has_keys else logsumexp != -jnp.inf
    dy = dy if has_key is None else where_key(has_key, dy)
    # A delta of the rounded y would have a large error if the softmax is saturated.
    delta = jnp.moveaxis(jnp.sum(upcast(dy) * (upcast(y) + upcast(error)), axis=3), 2, 1)
    if dlogsumexp is not None:
        delta -= dlogsumexp if has_key is None else jnp.where(has_key, dlogsumexp, 0.0)
    is_packed, (k, v) = k is None, (k, v) if k is not None else (q, q)
    (*qkv, padded_dy), of_kernels = _padded(q, k, v, dy), _masks(q, k, bias, masks)
    statistics = padded_dy, logsumexp, delta, of_kernels

    def run(kernel, side, *others):
        config = kernel.plan(*qkv, masks=of_kernels, **options)
        visits = visited_tiles(of_kernels, k.shape[1], config.tile)[side]
        return kernel(*qkv, *statistics, visits, *others, config=config, **options)

    if _one_kernel_is_faster(*qkv, of_kernels, **options):
        padded = run(backward, 1)
    elif is_packed and backward_queries.plan(*qkv, **options).copies_gradients:
        padded = run(backward_queries, 0, run(backward_keys, 1)), None, None
    else:
        padded = as_given(None if is_packed else k, run(backward_queries, 0), *run(backward_keys, 1))
    found = [None if a is None else a[..., : like.shape[-1]] for a, like in zip(padded, (q, k, v), strict=True)]
    if bias is None:
        return *found, None
    if is_packed:
        qkv = separate(qkv[0], None, None)
    config = backward_bias.plan(*qkv, masks=of_kernels, **options)
    return *found, cast(backward_bias(*qkv, *statistics, config=config, **options), bias.dtype)


def _one_kernel_is_faster(q, k, v, masks, **options):
    if backward.unsupported(q, k, v, masks=masks, **options) is not None:
        return False
    pairs = mean_keys(masks) * min(1, q.shape[1] / k.shape[1])
    return row_count(q, k) >= LEAST_ROWS and pairs >= LEAST_PAIRS


def _gradients_by_formula(dy, dlogsumexp, q, k, v, bias, masks, y, error, logsumexp, **options):
    statistics = logsumexp, jnp.ones_like(logsumexp)
    *of_qkv, dbias = gradients(dy, dlogsumexp, *separate(q, k, v), bias, masks, *statistics, **options)
    return *as_given(k, *of_qkv), dbias


def _padded_features(q, v):
    return next(size for size in HEADS if size >= max(q.shape[-1], v.shape[-1]))


def _padded(q: Array, k: Array, v: Array, *others: Array) -> tuple[Array, ...]:
    """Return all arrays, with their features padded with zeros to the same head dimension.

    It is the smallest head dimension in `HEADS` that holds the features of q and v.
    """
    size = _padded_features(q, v)
    arrays = q, k, v, *others
    return tuple(jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, size - a.shape[-1]),)) for a in arrays)


def _masks(q, k, bias, masks):
    queries, keys = q.shape[1], k.shape[1]
    is_small = queries * keys <= MOST_CONSTANTS * LEAST_TILE**2
    return segments_as_intervals(masks.with_intervals(queries, keys, np if is_small else jnp))._replace(bias=bias)


_ARGUMENTS = "q", "k", "v", "bias", "masks"
attend_kernel = _with_kernel(_attend, _attend_by_formula, *_ARGUMENTS)
"""`attend_kernel(q, k, v, bias, masks, *, scale, softcap) -> (y, error, logsumexp)`, with y and its rounding error
in the dtype of q, and logsumexp `(batch, heads, queries)`. If k and v are None, q is packed: see
`_formulas.separate`."""
gradients_kernel = _with_kernel(
    _gradients, _gradients_by_formula, "dy", "dlogsumexp", *_ARGUMENTS, "y", "error", "logsumexp"
)
"""`gradients_kernel(dy, dlogsumexp, q, k, v, bias, masks, y, error, logsumexp, **options) -> (dq, dk, dv, dbias)`.
dlogsumexp and bias may be None. If q is packed, dq is, too."""
