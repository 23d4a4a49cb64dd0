"""A product of half-precision matrices on Hopper's tensor cores, as a warp-specialized pipeline.

CTAs are persistent, and compute one tile of the result after another. A producer warpgroup brings blocks of both
operands into a ring in shared memory by bulk copies. Two consumer warpgroups multiply them by `wgmma`, with the sums in
registers, which the epilogue of a tile stores. In a cluster of two CTAs, whose tiles lie one below the other, each CTA
brings half of the right operand's block to both.

There are two schedules for the consumers. In the ping-pong schedule, one consumer stores a tile while the other
multiplies the next, so that the tensor cores do not idle. In the cooperative schedule, each consumer computes half of a
tile's rows. The tile is then twice as large, and fewer bytes are read per product.

The summed axis may be split (split-K), which yields one result per split.

A kernel is a subclass of `Product`. Its body calls `run` with the copies, the products of a step, and the epilogue.
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
"""Elements of the summed axis per step: the number in half precision that fills an operand's row."""

CONSUMERS = 2
"""Consumer warpgroups: with their share of the registers, each holds 64 x 256 or 128 x 128 sums."""
PRODUCER = CONSUMERS
"""Index of the producer's warpgroup, which follows the consumers."""
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Registers of a thread, multiples of 8 (PTX ISA, setmaxnreg). A multiprocessor has 65536, or 512 for one thread of
each of the three warpgroups; a producer and two consumers take 504."""

_RASTER_COLUMNS = 2048
"""Columns of the result that concurrent tiles cover, or the largest smaller number that divides the result. Half and
twice this number were slower, for dw (docs/lab/2026-11-21-dense.md) and for the forward
(docs/lab/2026-11-24-dense.md)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the result is divided into tiles, and the tiles among CTAs.

    Attributes:
      rows, columns: size of a CTA's tile.
      stages: stages of the ring.
      splits: number of parts of the summed axis.
      cluster: number of CTAs that share the right operand's blocks; their tiles lie one below the other.
      raster: width, in tiles, of the column blocks that are visited one after another; 0 for a single block.
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
        # Concurrent tiles form a square, so that their operands share the L2 cache.
        width = _RASTER_COLUMNS // self.columns
        return dataclasses.replace(self, cluster=2, raster=largest_divisor(columns // self.columns, width))


class _Tile(NamedTuple):
    """A tile of the result: its split, first row and column, its column of tiles, and the range of its steps."""

    split: Any
    row: Any
    column: Any
    tile_column: Any
    first: Any
    end: Any


def _raster(index: Any, rows: int, width: int) -> tuple[Any, Any]:
    """Return the row and column of the `index`th tile: row by row in a column block `width` tiles wide.

    Each block starts at its top. `plgpu.planar_snake` would visit every other block from its bottom.
    """
    row = remainder(quotient(index, width), rows)
    return row, quotient(index, width * rows) * width + remainder(index, width)


@dataclasses.dataclass(frozen=True)
class Product:
    """The product `(rows, summed_size) (summed_size, columns)` as a warp-specialized pipeline; subclasses add the rest.

    Attributes:
      config: the tiles.
      rows, columns, summed_size: sizes of the product.
      multiprocessors: number of multiprocessors of the device.
    """

    config: Config
    rows: int
    columns: int
    summed_size: int
    multiprocessors: int

    consumers: ClassVar[int] = CONSUMERS
    """Consumers per tile. With one consumer, the schedule is ping-pong, and all tiles have the same number of steps."""

    def check(self, kernel: str) -> None:
        """Require tiles to divide the columns, and column blocks to divide the columns of tiles."""
        check_divides(kernel, "columns", self.config.columns, self.columns)
        check_divides(kernel, "raster", self.config.raster or self.tile_columns, self.tile_columns)

    @property
    def turns(self) -> int:
        """Number of tiles that are multiplied or stored at a time."""
        return CONSUMERS // self.consumers

    @property
    def steps(self) -> int:
        """Steps of a tile without splits."""
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
        """Rows of a tile whose sums one consumer holds."""
        return self.config.rows // self.consumers

    @property
    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments for `launch`."""
        cluster = {"cta": self.config.cluster} if self.config.cluster > 1 else {}
        return dict(grid={"cluster": self.clusters}, cluster=cluster, warpgroups=CONSUMERS + 1)

    @property
    def multicast(self) -> dict[str, Any]:
        """Keyword arguments that copy the right operand to all CTAs of the cluster, each of which brings its share."""
        return dict(collective_axes="cta") if self.config.cluster > 1 else {}

    @property
    def barriers(self) -> list[Any]:
        """Barriers of the stages: one per turn for loaded operands, and one at which the cluster's consumers release a
        stage."""
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
        """Return the rows of the result whose sums a consumer holds."""
        return pl.ds(tile.row + self.first_row(warpgroup), self.consumer_rows)

    def first_row(self, warpgroup: Any) -> Any:
        """Return the first row of a tile whose sums a consumer holds."""
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
          ring: the stages. Its `copy(count, stage, barrier, tile, step)` brings a step of a tile; `count` increases
            over all tiles.
          accumulators: accumulators of a consumer.
          spans: function from a tile to consecutive ranges of steps, `(first, end, multiply)`.
            `multiply(stage, *accumulators)` starts the products of a step, and returns when the previous step's
            products are done.
          epilogue: `epilogue(tile, *sums)` stores the sums, which are in registers.
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
        """Call `count = visit(count, turn, tile)` for every `stride`th tile of a CTA, from number `first` on.

        `count` is the number of the ring's steps before the tile, including the steps of tiles that are skipped. `turn`
        is the number of the consumer that computes the tile. Returns the last count.
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
        """Bring the blocks of a tile's steps."""
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
        """Multiply the blocks of a tile's steps, and pass the sums to the epilogue."""
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
