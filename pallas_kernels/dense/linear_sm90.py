"""A dense layer's products in half precisions on Hopper's tensor cores, and in the same kernels what its bias wants.

    z[n, o] = Σ x[n, i] * w[o, i] + b[o],    over the inputs i,
    dw[o, i] = Σ dy[n, o] * x[n, i],    db[o] = Σ dy[n, o],    over the rows n.

A program makes a tile of the result. One warpgroup brings blocks of both operands into a ring in shared memory by bulk
copies, also those of the next tile while this one is finished; two multiply them, each for half of the tile's rows.

For dw both operands have the summed axis outermost, which the tensor cores take in half precisions. A column of ones
beside x's makes db: of the programs that read the same columns of dy, each does it for its share of the rows. Parts of
the rows are as many as keep all multiprocessors busy; their sums are added up after, in a fixed order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import load, operand, store

_MULTIPROCESSORS = 132
# Summed in a step. As many values of a half precision fill the tensor cores' rows in shared memory.
_STEP = 64
_LEAST_ROWS = 8192
_LEAST_INPUTS = 512
_MULTIPLIERS = 2
_COPIER = _MULTIPLIERS
# Of 512 a lane of each warpgroup together.
_COPIERS_REGISTERS, _MULTIPLIERS_REGISTERS = 40, 232


@dataclasses.dataclass(frozen=True)
class Tile:
    """How programs divide the result.

    Attributes:
      rows, columns: of a program's tile.
      slots: of the ring.
      parts: of the summed axis.
      mates: programs, beside each other in the rows, that share what they read of the right operand.
      wide: tiles of a row of them that are taken before the next row's; 0 for all.
    """

    rows: int
    columns: int
    slots: int
    parts: int
    mates: int
    wide: int = 0

    def of_many(self, columns: int) -> "Tile":
        """Where the result, `columns` wide, has more tiles than there are multiprocessors."""
        # The tiles of a time are as many rows as columns.
        return dataclasses.replace(self, mates=2, wide=math.gcd(columns // self.columns, 8))


def _plain_tile(columns):
    return Tile(rows=128, columns=256 if columns % 256 == 0 else 128, slots=4, parts=1, mates=1)


def _half(*arrays):
    return arrays[0].dtype in (jnp.bfloat16, jnp.float16) and len({a.dtype for a in arrays}) == 1


# --------------------------------------------------------------------------------------------------------- the forward


def forward_pays(x: Any, w: Any) -> bool:
    """Whether `forward` takes such arrays, and is faster than the library's product and a pass for the bias."""
    (rows, inputs), outputs = x.shape, w.shape[0]
    fits = inputs % _STEP == 0 and outputs > 0 and outputs % 128 == 0
    return _half(x, w) and fits and rows >= _LEAST_ROWS and inputs >= _LEAST_INPUTS


def forward(x: Array, w: Array, b: Array) -> Array:
    """`x wᵀ + b` in x's dtype, rounded once.

    Where there is no GPU the library's product takes the kernel's place.

    Args:
      x: `(rows, inputs)`, inputs a multiple of 64.
      w, b: `(outputs, inputs)` and `(outputs,)`, outputs a multiple of 128.
    """

    def plain(x, w, b):
        z = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
        return (z + b.astype(jnp.float32)).astype(x.dtype)

    tile = _plain_tile(w.shape[0]).of_many(w.shape[0])
    return on_gpu(functools.partial(_forward, tile=tile), plain, x, w, b)


