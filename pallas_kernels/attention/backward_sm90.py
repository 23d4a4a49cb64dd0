"""All gradients of attention in one kernel on Hopper's tensor cores, with five products per tile.

    pᵀ = exp(sᵀ - lse)    dv = Σ pᵀ do    dsᵀ = pᵀ (v doᵀ - delta)    dk = scale Σ dsᵀ q    dq = scale Σ ds k

A CTA computes rows of tiles: 128 keys of a key head, and tiles of 64 queries, or 128 for heads of 64. Each of two
consumer warpgroups owns 64 keys, and keeps the sums of dk and dv in registers. Both write dsᵀ to shared memory, and
each computes half of the tile's part of dq. A writer warpgroup adds this part to dq in device memory, in float32.

**Order of the sums.** A semaphore per tile of dq counts the rows that were added. A row's part waits until the
semaphore has reached the row's rank: the number of rows before it in the order that visit the tile. So dq has the same
bits on every run. XLA sets the semaphores to 0 before each launch, also in loops and CUDA graphs.

**The kernel cannot hang.** A row waits only for earlier rows of the order. Each CTA computes its rows in this order,
and all CTAs start, because there are at most as many as multiprocessors, and other kernels end. Assume that some rows
never end, and take the first of them. All rows before it end, so its CTA reaches it, and no part of it waits forever.
So it ends, too. XLA runs one kernel after another by default. Two such kernels in concurrent streams could hang, if
each kept CTAs of the other from starting, and so could a program that is exported on one GPU and runs on another with
fewer multiprocessors.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from pallas_kernels.attention.tiles import MOST_CONSTANTS, Masks, Visits
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import multiply_registers, operand, remainder
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_CONSUMERS = 2
_REGISTERS = 232
"""Registers per thread of a consumer. The other two warpgroups have `PRODUCER_REGISTERS`."""
_BUFFERS = 2
"""Buffers of ds, of parts of dq, and of queries and do."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles have `queries` queries and 128 keys."""

    queries: int

    @property
    def tile(self) -> tuple[int, int]:
        return self.queries, ROWS * _CONSUMERS


def _plan(q, k, v, do=None, lse=None, delta=None, masks=None, visits=None, *, scale, softcap=None):
    if reason := unsupported(q, k, v, scale):
        return reason
    if q.shape[-1] not in (64, 128):
        return f"head dimensions of {q.shape[-1]}, only 64 and 128"
    if not isinstance(masks.first, np.ndarray) or masks.query_segments is not None:
        return "masks that are only known when the program runs"
    if device.gpu() is None:  # a program that is exported may run on a GPU with fewer multiprocessors
        return "a GPU that is not present, because all CTAs must run at once"
    if simulating() is not None and device.gpu().multiprocessors > 1:  # CTAs would not add in the order of the rows
        return "several CTAs in the simulator, which has no semaphores"
    if row_count(q, k) > MOST_CONSTANTS:
        return f"{row_count(q, k)} rows of tiles, at most {MOST_CONSTANTS}"
    return Config(queries=64 if q.shape[-1] == 128 else 128)


