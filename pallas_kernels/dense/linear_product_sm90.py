"""The schedule of a matrix product on Hopper's tensor cores: tiles per CTA, and a warp-specialized pipeline.

The body of a kernel calls `Product.run`. `docs/kernels/dense.md` describes the data flow and its ping-pong and
cooperative schedules. A cluster's two CTAs compute two tiles, one below the other. Each copies half of each block of
the right operand, and multicasts it to both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import OPERAND_BYTES, largest_divisor, quotient, remainder
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import check_divides

CONSUMERS = 2
"""Consumer warpgroups per CTA."""
_MAX_SUMS = 64 * 256
"""Sums that fit in the registers of a consumer."""
PRODUCER = CONSUMERS
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Registers per thread, multiples of 8 (PTX ISA, setmaxnreg). A producer and two consumer threads share 512."""

_RASTER_COLUMNS = 2048
"""Columns of the result that concurrent tiles cover. Half and twice this were slower: docs/lab/2026-11-21-dense.md (dw)
and docs/lab/2026-11-24-dense.md (forward)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of `rows` x `columns`. The summed axis is divided into `splits` parts, each with a separate result
    (split-K). CTAs compute the result in vertical blocks, `raster` tiles wide; 0 means a single block. A cluster has 1
    or 2 CTAs. A tile has one consumer in the ping-pong schedule, and two in the cooperative schedule. The ping-pong
    schedule needs the same number of steps for all tiles."""

    rows: int
    columns: int
    stages: int
    splits: int = 1
    cluster: int = 1
    raster: int = 0
    consumers: int = CONSUMERS

    def clustered(self, columns: int) -> "Config":
        # Concurrent tiles then form a square, and share operands in the L2 cache.
        width = _RASTER_COLUMNS // self.columns
        return dataclasses.replace(self, cluster=2, raster=largest_divisor(-(-columns // self.columns), width))


class _Tile(NamedTuple):
    batch: Any
    split: Any
    row: Any
    column: Any
    tile_column: Any
    first: Any
    end: Any


def _raster(index: Any, rows: int, width: int) -> tuple[Any, Any]:
    row = remainder(quotient(index, width), rows)
    return row, quotient(index, width * rows) * width + remainder(index, width)


@dataclasses.dataclass(frozen=True)
class Product:
    """`batch` products with results of `rows` x `columns`, each a sum over `summed_size` elements."""

    config: Config
    rows: int
    columns: int
    summed_size: int
    dtype: Any
    multiprocessors: int
    batch: int = 1

    def check(self, kernel: str) -> None:
        check_divides(kernel, "raster", self.config.raster or self.tile_columns, self.tile_columns)
        if self.consumer_rows * self.config.columns > _MAX_SUMS:
            raise ValueError(f"{kernel}: config is {self.config}; wants at most {_MAX_SUMS} sums per consumer")

    @property
    def turns(self) -> int:
        return CONSUMERS // self.config.consumers

    @property
    def step(self) -> int:
        """Elements of the summed axis per step: one row of an operand's tile."""
        return OPERAND_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def steps(self) -> int:
        return -(-self.summed_size // self.step)

    @property
    def tile_rows(self) -> int:
        return -(-self.rows // (self.config.rows * self.config.cluster))

    @property
    def tile_columns(self) -> int:
        return -(-self.columns // self.config.columns)

    @property
    def tiles(self) -> int:
        return self.batch * self.config.splits * self.tile_rows * self.tile_columns

    @property
    def clusters(self) -> int:
        return min(self.tiles, self.multiprocessors // self.config.cluster)

    @property
    def consumer_rows(self) -> int:
        return self.config.rows // self.config.consumers

    @property
    def launch_options(self) -> dict[str, Any]:
        cluster = {"cta": self.config.cluster} if self.config.cluster > 1 else {}
        return dict(grid={"cluster": self.clusters}, cluster=cluster, warpgroups=CONSUMERS + 1)

    @property
    def multicast(self) -> dict[str, Any]:
        return dict(collective_axes="cta") if self.config.cluster > 1 else {}

    @property
    def barriers(self) -> list[Any]:
        barrier = plgpu.Barrier
        if self.config.cluster > 1:
            barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cta",))
        free = barrier(num_arrivals=self.config.consumers, num_barriers=self.config.stages)
        return [plgpu.Barrier(num_arrivals=2, num_barriers=self.turns * self.config.stages), free]

    def tile(self, index: Any, cta: Any) -> _Tile:
        config, steps, tiles = self.config, self.steps, self.tile_rows * self.tile_columns
        part, index = quotient(index, tiles), remainder(index, tiles)
        batch, split = quotient(part, config.splits), remainder(part, config.splits)
        row, column = _raster(index, self.tile_rows, config.raster or self.tile_columns)
        first, end = (quotient(n * steps, config.splits) for n in (split, split + 1))
        row, start = (row * config.cluster + cta) * config.rows, column * config.columns
        return _Tile(batch, split, row, start, column, first, end)

    def consumed_rows(self, tile: _Tile, warpgroup: Any) -> Any:
        return pl.ds(tile.row + self.first_row(warpgroup), self.consumer_rows)

    def first_row(self, warpgroup: Any) -> Any:
        return warpgroup * self.consumer_rows if self.config.consumers > 1 else 0

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
        """Run this warpgroup as producer or consumer, with the registers for its role. A step of the loop multiplies
        `step` elements of the summed axis.

        Args:
          ring: `ring.copy(count, stage, barrier, tile, step)` copies a tile's operands for a step. `count` numbers the
            steps of all tiles of the CTA.
          spans: maps a tile to `(first, end, multiply)` for consecutive ranges of steps. `multiply(stage,
            *accumulators)` starts a step's products, and waits for the previous step.
          epilogue: `epilogue(tile, *sums)` stores a tile's sums.
          warpgroup, cluster, cta: indices of this warpgroup in its CTA, of its cluster, and of its CTA in the cluster.
        """

        @pl.when(warpgroup == PRODUCER)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
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
        """Call `count = visit(count, turn, tile)` for every `stride`th tile of a CTA, beginning with tile number
        `first`, and return the last `count`. `count` is the number of steps along the summed axis for the CTA's earlier
        tiles, to which `visit` adds the tile's steps. `turn` is the index of the tile's consumer warpgroup in a
        ping-pong schedule."""

        def visit_next(i, count):
            number = first + i * stride
            tile = self.tile(cluster + number * self.clusters, cta)
            next_count = visit(count, remainder(number, self.turns), tile)
            return next_count + (stride - 1) * self.steps

        tiles = quotient(self.tiles - cluster + self.clusters - 1, self.clusters)
        visits = quotient(tiles - first + stride - 1, stride)
        return lax.fori_loop(0, visits, visit_next, jnp.int32(first * self.steps))

    def produce(self, ring: Ring, count: Any, turn: Any, tile: _Tile) -> Any:
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
