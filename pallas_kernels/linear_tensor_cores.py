"""A dense layer's gradients in its weights and bias, in half precisions on Hopper's tensor cores.

    dw[o, i] = Σ dy[n, o] * x[n, i],    db[o] = Σ dy[n, o], over the rows n.

A program adds up a tile of dw over a part of the rows. One warpgroup brings blocks of rows into a ring in shared memory
by bulk copies, two multiply them, each for half of the tile. Both operands have the summed axis outermost, which the
tensor cores take in half precisions. A column of ones beside x's makes db: of the programs that read the same columns
of dy, each does it for its share of the rows.

Parts of the rows are as many as keep all multiprocessors busy; their sums are added up after, in a fixed order.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.launch import launch, on_gpu, store

_MULTIPROCESSORS = 132
# Rows in a slot. As many columns of a half precision fill the tensor cores' rows in shared memory.
_ROWS = 64
_ROW_BYTES = 128
_LEAST_ROWS = 8192
_MULTIPLIERS = 2
_COPIER = _MULTIPLIERS
# Of 512 a lane of each warpgroup together.
_COPIERS_REGISTERS, _MULTIPLIERS_REGISTERS = 40, 232


@dataclasses.dataclass(frozen=True)
class Tile:
    """How programs divide the sums.

    Attributes:
      outputs, inputs: rows and columns of dw a program.
      slots: of the ring.
      parts: of the rows.
      mates: programs, beside each other in dw's rows, that share what they read of x.
      wide: tiles of a row of them that are taken before the next row's; 0 for all.
    """

    outputs: int
    inputs: int
    slots: int
    parts: int
    mates: int
    wide: int = 0


def tile(rows: int, outputs: int, inputs: int, **sizes: int) -> Tile | None:
    """The tile for a gradient of these sizes, `sizes` in place of its rule; None where there is none."""
    chosen = Tile(outputs=128, inputs=256 if inputs % 256 == 0 else 128, slots=4, parts=1, mates=1)
    tiles = (outputs // chosen.outputs) * (inputs // chosen.inputs)
    steps = -(-rows // _ROWS)
    if tiles > _MULTIPROCESSORS and outputs % (2 * chosen.outputs) == 0:
        # The tiles of a time are as many rows as columns.
        chosen = dataclasses.replace(chosen, mates=2, wide=math.gcd(inputs // chosen.inputs, 8))

    def microseconds(parts):
        # A step of a tile takes 0.75, writing and reading a part's sums goes at 3 TB/s.
        turns = -(-tiles * parts // _MULTIPROCESSORS) * -(-steps // parts)
        return turns * 0.75 * chosen.inputs / 256 + (parts > 1) * parts * outputs * inputs * 8 / 3e6

    if tiles:
        chosen = dataclasses.replace(chosen, parts=min(range(1, min(steps, _MULTIPROCESSORS) + 1), key=microseconds))
    chosen = dataclasses.replace(chosen, **sizes)
    fits = outputs % (chosen.outputs * chosen.mates) == 0 and inputs % chosen.inputs == 0
    return chosen if fits and 0 < chosen.parts <= steps else None


def pays(dy: Any, x: Any) -> bool:
    """Whether `weights_gradient` takes such arrays, and is faster than the library's product and sum."""
    half = dy.dtype == x.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    return half and dy.shape[0] >= _LEAST_ROWS and tile(*dy.shape, x.shape[1]) is not None


def weights_gradient(dy: Array, x: Array, *, dtype: DTypeLike | None = None, **sizes: int) -> tuple[Array, Array]:
    """dw in `dtype`, by default x's, and float32 db, of `(rows, outputs)` dy and `(rows, inputs)` x that have a `tile`.

    Where there is no GPU the library's product takes the kernel's place.
    """
    dtype = dtype or x.dtype

    def plain(dy, x):
        dw = jnp.matmul(dy.T, x, preferred_element_type=jnp.float32)
        return dw.astype(dtype), jnp.sum(dy, axis=0, dtype=jnp.float32)

    here = tile(*dy.shape, x.shape[1], **sizes)
    return on_gpu(functools.partial(_weights_gradient, tile=here, dtype=dtype), plain, dy, x)