def row_count(q: Any, k: Any) -> int:
    """Return the number of rows of tiles of all heads."""
    return k.shape[0] * Heads.of(q, k).keys * -(-k.shape[1] // (ROWS * _CONSUMERS))


def _visits_of_rows(visits):
    """Return whether each row visits each tile, as booleans `(batch or 1, rows, tiles)`."""
    is_visit = np.arange(visits.visits.shape[2]) < visits.counts[:, :, None]
    return np.take_along_axis(is_visit, np.argsort(visits.visits >> 2, axis=2), axis=2)


def ranks(visits: Visits) -> np.ndarray:
    """For each visit of a row to a tile, return how many rows that are computed before it visit the tile, int32 `(batch
    or 1, rows, visits)`. The rows of a head are computed from the last to the first."""
    visited = _visits_of_rows(visits)[:, ::-1].astype(np.int32)
    earlier = (np.cumsum(visited, axis=1) - visited)[:, ::-1]
    return np.take_along_axis(earlier, visits.visits >> 2, axis=2).astype(np.int32)


@kernel(plan=_plan, capability=(9, 0))
def backward(
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
) -> tuple[Array, Array | None, Array | None]:
    """Return dq `(batch, queries, heads, dimension)`, dk, and dv, or if q is packed, its gradient and twice None. The
    masks are known when JAX traces the program. The arguments are as in `backward_keys_sm90.backward_keys`."""
    queries_length, keys, head = q.shape[1], k.shape[1], k.shape[-1]
    heads = Heads.of(q, k)
    group = heads.group
    queries, rows = config.tile
    tiles, query_tiles = -(-keys // rows), -(-queries_length // queries)
    one_tile = (ROWS, queries)
    # A consumer's part of dq has half of the tile's features, or of its queries if there are more.
    part_shape = (queries, head // _CONSUMERS) if queries == ROWS else (ROWS, head)

    def body(
        q, k, v, do, lse, delta, masks, visits, ranks, schedule, dq, dk, dv, *scratch, program, warpgroup, semaphores
    ):
        buffers, barriers, ds_buffers, dq_buffers, left_tile, ds_ready, ds_free, dq_ready, dq_free, rows_ended = scratch
        k_tile, v_tile, q_stages, do_stages, lse_stages, delta_stages = buffers
        kv_ring, ring = rings(heads, config.tile, (q, k, v, do, lse, delta), buffers, barriers)
        for_each = functools.partial(for_each_visit, group)

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            order.for_each(functools.partial(produce, kv_ring, ring, group), program, schedule, visits)

        def write(row):
            def visit(step, query_head, i, tile, flags):
                buffer = remainder(step, _BUFFERS)
                rank = ranks[row.batch if ranks.shape[0] > 1 else 0, row.index, i]
                plgpu.barrier_wait(dq_ready.at[buffer])
                out, part = dq.at[row.batch, pl.ds(tile * queries, queries), query_head], dq_buffers.at[buffer]
                if semaphores is None:  # the simulator's only CTA computes one row after another
                    out[...] = jnp.where(rank == 0, 0, out[...]) + part[...]
                    plgpu.barrier_arrive(dq_free.at[buffer])
                    return
                added = semaphores.at[(row.batch * heads.queries + query_head) * query_tiles + tile]
                plgpu.semaphore_wait(added, rank, decrement=False, memory_scope="gpu")
                pl.when(rank == 0)(lambda: plgpu.copy_smem_to_gmem(part, out))
                pl.when(rank > 0)(lambda: plgpu.copy_smem_to_gmem(part, out, reduction_op="add"))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_free.at[buffer])
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(added, memory_scope="gpu")

            for_each(row, visit)

        @pl.when(warpgroup == _CONSUMERS + 1)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            order.for_each(write, program, schedule, visits)

        def consume(row):
            kv_ring.wait(row.number)
            own = pl.ds(warpgroup * ROWS, ROWS)

            def sum_queries(step, zero):
                buffer = remainder(step, _BUFFERS)
                plgpu.barrier_wait(ds_ready.at[buffer])
                if queries == ROWS:
                    member = slice(None), pl.ds(warpgroup * part_shape[1], part_shape[1])
                    ds, keys = ds_buffers.at[buffer], k_tile.at[zero, :, member[1]]
                else:
                    member = pl.ds(warpgroup * ROWS, ROWS), slice(None)
                    ds, keys = ds_buffers.at[buffer, :, member[0]], k_tile.at[zero]
                (part,) = products(part_shape, (ds.transpose((1, 0)), keys))
                plgpu.barrier_arrive(ds_free.at[buffer])
                buffer = remainder(step, _BUFFERS)
                pl.when(step >= _BUFFERS)(lambda: plgpu.barrier_wait(dq_free.at[buffer]))
                dq_buffers[buffer, *member] = part
                plgpu.commit_smem()
                plgpu.barrier_arrive(dq_ready.at[buffer])

            def sum_all(dk_sums, dv_sums):
                def visit(step, query_head, i, tile, flags):
                    ring.wait(step)
                    stage = ring.stage(step)
                    q, do = q_stages.at[stage], do_stages.at[stage]
                    zero = unknown_zero(tile)
                    k, v = k_tile.at[zero], v_tile.at[zero]
                    s, dp = products(one_tile, (k.at[own], q.transpose((1, 0))), (v.at[own], do.transpose((1, 0))))
                    key = row.index * rows + warpgroup * ROWS
                    position = Tile(row.batch, query_head, tile * queries, key, one_tile, query_axis=1)
                    options = dict(scale=scale, softcap=softcap)
                    p, slope = probabilities(s, lse_stages.at[stage], masks, position, flags, **options)
                    ds = (slope * (dp - along_queries(delta_stages.at[stage], one_tile))).astype(k_tile.dtype)
                    p = p.astype(k_tile.dtype)
                    left = None if left_tile is None else left_tile.at[warpgroup]
                    buffer = remainder(step, _BUFFERS)
                    multiply_registers(dv_sums, p, do, left)
                    pl.when(step >= _BUFFERS)(lambda: plgpu.barrier_wait(ds_free.at[buffer]))
                    ds_buffers[buffer, own] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_ready.at[buffer])
                    multiply_registers(dk_sums, ds, q, left)
                    # The other consumer has had a tile's time to compute its half of the last tile's ds.
                    pl.when(step > first_step)(lambda: sum_queries(step - 1, zero))
                    plgpu.wgmma_wait(0)
                    ring.release(step)

                first_step = row.first_step * group
                for_each(row, visit)
                last = first_step + row.count * group - 1
                pl.when(row.count > 0)(lambda: sum_queries(last, unknown_zero(last)))
                return dk_sums[...], dv_sums[...]

            sums = plgpu.ACC((ROWS, head), jnp.float32)
            dk_sums, dv_sums = pl.run_scoped(sum_all, sums, sums)
            # The other consumer may still read the keys: its last product has all of them.
            plgpu.barrier_arrive(rows_ended)
            plgpu.barrier_wait(rows_ended)
            outputs = (dk_sums * scale, k_tile, dk, heads.key), (dv_sums, v_tile, dk if dv is None else dv, heads.value)
            for total, tile, out, index in outputs:
                block = tile.at[0, own]
                block[...] = total.astype(block.dtype)
                plgpu.commit_smem()
                keys = pl.ds(row.index * rows + warpgroup * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(block, out.at[row.batch, keys, index(row.head)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            kv_ring.release(row.number)

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(_REGISTERS, action="increase")
            order.for_each(consume, program, schedule, visits)
            plgpu.wait_smem_to_gmem(0)

    own, read = heads.shape(k, heads.keys), heads.shape(q, heads.queries)
    order = rows_of(own, read, tiles, visits, last_first=True, persistent=True)
    shape = k.shape
    q, k, v, do = heads.flat(q, k, v, do)
    results = (heads.shape(k, k.shape[2]), None) if heads.packed else (heads.shape(k, heads.keys),) * 2
    buffers, barriers = memory(q, k, config.tile, _BUFFERS, 1, _CONSUMERS)
    sums = jax.ShapeDtypeStruct((q.shape[0], query_tiles * queries, heads.queries, head), jnp.float32)
    dq, dk, dv = launch(
        body,
        q,
        k,
        v,
        do,
        *padded_statistics(lse, delta, queries),
        padded(masks, config.tile, transposed=True),
        visits,
        ranks(visits),
        order.schedule,
        out=(sums, *results),
        grid={"program": order.programs},
        warpgroups=_CONSUMERS + 2,
        scratch=[
            buffers,
            barriers,
            operand((_BUFFERS, rows, queries), k.dtype),
            operand((_BUFFERS, queries, head), jnp.float32),
            operand((_CONSUMERS, ROWS, queries), q.dtype) if simulating() is not None else None,
            *[plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_BUFFERS)] * 3,
            plgpu.Barrier(num_barriers=_BUFFERS),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
        ],
        name="attention_backward",
        sums_across_warps=False,
        approximate=True,
        semaphores=q.shape[0] * heads.queries * query_tiles,
    )
    dq = dq[:, :queries_length] * scale
    visited = _visits_of_rows(visits).any(axis=1)
    if not visited.all():
        of_queries = visited.repeat(queries, axis=1)[:, :queries_length, None, None]
        dq = jnp.where(of_queries, dq, 0)
    dq, dk = dq.astype(q.dtype), dk[:, :keys]
    if not heads.packed:
        return dq, dk, dv[:, :keys]
    # XLA writes dq in place.
    return dk.reshape(shape).at[:, :, :, :group].set(dq.reshape(*shape[:3], group, head)), None, None
