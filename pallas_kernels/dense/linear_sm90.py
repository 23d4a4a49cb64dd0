"""Half-precision products of a dense layer on Hopper's tensor cores, including the bias and its gradient.

    z[n, o] = Σ x[n, i] * w[o, i] + b[o],    over the inputs i,
    dw[o, i] = Σ dy[n, o] * x[n, i],    db[o] = Σ dy[n, o],    over the rows n.

Here o is an output, x the input, w and b the parameters, and dy the gradient with respect to z. Both products use one
warp-specialized pipeline. CTAs are persistent, and compute one tile of the result after another. A producer warpgroup
brings blocks of both operands into a ring in shared memory by bulk copies. Two consumer warpgroups multiply them by
`wgmma`, with the sums in registers. In a cluster of two CTAs, whose tiles lie one below the other, each CTA brings half
of the right operand's block to both.

For z, the consumers use a ping-pong schedule: while one stores a tile, the other multiplies the next, so that the
tensor cores do not idle. A tile leaves through shared memory. For dw, where a CTA has a single tile or tiles of
hundreds of steps, the consumers use a cooperative schedule: each computes half of a tile's rows. The tile is then twice
as large, and fewer bytes are read per product.

For dw, the summed axis is the outermost axis of both operands, which the tensor cores support in half precision. A
product with columns of ones yields db: of the CTAs that read the same columns of dy, each computes it for its share of
the rows. The rows are split (split-K) until all multiprocessors are busy. The sums of the splits are then added in a
fixed order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    OPERAND_BYTES,
    largest_divisor,
    load,
    operand,
    quotient,
    remainder,
    store,
    value_a_column,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import check_divides, kernel

_ITEM_BYTES = 2
"""Bytes of a half-precision element."""
_STEP = OPERAND_BYTES // _ITEM_BYTES
"""Elements of the summed axis per step: the number in half precision that fills an operand's row."""
_ROWS = 128
"""Rows of a tile: twice the 64 of a wgmma (PTX ISA)."""
_MIN_COLUMNS, _MAX_COLUMNS = 128, 256
"""Columns of a tile: a wgmma has at most 256 (PTX ISA). 128 for results that 256 does not divide, and for tiles whose
sums one consumer holds."""

_MIN_ROWS = 8192
_MIN_INPUTS = 512
"""Fewest rows for which the kernels pay: docs/lab/2026-11-21-dense.md. Fewest inputs for which the forward pays: no
page of the lab has this measurement."""

_CONSUMERS = 2
"""Consumer warpgroups: with their share of the registers, each holds 64 x 256 or 128 x 128 sums."""
_PRODUCER = _CONSUMERS
"""Index of the producer's warpgroup, which follows the consumers."""
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
"""Registers of a thread, multiples of 8 (PTX ISA, setmaxnreg). A multiprocessor has 65536, or 512 for one thread of
each of the three warpgroups; a producer and two consumers take 504."""

_MAX_STAGES = 6
"""Most stages of the ring. On Hopper, 4 fit next to the buffers with the largest tiles. Three were slower there:
docs/lab/2026-11-21-dense.md."""
_RASTER_COLUMNS = 2048
"""Columns of the result that concurrent tiles cover, or the largest smaller number that divides the result. Half and
twice this number were slower, for dw (docs/lab/2026-11-21-dense.md) and for the forward
(docs/lab/2026-11-24-dense.md)."""
_RESERVED_BYTES = 2048 + 512
"""Bytes of shared memory: Mosaic takes 2 KiB for sums across warps; 512 are more than the barriers need."""
_STEP_MICROSECONDS = 0.75
"""Microseconds per step of a tile of 128 x 256 on an H200, used only to choose the splits. No page of the lab has this
measurement; the rates in docs/lab/2026-11-21-dense.md are near it."""
_BYTES_A_MICROSECOND = 3e6
"""Bytes per microsecond at which the splits' sums are written and read, used only to choose the splits. Chosen by hand,
below the rate of a copy on an H200; not tuned."""


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