def _forward(x, w, b, *, tile):
    (rows, inputs), outputs = x.shape, w.shape[0]
    division = _Division(tile, rows, outputs, inputs)
    high, layout = tile.rows // _MULTIPLIERS, plgpu.Layout.WGMMA.reduce(0)

    def body(x_ref, w_ref, b_ref, z_ref, xs, ws, leaving, *barriers, warpgroup, **ids):
        def copy(slot, step, place, copy_left, copy_right):
            summed = pl.ds(step * _STEP, _STEP)
            copy_left(x_ref.at[pl.ds(place.row, tile.rows), summed], xs.at[slot])
            copy_right(w_ref.at[pl.ds(place.column, tile.columns), summed], ws.at[slot])

        def multiply(slot, sums, beside):
            left = xs.at[slot, pl.ds(warpgroup * high, high)]
            plgpu.wgmma(sums, left, ws.at[slot].transpose((1, 0)))

        def finish(place, z):
            here = pl.ds(place.row + warpgroup * high, high)
            for i, start in enumerate(range(0, tile.columns, _STEP)):
                columns, buffer = pl.ds(place.column + start, _STEP), leaving.at[warpgroup, i % 2]
                bias = load(b_ref.at[columns], layout, optimized=False)
                # The copy before last has read its buffer.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                z_ = z[:, start : start + _STEP] + lax.broadcast_in_dim(bias, (high, _STEP), [1])
                buffer[...] = z_.astype(x.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, z_ref.at[here, columns])

        sums = [plgpu.ACC((high, tile.columns))]
        division.run(copy, multiply, finish, sums, barriers, warpgroup=warpgroup, **ids)
        pl.when(warpgroup < _COPIER)(lambda: plgpu.wait_smem_to_gmem(0))

    return launch(
        body,
        x,
        w,
        b.astype(jnp.float32),
        out=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        scratch=[
            operand((tile.slots, tile.rows, _STEP), x.dtype),
            operand((tile.slots, tile.columns, _STEP), x.dtype),
            operand((_MULTIPLIERS, 2, high, _STEP), x.dtype),
            *division.barriers,
        ],
        name="linear",
        **division.launched,
    )


# ------------------------------------------------------------------------------------------- the parameters' gradients


