"""The gradients of attention's keys and values on Hopper's tensor cores.

    pᵀ = exp(sᵀ - lse)    dv = Σ pᵀ do    dsᵀ = pᵀ (v doᵀ - delta)    dk = scale Σ dsᵀ q,    with sums over the queries.

A CTA computes one tile of keys of one key head. A producer warpgroup copies tiles of queries and of do to a ring of
shared memory, one query head of the group after another. Each consumer warpgroup owns 64 keys, and keeps their sums in
registers. pᵀ and dsᵀ are multiplied from registers. The order of the sums is fixed.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.scores_sm90 import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    Tile,
    aligned,
    fits,
    operand_bytes,
    padded,
    padded_statistics,
    scores,
    unsupported,
)
from pallas_kernels.attention.tiles import Masks, Visits
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, multiply_registers, operand, value_a_column
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of 128 keys and `queries` queries, and `stages` of queries and do."""

    queries: int = 64
    stages: int = 2

    @property
    def tile(self) -> tuple[int, int]:
        return self.queries, ROWS * _CONSUMERS

    def shared_bytes(self, head: int) -> int:
        vectors = 2 * self.stages * self.queries * 4
        return operand_bytes(2 * ROWS * _CONSUMERS + 2 * self.stages * self.queries, head) + vectors


def _plan(q, k, v, do=None, lse=None, delta=None, masks=None, visits=None, *, scale, softcap=None):
    if reason := unsupported(q, k, v, scale):
        return reason
    head = q.shape[3]
    if head > 128:
        return f"head dimensions of {head}, only 64 or 128"
    queries = 128 if head == 64 else 64
    return next(c for stages in (3, 2) if fits((c := Config(queries, stages)).shared_bytes(head)))


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
    """Return dk and dv in the shape and dtype of k and v.

    Args:
      q, k, v, masks, scale, softcap: as in `forward_sm90.forward`, with dimensions of 64 or 128.
      do: gradient with respect to o, in the shape and dtype of q.
      lse: `(batch, heads, queries)`, from the forward.
      delta: float32 `(batch, heads, queries)`, the sum of o do over the dimension, minus the gradient with respect to
        lse.
      visits: `visited_tiles(masks, keys, config.tile)[1]`, with the tile of the plan.
    """
    batch, keys, heads, head = k.shape
    group = q.shape[2] // heads
    queries, rows = config.tile
    tiles = -(-keys // rows)
    one_tile = (ROWS, queries)

    def body(q, k, v, do, lse, delta, masks, visits, dk, dv, *scratch, batch, head, row, warpgroup):
        k_tile, v_tile, q_stages, do_stages, lse_stages, delta_stages, p_tile, kv_loaded, loaded, free = scratch
        example = batch if visits.visits.shape[0] > 1 else 0
        count = visits.counts[example, row]

        def copy(step, stage, barrier, query_head, tile):
            block = pl.ds(tile * queries, queries)
            for ref, stages in ((q, q_stages), (do, do_stages)):
                plgpu.copy_gmem_to_smem(ref.at[batch, block, query_head], stages.at[stage], barrier)
            for ref, stages in ((lse, lse_stages), (delta, delta_stages)):
                plgpu.copy_gmem_to_smem(ref.at[batch, query_head, block], stages.at[stage], barrier)

        ring = Ring(config.stages, copy, loaded, free=free)

        def for_each_visit(visit):
            """Call `visit(step, query head, tile, masked)` for each query head of the group, and each tile."""

            def visit_head(member, _):
                def visit_tile(i, _):
                    code = visits.visits[example, row, i]
                    tile, masked = lax.shift_right_logical(code, 1), (code & 1) == 1
                    visit(member * count + i, head * group + member, tile, masked)

                lax.fori_loop(0, count, visit_tile, None)

            lax.fori_loop(0, group, visit_head, None)

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            for ref, own in ((k, k_tile), (v, v_tile)):
                plgpu.copy_gmem_to_smem(ref.at[batch, pl.ds(row * rows, rows), head], own, kv_loaded)
            for_each_visit(lambda step, query_head, tile, masked: ring.produce(step, query_head, tile))

        def consume(dk_sums, dv_sums):
            own = pl.ds(warpgroup * ROWS, ROWS)
            scratch = None if p_tile is None else p_tile.at[warpgroup]

            def visit(step, query_head, tile, masked):
                ring.wait(step)
                stage = ring.stage(step)
                q, do = q_stages.at[stage], do_stages.at[stage]

                def multiply(s, dp):
                    plgpu.wgmma(s, k_tile.at[own], q.transpose((1, 0)))
                    plgpu.wgmma(dp, v_tile.at[own], do.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    return s[...], dp[...]

                def along_queries(stages):
                    values = load(stages.at[stage], value_a_column())
                    return lax.broadcast_in_dim(values, one_tile, [1])

                s, dp = pl.run_scoped(multiply, *[plgpu.ACC(one_tile, jnp.float32)] * 2)
                key = row * rows + warpgroup * ROWS
                position = Tile(batch, query_head, tile * queries, key, one_tile, query_axis=1)
                s, factor, capped = scores(s, masks, position, masked, scale=scale, softcap=softcap)
                p = jnp.exp2(s * factor - along_queries(lse_stages))
                ds = p * (dp - along_queries(delta_stages))
                if capped is not None:
                    ds *= 1 - capped * capped
                multiply_registers(dv_sums, p.astype(do.dtype), do, scratch)
                multiply_registers(dk_sums, ds.astype(q.dtype), q, scratch)
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                ring.release(step)

            for_each_visit(visit)
            return dk_sums[...], dv_sums[...]

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS[_CONSUMERS], action="increase")
            plgpu.barrier_wait(kv_loaded)
            sums = [plgpu.ACC((ROWS, k_tile.shape[1]), jnp.float32)] * 2
            dk_sums, dv_sums = pl.run_scoped(consume, *sums)
            own, keys = pl.ds(warpgroup * ROWS, ROWS), pl.ds(row * rows + warpgroup * ROWS, ROWS)
            for sums, buffer in ((dk_sums * scale, k_tile.at[own]), (dv_sums, v_tile.at[own])):
                buffer[...] = sums.astype(buffer.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_tile.at[own], dk.at[batch, keys, head])
            plgpu.copy_smem_to_gmem(v_tile.at[own], dv.at[batch, keys, head])
            plgpu.wait_smem_to_gmem(0)

    q, k, v, do = map(aligned, (q, k, v, do))
    stages = operand((config.stages, queries, head), q.dtype)
    own, vectors = operand((rows, head), k.dtype), plgpu.SMEM((config.stages, queries), jnp.float32)
    dk, dv = launch(
        body,
        q,
        k,
        v,
        do,
        *padded_statistics(lse, delta, queries),
        padded(masks, config.tile, transposed=True),
        visits,
        out=(k, v),
        grid={"batch": batch, "head": heads, "row": tiles},
        warpgroups=_CONSUMERS + 1,
        scratch=[
            own,
            own,
            stages,
            stages,
            vectors,
            vectors,
            operand((_CONSUMERS, ROWS, queries), q.dtype) if simulating() is not None else None,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=4, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=config.stages),
        ],
        name="attention_backward_keys",
        approximate=True,
    )
    return dk[:, :keys], dv[:, :keys]
