"""A product of half-precision matrices on Hopper's tensor cores, as a warp-specialized pipeline.

CTAs are persistent, and compute one tile of the result after another. A producer warpgroup copies blocks of both
operands into a ring in shared memory by bulk copies. Two consumer warpgroups multiply the blocks with `wgmma`, and keep
the sums in registers. The epilogue of a tile stores the sums. Two CTAs can form a cluster, whose tiles lie one below
the other. Both tiles need the same block of the right operand, and each CTA copies half of it to both CTAs.

There are two schedules for the consumers. In the ping-pong schedule, one consumer stores a tile while the other
consumer multiplies the next tile, so that the tensor cores do not idle. In the cooperative schedule, each consumer
computes half of a tile's rows. The tile is then twice as large, and fewer bytes are read per product.

The summed axis may be split (split-K), which yields one result per split.

A kernel is a subclass of `Product`. Its body calls `run` with functions for the copies, the products of a step, and the
epilogue.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import OPERAND_BYTES, largest_divisor, quotient, remainder
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import check_divides

ITEM_BYTES = 2
"""Bytes of a half-precision element."""
STEP = OPERAND_BYTES // ITEM_BYTES
"""Number of elements of the summed axis per step. This number of half-precision elements fills one row of an
operand."""

CONSUMERS = 2
"""Number of consumer warpgroups. The registers of each consumer hold 64 x 256 or 128 x 128 sums."""
PRODUCER = CONSUMERS
"""Index of the producer's warpgroup, which follows the consumers' warpgroups."""
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Registers per thread of the producer and of the consumers, which must be multiples of 8 (PTX ISA, setmaxnreg). A
multiprocessor has 65536 registers. One thread of each of the three warpgroups may therefore take 512 together; a
producer thread and two consumer threads take 504."""