def _config(columns: int, buffer_bytes: int) -> Config:
    """Return a config with tiles of `columns` columns, one CTA per cluster, and one split.

    It has the most stages that fit next to `buffer_bytes` of other shared memory.
    """
    available_bytes = device.target().shared_bytes - _RESERVED_BYTES - buffer_bytes
    return Config(_ROWS, columns, stages=min(_MAX_STAGES, available_bytes // ((_ROWS + columns) * _STEP * _ITEM_BYTES)))


def _unsupported_operands(left: Any, right: Any) -> str | None:
    if left.dtype not in (jnp.bfloat16, jnp.float16) or right.dtype != left.dtype:
        return f"dtypes {left.dtype} and {right.dtype}, only bfloat16 or float16 for both"
    return None if left.shape[0] else "no rows"


def _unsupported_size(name: str, size: int, unit: int) -> str | None:
    return None if size and size % unit == 0 else f"{size} {name}, only multiples of {unit}"


def _unsupported_device(config: Config) -> str | None:
    available = device.target().shared_bytes
    return None if config.stages >= 2 else f"{available} bytes of shared memory, too few for a ring of two stages"


# --------------------------------------------------------------------------------------------------------- the product


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
class _Product:
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

    consumers: ClassVar[int] = _CONSUMERS
    """Consumers per tile. With one consumer, the schedule is ping-pong, and all tiles have the same number of steps."""

    def check(self, kernel: str) -> None:
        """Require tiles to divide the columns, and column blocks to divide the columns of tiles."""
        check_divides(kernel, "columns", self.config.columns, self.columns)
        check_divides(kernel, "raster", self.config.raster or self.tile_columns, self.tile_columns)

    @property
    def turns(self) -> int:
        """Number of tiles that are multiplied or stored at a time."""
        return _CONSUMERS // self.consumers

    @property
    def steps(self) -> int:
        """Steps of a tile without splits."""
        return -(-self.summed_size // _STEP)

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
        return dict(grid={"cluster": self.clusters}, cluster=cluster, warpgroups=_CONSUMERS + 1)

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

        @pl.when(warpgroup == _PRODUCER)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            # No CTA may end while another CTA's consumers arrive at its barriers.
            ring.drain(self.visit_tiles(functools.partial(self.produce, ring), cluster, cta, first=0, stride=1))

        @pl.when(warpgroup < _PRODUCER)
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


# --------------------------------------------------------------------------------------------------------- the forward


class _ForwardRefs(NamedTuple):
    x: Any
    w: Any
    b: Any
    z: Any
    x_stages: Any
    w_stages: Any
    z_buffers: Any
    loaded: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Forward(_Product):
    """Computes `z = x wᵀ + b` with the operands x and wᵀ. A tile is written in parts through its consumer's buffer."""

    consumers = 1

    def body(self, *refs, warpgroup, **ids):
        refs = _ForwardRefs(*refs)
        ring = Ring(self.config.stages, functools.partial(self.copy, refs), refs.loaded, free=refs.free)
        multiply = functools.partial(self.multiply, refs)
        self.run(
            ring,
            [plgpu.ACC((self.consumer_rows, self.config.columns))],
            lambda tile: [(tile.first, tile.end, multiply)],
            functools.partial(self.epilogue, refs, warpgroup),
            warpgroup,
            **ids,
        )
        pl.when(warpgroup < _PRODUCER)(lambda: plgpu.wait_smem_to_gmem(0))

    def copy(self, refs, count, stage, barrier, tile, step):
        summed_slice = pl.ds(step * _STEP, _STEP)
        rows, columns = pl.ds(tile.row, self.config.rows), pl.ds(tile.column, self.config.columns)
        plgpu.copy_gmem_to_smem(refs.x.at[rows, summed_slice], refs.x_stages.at[stage], barrier)
        plgpu.copy_gmem_to_smem(refs.w.at[columns, summed_slice], refs.w_stages.at[stage], barrier, **self.multicast)

    def multiply(self, refs, stage, sums):
        plgpu.wgmma(sums, refs.x_stages.at[stage], refs.w_stages.at[stage].transpose((1, 0)))
        plgpu.wgmma_wait(1)

    def epilogue(self, refs, warpgroup, tile, z):
        rows, buffer = self.consumed_rows(tile, warpgroup), refs.z_buffers.at[warpgroup]
        for start in range(0, self.config.columns, _STEP):
            columns = pl.ds(tile.column + start, _STEP)
            bias = load(refs.b.at[columns], value_a_column(), optimized=False)
            # The previous copy must have read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            piece = z[:, start : start + _STEP] + lax.broadcast_in_dim(bias, (self.consumer_rows, _STEP), [1])
            buffer[...] = piece.astype(refs.z.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, refs.z.at[rows, columns])


def _forward_config(outputs):
    return _config(_MIN_COLUMNS, buffer_bytes=_CONSUMERS * _ROWS * _STEP * _ITEM_BYTES).clustered(outputs)


def _forward_unsupported(x, w, b):
    inputs, outputs = x.shape[1], w.shape[0]
    return (
        ("no bias" if b is None else None)
        or _unsupported_operands(x, w)
        or _unsupported_size("inputs", inputs, _STEP)
        or _unsupported_size("outputs", outputs, _MIN_COLUMNS)
        or _unsupported_device(_forward_config(outputs))
    )


def _forward_heuristic(x, w, b):
    rows, inputs = x.shape
    return _forward_config(w.shape[0]) if rows >= _MIN_ROWS and inputs >= _MIN_INPUTS else None


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic, capability=(9, 0))
def forward(x: Array, w: Array, b: Array, *, config: Config) -> Array:
    """Return `x wᵀ + b` in x's dtype, rounded once.

    Args:
      x: `(rows, inputs)` in half precision, inputs a multiple of 64.
      w, b: `(outputs, inputs)` in x's dtype, and `(outputs,)`, outputs a multiple of 128.
      config: tiles with one split, and 64 or 128 columns, which divide the outputs.

    Raises:
      ValueError: if the config is another.
    """
    (rows, inputs), outputs = x.shape, w.shape[0]
    if config.splits != 1 or config.columns not in (_STEP, _MIN_COLUMNS):
        wanted = f"one split, and {_STEP} or {_MIN_COLUMNS} columns"
        raise ValueError(f"linear_sm90.forward: config is {config}; wants {wanted}")
    product = _Forward(config, rows, outputs, inputs, device.target().multiprocessors)
    product.check("linear_sm90.forward")
    return launch(
        product.body,
        x,
        w,
        b.astype(jnp.float32),
        out=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        scratch=[
            operand((config.stages, config.rows, _STEP), x.dtype),
            operand((config.stages, config.columns, _STEP), x.dtype),
            operand((_CONSUMERS, product.consumer_rows, _STEP), x.dtype),
            *product.barriers,
        ],
        name="linear",
        **product.launch_options,
    )


# ------------------------------------------------------------------------------------------- the parameters' gradients

_ONES = 8
"""Columns of ones: the fewest that a wgmma has (PTX ISA)."""


class _WeightsGradientRefs(NamedTuple):
    dy: Any
    x: Any
    dw: Any
    db: Any
    dy_stages: Any
    x_stages: Any
    ones: Any
    loaded: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _WeightsGradient(_Product):
    """Computes `dw = dyᵀ x` with the operands dyᵀ and x, and `db = dyᵀ 1`."""

    def body(self, *refs, warpgroup, **ids):
        refs = _WeightsGradientRefs(*refs)
        ring = Ring(self.config.stages, functools.partial(self.copy, refs), refs.loaded, free=refs.free)

        @pl.when(warpgroup < _PRODUCER)
        def _():
            two_rows_a_warp = plgpu.Tiling(((_ONES, _STEP), (2, _STEP), (_STEP // 16,)))
            layout = plgpu.Layout.TILED(two_rows_a_warp, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
            refs.ones[warpgroup] = plgpu.layout_cast(jnp.ones((_ONES, _STEP), refs.x.dtype), layout)
            plgpu.commit_smem()

        self.run(
            ring,
            [plgpu.ACC((self.consumer_rows, self.config.columns)), plgpu.ACC((self.consumer_rows, _ONES))],
            functools.partial(self.spans, refs, warpgroup),
            functools.partial(self.epilogue, refs, warpgroup),
            warpgroup,
            **ids,
        )

    def copy(self, refs, count, stage, barrier, tile, step):
        summed_slice = pl.ds(step * _STEP, _STEP)
        rows, columns = pl.ds(tile.row, self.config.rows), pl.ds(tile.column, self.config.columns)
        plgpu.copy_gmem_to_smem(refs.dy.at[summed_slice, rows], refs.dy_stages.at[stage], barrier)
        plgpu.copy_gmem_to_smem(refs.x.at[summed_slice, columns], refs.x_stages.at[stage], barrier, **self.multicast)

    def spans(self, refs, warpgroup, tile):
        """Return a tile's steps before, in, and after the share of steps that it adds to db, given by its column of
        tiles."""
        multiply = functools.partial(self.multiply, refs, warpgroup)
        length = tile.end - tile.first
        start, stop = (
            tile.first + quotient(length * n, self.tile_columns) for n in (tile.tile_column, tile.tile_column + 1)
        )
        with_bias = functools.partial(multiply, with_bias=True)
        return [(tile.first, start, multiply), (start, stop, with_bias), (stop, tile.end, multiply)]

    def multiply(self, refs, warpgroup, stage, sums, bias_sums, *, with_bias=False):
        rows = pl.ds(self.first_row(warpgroup), self.consumer_rows)
        left = refs.dy_stages.at[stage, :, rows].transpose((1, 0))
        plgpu.wgmma(sums, left, refs.x_stages.at[stage])
        if with_bias:
            plgpu.wgmma(bias_sums, left, refs.ones.at[warpgroup].transpose((1, 0)))
        plgpu.wgmma_wait(2 if with_bias else 1)

    def epilogue(self, refs, warpgroup, tile, sums, bias_sums):
        rows, columns = self.consumed_rows(tile, warpgroup), pl.ds(tile.column, self.config.columns)
        store(refs.dw.at[tile.split, rows, columns], sums.astype(refs.dw.dtype))
        store(refs.db.at[tile.split, tile.tile_column, rows], bias_sums)


def _weights_config(rows, outputs, inputs):
    columns = _MIN_COLUMNS if inputs % _MAX_COLUMNS else _MAX_COLUMNS
    config = _config(columns, buffer_bytes=_CONSUMERS * _ONES * _STEP * _ITEM_BYTES)
    multiprocessors, steps = device.target().multiprocessors, -(-rows // _STEP)
    tiles = (outputs // config.rows) * (inputs // config.columns)
    if tiles > multiprocessors and outputs % (2 * config.rows) == 0:
        config = config.clustered(inputs)

    def microseconds(splits):
        turns = -(-tiles * splits // multiprocessors) * -(-steps // splits)
        moved_bytes = (splits > 1) * splits * outputs * inputs * 8
        return turns * _STEP_MICROSECONDS * config.columns / _MAX_COLUMNS + moved_bytes / _BYTES_A_MICROSECOND

    return dataclasses.replace(config, splits=min(range(1, min(steps, multiprocessors) + 1), key=microseconds))


def _weights_unsupported(dy, x, *, dtype=None):
    (rows, outputs), inputs = dy.shape, x.shape[1]
    return (
        _unsupported_operands(dy, x)
        or _unsupported_size("outputs", outputs, _ROWS)
        or _unsupported_size("inputs", inputs, _MIN_COLUMNS)
        or _unsupported_device(_weights_config(rows, outputs, inputs))
    )


def _weights_heuristic(dy, x, *, dtype=None):
    return _weights_config(*dy.shape, x.shape[1]) if dy.shape[0] >= _MIN_ROWS else None


@kernel(unsupported=_weights_unsupported, heuristic=_weights_heuristic, capability=(9, 0))
def weights_gradient(dy: Array, x: Array, *, dtype: DTypeLike | None = None, config: Config) -> tuple[Array, Array]:
    """Return dw in `dtype`, which is x's dtype by default, and float32 db.

    Args:
      dy: `(rows, outputs)` in half precision, outputs a multiple of 128.
      x: `(rows, inputs)` in dy's dtype, inputs a multiple of 128 and of the config's columns.
    """
    dtype = dtype or x.dtype
    (rows, outputs), inputs = dy.shape, x.shape[1]
    product = _WeightsGradient(config, outputs, inputs, rows, device.target().multiprocessors)
    product.check("linear_sm90.weights_gradient")
    dw, db = launch(
        product.body,
        dy,
        x,
        out=(
            jax.ShapeDtypeStruct((config.splits, outputs, inputs), dtype if config.splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((config.splits, product.tile_columns, outputs, _ONES), jnp.float32),
        ),
        scratch=[
            operand((config.stages, _STEP, config.rows), x.dtype),
            operand((config.stages, _STEP, config.columns), x.dtype),
            operand((_CONSUMERS, _ONES, _STEP), x.dtype),
            *product.barriers,
        ],
        name="linear_backward_weights",
        **product.launch_options,
    )
    dw = dw[0] if config.splits == 1 else jnp.sum(dw, axis=0).astype(dtype)
    return dw, jnp.sum(db[..., 0], axis=(0, 1))
