"""Gradients of `conv2d` and `conv2d_relu_max_pool2d` with respect to the weights on Hopper's tensor cores, batch last.

For `conv2d_relu_max_pool2d`, each row p of windows is one product over the batch:

    sums[(c, i, j), (t, k, q)] += sum over n of x[c, p * R + i, j, n] * routed[t, k, q, n].

Here c and k are input and output channels, and n is an example. (i, j) are a row and a column of x under the windows'
filters. q is a window of R x S positions t. `routed` is dy at the positions of the maxima, and zero elsewhere. The
batch is the last axis of both operands. The tensor cores require this of float32, which is rounded to TF32. The sums
with `j = q * S + s + v` and `i = r + u`, where (r, s) is position t, add up to the gradient of w[k, c, u, v]. The other
sums, two in three for LeNet's second block, are not used.

A CTA computes these sums for one part of the input channels, one part of the positions, and one split of the rows and
the batch. Bulk copies bring rows of x, dy, and the indices into a ring of stages in shared memory. The warpgroups write
`routed` there, and multiply with one 64-row tile of accumulators each, in registers. At the end a CTA writes the sums
to device memory, reads them back through the L2 cache, and writes the gradients of its part.

For `conv2d`, the t are R rows of its output, `routed` is the output's gradient, which is only rounded, and S = 1. A row
of ones among the rows of x yields the bias gradient.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.gathers import columns, gather_elements, lane_and_column, meet, sums_of_rows
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    OPERAND_BYTES,
    divisors,
    largest_divisor,
    load,
    operand,
    quotient,
    remainder,
    rounded_to_tf32,
    store,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_TILE = 64
"""Rows of the tensor cores' tiles, one tile per warpgroup."""
_MAX_WARPGROUPS = 4
"""Most warpgroups per CTA: its 512 threads have 128 registers each, which hold their sums."""
_MAX_COLUMNS = 160
"""Most columns: a thread keeps half as many sums in its registers. With 144 it spills them."""
_MAX_STAGES = 4
"""Most stages. Chosen by hand; not tuned."""
_RESERVED_BYTES = 27 * 1024
"""Bytes of shared memory that stages leave for barriers, for sums across warps, and as a reserve. The stages were
measured with this value."""
_BLOCK_COLUMNS = 4
"""Most sums that a thread gathers by one operation: a row of a block has up to 16 bytes."""
_MIN_BATCH = 2048
"""Batch below which extracting the gradient from the sums costs what the tensor cores save."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How CTAs divide the sums.

    Attributes:
      channels: input channels per CTA.
      places: positions of a window per CTA.
      images_on_left: whether x's rows, not the routed gradient's, form the tiles of 64 rows, one per warpgroup.
      stages: stages of the pipeline.
    """

    channels: int
    places: int
    images_on_left: bool
    stages: int