_RASTER_COLUMNS = 2048
"""Number of columns of the result that concurrent tiles cover. If it does not divide the columns of the result, the
largest smaller number that divides them is used. Half and twice this number were slower, for dw
(docs/lab/2026-11-21-dense.md) and for the forward (docs/lab/2026-11-24-dense.md)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of the result into tiles, and of the tiles among CTAs.

    Attributes:
      rows, columns: numbers of rows and columns of a CTA's tile.
      stages: number of stages of the ring.
      splits: number of parts into which the summed axis is divided.
      cluster: number of CTAs that share the right operand's blocks; their tiles lie one below the other.
      raster: number of columns of tiles in a column block. The tiles of one column block are computed before the tiles
        of the next. 0 means a single column block.
    """

    rows: int
    columns: int
    stages: int
    splits: int = 1
    cluster: int = 1
    raster: int = 0

    def clustered(self, columns: int) -> "Config":
        """Return the config with clusters of two, for a result with `columns` columns.

        This is best if the result has more tiles than there are multiprocessors.
        """
        # Concurrent tiles then form a square. They share rows and columns of the operands, which they read through the
        # L2 cache.
        width = _RASTER_COLUMNS // self.columns
        return dataclasses.replace(self, cluster=2, raster=largest_divisor(columns // self.columns, width))


class _Tile(NamedTuple):
    """A tile of the result.

    Attributes:
      split: index of the part of the summed axis.
      row, column: the tile's first row and first column in the result.
      tile_column: index of the tile's column of tiles.
      first, end: the range of the tile's steps along the summed axis.
    """

    split: Any
    row: Any
    column: Any
    tile_column: Any
    first: Any
    end: Any


def _raster(index: Any, rows: int, width: int) -> tuple[Any, Any]:
    """Return the row and column of the `index`th tile, in units of tiles. Within a column block of `width` tiles, tiles
    follow one another row by row.

    Each column block starts at its top. `plgpu.planar_snake` would visit every other block from its bottom.
    """
    row = remainder(quotient(index, width), rows)
    return row, quotient(index, width * rows) * width + remainder(index, width)


@dataclasses.dataclass(frozen=True)
class Product:
    """The product `(rows, summed_size) (summed_size, columns)` as a warp-specialized pipeline.

    Attributes:
      config: the tiles.
      rows, columns, summed_size: numbers of rows and columns of the result, and length of the summed axis.
      multiprocessors: number of multiprocessors of the device.
    """

    config: Config
    rows: int
    columns: int
    summed_size: int
    multiprocessors: int

    consumers: ClassVar[int] = CONSUMERS
    """Number of consumers per tile. With one consumer, the schedule is ping-pong, and all tiles must have the same
    number of steps."""

    def check(self, kernel: str) -> None:
        """Raise ValueError unless a tile's width divides the number of columns, and a column block's width divides the
        number of columns of tiles."""
        check_divides(kernel, "columns", self.config.columns, self.columns)
        check_divides(kernel, "raster", self.config.raster or self.tile_columns, self.tile_columns)

    @property
    def turns(self) -> int:
        """Number of tiles that a CTA multiplies or stores at a time: two in the ping-pong schedule, else one."""
        return CONSUMERS // self.consumers

    @property
    def steps(self) -> int:
        """Number of steps of a tile if the summed axis is not split."""
        return -(-self.summed_size // STEP)

    @property
    def tile_rows(self) -> int:
        """Number of rows of tiles, where a cluster's tiles count as one row."""
        return -(-self.rows // (self.config.rows * self.config.cluster))

    @property
    def tile_columns(self) -> int:
        """Number of columns of tiles."""
        return self.columns // self.config.columns

    @property
    def tiles(self) -> int:
        """Number of tiles over all splits, where a cluster's tiles count as one."""
        return self.config.splits * self.tile_rows * self.tile_columns

    @property
    def clusters(self) -> int:
        return min(self.tiles, self.multiprocessors // self.config.cluster)

    @property
    def consumer_rows(self) -> int:
        """Number of rows of a tile whose sums one consumer holds."""
        return self.config.rows // self.consumers

    @property
    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments for `launch`."""
        cluster = {"cta": self.config.cluster} if self.config.cluster > 1 else {}
        return dict(grid={"cluster": self.clusters}, cluster=cluster, warpgroups=CONSUMERS + 1)

    @property
    def multicast(self) -> dict[str, Any]:
        """Keyword arguments for bulk copies of the right operand. Each CTA of a cluster then copies its share of a
        block to all CTAs of the cluster."""
        return dict(collective_axes="cta") if self.config.cluster > 1 else {}

    @property
    def barriers(self) -> list[Any]:
        """The ring's barriers. Each stage has one barrier per turn, at which the stage's copies arrive. It has one more
        barrier, at which the consumers of the cluster release the stage."""
        barrier = plgpu.Barrier
        if self.config.cluster > 1:
            barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cta",))
        free = barrier(num_arrivals=self.consumers, num_barriers=self.config.stages)
        return [plgpu.Barrier(num_arrivals=2, num_barriers=self.turns * self.config.stages), free]

    def tile(self, index: Any, cta: Any) -> _Tile:
        config, steps, tiles = self.config, self.steps, self.tile_rows * self.tile_columns
        split, index = quotient(index, tiles), remainder(index, tiles)
        row, column = _raster(index, self.tile_rows, config.raster or self.tile_columns)
        first, end = (quotient(n * steps, config.splits) for n in (split, split + 1))
        return _Tile(split, (row * config.cluster + cta) * config.rows, column * config.columns, column, first, end)

    def consumed_rows(self, tile: _Tile, warpgroup: Any) -> Any:
        """Return the slice of rows of the result whose sums a consumer holds."""
        return pl.ds(tile.row + self.first_row(warpgroup), self.consumer_rows)

    def first_row(self, warpgroup: Any) -> Any:
        """Return the index, within a tile, of the first row whose sums a consumer holds."""
        return warpgroup * self.consumer_rows if self.consumers > 1 else 0

    def run(
        self,
        ring: Ring,
        accumulators: Sequence[Any],
        spans: Callable[[_Tile], Sequence[tuple[Any, Any, Callable]]],
        epilogue: Callable[..., None],
        warpgroup: Any,
        cluster: Any,
        cta: Any = 0,
    ) -> None:
        """Run the pipeline: the producer and the consumers, each with its share of the registers.

        Args:
          ring: the stages. Its `copy(count, stage, barrier, tile, step)` copies the operands' blocks for a step of a
            tile. `count` increases over all tiles.
          accumulators: types of the accumulators that each consumer allocates.
          spans: function from a tile to consecutive ranges of steps, `(first, end, multiply)`. The function
            `multiply(stage, *accumulators)` starts the products of a step, and returns when the products of the
            previous step are done.
          epilogue: `epilogue(tile, *sums)` stores a tile's sums, which it gets in registers.
        """

        @pl.when(warpgroup == PRODUCER)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            # No CTA may end while another CTA's consumers arrive at its barriers.
            ring.drain(self.visit_tiles(functools.partial(self.produce, ring), cluster, cta, first=0, stride=1))

        @pl.when(warpgroup < PRODUCER)
        def _():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            first = warpgroup if self.turns > 1 else 0
            consume = functools.partial(self.consume, ring, accumulators, spans, epilogue)
            self.visit_tiles(consume, cluster, cta, first=first, stride=self.turns)

    def visit_tiles(
        self, visit: Callable[[Any, Any, _Tile], Any], cluster: Any, cta: Any, *, first: Any, stride: int
    ) -> Any:
        """Call `count = visit(count, turn, tile)` for every `stride`th tile of a CTA, starting with tile number
        `first`.

        `count` is the number of the ring's steps before the tile, including the steps of tiles that are skipped. In the
        ping-pong schedule, `turn` is the index of the consumer that computes the tile; otherwise it is 0. Return the
        last count.
        """

        def visit_next(i, count):
            number = first + i * stride
            tile = self.tile(cluster + number * self.clusters, cta)
            next_count = visit(count, remainder(number, self.turns), tile)
            return next_count + (stride - 1) * self.steps

        tiles = quotient(self.tiles - cluster + self.clusters - 1, self.clusters)
        visits = quotient(tiles - first + stride - 1, stride)
        return lax.fori_loop(0, visits, visit_next, jnp.int32(first * self.steps))

    def produce(self, ring: Ring, count: Any, turn: Any, tile: _Tile) -> Any:
        """Copy the operands' blocks for all steps of a tile into the ring. Return the new `count`."""
        ring = dataclasses.replace(ring, turn=turn)

        def fetch(step, count):
            ring.produce(count, tile, step)
            return count + 1

        return lax.fori_loop(tile.first, tile.end, fetch, count)

    def consume(
        self,
        ring: Ring,
        accumulators: Sequence[Any],
        spans: Callable,
        epilogue: Callable,
        count: Any,
        turn: Any,
        tile: _Tile,
    ) -> Any:
        """Multiply the operands' blocks for all steps of a tile, and pass the sums to the epilogue. Return the new
        `count`."""
        ring = dataclasses.replace(ring, turn=turn)

        def accumulate(*sums):
            def add(step, count, *, multiply):
                ring.wait(count)
                multiply(ring.stage(count), *sums)
                pl.when(step > tile.first)(lambda: ring.release(count - 1))
                return count + 1

            next_count = count
            for first, end, multiply in spans(tile):
                next_count = lax.fori_loop(first, end, functools.partial(add, multiply=multiply), next_count)
            plgpu.wgmma_wait(0)
            ring.release(next_count - 1)
            return [a[...] for a in sums]

        epilogue(tile, *pl.run_scoped(accumulate, *accumulators))
        return count + tile.end - tile.first
