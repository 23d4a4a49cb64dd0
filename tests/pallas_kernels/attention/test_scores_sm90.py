import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import FEW_CTAS, can_simulate, structs
from helpers import cuda_program, on_the_cpu

from pallas_kernels.attention import (
    backward_bias_sm90,
    backward_keys_sm90,
    backward_queries_sm90,
    forward_sm90,
    scores_sm90,
)
from pallas_kernels.attention.tiles import Known, Masks, Visits, visited_tiles
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.core.simulator import simulated


def test_the_unknown_zero_of_every_tile_and_of_many_visits_is_0():
    tiles = np.array([0, 2**24, 2**29 - 1], np.int32)
    assert (jax.jit(scores_sm90.unknown_zero)(tiles) == 0).all()


def test_padding_is_masked():
    ones = jnp.ones((1, 3), jnp.int32)
    bias = jnp.arange(15.0).reshape(1, 1, 3, 5)
    masks = Masks(ones, 4 * ones, ones, jnp.ones((1, 5), jnp.int32), bias[:, :, :1] > 2, bias)
    padded = scores_sm90.padded(masks, (4, 8), transposed=True)
    assert [a.shape for a in padded[:6]] == [(1, 4)] * 3 + [(1, 8), (1, 1, 8, 1), (1, 1, 8, 4)]
    assert padded.first[0, 3] == padded.end[0, 3] == 0
    np.testing.assert_array_equal(padded.bias[0, 0, :5, :3], bias[0, 0].T)


def test_queries_without_keys_have_probability_zero():
    lse, delta = scores_sm90.padded_statistics(jnp.array([[[1.0, -jnp.inf, 3.0]]]), jnp.ones((1, 1, 3)), 4)
    np.testing.assert_array_equal(jnp.exp2(-lse)[0, 0, 1::2], [0, 0])
    np.testing.assert_allclose(jnp.exp2(-lse)[0, 0, ::2], np.exp([-1, -3]), rtol=1e-5)
    np.testing.assert_array_equal(delta[0, 0], [1, 1, 1, 0])


@pytest.mark.parametrize("head", scores_sm90.HEADS)
def test_plans_fit_in_registers(head, on_hopper):
    q, k, v, _ = structs(head)
    kernels = forward_sm90.forward, backward_keys_sm90.backward_keys, backward_queries_sm90.backward_queries
    forward, by_keys, by_queries = (kernel.plan(q, k, v, scale=1.0) for kernel in kernels)
    # Registers per thread: a float32 tile of 64 x n takes n / 2. One operand in half precision, n / 4, is live at once.
    registers = {
        "forward": head / 2 + forward.keys * 3 / 4,
        "keys": head / 2 + by_keys.queries * 3 / 4 if by_keys.divided else head + by_keys.queries * 5 / 4,
        "queries": head / 2 + by_queries.keys * 5 / 4,
    }
    assert registers.pop("forward") <= scores_sm90.CONSUMER_REGISTERS[forward.consumers] - 16
    assert max(registers.values()) <= scores_sm90.CONSUMER_REGISTERS[2] - 16, registers
    for consumers, of_each in scores_sm90.CONSUMER_REGISTERS.items():
        assert 128 * (consumers * of_each + scores_sm90.PRODUCER_REGISTERS) <= HOPPER.registers


def test_the_kernels_lower_in_64_bit_mode(on_hopper):
    q, k, v, masks = structs(64, queries=200, keys=300, options=True)
    statistics = [jax.ShapeDtypeStruct((4, 16, 200), "float32")] * 2

    def all_kernels(q, k, v, lse, delta, masks):
        def run(kernel, side, *arrays):
            config = kernel.plan(q, k, v, scale=0.1)
            return kernel(*arrays, masks, visited_tiles(masks, 300, config.tile)[side], scale=0.1, config=config)

        gradients = q, k, v, q, lse, delta
        forward = run(forward_sm90.forward, 0, q, k, v)
        of_keys = run(backward_keys_sm90.backward_keys, 1, *gradients)
        of_queries = run(backward_queries_sm90.backward_queries, 0, *gradients)
        return forward, of_keys, of_queries, backward_bias_sm90.backward_bias(*gradients, masks, scale=0.1)

    with jax.enable_x64(True):
        program = cuda_program(all_kernels, q, k, v, *statistics, masks)
    names = "forward", "backward_keys", "backward_queries", "backward_bias"
    assert all(f"attention_{name}" in program for name in names)


def rows_of(batch, heads, tiles, visits, persistent):
    own = jax.ShapeDtypeStruct((batch, 8192, heads, 64), "float16")
    return scores_sm90.rows_of(own, own, tiles, visits, last_first=True, persistent=persistent)