def _weights_gradient(dy, x, *, tile, dtype):
    (rows, outputs), (_, inputs) = dy.shape, x.shape
    steps, slots, parts = -(-rows // _ROWS), tile.slots, tile.parts
    high, across, down = tile.outputs // _MULTIPLIERS, inputs // tile.inputs, outputs // (tile.outputs * tile.mates)
    wide = tile.wide or across
    jobs = parts * down * across
    programs = min(jobs, _MULTIPROCESSORS // tile.mates)
    together = dict(collective_axes="mate") if tile.mates > 1 else {}

    def body(dy_ref, x_ref, dw_ref, db_ref, dys, xs, ones, loaded, free, *, program, warpgroup, mate=0):
        def each_job(do):
            """`turn = do(turn, part, first output, tile across, first step, end)` for each job: turns count steps."""

            def one(i, turn):
                job = program + i * programs
                part, place = job // (down * across), job % (down * across)
                low = place // wide % down
                column = place // (wide * down) * wide + place % wide
                first, end = part * steps // parts, (part + 1) * steps // parts
                return do(turn, part, (low * tile.mates + mate) * tile.outputs, column, first, end)

            return lax.fori_loop(0, (jobs - program + programs - 1) // programs, one, jnp.int32(0))

        def copy(turn, part, output, column, first, end):
            def fetch(step, turn):
                slot = turn % slots
                pl.when(turn >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                rows = pl.ds(step * _ROWS, _ROWS)
                left, right = pl.ds(output, tile.outputs), pl.ds(column * tile.inputs, tile.inputs)
                plgpu.copy_gmem_to_smem(dy_ref.at[rows, left], dys.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(x_ref.at[rows, right], xs.at[slot], loaded.at[slot], **together)
                return turn + 1

            return lax.fori_loop(first, end, fetch, turn)

        def multiply(turn, part, output, column, first, end):
            def accumulate(sums, bias_sums):
                def add(step, turn, *, bias):
                    slot = turn % slots
                    plgpu.barrier_wait(loaded.at[slot])
                    left = dys.at[slot, :, pl.ds(warpgroup * high, high)].transpose((1, 0))
                    plgpu.wgmma(sums, left, xs.at[slot])
                    if bias:
                        plgpu.wgmma(bias_sums, left, ones.at[warpgroup].transpose((1, 0)))
                    # The products of the step before are done.
                    plgpu.wgmma_wait(2 if bias else 1)
                    pl.when(step > first)(lambda: plgpu.barrier_arrive(free.at[(turn - 1) % slots]))
                    return turn + 1

                start, stop = (first + (end - first) * c // across for c in (column, column + 1))
                at = turn
                for low, high_, bias in ((first, start, False), (start, stop, True), (stop, end, False)):
                    at = lax.fori_loop(low, high_, functools.partial(add, bias=bias), at)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[(at - 1) % slots])
                return sums[...], bias_sums[...]

            sums, bias_sums = pl.run_scoped(accumulate, plgpu.ACC((high, tile.inputs)), plgpu.ACC((high, 8)))
            mine = pl.ds(output + warpgroup * high, high)
            store(dw_ref.at[part, mine, pl.ds(column * tile.inputs, tile.inputs)], sums.astype(dw_ref.dtype))
            store(db_ref.at[part, column, mine], bias_sums)
            return turn + end - first

        @pl.when(warpgroup == _COPIER)
        def _():
            plgpu.set_max_registers(_COPIERS_REGISTERS, action="decrease")
            turns = each_job(copy)
            # No mate may end while another still tells it that a slot is free.
            lax.fori_loop(
                jnp.maximum(turns - slots, 0), turns, lambda turn, _: plgpu.barrier_wait(free.at[turn % slots]), None
            )

        @pl.when(warpgroup < _COPIER)
        def _():
            plgpu.set_max_registers(_MULTIPLIERS_REGISTERS, action="increase")
            ones[warpgroup] = plgpu.layout_cast(jnp.ones((8, _ROWS), x.dtype), layout)
            plgpu.commit_smem()
            each_job(multiply)

    # Two rows a warp.
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((8, _ROWS), (2, _ROWS), (_ROWS // 16,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )
    operand = functools.partial(
        plgpu.SMEM,
        dtype=x.dtype,
        transforms=(plgpu.TilingTransform((8, _ROW_BYTES // 2)), plgpu.SwizzleTransform(_ROW_BYTES)),
    )
    barriers = dict(num_arrivals=_MULTIPLIERS, num_barriers=slots)
    dw, db = launch(
        body,
        dy,
        x,
        out=(
            jax.ShapeDtypeStruct((parts, outputs, inputs), dtype if parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct((parts, across, outputs, 8), jnp.float32),
        ),
        grid={"program": programs},
        cluster={"mate": tile.mates} if tile.mates > 1 else {},
        warpgroups=_MULTIPLIERS + 1,
        scratch=[
            operand((slots, _ROWS, tile.outputs)),
            operand((slots, _ROWS, tile.inputs)),
            operand((_MULTIPLIERS, 8, _ROWS)),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.ClusterBarrier(collective_axes=("mate",), **barriers) if together else plgpu.Barrier(**barriers),
        ],
        name="linear_backward_weights",
    )
    dw = dw[0] if parts == 1 else jnp.sum(dw, axis=0).astype(dtype)
    return dw, jnp.sum(db[..., 0], axis=(0, 1))
