"""Attention in float64 NumPy, and the arguments of the kernels' tests."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.tiles import Known, Masks, intervals
from pallas_kernels.core.device import HOPPER

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)

FEW_CTAS = dataclasses.replace(HOPPER, multiprocessors=1)
"""A CTA computes all rows of tiles of known masks, so that its rings continue from row to row."""

CASES = {
    "causal": dict(queries=200, keys=200, is_causal=True),
    "one query": dict(queries=1, keys=200),
    "window, lengths, grouped heads": dict(
        batch=2, queries=200, keys=140, heads=2, window=(20, 5), lengths=([200, 90], [140, 0])
    ),
    "segments, softcap, bfloat16": dict(
        queries=140, keys=200, head=128, segments=3, softcap=2.0, dtype="bfloat16", atol=3e-2
    ),
    "mask, bias": dict(queries=140, keys=140, mask=(1, 1, 1, 140), bias=(1, 1, 140, 140)),
    "heads of 32": dict(queries=140, keys=140, head=32, window=(20, 5), bias=(1, 1, 1, 140)),
    "heads of 256": dict(queries=100, keys=100, head=256, is_causal=True),
}
"""Sizes that are no multiples of the tiles, up to one and a half tiles."""

Expected = collections.namedtuple("Expected", "o lse delta dq dk dv dbias")


def arrays(case):
    random = np.random.default_rng(0)
    batch, heads, head = case.get("batch", 1), case.get("heads", 1), case.get("head", 64)
    sizes = [(case["queries"], heads), (case["keys"], 1), (case["keys"], 1), (case["queries"], heads)]
    return [
        jnp.asarray(random.standard_normal((batch, length, n, head)), case.get("dtype", "float16"))
        for length, n in sizes
    ]


def masks_of(case):
    random = np.random.default_rng(1)
    queries, keys = case["queries"], case["keys"]
    lengths = [None if a is None else jnp.asarray(a, jnp.int32) for a in case.get("lengths", (None, None))]
    before, after = case.get("window", (None, None))
    known = Known(before, 0 if case.get("is_causal") else after)
    options = dict(query_lengths=lengths[0], key_lengths=lengths[1], array_module=jnp if "lengths" in case else np)
    first, end = intervals(queries, keys, known, **options)
    segments = [None, None]
    if "segments" in case:  # out of order
        segments = [jnp.asarray(random.integers(0, case["segments"], (1, n)), jnp.int32) for n in (queries, keys)]
    mask = jnp.asarray(random.random(case["mask"]) < 0.5) if "mask" in case else None
    bias = jnp.asarray(random.standard_normal(case["bias"]), jnp.float32) if "bias" in case else None
    return Masks(first, end, *segments, mask, bias)


def reference(q, k, v, masks, do=None, *, scale, softcap=None):
    q, k, v = (np.asarray(a, np.float64).transpose(0, 2, 1, 3) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, 1) for a in (k, v))
    s, slope = scale * q @ k.swapaxes(2, 3), 1.0
    if softcap is not None:
        slope = 1 - np.tanh(s / softcap) ** 2
        s = softcap * np.tanh(s / softcap)
    s = s if masks.bias is None else s + masks.bias
    key = np.arange(k.shape[2])
    valid = ((key >= np.asarray(masks.first)[:, :, None]) & (key < np.asarray(masks.end)[:, :, None]))[:, None]
    if masks.query_segments is not None:
        valid = valid & np.asarray(masks.query_segments[:, :, None] == masks.key_segments[:, None, :])[:, None]
    valid = valid if masks.mask is None else valid & np.asarray(masks.mask)
    exponentials = np.where(valid, np.exp(s), 0)
    total = exponentials.sum(-1, keepdims=True)
    p = exponentials / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    o = p @ v
    gradients = [None] * 5
    if do is not None:
        do = np.asarray(do, np.float64).transpose(0, 2, 1, 3)
        delta = (o * do).sum(-1)
        dz = p * (do @ v.swapaxes(2, 3) - delta[..., None])
        ds, dbias = scale * slope * dz, None
        if masks.bias is not None:
            dbias = dz.sum(tuple(axis for axis, size in enumerate(masks.bias.shape) if size == 1), keepdims=True)

        def grouped(a):
            return a.reshape(len(a), -1, group, *a.shape[2:]).sum(2).transpose(0, 2, 1, 3)

        dk, dv = grouped(ds.swapaxes(2, 3) @ q), grouped(p.swapaxes(2, 3) @ do)
        gradients = [delta, (ds @ k).transpose(0, 2, 1, 3), dk, dv, dbias]
    return Expected(o.transpose(0, 2, 1, 3), lse, *gradients)


def structs(head, dtype="bfloat16", queries=8192, keys=8192, heads=(16, 4), options=False):
    """Return shapes of q, k, v, and of masks with all options if `options`."""
    q, k = (jax.ShapeDtypeStruct((4, n, m, head), dtype) for n, m in zip((queries, keys), heads, strict=True))
    row, column = (jax.ShapeDtypeStruct((4, n), "int32") for n in (queries, keys))
    elements = (jax.ShapeDtypeStruct((1, heads[0], queries, keys), a) for a in ("bool", dtype))
    return q, k, k, Masks(row, row, row, column, *elements) if options else Masks(row, row)