@pytest.mark.parametrize("heads", [(4, 16), (32, 12), (1, 3)])
@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["known", "traced"])
def test_a_schedule_has_each_row_once_and_gives_each_cta_as_many_tiles(heads, array, on_hopper):
    counts = np.random.default_rng(0).permutation(16).astype(np.int32)[None]
    visits = Visits(np.zeros((1, 16, 16), np.int32), array(counts))
    rows = rows_of(*heads, 16, visits, persistent=True)
    schedule = np.asarray(rows.schedule)
    of_cta = [row[1 : row[0, 0] + 1] for row in schedule]
    positions, tiles_of_row = np.concatenate(of_cta).T
    np.testing.assert_array_equal(np.sort(positions), np.arange(math.prod(rows.shape)))
    batches, of_batch, indices = rows.at(positions)
    assert len({*zip(batches.tolist(), of_batch.tolist(), indices.tolist(), strict=True)}) == len(positions)
    np.testing.assert_array_equal(tiles_of_row, counts[0, indices])
    assert len(schedule) == rows.programs == min(HOPPER.multiprocessors, len(positions))
    assert schedule.shape[1] >= 2 + max(map(len, of_cta)), "the row after the last is loaded, too"
    tiles = [row[:, 1].sum() for row in of_cta]
    assert max(tiles) - min(tiles) <= counts.max()


def test_ctas_compute_one_row_unless_they_are_persistent():
    visits = Visits(np.zeros((1, 4, 4), np.int32), np.array([[1, 2, 3, 4]]))
    rows = rows_of(2, 3, 4, visits, persistent=False)
    assert rows.programs == 24 and rows.schedule is None


def separate(packed):
    queries = packed[:, :, :, :-2].reshape(*packed.shape[:2], -1, packed.shape[-1])
    return queries, packed[:, :, :, -2], packed[:, :, :, -1]


def joined(dq, dk, dv):
    return jnp.concatenate([dq.reshape(*dk.shape[:3], -1, dk.shape[3]), dk[:, :, :, None], dv[:, :, :, None]], axis=3)


def results_and_gradient(qkv, do, packed):
    """Return o and the packed gradient."""
    q, k, v = qkv
    length = q.shape[1]
    masks = Masks(known=Known(after=0, has_keys=True)).with_intervals(length, length, np)

    def run(kernel, side, *arrays):
        config = kernel.plan(q, k, v, scale=0.3)
        return kernel(*arrays, visited_tiles(masks, length, config.tile)[side], scale=0.3, config=config)

    o, _, lse = run(forward_sm90.forward, 0, q, k, v, masks)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=3).swapaxes(1, 2)
    arrays = q, k, v, do, lse, delta, masks
    dkv = run(backward_keys_sm90.backward_keys, 1, *arrays)
    if not packed:
        return o, joined(run(backward_queries_sm90.backward_queries, 0, *arrays), *dkv)
    config = backward_queries_sm90.backward_queries.plan(q, k, v, scale=0.3)
    visits, _ = visited_tiles(masks, length, config.tile)
    return o, backward_queries_sm90.backward_queries(*arrays, visits, dkv, scale=0.3, config=config)


@can_simulate
@pytest.mark.parametrize(("length", "key_heads", "group", "head"), [(200, 2, 1, 64), (140, 1, 2, 128)])
def test_packed_arrays_give_the_bits_of_separate_arrays(length, key_heads, group, head):
    keys = jax.random.split(jax.random.key(length), 2)
    packed = jax.random.normal(keys[0], (1, length, key_heads, group + 2, head), jnp.bfloat16)
    do = jax.random.normal(keys[1], (1, length, key_heads * group, head), jnp.bfloat16)
    with on_the_cpu(), targeting(FEW_CTAS), simulated():
        actual = jax.jit(lambda a, do: results_and_gradient((a,) * 3, do, packed=True))(packed, do)
        expected = jax.jit(lambda a, do: results_and_gradient(separate(a), do, packed=False))(packed, do)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("head", [64, 128])
def test_packed_arrays_lower_for_cuda(head, on_hopper):
    packed = jax.ShapeDtypeStruct((2, 1000, 3, 4, head), jnp.bfloat16)
    do = jax.ShapeDtypeStruct((2, 1000, 6, head), jnp.bfloat16)
    program = cuda_program(lambda a, do: results_and_gradient((a,) * 3, do, packed=True), packed, do)
    assert program.count("mosaic_gpu") >= 3


def test_ctas_of_the_backward_for_heads_of_128_compute_several_short_rows(on_hopper):
    q, packed = (jax.ShapeDtypeStruct((1, 8192, 4, *members, 128), "bfloat16") for members in ((), (3,)))
    causal, window = (
        Masks(known=Known(before=before, after=0)).with_intervals(8192, 8192, np) for before in (None, 1023)
    )
    traced = jax.tree.map(jnp.asarray, causal)
    stages = [
        backward_keys_sm90.backward_keys.plan(a, a, a, masks=masks, scale=1.0).key_stages
        + 10 * backward_queries_sm90.backward_queries.plan(a, a, a, masks=masks, scale=1.0).query_stages
        for a in (q, packed)
        for masks in (causal, window, traced)
    ]
    assert stages == [11, 22, 22, 11, 12, 12]
