"""The gradient of attention's queries on Hopper's tensor cores.

    p = exp(s - lse)    ds = p (do vᵀ - delta)    dq = scale Σ ds k,    with the sum over the keys.

A CTA computes tiles of queries, one after another. A producer warpgroup copies tiles of keys and values to a ring of
shared memory, and the next tile of queries early. Each consumer warpgroup owns 64 queries, and keeps their sums in
registers. ds is multiplied from registers. The order of the sum is fixed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.scores_sm90 import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    Heads,
    Tile,
    aligned,
    padded,
    padded_statistics,
    rows_of,
    scores,
    tile_memory,
    unknown_zero,
    unsupported,
)
from pallas_kernels.attention.tiles import Masks, Visits, attends_to_few
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, multiply_registers, operand, remainder, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles have 128 queries and `keys` keys. Shared memory holds `query_stages` tiles of queries and of do.

    If `query_stages` is 1, each CTA computes one tile of queries. Tiles of values and of keys alternate in a ring of
    `buffers` buffers. With `values_first`, the product of do and the values starts before the product of the queries
    and the keys, and the buffer of the values is free earlier."""

    keys: int = 128
    buffers: int = 4
    query_stages: int = 1
    values_first: bool = False

    @property
    def copies_gradients(self) -> bool:
        """Whether shared memory has space for `keys_gradients`."""
        return not self.values_first

    @property
    def tile(self) -> tuple[int, int]:
        return ROWS * _CONSUMERS, self.keys


def _plan(q, k, v, do=None, lse=None, delta=None, masks=None, visits=None, keys_gradients=None, *, scale, softcap=None):
    if reason := unsupported(q, k, v, scale):
        return reason
    head = q.shape[-1]
    if head == 256:
        return Config(keys=64, buffers=3, values_first=True)
    if head <= 64:
        return Config(buffers=8, query_stages=2)
    # With a packed q, shared memory also holds the gradients of the keys.
    return Config(buffers=3, query_stages=2) if q.ndim == 4 and attends_to_few(masks) else Config()