def tile(rows: int, outputs: int, inputs: int) -> Tile | None:
    """The tile for dw of these sizes; None where there is none."""
    steps = -(-rows // _STEP)
    if not steps or not outputs or not inputs or outputs % 128 or inputs % 128:
        return None
    tile = _plain_tile(inputs)
    tiles = (outputs // tile.rows) * (inputs // tile.columns)
    if tiles > _MULTIPROCESSORS and outputs % (2 * tile.rows) == 0:
        tile = tile.of_many(inputs)

    def microseconds(parts):
        # A step of a tile takes 0.75, writing and reading a part's sums goes at 3 TB/s.
        turns = -(-tiles * parts // _MULTIPROCESSORS) * -(-steps // parts)
        return turns * 0.75 * tile.columns / 256 + (parts > 1) * parts * outputs * inputs * 8 / 3e6

    return dataclasses.replace(tile, parts=min(range(1, min(steps, _MULTIPROCESSORS) + 1), key=microseconds))


def pays(dy: Any, x: Any) -> bool:
    """Whether `weights_gradient` takes such arrays, and is faster than the library's product and sum."""
    return _half(dy, x) and dy.shape[0] >= _LEAST_ROWS and tile(*dy.shape, x.shape[1]) is not None


def weights_gradient(dy: Array, x: Array, *, dtype: DTypeLike | None = None) -> tuple[Array, Array]:
    """dw in `dtype`, by default x's, and float32 db, of `(rows, outputs)` dy and `(rows, inputs)` x that have a `tile`.

    Where there is no GPU the library's product takes the kernel's place.
    """
    dtype = dtype or x.dtype

    def plain(dy, x):
        dw = jnp.matmul(dy.T, x, preferred_element_type=jnp.float32)
        return dw.astype(dtype), jnp.sum(dy, axis=0, dtype=jnp.float32)

    here = tile(*dy.shape, x.shape[1])
    return on_gpu(functools.partial(_weights_gradient, tile=here, dtype=dtype), plain, dy, x)


def _weights_gradient(dy, x, *, tile, dtype):
    (rows, outputs), (_, inputs) = dy.shape, x.shape
    division = _Division(tile, outputs, inputs, rows)
    high, parts = tile.rows // _MULTIPLIERS, tile.parts

    def body(dy_ref, x_ref, dw_ref, db_ref, dys, xs, ones, *barriers, warpgroup, **ids):
        def copy(slot, step, place, copy_left, copy_right):
            summed = pl.ds(step * _STEP, _STEP)
            copy_left(dy_ref.at[summed, pl.ds(place.row, tile.rows)], dys.at[slot])
            copy_right(x_ref.at[summed, pl.ds(place.column, tile.columns)], xs.at[slot])

        def multiply(slot, sums, bias_sums, beside):
            left = dys.at[slot, :, pl.ds(warpgroup * high, high)].transpose((1, 0))
            plgpu.wgmma(sums, left, xs.at[slot])
            if beside:
                plgpu.wgmma(bias_sums, left, ones.at[warpgroup].transpose((1, 0)))

        def finish(place, sums, bias_sums):
            here = pl.ds(place.row + warpgroup * high, high)
            store(dw_ref.at[place.part, here, pl.ds(place.column, tile.columns)], sums.astype(dw_ref.dtype))
            store(db_ref.at[place.part, place.across, here], bias_sums)

        @pl.when(warpgroup < _COPIER)
        def _():
            ones[warpgroup] = plgpu.layout_cast(jnp.ones((8, _STEP), x.dtype), layout)
            plgpu.commit_smem()

        sums = [plgpu.ACC((high, tile.columns)), plgpu.ACC((high, 8))]
        division.run(copy, multiply, finish, sums, barriers, warpgroup=warpgroup, beside=True, **ids)

    # Two rows a warp.
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((8, _STEP), (2, _STEP), (_STEP // 16,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )
    dw, db = launch(
        body,
        dy,
        x,
        out=(
            jax.ShapeDtypeStruct((parts, outputs, inputs), dtype if parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct((parts, division.across, outputs, 8), jnp.float32),
        ),
        scratch=[
            operand((tile.slots, _STEP, tile.rows), x.dtype),
            operand((tile.slots, _STEP, tile.columns), x.dtype),
            operand((_MULTIPLIERS, 8, _STEP), x.dtype),
            *division.barriers,
        ],
        name="linear_backward_weights",
        **division.launched,
    )
    dw = dw[0] if parts == 1 else jnp.sum(dw, axis=0).astype(dtype)
    return dw, jnp.sum(db[..., 0], axis=(0, 1))


# ------------------------------------------------------------------------------------------------------ what they share


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tile's part, its first row and column, which of its row of tiles it is, and the steps of its sums."""

    part: Any
    row: Any
    column: Any
    across: Any
    first: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class _Division:
    """A product, `(rows, summed) (summed, columns)`, divided into tiles: persistent programs take one after another."""

    tile: Tile
    rows: int
    columns: int
    summed: int

    @property
    def down(self) -> int:
        """Tiles of all mates together."""
        return -(-self.rows // (self.tile.rows * self.tile.mates))

    @property
    def across(self) -> int:
        return self.columns // self.tile.columns

    @property
    def jobs(self) -> int:
        return self.tile.parts * self.down * self.across

    @property
    def programs(self) -> int:
        return min(self.jobs, _MULTIPROCESSORS // self.tile.mates)

    @property
    def launched(self) -> dict[str, Any]:
        """How it is launched."""
        cluster = {"mate": self.tile.mates} if self.tile.mates > 1 else {}
        return dict(grid={"program": self.programs}, cluster=cluster, warpgroups=_MULTIPLIERS + 1)

    @property
    def barriers(self) -> list[Any]:
        """Of the slots: whether they are loaded, and whether they are free, with all mates."""
        barrier = plgpu.Barrier
        if self.tile.mates > 1:
            barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("mate",))
        free = barrier(num_arrivals=_MULTIPLIERS, num_barriers=self.tile.slots)
        return [plgpu.Barrier(num_arrivals=2, num_barriers=self.tile.slots), free]

    def place(self, job: Any, mate: Any) -> _Place:
        tile, across, down = self.tile, self.across, self.down
        wide, steps = tile.wide or across, -(-self.summed // _STEP)
        part, place = job // (down * across), job % (down * across)
        low = place // wide % down
        column = place // (wide * down) * wide + place % wide
        first, end = part * steps // tile.parts, (part + 1) * steps // tile.parts
        return _Place(part, (low * tile.mates + mate) * tile.rows, column * tile.columns, column, first, end)

    def run(
        self,
        copy: Callable,
        multiply: Callable,
        finish: Callable,
        sums: Sequence[Any],
        barriers: Sequence[Any],
        *,
        program: Any,
        warpgroup: Any,
        mate: Any = 0,
        beside: bool = False,
    ) -> None:
        """The body of a program.

        Args:
          copy: `copy(slot, step, place, copy_left, copy_right)` fills a slot by one call of each.
          multiply: `multiply(slot, *sums, beside)` adds a slot's products to the sums.
          finish: `finish(place, *sums)` with the sums in registers.
          sums: the accumulators.
          barriers: those of `barriers`.
          beside: whether there is a second product, `beside`, of the left operand alone: the tiles of a row of them
            make it for a share of the steps each.
        """
        (loaded, free), slots = barriers, self.tile.slots
        together = dict(collective_axes="mate") if self.tile.mates > 1 else {}

        def each_job(do):
            """`turn = do(turn, place)`: turns count the steps of all jobs, and go round the slots."""

            def one(i, turn):
                return do(turn, self.place(program + i * self.programs, mate))

            jobs = (self.jobs - program + self.programs - 1) // self.programs
            return lax.fori_loop(0, jobs, one, jnp.int32(0))

        def bring(turn, place):
            def fetch(step, turn):
                slot = turn % slots
                pl.when(turn >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                copy_left = functools.partial(plgpu.copy_gmem_to_smem, barrier=loaded.at[slot])
                copy(slot, step, place, copy_left, functools.partial(copy_left, **together))
                return turn + 1

            return lax.fori_loop(place.first, place.end, fetch, turn)

        def make(turn, place):
            def accumulate(*sums):
                def add(step, turn, *, beside):
                    plgpu.barrier_wait(loaded.at[turn % slots])
                    multiply(turn % slots, *sums, beside=beside)
                    # The products of the step before are done.
                    plgpu.wgmma_wait(2 if beside else 1)
                    pl.when(step > place.first)(lambda: plgpu.barrier_arrive(free.at[(turn - 1) % slots]))
                    return turn + 1

                pieces = [(place.first, place.end, False)]
                if beside:
                    length = place.end - place.first
                    start, stop = (place.first + length * n // self.across for n in (place.across, place.across + 1))
                    pieces = [(place.first, start, False), (start, stop, True), (stop, place.end, False)]
                last = turn
                for first, end, beside_ in pieces:
                    last = lax.fori_loop(first, end, functools.partial(add, beside=beside_), last)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[(last - 1) % slots])
                return [a[...] for a in sums]

            finish(place, *pl.run_scoped(accumulate, *sums))
            return turn + place.end - place.first

        @pl.when(warpgroup == _COPIER)
        def _():
            plgpu.set_max_registers(_COPIERS_REGISTERS, action="decrease")
            turns = each_job(bring)
            # No mate may end while another still tells it that a slot is free.
            lax.fori_loop(
                jnp.maximum(turns - slots, 0), turns, lambda turn, _: plgpu.barrier_wait(free.at[turn % slots]), None
            )

        @pl.when(warpgroup < _COPIER)
        def _():
            plgpu.set_max_registers(_MULTIPLIERS_REGISTERS, action="increase")
            each_job(make)