# --------------------------------------------------------------------------------------------------------------- sizes


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes that follow from the shapes and a config. P counts rows of windows."""

    K: int
    P: int
    Q: int
    N: int
    C: int
    H: int
    W: int
    R: int
    S: int
    dtype: Any
    config: Config

    @property
    def filter_size(self) -> tuple[int, int]:
        return self.H - self.P * self.R + 1, self.W - self.Q * self.S + 1

    @property
    def band(self) -> int:
        """Rows of x under the filters of one row of windows."""
        return self.H - self.P * self.R + self.R

    @property
    def ones(self) -> int:
        """Index of the row of ones, which follows the rows of x."""
        return self.config.channels * self.band * self.W

    @property
    def routed_rows(self) -> int:
        return self.config.places * self.K * self.Q

    @property
    def warpgroups(self) -> int:
        return -(-(self.ones + 8) // _TILE) if self.config.images_on_left else self.routed_rows // _TILE

    @property
    def columns(self) -> int:
        """Sums per row."""
        return self.routed_rows if self.config.images_on_left else self.ones + 8

    @property
    def taps(self) -> int:
        """Taps of the filters, for a CTA's input channels."""
        return self.config.channels * self.filter_size[0] * self.filter_size[1]

    @property
    def vectors(self) -> int:
        """Number of vectors of `LANES` that hold a CTA's gradients, first of w as `(c, u, v, k)`, then of b."""
        return -(-(self.taps + 1) * self.K // LANES)

    @property
    def x_rows(self) -> int:
        """Rows of shared memory for x."""
        return self.warpgroups * _TILE if self.config.images_on_left else self.columns

    @property
    def gradient_rows(self) -> int:
        """Rows of dy in a stage, which the warpgroups divide among themselves to route it."""
        raise NotImplementedError

    @property
    def stage_bytes(self) -> int:
        raise NotImplementedError

    @property
    def other_bytes(self) -> int:
        """Bytes of shared memory besides the stages."""
        return 0

    @property
    def stages(self) -> int:
        """Number of stages: the most that fit."""
        left = device.target().shared_bytes - _RESERVED_BYTES - self.other_bytes
        return min(_MAX_STAGES, left // self.stage_bytes)

    @property
    def shares(self) -> tuple[int, int]:
        """Number of parts of the input channels, and of a window's positions."""
        return self.C // self.config.channels, self.R * self.S // self.config.places

    @property
    def examples(self) -> int:
        """Examples per step: the number that fills a row of an operand."""
        return OPERAND_BYTES // self.dtype.itemsize

    @property
    def units(self) -> int:
        """Steps of all splits together."""
        return self.P * (self.N // self.examples)

    def per_split(self, multiprocessors: int) -> int:
        splits = min(self.units, -(-multiprocessors // (self.shares[0] * self.shares[1])))
        return -(-self.units // splits)

    def fit(self) -> bool:
        """Whether the sizes suit the tensor cores' tiles, registers, and shared memory."""
        return (
            1 <= self.warpgroups <= _MAX_WARPGROUPS
            and self.columns <= _MAX_COLUMNS
            and (self.config.images_on_left or self.routed_rows % _TILE == 0)
            and self.gradient_rows % (8 * self.warpgroups) == 0
            and self.stages >= 2
        )

    def clocks(self) -> int:
        """Clocks of all CTAs: half a clock for each column of a product of 8 values, and one for 24 bytes of the
        cache."""
        clocks = self.warpgroups * self.columns * OPERAND_BYTES // 64 + self.stage_bytes // 24
        return clocks * self.shares[0] * self.shares[1]


class _PooledSizes(_Sizes):
    """Sizes of `weights_gradient`: a stage has dy and the indices, and each step routes dy into one of two buffers."""

    @property
    def gradient_rows(self) -> int:
        return self.K * self.Q

    @property
    def stage_bytes(self) -> int:
        return OPERAND_BYTES * (self.x_rows + self.gradient_rows) + self.gradient_rows * self.examples

    @property
    def other_bytes(self) -> int:
        return OPERAND_BYTES * 2 * self.routed_rows


class _ConvolutionSizes(_Sizes):
    """Sizes of `correlate_batch`: dy is copied to where the product reads it."""

    @property
    def gradient_rows(self) -> int:
        return self.routed_rows

    @property
    def stage_bytes(self) -> int:
        return OPERAND_BYTES * (self.x_rows + self.routed_rows)

    def fit(self) -> bool:
        # dy's rows are copied one channel at a time.
        return self.config.places * self.Q % 8 == 0 and super().fit()


def _pooled_sizes(dy: Any, x: Any, window: tuple[int, int], config: Config) -> _Sizes:
    return _PooledSizes(*dy.shape, *x.shape[:3], *window, dy.dtype, config)


def _convolution_sizes(dy: Any, x: Any, rows: int, config: Config) -> _Sizes:
    K, out_rows, Q, N = dy.shape
    return _ConvolutionSizes(K, out_rows // rows, Q, N, *x.shape[:3], rows, 1, dy.dtype, config)


def _cheapest(sizes: Any) -> Config | None:
    """Return the config with the fewest clocks, or None if rows do not come in eights or nothing fits.

    Args:
      sizes: function from a config to its sizes.
    """
    shapes = sizes(Config(1, 1, True, 0))
    if any(
        rows % 8 for rows in (shapes.K * shapes.Q, shapes.band * shapes.W, shapes.R * shapes.W, shapes.H * shapes.W)
    ):
        return None
    candidates = (
        sizes(Config(channels, places, images_on_left, 0))
        for channels, places, images_on_left in itertools.product(
            divisors(shapes.C), divisors(shapes.R * shapes.S), (False, True)
        )
    )
    best = min((candidate for candidate in candidates if candidate.fit()), key=_Sizes.clocks, default=None)
    return best and dataclasses.replace(best.config, stages=best.stages)


# ------------------------------------------------------------------------------------------------------------- kernels


def _pooled_config(dy: Any, x: Any, window: tuple[int, int]) -> Config | None:
    return _cheapest(functools.partial(_pooled_sizes, dy, x, window))


def _pooled_unsupported(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> str | None:
    return _misfit(dy, x) if _pooled_config(dy, x, window) is None else None


def _pooled_heuristic(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> Config | None:
    return _pooled_config(dy, x, window) if dy.shape[-1] >= _MIN_BATCH else None


def _misfit(dy, x):
    return f"dy {dy.shape} with x {x.shape}: their rows do not come in eights, or fit no tiles in shared memory"


@kernel(unsupported=_pooled_unsupported, heuristic=_pooled_heuristic, capability=(9, 0))
def weights_gradient(
    dy: Array, place: Array, x: Array, *, window: tuple[int, int], config: Config
) -> tuple[Array, Array]:
    """Compute the gradients of `conv2d_relu_max_pool2d` with respect to w and b, with float32 rounded to TF32.

    Args:
      dy, place: `(K, P, Q, N)`, the gradient with respect to y, and the indices of the maxima. The batch N is a
        multiple of `LANES`.
      x: `(C, H, W, N)`, with H = P * R + F - 1 and W = Q * S + G - 1.

    Returns:
      dw `(K, C, F, G)` and db `(K,)` in float32.
    """
    sizes = _pooled_sizes(dy, x, window, config)
    # The order in which the forward wrote them, by rows of windows.
    place = place.swapaxes(0, 1).reshape(sizes.P, -1, sizes.N)
    stages = config.stages, sizes.gradient_rows, sizes.examples
    return _launch(
        _PooledProgram,
        sizes,
        [x.reshape(-1, sizes.N), dy, place],
        buffers=2,
        copies=config.channels + 1 + (1 if simulating() is None else sizes.K),  # The simulator reshapes no memory.
        dys_and_places=(plgpu.SMEM(stages, dy.dtype), plgpu.SMEM(stages, jnp.uint8)),
        name="conv2d_relu_max_pool2d_backward_weights_tensor_cores",
    )


def _rows_a_product(dy: Any, x: Any) -> int | None:
    """Return the rows of a convolution's output per product, such that x's rows and the gradient's come in eights."""
    (_, rows, Q, _), W = dy.shape, x.shape[2]
    return next((R for R in (1, 2, 4) if rows % R == 0 and R * W % 8 == 0 and R * Q % 8 == 0), None)


def _convolution_heuristic(dy: Any, x: Any) -> Config | None:
    rows = _rows_a_product(dy, x)
    return rows and _cheapest(functools.partial(_convolution_sizes, dy, x, rows))


def _convolution_unsupported(dy: Any, x: Any) -> str | None:
    return _misfit(dy, x) if _convolution_heuristic(dy, x) is None else None


@kernel(unsupported=_convolution_unsupported, heuristic=_convolution_heuristic, capability=(9, 0))
def correlate_batch(dy: Array, x: Array, *, config: Config) -> tuple[Array, Array]:
    """Compute `conv2d.correlate_batch` with stride 1, and dy's sums. In float32, dy is rounded to TF32 and x is
    truncated.

    Args:
      dy: `(K, I, J, N)`, whose batch N is a multiple of `LANES`.
      x: `(C, H, W, N)`.

    Returns:
      `(K, C, H - I + 1, W - J + 1)` and `(K,)` in float32.
    """
    sizes = _convolution_sizes(dy, x, _rows_a_product(dy, x), config)
    return _launch(
        _ConvolutionProgram,
        sizes,
        [x.reshape(-1, sizes.N), dy.reshape(-1, sizes.N), None],
        buffers=config.stages,
        copies=config.channels + sizes.K,
        name="correlate_batch_tensor_cores",
    )


def _launch(program, sizes, arrays, *, buffers, copies, name, dys_and_places=(None, None)):
    """Launch the kernel, and return the gradients with respect to w and b.

    Args:
      buffers: number of buffers for the routed gradient.
      copies: number of copies that fill a stage.
      dys_and_places: shared memory for stages of dy and of the indices, where dy is routed.
    """
    config, per_split = sizes.config, sizes.per_split(device.target().multiprocessors)
    (splits, *shares), rows = (-(-sizes.units // per_split), *sizes.shares), sizes.warpgroups * _TILE
    x, dy, *_ = arrays
    _, gradients = launch(
        functools.partial(_body, program, sizes, per_split),
        *arrays,
        out=[
            jax.ShapeDtypeStruct((splits, *shares, *shape), jnp.float32)
            for shape in ((rows, sizes.columns), (sizes.vectors * LANES,))
        ],
        grid={"split": splits, "c": shares[0], "t": shares[1]},
        warpgroups=sizes.warpgroups,
        scratch=[
            operand((config.stages, sizes.x_rows, sizes.examples), x.dtype),
            operand((buffers, sizes.routed_rows, sizes.examples), dy.dtype),
            plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=sizes.warpgroups),
            *dys_and_places,
        ],
        name=name,
    )
    gradients = jnp.sum(gradients, axis=(0, 2))
    taps = sizes.taps * sizes.K
    dw = gradients[:, :taps].reshape(sizes.C, *sizes.filter_size, sizes.K).transpose(3, 0, 1, 2)
    # The CTAs of every part of the channels saw the same gradients, so the first ones' sums are the bias gradient.
    return dw, gradients[0, taps : taps + sizes.K]


# ---------------------------------------------------------------------------------------------------- the kernel's body


def _body(program, sizes, per_split, *refs, split, **ids):
    def accumulate(sums):
        first = split * per_split
        steps = jnp.minimum(sizes.units - first, per_split)
        program(sizes, *refs, sums=sums, split=split, first=first, steps=steps, **ids).run()

    pl.run_scoped(accumulate, plgpu.ACC((_TILE, sizes.columns)))


@dataclasses.dataclass(frozen=True)
class _Program:
    """One split's sums, for a part of the channels and of the positions: references and steps.

    Attributes:
      x, dy, place: arrays in device memory; place is None for `conv2d`.
      out: the sums, in device memory. Only the gradients are used later.
      gradients: gradients with respect to w and b, from this CTA's units.
      xs: stages of x's rows, followed by the ones.
      routed: the routed gradient.
      loaded: barriers at which a stage's copies arrive.
      ready: barrier at which the warpgroups wait until all have routed.
      dys, places: stages of dy and of the indices, or None.
      sums: the accumulator.
      split, c, t: the CTA's position in the grid.
      first: the split's first unit, of `steps`.
    """

    sizes: _Sizes
    x: Any
    dy: Any
    place: Any
    out: Any
    gradients: Any
    xs: Any
    routed: Any
    loaded: Any
    ready: Any
    dys: Any
    places: Any
    sums: Any
    split: Any
    c: Any
    t: Any
    warpgroup: Any
    first: Any
    steps: Any

    def run(self):
        ring = Ring(self.sizes.config.stages, self.copy, self.loaded, self.steps)
        pl.when(self.warpgroup == 0)(functools.partial(self.begin, ring))
        lax.fori_loop(0, self.steps, functools.partial(self.add, ring), None)
        plgpu.wgmma_wait(0)
        rows = pl.ds(self.warpgroup * _TILE, _TILE)
        store(self.out.at[self.split, self.c, self.t, rows], self.sums[...])
        meet(self.ready)
        warpgroups, vectors = self.sizes.warpgroups, self.sizes.vectors
        for first in range(0, vectors, warpgroups):
            vector = first + self.warpgroup
            pl.when(vector < vectors)(functools.partial(self.cut_out, vector))

    def cut_out(self, vector):
        """Compute a vector of the gradients from the sums, which are in the L2 cache, by adding up windows and
        positions."""
        sizes, places = self.sizes, self.sizes.config.places
        F, G = sizes.filter_size
        width = largest_divisor(sizes.Q, _BLOCK_COLUMNS)
        lane, column = lane_and_column(LANES, width)
        number = jnp.minimum(vector * LANES + lane, (sizes.taps + 1) * sizes.K - 1)
        tap, k = quotient(number, sizes.K), remainder(number, sizes.K)
        c, u, v = quotient(tap, F * G), remainder(quotient(tap, G), F), remainder(tap, G)
        of_weights = tap < sizes.taps
        first = jnp.where(of_weights, (c * sizes.band + u) * sizes.W + v + column * sizes.S, sizes.ones)
        moves = jnp.where(of_weights, 1, 0)
        sums, total = self.out.at[self.split, self.c, self.t], 0.0
        for t, q in itertools.product(range(places), range(0, sizes.Q, width)):
            r, s = quotient(self.t * places + t, sizes.S), remainder(self.t * places + t, sizes.S)
            image, routed = first + moves * (r * sizes.W + q * sizes.S + s), self.routed_row(t, k, q + column)
            total += gather_elements(sums, *((image, routed) if sizes.config.images_on_left else (routed, image)))
        gradients = columns(sums_of_rows(total))[0]
        self.gradients[self.split, self.c, self.t, pl.ds(vector * LANES, LANES)] = gradients

    def routed_row(self, t, k, q):
        """Return the row of the routed gradient for a position, an output channel, and a window."""
        raise NotImplementedError

    def begin(self, ring):
        ones = plgpu.layout_cast(jnp.ones((8, self.sizes.examples), self.x.dtype), self.layout)
        for stage in range(ring.stages):
            self.xs[stage, self.sizes.ones : self.sizes.ones + 8] = ones
        plgpu.commit_smem()
        ring.prefetch(ring.stages - 1)

    def add(self, ring, step, _):
        stage = ring.stage(step)
        ring.wait(step)
        xs, routed = self.xs.at[stage], self.routed.at[self.scatter_gradients(step, stage)]
        # The last product is done, for every warpgroup once past the barrier, so its operands may be overwritten.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.ready)
        plgpu.barrier_wait(self.ready)
        pl.when(self.warpgroup == 0)(lambda: ring.fetch(step + ring.stages - 1))
        left, right = (xs, routed) if self.sizes.config.images_on_left else (routed, xs)
        plgpu.wgmma(self.sums, left.at[pl.ds(self.warpgroup * _TILE, _TILE)], right.transpose((1, 0)))

    def copy(self, step, stage, barrier):
        """Start the copies of a unit: one row of windows, for the examples of one step."""
        sizes = self.sizes
        unit = self.first + step
        p, examples = remainder(unit, sizes.P), pl.ds(quotient(unit, sizes.P) * sizes.examples, sizes.examples)
        channels, rows = sizes.config.channels, sizes.band * sizes.W
        for channel in range(channels):
            under = pl.ds(((self.c * channels + channel) * sizes.H + p * sizes.R) * sizes.W, rows)
            plgpu.copy_gmem_to_smem(self.x.at[under, examples], self.xs.at[stage, pl.ds(channel * rows, rows)], barrier)
        self.copy_gradient(p, examples, stage, barrier)

    def copy_gradient(self, p, examples, stage, barrier):
        raise NotImplementedError

    def scatter_gradients(self, step, stage):
        """Compute the routed gradient from the copied data, and return the index of its buffer."""
        raise NotImplementedError

    @property
    def share(self):
        """Rows of the gradient that the warpgroup routes."""
        return self.sizes.gradient_rows // self.sizes.warpgroups

    @property
    def layout(self):
        """Layout with two rows per warp, in which a warp's accesses to shared memory never meet in one bank."""
        examples = self.sizes.examples
        tiling = plgpu.Tiling(((8, examples), (2, examples), (examples // 16,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


class _PooledProgram(_Program):
    """Routes dy to the positions of the windows' maxima, into two buffers in turn."""

    def routed_row(self, t, k, q):
        return (t * self.sizes.K + k) * self.sizes.Q + q

    def copy_gradient(self, p, examples, stage, barrier):
        K, Q = self.sizes.K, self.sizes.Q
        if simulating() is None:
            dys = self.dys.at[stage].reshape(K, Q, self.sizes.examples)
            plgpu.copy_gmem_to_smem(self.dy.at[:, p, :, examples], dys, barrier)
        else:
            for k in range(K):
                plgpu.copy_gmem_to_smem(self.dy.at[k, p, :, examples], self.dys.at[stage, pl.ds(k * Q, Q)], barrier)
        plgpu.copy_gmem_to_smem(self.place.at[p, :, examples], self.places.at[stage], barrier)

    def scatter_gradients(self, step, stage):
        buffer, places = remainder(step, 2), self.sizes.config.places
        rows = pl.ds(self.warpgroup * self.share, self.share)
        gradient = rounded_to_tf32(load(self.dys.at[stage, rows], self.layout))
        maximum = load(self.places.at[stage, rows], self.layout, optimized=False).astype(jnp.int32)
        for t in range(places):
            of_place = jnp.where(maximum == self.t * places + t, gradient, jnp.zeros_like(gradient))
            first = t * self.sizes.gradient_rows + self.warpgroup * self.share
            self.routed[buffer, pl.ds(first, self.share)] = of_place
        plgpu.commit_smem()
        return buffer


class _ConvolutionProgram(_Program):
    """Uses dy as the routed gradient, rounded in place if float32."""

    def routed_row(self, t, k, q):
        return (k * self.sizes.config.places + t) * self.sizes.Q + q

    def copy_gradient(self, p, examples, stage, barrier):
        sizes, places = self.sizes, self.sizes.config.places
        for k in range(sizes.K):
            rows = pl.ds((k * sizes.P * sizes.R + p * sizes.R + self.t * places) * sizes.Q, places * sizes.Q)
            to = self.routed.at[stage, pl.ds(k * places * sizes.Q, places * sizes.Q)]
            plgpu.copy_gmem_to_smem(self.dy.at[rows, examples], to, barrier)

    def scatter_gradients(self, step, stage):
        if self.dy.dtype == jnp.float32:
            rows = pl.ds(self.warpgroup * self.share, self.share)
            self.routed[stage, rows] = rounded_to_tf32(load(self.routed.at[stage, rows], self.layout))
            plgpu.commit_smem()
        return stage
