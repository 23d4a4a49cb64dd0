"""Shared parts of the attention kernels whose CTAs own tiles of keys. A row of tiles has the queries that attend to
these keys, one query head of the group after another."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.scores_sm90 import Heads, Row, Tile, scores, tile_memory
from pallas_kernels.attention.tiles import Masks
from pallas_kernels.core.layouts import load, value_a_column
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring


def memory(q: Any, k: Any, tile: tuple[int, int], stages: int, key_stages: int, consumers: int) -> tuple[list, list]:
    """Return the buffers of k, v, q, do, lse, and delta, and the barriers, that `rings` takes."""
    queries, keys = tile
    of_keys = tile_memory((key_stages, keys, k.shape[-1]), k.dtype)
    of_queries, vectors = (
        tile_memory((stages, queries, q.shape[-1]), q.dtype),
        plgpu.SMEM((stages, queries), jnp.float32),
    )
    barriers = [
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=barriers)
        for arrivals, barriers in ((2, key_stages), (consumers, key_stages), (4, stages), (consumers, stages))
    ]
    return [*[of_keys] * 2, *[of_queries] * 2, *[vectors] * 2], barriers


def rings(heads: Heads, tile: tuple[int, int], arrays: Sequence, buffers: Sequence, barriers: Sequence) -> list[Ring]:
    """Return the ring of the keys and values of rows, and the ring of the queries of tiles. `arrays` are q, k, v, do,
    lse, and delta."""
    queries, keys = tile
    q, k, v, do, lse, delta = arrays
    k_stages, v_stages, q_stages, do_stages, lse_stages, delta_stages = buffers
    keys_loaded, keys_free, loaded, free = barriers

    def copy_keys(step, stage, barrier, row):
        for ref, stages, index in ((k, k_stages, heads.key), (v, v_stages, heads.value)):
            block = ref.at[row.batch, pl.ds(row.index * keys, keys), index(row.head)]
            plgpu.copy_gmem_to_smem(block, stages.at[stage], barrier)

    def copy(step, stage, barrier, batch, query_head, tile):
        block = pl.ds(tile * queries, queries)
        for ref, stages, index in ((q, q_stages, heads.query(query_head)), (do, do_stages, query_head)):
            plgpu.copy_gmem_to_smem(ref.at[batch, block, index], stages.at[stage], barrier)
        for ref, stages in ((lse, lse_stages), (delta, delta_stages)):
            plgpu.copy_gmem_to_smem(ref.at[batch, query_head, block], stages.at[stage], barrier)

    return [
        Ring(k_stages.shape[0], copy_keys, keys_loaded, free=keys_free),
        Ring(q_stages.shape[0], copy, loaded, free=free),
    ]


def for_each_visit(group: int, row: Row, visit: Callable[..., None]) -> None:
    """Call `visit(step, query head, i, tile, flags)` for each query head that reads the row's key head, and the i-th
    tile of queries that the row visits. `step` is the number of the CTA's earlier visits."""

    def visit_head(member, _):
        def visit_tile(i, _):
            step = row.first_step * group + member * row.count + i
            visit(step, row.head * group + member, i, *row.visit(i))

        lax.fori_loop(0, row.count, visit_tile, None)

    lax.fori_loop(0, jnp.int32(group), visit_head, None)


def produce(keys_ring: Ring, ring: Ring, group: int, row: Row) -> None:
    keys_ring.produce(row.number, row)
    for_each_visit(group, row, lambda step, head, i, tile, flags: ring.produce(step, row.batch, head, tile))


def products(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> list[Array]:
    """Return the matrix product of each pair."""

    def multiply(*sums):
        for total, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, a, b)
        plgpu.wgmma_wait(0)
        return [a[...] for a in sums]

    return pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * len(pairs))


def along_queries(vector: Any, shape: tuple[int, int]) -> Array:
    return lax.broadcast_in_dim(load(vector, value_a_column()), shape, [1])


def probabilities(
    products: Array, lse: Any, masks: Masks, tile: Tile, flags: Any, **options: Any
) -> tuple[Array, Array]:
    """Return pᵀ, and pᵀ times the derivative of the softcap, given k qᵀ. `options` are scale and softcap."""
    s, factor, capped = scores(products, masks, tile, flags, **options)
    p = jnp.exp2(s * factor - along_queries(lse, tile.shape))
    return p, p if capped is None else p * (1 - capped * capped)
