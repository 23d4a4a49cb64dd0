"""The forward of attention on Hopper's tensor cores, with an online softmax.

    s = scale q kᵀ    o = softmax(s) v    lse = log Σ exp(s),    with the sum over the keys.

A CTA computes tiles of queries, one after another. A producer warpgroup copies tiles of keys and values to two rings of
shared memory, and the next tile of queries early. Each consumer warpgroup owns 64 queries. It keeps their outputs,
largest score, and sum of exponentials in registers, and multiplies the probabilities from registers. Two consumers
alternate: one multiplies while the other computes exponentials, or stores its results.
"""

import dataclasses
import functools
import math

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
    padded,
    rows_of,
    scores,
    tile_memory,
    unsupported,
)
from pallas_kernels.attention.tiles import Masks, Visits
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import multiply_registers, operand, store, value_a_row, with_products
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_SHORT = 2048
"""Up to this length, three consumers waste more of their larger tiles than they gain."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles have `64 * consumers` queries and `keys` keys.

    Shared memory holds `stages` tiles of keys and of values, and `query_stages` tiles of queries. If `query_stages` is
    1, each CTA computes one tile of queries. If `alternate`, two consumer warpgroups use the tensor cores in turn, and
    if CTAs also compute several tiles, the results have their own shared memory."""

    keys: int = 128
    stages: int = 2
    query_stages: int = 2
    consumers: int = 2
    alternate: bool = True

    @property
    def tile(self) -> tuple[int, int]:
        return ROWS * self.consumers, self.keys

    @property
    def results_apart(self) -> bool:
        return self.alternate and self.query_stages > 1


def _plan(q, k, v, masks=None, visits=None, *, scale, softcap=None):
    if reason := unsupported(q, k, v, scale):
        return reason
    queries, head = q.shape[1], q.shape[-1]
    if head == 64 and queries <= _SHORT:
        return Config(stages=3)
    if head <= 64:
        return Config(consumers=3, alternate=False)
    return Config(keys=64, query_stages=1) if head == 256 else Config()


