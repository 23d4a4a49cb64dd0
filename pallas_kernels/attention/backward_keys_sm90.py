"""The gradients of attention's keys and values on Hopper's tensor cores.

    pᵀ = exp(sᵀ - lse)    dv = Σ pᵀ do    dsᵀ = pᵀ (v doᵀ - delta)    dk = scale Σ dsᵀ q,    with sums over the queries.

A CTA computes tiles of keys of key heads, one after another. A producer warpgroup copies tiles of queries and of do to
a ring of shared memory, one query head of the group after another, and the next tile of keys early. Each consumer
warpgroup owns 64 keys, and keeps their sums in registers. pᵀ and dsᵀ are multiplied from registers. The order of the
sums is fixed.

For dimensions of 256, the registers of a consumer hold one sum of 64 keys. The consumers then divide the roles: one
computes pᵀ and dv, the other dsᵀ and dk. The first passes pᵀ to the second in shared memory, in float32.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.attention.rows_of_keys_sm90 import (
    along_queries,
    for_each_visit,
    memory,
    probabilities,
    produce,
    products,
    rings,
)
from pallas_kernels.attention.scores_sm90 import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    Heads,
    Tile,
    padded,
    padded_statistics,
    rows_of,
    unknown_zero,
    unsupported,
)
from pallas_kernels.attention.tiles import Masks, Visits, attends_to_few
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, multiply_registers, operand, remainder
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_CONSUMERS = 2
_BUFFERS = 2
"""Buffers of p between consumers of divided roles."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles have `queries` queries and 128 keys, or 64 keys if the consumers' roles are `divided`. Shared memory holds
    `stages` tiles of queries and of do, and `key_stages` tiles of keys and of values. If `key_stages` is 1, each CTA
    computes one tile of keys."""

    queries: int = 64
    stages: int = 2
    key_stages: int = 1
    divided: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        return self.queries, ROWS if self.divided else ROWS * _CONSUMERS


def _plan(q, k, v, do=None, lse=None, delta=None, masks=None, visits=None, *, scale, softcap=None):
    if reason := unsupported(q, k, v, scale):
        return reason
    head = q.shape[-1]
    if head == 256:
        return Config(divided=True)
    if head <= 64:
        return Config(queries=128, key_stages=2)
    return Config(stages=3, key_stages=2 if attends_to_few(masks) else 1)


@kernel(plan=_plan, capability=(9, 0))
def backward_keys(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    masks: Masks,
    visits: Visits,
    *,
    scale: float,
    softcap: float | None = None,
    config: Config,
) -> tuple[Array, Array]:
    """Return dk and dv `(batch, keys, key heads, dimension)` in the dtype of k.

    Args:
      q, k, v, masks, scale, softcap: as in `forward_sm90.forward`.
      do: gradient with respect to o, in the shape and dtype of o.
      lse: `(batch, heads, queries)`, from the forward.
      delta: float32 `(batch, heads, queries)`, the sum of `o * do` over the head dimension, minus the gradient with
        respect to lse.
      visits: `visited_tiles(masks, keys, config.tile)[1]`, with the number of keys and this function's `config`.
    """
    keys, head = k.shape[1], k.shape[-1]
    heads = Heads.of(q, k)
    group = heads.group
    queries, rows = config.tile
    tiles = -(-keys // rows)
    one_tile = (ROWS, queries)

    def body(q, k, v, do, lse, delta, masks, visits, schedule, dk, dv, *scratch, program, warpgroup):
        buffers, barriers, left_tile, p_buffers, p_ready, p_free = scratch
        k_stages, v_stages, q_stages, do_stages, lse_stages, delta_stages = buffers
        kv_ring, ring = rings(heads, config.tile, (q, k, v, do, lse, delta), buffers, barriers)
        for_each = functools.partial(for_each_visit, group)

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            order.for_each(functools.partial(produce, kv_ring, ring, group), program, schedule, visits)

        def probabilities_of(s, row, stage, query_head, tile, flags):
            key = row.index * rows + first_row()
            position = Tile(row.batch, query_head, tile * queries, key, one_tile, query_axis=1)
            return probabilities(s, lse_stages.at[stage], masks, position, flags, scale=scale, softcap=softcap)

        def first_row():
            return 0 if config.divided else warpgroup * ROWS

        def multiply_and_release(step, *products):
            """For each `(sums, left, right)` in `products`, add the product `left right` to `sums`. `left` is in
            registers, and `right` in shared memory of this step, which is released afterwards."""
            scratch = None if left_tile is None else left_tile.at[warpgroup]
            for sums, left, right in products:
                multiply_registers(sums, left.astype(q.dtype), right, scratch)
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()
            ring.release(step)

        def cooperate(row, dk_sums, dv_sums):
            own = pl.ds(first_row(), ROWS)

            def visit(step, query_head, i, tile, flags):
                ring.wait(step)
                stage, key_stage = ring.stage(step), kv_ring.stage(row.number) + unknown_zero(tile)
                q, do = q_stages.at[stage], do_stages.at[stage]
                k, v = k_stages.at[key_stage, own], v_stages.at[key_stage, own]
                s, dp = products(one_tile, (k, q.transpose((1, 0))), (v, do.transpose((1, 0))))
                p, slope = probabilities_of(s, row, stage, query_head, tile, flags)
                ds = slope * (dp - along_queries(delta_stages.at[stage], one_tile))
                multiply_and_release(step, (dv_sums, p, do), (dk_sums, ds, q))

            for_each(row, visit)
            return dk_sums[...], dv_sums[...]

        def sum_values(row, k_tile, sums):
            """Compute pᵀ and dv, and hand pᵀ to the other consumer."""

            def visit(step, query_head, i, tile, flags):
                ring.wait(step)
                stage, buffer = ring.stage(step), remainder(step, _BUFFERS)
                (s,) = products(one_tile, (k_tile, q_stages.at[stage].transpose((1, 0))))
                p, slope = probabilities_of(s, row, stage, query_head, tile, flags)
                pl.when(step >= _BUFFERS)(lambda: plgpu.barrier_wait(p_free.at[buffer]))
                p_buffers[buffer] = slope
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[buffer])
                multiply_and_release(step, (sums, p, do_stages.at[stage]))

            for_each(row, visit)
            return sums[...]

        def sum_keys(row, v_tile, sums):
            """Compute dsᵀ and dk from pᵀ of the other consumer."""

            def visit(step, query_head, i, tile, flags):
                ring.wait(step)
                stage, buffer = ring.stage(step), remainder(step, _BUFFERS)
                (dp,) = products(one_tile, (v_tile, do_stages.at[stage].transpose((1, 0))))
                dp -= along_queries(delta_stages.at[stage], one_tile)
                plgpu.barrier_wait(p_ready.at[buffer])
                ds = dp * load(p_buffers.at[buffer], plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_free.at[buffer])
                multiply_and_release(step, (sums, ds, q_stages.at[stage]))

            for_each(row, visit)
            return sums[...]

        def store_sums(row, sums, tile, out):
            own = tile.at[pl.ds(first_row(), ROWS)]
            own[...] = sums.astype(own.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own, out.at[row.batch, pl.ds(row.index * rows + first_row(), ROWS), row.head])

        def consume(row):
            kv_ring.wait(row.number)
            k_tile, v_tile = (a.at[kv_ring.stage(row.number)] for a in (k_stages, v_stages))
            sums = plgpu.ACC((ROWS, head), jnp.float32)
            if not config.divided:
                both = functools.partial(cooperate, row)
                dk_sums, dv_sums = pl.run_scoped(both, sums, sums)
                store_sums(row, dk_sums * scale, k_tile, dk)
                store_sums(row, dv_sums, v_tile, dv)
            else:
                # Each consumer overwrites the tile that the other consumer does not read.
                @pl.when(warpgroup == 0)
                def _():
                    store_sums(row, pl.run_scoped(functools.partial(sum_values, row, k_tile), sums), k_tile, dv)

                @pl.when(warpgroup == 1)
                def _():
                    dk_sums = pl.run_scoped(functools.partial(sum_keys, row, v_tile), sums)
                    store_sums(row, dk_sums * scale, v_tile, dk)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            kv_ring.release(row.number)

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS[_CONSUMERS], action="increase")
            order.for_each(consume, program, schedule, visits)
            plgpu.wait_smem_to_gmem(0)

    own, read = heads.shape(k, heads.keys), heads.shape(q, heads.queries)
    order = rows_of(own, read, tiles, visits, last_first=False, persistent=config.key_stages > 1)
    q, k, v, do = heads.flat(q, k, v, do)
    result = heads.shape(k, heads.keys)
    buffers, barriers = memory(q, k, config.tile, config.stages, config.key_stages, _CONSUMERS)
    dk, dv = launch(
        body,
        q,
        k,
        v,
        do,
        *padded_statistics(lse, delta, queries),
        padded(masks, config.tile, transposed=True),
        visits,
        order.schedule,
        out=(result, result),
        grid={"program": order.programs},
        warpgroups=_CONSUMERS + 1,
        scratch=[
            buffers,
            barriers,
            operand((_CONSUMERS, ROWS, queries), q.dtype) if simulating() is not None else None,
            operand((_BUFFERS, ROWS, queries), jnp.float32) if config.divided else None,
            *[plgpu.Barrier(num_barriers=_BUFFERS) if config.divided else None] * 2,
        ],
        name="attention_backward_keys",
        sums_across_warps=False,
        approximate=True,
    )
    return dk[:, :keys], dv[:, :keys]
