"""Packed queries, keys, and values: one array `(batch, positions, key heads, group + 2, dimension)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import FEW_CTAS, can_simulate
from helpers import cuda_program, on_the_cpu

from pallas_kernels.attention.backward_keys_sm90 import backward_keys
from pallas_kernels.attention.backward_queries_sm90 import backward_queries
from pallas_kernels.attention.forward_sm90 import forward
from pallas_kernels.attention.tiles import Known, Masks, visited_tiles
from pallas_kernels.core.device import targeting
from pallas_kernels.core.simulator import simulated


def separate(packed):
    queries = packed[:, :, :, :-2].reshape(*packed.shape[:2], -1, packed.shape[-1])
    return queries, packed[:, :, :, -2], packed[:, :, :, -1]


def joined(dq, dk, dv):
    return jnp.concatenate([dq.reshape(*dk.shape[:3], -1, dk.shape[3]), dk[:, :, :, None], dv[:, :, :, None]], axis=3)


def results(qkv, do, packed):
    """Return o and the packed gradient."""
    q, k, v = qkv
    length = q.shape[1]
    masks = Masks(known=Known(after=0, has_keys=True)).with_intervals(length, length, np)

    def run(kernel, side, *arrays):
        config = kernel.plan(q, k, v, scale=0.3)
        return kernel(*arrays, visited_tiles(masks, length, config.tile)[side], scale=0.3, config=config)

    o, _, lse = run(forward, 0, q, k, v, masks)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=3).swapaxes(1, 2)
    arrays = q, k, v, do, lse, delta, masks
    dkv = run(backward_keys, 1, *arrays)
    if not packed:
        return o, joined(run(backward_queries, 0, *arrays), *dkv)
    config = backward_queries.plan(q, k, v, scale=0.3)
    visits, _ = visited_tiles(masks, length, config.tile)
    return o, backward_queries(*arrays, visits, dkv, scale=0.3, config=config)


@can_simulate
@pytest.mark.parametrize(("length", "key_heads", "group", "head"), [(200, 2, 1, 64), (140, 1, 2, 128)])
def test_the_results_have_the_bits_of_separate_arrays(length, key_heads, group, head):
    keys = jax.random.split(jax.random.key(length), 2)
    packed = jax.random.normal(keys[0], (1, length, key_heads, group + 2, head), jnp.bfloat16)
    do = jax.random.normal(keys[1], (1, length, key_heads * group, head), jnp.bfloat16)
    with on_the_cpu(), targeting(FEW_CTAS), simulated():
        actual = jax.jit(lambda a, do: results((a,) * 3, do, packed=True))(packed, do)
        expected = jax.jit(lambda a, do: results(separate(a), do, packed=False))(packed, do)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("head", [64, 128])
def test_it_lowers_for_cuda(head, on_hopper):
    packed = jax.ShapeDtypeStruct((2, 1000, 3, 4, head), jnp.bfloat16)
    do = jax.ShapeDtypeStruct((2, 1000, 6, head), jnp.bfloat16)
    program = cuda_program(lambda a, do: results((a,) * 3, do, packed=True), packed, do)
    assert program.count("mosaic_gpu") >= 3
