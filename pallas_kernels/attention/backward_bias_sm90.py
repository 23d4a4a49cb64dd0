"""The gradient of attention's bias on Hopper's tensor cores.

    p = exp(s - lse)    dbias = Σ p (do vᵀ - delta),    with the sum over the axes along which the bias broadcasts.

A CTA computes the sum of some tiles of queries and keys. For a bias of all axes, these are one tile. For a bias that
broadcasts, they are the tiles of several examples, heads, queries, or keys, in a fixed order. A producer warpgroup
copies q, do, k, and v of one tile after another to a ring of shared memory. Each consumer warpgroup owns 64 queries of
each tile, and keeps one tile of sums in registers. XLA adds the sums of the CTAs, and of a tile's rows or columns.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.scores_sm90 import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    Tile,
    aligned,
    padded,
    padded_statistics,
    scores,
    tile_memory,
    unsupported,
)
from pallas_kernels.attention.tiles import Masks, tiles_with_pairs
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, quotient, remainder, store, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import kernel

_CONSUMERS = 2


class Config(NamedTuple):
    """Tiles of 128 queries and `keys` keys, in a ring of `stages` tiles. `parts` CTAs divide the sum of each tile."""

    keys: int
    stages: int
    parts: int

    @property
    def tile(self) -> tuple[int, int]:
        return ROWS * _CONSUMERS, self.keys


def _plan(q, k, v, do=None, lse=None, delta=None, masks=None, *, scale, softcap=None):
    if reason := unsupported(q, k, v, scale):
        return reason
    keys, stages = {32: (128, 4), 64: (128, 3), 128: (64, 2), 256: (64, 1)}[q.shape[3]]
    summed, kept = _axes(q.shape, k.shape[1], masks.bias.shape, (ROWS * _CONSUMERS, keys))
    # All multiprocessors get CTAs, also if the bias is small.
    parts = min(math.prod(summed), -(-device.target().multiprocessors // math.prod(kept)))
    return Config(keys, stages, parts)


def _axes(q, keys, bias, tile):
    """Return two shapes `(examples, heads, tiles of queries, tiles of keys)`, one for summed and one for kept axes.

    The bias broadcasts along the summed axes. The first shape has the sizes of the summed axes, and 1 for each kept
    axis. The second shape has the sizes of the kept axes, and 1 for each summed axis.

    `q` and `bias` are the shapes of q and of the bias, and `keys` is the number of keys. `tile` has the numbers of
    queries and of keys per tile.
    """
    batch, queries, heads, _ = q
    sizes = batch, heads, -(-queries // tile[0]), -(-keys // tile[1])
    broadcasts = [size == 1 for size in bias]
    summed = tuple(size if b else 1 for size, b in zip(sizes, broadcasts, strict=True))
    return summed, tuple(1 if b else size for size, b in zip(sizes, broadcasts, strict=True))


@kernel(plan=_plan, capability=(9, 0))
def backward_bias(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    masks: Masks,
    *,
    scale: float,
    softcap: float | None = None,
    config: Config,
) -> Array:
    """Return dbias in the shape of `masks.bias`, in float32.

    Args:
      q, k, v, masks, scale, softcap: as in `forward_sm90.forward`. `masks.bias` is given.
      do, lse, delta: as in `backward_keys_sm90.backward_keys`.
    """
    keys, head_size = k.shape[1], q.shape[3]
    rows, columns = config.tile
    group = q.shape[2] // k.shape[2]
    summed, kept = _axes(q.shape, keys, masks.bias.shape, config.tile)
    steps = math.prod(summed)
    steps_per_part = -(-steps // config.parts)
    one_tile = (ROWS, columns)

    def body(q, k, v, do, lse, delta, masks, codes, sums, *scratch, kept_tile, part, warpgroup):
        q_stages, do_stages, k_stages, v_stages, lse_stages, delta_stages, loaded, free = scratch
        own = pl.ds(warpgroup * ROWS, ROWS)
        kept_index = _unravel(kept_tile, kept)

        def copy(step, stage, barrier, batch, head, row, tile):
            queries = pl.ds(row * rows, rows)
            for ref, stages in ((q, q_stages), (do, do_stages)):
                plgpu.copy_gmem_to_smem(ref.at[batch, queries, head], stages.at[stage], barrier)
            for ref, stages in ((k, k_stages), (v, v_stages)):
                block = ref.at[batch, pl.ds(tile * columns, columns), quotient(head, group)]
                plgpu.copy_gmem_to_smem(block, stages.at[stage], barrier)
            for ref, stages in ((lse, lse_stages), (delta, delta_stages)):
                plgpu.copy_gmem_to_smem(ref.at[batch, head, queries], stages.at[stage], barrier)

        ring = Ring(config.stages, copy, loaded, free=free)

        def for_each_tile(visit, carry):
            """Call `carry = visit(step, flags, index, carry)` for each of the CTA's tiles that has a valid pair, and
            return the last `carry`. `step` counts these tiles from 0."""

            def consider(i, step_and_carry):
                step, carry = step_and_carry
                position = part * steps_per_part + i
                index = [a + b for a, b in zip(_unravel(position, summed), kept_index, strict=True)]
                batch, _, row, tile = index
                code = codes[batch if codes.shape[0] > 1 else 0, row, tile]
                return lax.cond(code >= 0, lambda: (step + 1, visit(step, code, index, carry)), lambda: (step, carry))

            count = jnp.minimum(steps_per_part, steps - part * steps_per_part)
            return lax.fori_loop(0, count, consider, (jnp.int32(0), carry))[1]

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            for_each_tile(lambda step, flags, index, _: ring.produce(step, *index), None)

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS[_CONSUMERS], action="increase")

            def add(step, flags, index, total):
                batch, head, row, tile = index
                ring.wait(step)
                stage = ring.stage(step)

                def multiply(s, dp):
                    plgpu.wgmma(s, q_stages.at[stage, own], k_stages.at[stage].transpose((1, 0)))
                    plgpu.wgmma(dp, do_stages.at[stage, own], v_stages.at[stage].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    return s[...], dp[...]

                s, dp = pl.run_scoped(multiply, *[plgpu.ACC(one_tile, jnp.float32)] * 2)
                row_lse, row_delta = (
                    lax.broadcast_in_dim(load(ref.at[stage, own], value_a_row()), one_tile, [0])
                    for ref in (lse_stages, delta_stages)
                )
                plgpu.commit_smem()
                ring.release(step)
                position = Tile(batch, head, row * rows + warpgroup * ROWS, tile * columns, one_tile)
                s, factor, _ = scores(s, masks, position, flags, scale=scale, softcap=softcap)
                return total + jnp.exp2(s * factor - row_lse) * (dp - row_delta)

            total = plgpu.layout_cast(jnp.zeros(one_tile, jnp.float32), plgpu.Layout.WGMMA)
            store(sums.at[part, kept_tile, own], for_each_tile(add, total))

    q, k, v, do = map(aligned, (q, k, v, do))
    visited, flags = tiles_with_pairs(masks, keys, config.tile)
    queries, stages = ((config.stages, n, head_size) for n in config.tile)
    vectors = plgpu.SMEM((config.stages, rows), jnp.float32)
    sums = launch(
        body,
        q,
        k,
        v,
        do,
        *padded_statistics(lse, delta, rows),
        padded(masks, config.tile),
        jnp.where(visited, flags, -1),
        out=jax.ShapeDtypeStruct((config.parts, math.prod(kept), rows, columns), jnp.float32),
        grid={"kept_tile": math.prod(kept), "part": config.parts},
        warpgroups=_CONSUMERS + 1,
        scratch=[
            *[tile_memory(queries, q.dtype)] * 2,
            *[tile_memory(stages, q.dtype)] * 2,
            vectors,
            vectors,
            plgpu.Barrier(num_arrivals=6, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=config.stages),
        ],
        name="attention_backward_bias",
        sums_across_warps=False,
        approximate=True,
    )
    *outer, of_queries, of_keys = kept
    tiles = jnp.sum(sums, axis=0).reshape(*outer, of_queries, of_keys, rows, columns)
    bias = jnp.moveaxis(tiles, 4, 3).reshape(*outer, of_queries * rows, of_keys * columns)
    for axis, size in zip((2, 3), masks.bias.shape[2:], strict=True):
        bias = jnp.sum(bias, axis=axis, keepdims=True) if size == 1 else lax.slice_in_dim(bias, 0, size, axis=axis)
    return bias


def _unravel(index, sizes):
    """Return the index along each axis. The last axis runs fastest."""
    found = []
    for size in reversed(sizes):
        found.append(remainder(index, size))
        index = quotient(index, size)
    return found[::-1]