@kernel(plan=_plan, capability=(9, 0))
def backward_queries(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    masks: Masks,
    visits: Visits,
    keys_gradients: tuple[Array, Array] | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    config: Config,
) -> Array:
    """Return dq in the shape and dtype of q, or with `keys_gradients` the packed gradient of dq, dk, and dv.

    Args:
      q, k, v, masks, scale, softcap: as in `forward_sm90.forward`.
      do, lse, delta: as in `backward_keys_sm90.backward_keys`.
      visits: `visited_tiles(masks, keys, config.tile)[0]`, with the number of keys and this function's `config`.
      keys_gradients: dk and dv, if q, k, and v are packed. The producer then also copies them to the result.
    """
    queries, head = q.shape[1], q.shape[-1]
    heads = Heads.of(q, k)
    rows, keys = config.tile
    tiles = -(-queries // rows)
    one_tile = (ROWS, keys)

    def body(q, k, v, do, lse, delta, masks, visits, schedule, dkv, dq, *scratch, program, warpgroup):
        q_stages, do_stages, buffers, dkv_tile, ds_tile, q_loaded, q_free, loaded, free, dkv_loaded = scratch

        def copy_queries(step, stage, barrier, row):
            for ref, stages, index in ((q, q_stages, heads.query(row.head)), (do, do_stages, row.head)):
                block = ref.at[row.batch, pl.ds(row.index * rows, rows), index]
                plgpu.copy_gmem_to_smem(block, stages.at[stage], barrier)

        def copy(step, stage, barrier, ref, row, tile, index):
            block = ref.at[row.batch, pl.ds(tile * keys, keys), index(heads.key_head(row.head))]
            plgpu.copy_gmem_to_smem(block, buffers.at[stage], barrier)

        q_ring = Ring(config.query_stages, copy_queries, q_loaded, free=q_free)
        ring = Ring(config.buffers, copy, loaded, free=free)

        def produce(row):
            q_ring.produce(row.number, row)

            def produce_tile(i, _):
                tile, _ = row.visit(i)
                step = 2 * (row.first_step + i)
                ring.produce(step, v, row, tile, heads.value)
                ring.produce(step + 1, k, row, tile, heads.key)

            lax.fori_loop(0, row.count, produce_tile, None)
            if dkv is not None:
                pl.when(remainder(row.head, heads.group) == 0)(lambda: copy_gradients_of_keys(row))

        def copy_gradients_of_keys(row):
            """Copy the row's positions of dk and dv, while the consumers compute."""
            key_head, positions = heads.key_head(row.head), pl.ds(row.index * rows, rows)
            for ref, index in zip(dkv, (heads.key, heads.value), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[row.batch, positions, key_head], dkv_tile, dkv_loaded)
                plgpu.barrier_wait(dkv_loaded)
                plgpu.copy_smem_to_gmem(dkv_tile, dq.at[row.batch, positions, index(key_head)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            order.for_each(produce, program, schedule, visits)
            if dkv is not None:
                plgpu.wait_smem_to_gmem(0)

        def consume(row):
            q_ring.wait(row.number)
            queries = pl.ds(row.index * rows + warpgroup * ROWS, ROWS)
            own = pl.ds(warpgroup * ROWS, ROWS)
            row_lse, row_delta = (
                load(ref.at[row.batch, row.head, queries], value_a_row(), optimized=False) for ref in (lse, delta)
            )
            first_tile = Tile(row.batch, row.head, row.index * rows + warpgroup * ROWS, 0, one_tile)
            first_tile = first_tile.with_queries(masks)

            def add(sums, i):
                tile, flags = row.visit(i)
                v_step = 2 * (row.first_step + i)
                k_step = v_step + 1
                v, k = (buffers.at[ring.stage(step)] for step in (v_step, k_step))
                stage = q_ring.stage(row.number) + unknown_zero(tile)
                q, do = q_stages.at[stage, own], do_stages.at[stage, own]
                position = dataclasses.replace(first_tile, key=tile * keys)

                def multiply(s, dp):
                    def start_dp():
                        ring.wait(v_step)
                        plgpu.wgmma(dp, do, v.transpose((1, 0)))

                    def start_s():
                        ring.wait(k_step)
                        plgpu.wgmma(s, q, k.transpose((1, 0)))

                    if config.values_first:
                        start_dp()
                        start_s()
                        plgpu.wgmma_wait(1)
                        ring.release(v_step)
                    else:
                        start_s()
                        start_dp()
                        plgpu.wgmma_wait(0)
                        ring.release(v_step)
                    return s[...], dp[...]

                s, dp = pl.run_scoped(multiply, *[plgpu.ACC(one_tile, jnp.float32)] * 2)
                s, factor, capped = scores(s, masks, position, flags, scale=scale, softcap=softcap)
                p = jnp.exp2(s * factor - lax.broadcast_in_dim(row_lse, one_tile, [0]))
                ds = p * (dp - lax.broadcast_in_dim(row_delta, one_tile, [0]))
                if capped is not None:
                    ds *= 1 - capped * capped
                scratch = None if ds_tile is None else ds_tile.at[warpgroup]
                multiply_registers(sums, ds.astype(k.dtype), k, scratch)
                plgpu.wgmma_wait(0)
                ring.release(k_step)

            def add_all(sums):
                lax.fori_loop(0, row.count, lambda i, _: add(sums, i), None)
                return sums[...]

            sums = pl.run_scoped(add_all, plgpu.ACC((ROWS, head), jnp.float32))
            q = q_stages.at[q_ring.stage(row.number), own]
            q[...] = (sums * scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q, dq.at[row.batch, queries, (row.head if dkv is None else heads.query(row.head))])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            q_ring.release(row.number)

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS[_CONSUMERS], action="increase")
            order.for_each(consume, program, schedule, visits)
            plgpu.wait_smem_to_gmem(0)

    own, read = heads.shape(q, heads.queries), heads.shape(k, heads.keys)
    order = rows_of(own, read, tiles, visits, last_first=True, persistent=config.query_stages > 1)
    shape = q.shape if keys_gradients is not None else own.shape
    q, k, v, do = heads.flat(q, k, v, do)
    own = tile_memory((config.query_stages, rows, head), q.dtype)
    dq = launch(
        body,
        q,
        k,
        v,
        do,
        *padded_statistics(lse, delta, rows),
        padded(masks, config.tile),
        visits,
        order.schedule,
        jax.tree.map(aligned, keys_gradients),
        out=q if keys_gradients is not None else heads.shape(q, heads.queries),
        grid={"program": order.programs},
        warpgroups=_CONSUMERS + 1,
        scratch=[
            own,
            own,
            tile_memory((config.buffers, keys, head), k.dtype),
            None if keys_gradients is None else tile_memory((rows, head), k.dtype),
            operand((_CONSUMERS, ROWS, keys), k.dtype) if simulating() is not None else None,
            plgpu.Barrier(num_arrivals=2, num_barriers=config.query_stages),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=config.query_stages),
            plgpu.Barrier(num_barriers=config.buffers),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=config.buffers),
            None if keys_gradients is None else plgpu.Barrier(),
        ],
        name="attention_backward_queries",
        approximate=True,
    )
    return dq[:, :queries].reshape(shape)