@kernel(plan=_plan, capability=(9, 0))
def forward(
    q: Array,
    k: Array,
    v: Array,
    masks: Masks,
    visits: Visits,
    *,
    scale: float,
    softcap: float | None = None,
    config: Config,
) -> tuple[Array, Array, Array]:
    """Return o `(batch, queries, heads, dimension)`, the rounding error of o, rounded to the dtype of o, and float32
    lse `(batch, heads, queries)`, the natural logarithm of the sum of exponentials. A query without a valid key gets 0,
    0, and -inf.

    Args:
      q: `(batch, queries, heads, dimension)` in half precision, with dimensions of 32, 64, 128, or 256.
      k, v: `(batch, keys, key heads, dimension)`. Consecutive query heads share a key head. If q, k, and v are one
        array with five axes, it is packed: see `scores_sm90.Heads`.
      masks: which keys each query attends to, and the bias.
      visits: `visited_tiles(masks, keys, config.tile)[0]`, with the number of keys and this function's `config`.
      scale: factor of the scores, positive.
      softcap: c in `c tanh(s / c)`, or None.
    """
    batch, queries, head = *q.shape[:2], q.shape[-1]
    heads = Heads.of(q, k)
    rows, keys = config.tile
    tiles = -(-queries // rows)
    one_tile = (ROWS, keys)

    def body(q, k, v, masks, visits, schedule, o, error, lse, *scratch, program, warpgroup):
        q_stages, k_stages, v_stages, results, p_tile, *barriers = scratch
        q_loaded, q_free, k_loaded, k_free, v_loaded, v_free, turns = barriers

        def copy_queries(step, stage, barrier, row):
            block = q.at[row.batch, pl.ds(row.index * rows, rows), heads.query(row.head)]
            plgpu.copy_gmem_to_smem(block, q_stages.at[stage], barrier)

        def copy_from(ref, stages, index):
            def copy(step, stage, barrier, row, tile):
                block = ref.at[row.batch, pl.ds(tile * keys, keys), index(heads.key_head(row.head))]
                plgpu.copy_gmem_to_smem(block, stages.at[stage], barrier)

            return copy

        q_ring = Ring(config.query_stages, copy_queries, q_loaded, free=q_free)
        k_ring = Ring(config.stages, copy_from(k, k_stages, heads.key), k_loaded, free=k_free)
        v_ring = Ring(config.stages, copy_from(v, v_stages, heads.value), v_loaded, free=v_free)

        def produce(row):
            q_ring.produce(row.number, row)

            def produce_tile(i, _):
                tile, _ = row.visit(i)
                k_ring.produce(row.first_step + i, row, tile)
                v_ring.produce(row.first_step + i, row, tile)

            lax.fori_loop(0, row.count, produce_tile, None)

        @pl.when(warpgroup == config.consumers)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            order.for_each(produce, program, schedule, visits)

        def wait_for_turn():
            if config.alternate:
                plgpu.barrier_wait(turns.at[warpgroup])

        def end_turn():
            if config.alternate:
                plgpu.barrier_arrive(turns.at[1 - warpgroup])

        def consume_tile(row, own, first_tile, i, carry):
            sums, largest, total = carry
            tile, flags = row.visit(i)
            step = row.first_step + i

            def multiply(products):
                plgpu.wgmma(products, own, k_stages.at[k_ring.stage(step)].transpose((1, 0)))
                end_turn()
                return products[...]

            k_ring.wait(step)
            s = pl.run_scoped(multiply, plgpu.ACC(one_tile, jnp.float32))
            k_ring.release(step)
            position = dataclasses.replace(first_tile, key=tile * keys)
            s, factor, _ = scores(s, masks, position, flags, scale=scale, softcap=softcap)
            new_largest = jnp.maximum(largest, jnp.max(s, axis=1) * factor)
            # While all keys are masked, the largest score is -inf, and must not be subtracted from -inf.
            shift = jnp.where(new_largest == -jnp.inf, jnp.float32(0), new_largest)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(shift, one_tile, [0]))
            decay = jnp.exp2(largest - shift)
            total = total * decay + jnp.sum(p, axis=1)
            sums *= lax.broadcast_in_dim(decay, sums.shape, [0])
            p = p.astype(own.dtype)
            v_ring.wait(step)
            wait_for_turn()
            stage = v_stages.at[v_ring.stage(step)]
            scratch = None if p_tile is None else p_tile.at[warpgroup]
            (sums,) = with_products([sums], lambda sums: multiply_registers(sums, p, stage, scratch))
            v_ring.release(step)
            return sums, new_largest, total

        def consume(row):
            q_ring.wait(row.number)
            own = q_stages.at[q_ring.stage(row.number), pl.ds(warpgroup * ROWS, ROWS)]
            sums = plgpu.layout_cast(jnp.zeros((ROWS, head), jnp.float32), plgpu.Layout.WGMMA)
            largest = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), value_a_row())
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), value_a_row())
            first_query = row.index * rows + warpgroup * ROWS
            first_tile = Tile(row.batch, row.head, first_query, 0, one_tile).with_queries(masks)
            consume_one = functools.partial(consume_tile, row, own, first_tile)
            # A turn is the last product of a tile and the first of the next tile.
            wait_for_turn()
            sums, largest, total = lax.fori_loop(0, row.count, consume_one, (sums, largest, total))
            end_turn()
            if config.results_apart:
                q_ring.release(row.number)
                own = results.at[pl.ds(warpgroup * ROWS, ROWS)]
            inverse = jnp.where(total == 0, jnp.float32(0), 1 / total)
            queries = pl.ds(first_query, ROWS)
            sums *= lax.broadcast_in_dim(inverse, sums.shape, [0])
            rounded = sums.astype(own.dtype)
            for out, values in ((o, rounded), (error, (sums - rounded.astype(jnp.float32)).astype(own.dtype))):
                if out is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    own[...] = values
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(own, out.at[row.batch, queries, row.head])
            if not config.results_apart:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                q_ring.release(row.number)
            store(lse.at[row.batch, row.head, queries], largest * math.log(2) + jnp.log(total))

        @pl.when(warpgroup < config.consumers)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS[config.consumers], action="increase")
            pl.when(warpgroup == 1)(end_turn)
            order.for_each(consume, program, schedule, visits)
            pl.when(warpgroup == 0)(wait_for_turn)
            plgpu.wait_smem_to_gmem(0)

    own, read = heads.shape(q, heads.queries), heads.shape(k, heads.keys)
    order = rows_of(own, read, tiles, visits, last_first=True, persistent=config.query_stages > 1)
    q, k, v = heads.flat(q, k, v)
    result = heads.shape(q, heads.queries)
    stages = tile_memory((config.stages, keys, head), q.dtype)
    loaded = plgpu.Barrier(num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages)
    o, error, lse = launch(
        body,
        q,
        k,
        v,
        padded(masks, config.tile),
        visits,
        order.schedule,
        out=(result, result, jax.ShapeDtypeStruct((batch, heads.queries, tiles * rows), jnp.float32)),
        grid={"program": order.programs},
        warpgroups=config.consumers + 1,
        scratch=[
            tile_memory((config.query_stages, rows, head), q.dtype),
            stages,
            stages,
            tile_memory((rows, head), q.dtype) if config.results_apart else None,
            operand((config.consumers, ROWS, keys), q.dtype) if simulating() is not None else None,
            plgpu.Barrier(num_barriers=config.query_stages),
            plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.query_stages),
            *(loaded, free) * 2,
            plgpu.Barrier(num_barriers=2) if config.alternate else None,
        ],
        name="attention_forward",
        skippable=(1,),
        approximate=True,
    )
    return o[:, :queries], error[:, :queries], lse[:, :, :queries]
