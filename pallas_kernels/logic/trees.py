"""Convolutions whose filters are trees of gates, and their gradients. The batch is the last axis of images:
`(channels, height, width, N)`.

Each lane is one example. A CTA of `forward` computes rows of the pooled output for one kernel of the convolution and
one block of examples. It evaluates the kernel's tree in registers, which also hold the tree's coefficients and the
positions of its leaves. For each leaf and position, the CTA reads one vector of examples. With an or-pool, the CTA
evaluates the tree at all positions of a pooling window, and writes the largest value and its index.

For each pooling window, a CTA of `leaf_gradients` recomputes the tree at the position that this index selects. It sums
the gradients with respect to the coefficients in registers, and writes the gradients with respect to the leaves to
device memory. A CTA of `input_gradient` computes the gradient with respect to some rows of one input channel. It loops
over the leaves that read this channel, and adds their gradients to rows of shared memory in a fixed order. Each lane is
one example in these kernels as well, so no two threads add to the same element.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.gathers import (
    columns,
    compiler_fence,
    gather_elements,
    lane_and_column,
    scatter_elements,
    spread,
)
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.tree import gradients_of_tree, levels_of_tree

_MAX_LEAVES = 16
"""Maximum number of leaves per tree. The tree's 60 coefficients and 31 values must fit in a thread's 255 registers."""
_MAX_PLACES = 9
"""Maximum number of positions per pooling window. The tree is evaluated at one position after another in unrolled code.
Chosen by hand, for windows up to 3 x 3; not tuned."""
_PROGRAMS = 4
"""Wanted number of CTAs of `leaf_gradients` per multiprocessor. If a thread has 128 registers, four CTAs fill the 65536
registers of a multiprocessor."""
_MAX_COLUMNS_PER_TURN = 2
"""Maximum number of windows whose leaves a CTA of `leaf_gradients` reads at once. Chosen by hand; not timed separately
(docs/lab/2026-11-22-trees.md)."""
_BAND_BYTES = 17 * 1024
"""Maximum number of bytes of shared memory for the band of dx, some rows of one channel, that a CTA of `input_gradient`
computes. With smaller bands, there are more CTAs per multiprocessor, which hide each other's latency better. With even
smaller bands, most leaves would add to two bands. Measured in docs/lab/2026-11-22-trees.md."""
_BANDS = 8
"""Wanted number of bands per multiprocessor, if images have enough rows. Several CTAs are needed because each waits for
memory most of the time. Chosen by hand; docs/lab/2026-11-22-trees.md measures it together with other changes."""
_UNROLLED_WINDOWS = 8
"""Maximum number of pooling windows for which a CTA of `input_gradient` fetches a leaf's gradients at once. Not
tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Number of rows per CTA. They are rows of the image for `input_gradient`, and rows of the pooled output for the
    other kernels."""

    rows: int


# -------------------------------------------------------------------------------------------------------- the geometry


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """Positions of trees and of pooling windows.

    Attributes:
      height, width: size of the padded image.
      rows, columns: size of the pooled output, with one element per pooling window.
      stride, pool: stride of the convolution, and size of the pooling windows.
    """

    height: int
    width: int
    rows: int
    columns: int
    stride: tuple[int, int]
    pool: tuple[int, int]

    @classmethod
    def from_image(cls, x: Any, window: tuple[int, int], stride: tuple[int, int], pool: tuple[int, int]) -> "_Geometry":
        sizes = [((size - f) // s + 1) // p for size, f, s, p in zip(x.shape[1:3], window, stride, pool, strict=True)]
        return cls(*x.shape[1:3], *sizes, stride, pool)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Positions in a pooling window, in row-major order."""
        return list(itertools.product(*map(range, self.pool)))

    def first(self, row: Any, column: Any) -> Any:
        """Return the index of the pixel at which the tree at the first position of a pooling window begins. Pixels of
        the padded image are numbered in row-major order."""
        return row * (self.pool[0] * self.stride[0] * self.width) + column * (self.pool[1] * self.stride[1])

    def step(self, place: tuple[int, int]) -> int:
        """Return the distance in pixels from `first` to the first pixel of the tree at a position of the pooling
        window."""
        return place[0] * self.stride[0] * self.width + place[1] * self.stride[1]

    def leaf_pixels(self, leaves: Array) -> Array:
        """Return `(kernels, leaves)`: the distance in pixels from a tree's first pixel to each leaf, which may be in
        another channel."""
        channel, row, column = jnp.moveaxis(leaves, -1, 0)
        return (channel * self.height + row) * self.width + column


class _Tree:
    """The coefficients and leaf positions of one kernel's tree, in registers."""

    def __init__(self, c_ref: Any, pixels_ref: Any, k: Any):
        gates, count = c_ref.shape[1], pixels_ref.shape[1]
        self.c = [[c_ref[k, g, i] for i in range(4)] for g in range(gates)]
        self.pixels = [pixels_ref[k, leaf] for leaf in range(count)]

    def load_leaves(self, x_ref: Any, first: Any, lanes: Any, geometry: _Geometry) -> list[list[Array]]:
        """Load the leaves of the tree at all positions of the pooling window that begins at pixel `first`. Return one
        list of leaves per position."""
        steps = [geometry.step(place) for place in geometry.places]
        # One address per leaf is enough, because the leaf's rows at the other positions are constant distances away.
        rows = [x_ref.at[pl.ds(first + pixel, 1 + steps[-1])] for pixel in self.pixels]
        return [[row[step, lanes].astype(jnp.float32) for row in rows] for step in steps]

    def gather_leaves(
        self, numbers: Any, N: int, first: Any, lanes: Any, place: Array, geometry: _Geometry
    ) -> list[Array]:
        """Load the leaves of the tree at a separate position for each lane, for the pooling window that begins at pixel
        `first`.

        Args:
          numbers: the flattened image.
          place: index of each lane's position in the pooling window.
        """
        lane = lane_and_column(LANES, 1)[0]
        step = lane * 0
        for i, pool_place in enumerate(geometry.places[1:], start=1):
            step = jnp.where(spread(place, 1) == i, geometry.step(pool_place), step)
        offsets = (first + step) * N + lanes.start + lane

        def gather(pixel):
            return columns(gather_elements(numbers, offsets + pixel * N))[0].astype(jnp.float32)

        return [gather(pixel) for pixel in self.pixels]


def unsupported(leaves: tuple[int, ...], pool: tuple[int, int]) -> str | None:
    """Return the reason why the kernels do not support the trees or the pooling window, or None. `leaves` is the shape
    `(kernels, leaves, 3)` of the leaves."""
    if leaves[1] > _MAX_LEAVES:
        return f"trees of {leaves[1]} leaves, at most {_MAX_LEAVES}"
    if math.prod(pool) > _MAX_PLACES:
        return f"pool={pool}, at most {_MAX_PLACES} positions"
    return None


def _unsupported(*arrays, pool, **options):
    *_, leaves, x = arrays
    return unsupported(leaves.shape, pool) or ("images of 2^31 or more elements" if x.size >= 2**31 else None)


# ------------------------------------------------------------------------------------------------------------- forward


def _forward_heuristic(coefficients, leaves, x, *, window, stride, pool):
    return Config(rows=1)  # The fastest in docs/lab/2026-11-22-trees.md.


@kernel(unsupported=_unsupported, heuristic=_forward_heuristic)
def forward(
    coefficients: Array,
    leaves: Array,
    x: Array,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    pool: tuple[int, int],
    config: Config,
) -> tuple[Array, Array | None]:
    """Return (y, indices): for each kernel and pooling window, the largest value of the kernel's tree in the window,
    and the first position with this value.

    Args:
      coefficients: `(kernels, gates, 4)`.
      leaves: `(kernels, leaves, 3)` int32: for each leaf, its channel, and its row and column in the convolution's
        window.
      x: `(channels, height, width, N)` including padding. The batch N is a multiple of `LANES`.

    Returns:
      y `(kernels, rows, columns, N)` in x's dtype, computed in float32, and the indices, uint8 of the same shape. The
      index of position (u, v) in a pooling window is `u * pool[1] + v`. If the window has only one position, indices is
      None.
    """
    geometry = _Geometry.from_image(x, window, stride, pool)
    kernels, N = leaves.shape[0], x.shape[-1]

    def body(c_ref, pixels_ref, x_ref, y_ref, place_ref, *, block, part, k):
        lanes, tree = pl.ds(block * LANES, LANES), _Tree(c_ref, pixels_ref, k)

        def window(row, column):
            largest = place = None
            for i, leaves in enumerate(tree.load_leaves(x_ref, geometry.first(row, column), lanes, geometry)):
                *_, (value,) = levels_of_tree(tree.c, leaves)
                if i == 0:
                    largest, place = value, jnp.where(value != value, 0, 0)
                else:
                    # Keep the first of equal values, and keep a NaN.
                    is_larger = ~(value <= largest) & (largest == largest)
                    largest, place = jnp.where(is_larger, value, largest), jnp.where(is_larger, i, place)
            y_ref[k, row, column, lanes] = largest.astype(y_ref.dtype)
            if place_ref is not None:
                place_ref[k, row, column, lanes] = place.astype(jnp.uint8)

        first = part * config.rows
        last = jnp.minimum(first + config.rows, geometry.rows)
        _visit_windows(first, last, geometry.columns, lambda row, columns, _: window(row, *columns))

    shape = (kernels, geometry.rows, geometry.columns, N)
    places = jax.ShapeDtypeStruct(shape, jnp.uint8) if len(geometry.places) > 1 else None
    return launch(
        body,
        coefficients.astype(jnp.float32),
        geometry.leaf_pixels(leaves),
        _as_rows(x),
        out=(jax.ShapeDtypeStruct(shape, x.dtype), places),
        grid={"block": N // LANES, "part": -(-geometry.rows // config.rows), "k": kernels},
        barriers=False,
        name="trees",
    )


def _as_rows(x):
    """Reshape an image to one row of examples per pixel."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _visit_windows(first: Any, last: Any, columns: int, body: Any, carry: Any = None, columns_per_turn: int = 1) -> Any:
    """Call `body(row, columns, carry) -> carry` for all pooling windows in the rows from `first` to `last`, excluding
    `last`. Each row has `columns` windows. A call gets the columns of `columns_per_turn` neighboring windows."""
    turns = columns // columns_per_turn

    def step(i, carry):
        first_column = i % turns * columns_per_turn
        return body(first + i // turns, [first_column + n for n in range(columns_per_turn)], carry)

    return lax.fori_loop(0, (last - first) * turns, step, carry)


# ----------------------------------------------------------------------------- gradients of coefficients and of leaves


def _leaves_heuristic(dy, places, coefficients, leaves, x, *, window, stride, pool):
    rows, warpgroups_per_row = dy.shape[1], leaves.shape[0] * (x.shape[-1] // LANES)
    return Config(max(1, min(rows, rows * warpgroups_per_row // (_PROGRAMS * device.target().multiprocessors))))


@kernel(unsupported=_unsupported, heuristic=_leaves_heuristic)
def leaf_gradients(
    dy: Array,
    places: Array | None,
    coefficients: Array,
    leaves: Array,
    x: Array,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    pool: tuple[int, int],
    config: Config,
) -> tuple[Array, Array]:
    """Return (dc, dleaves), the gradients with respect to the coefficients and with respect to the leaves.

    It runs only on GPUs and in the simulator.

    Args:
      dy: `(kernels, rows, columns, N)`, the gradient with respect to y.
      places: the indices that `forward` returned, of dy's shape, or None if a pooling window has only one position.
      coefficients, leaves, x: as in `forward`.

    Returns:
      dc `(kernels, gates, 4)`: for each gate with inputs a and b, the sums of `dy (1, a, b, ab)`, where dy is the
      gradient with respect to the gate's value; and dleaves `(kernels * leaves, rows, columns, N)`. Both are float32.
    """
    geometry = _Geometry.from_image(x, window, stride, pool)
    (kernels, gates, _), N, count = coefficients.shape, x.shape[-1], leaves.shape[1]
    blocks, parts = N // LANES, -(-geometry.rows // config.rows)
    dc, dleaves = launch(
        functools.partial(_leaf_gradients_of_rows, geometry=geometry, rows=config.rows),
        dy,
        places,
        coefficients.astype(jnp.float32),
        geometry.leaf_pixels(leaves),
        _as_rows(x) if places is None else x.ravel(),
        out=(
            jax.ShapeDtypeStruct((blocks, parts, kernels, 4 * gates), jnp.float32),
            jax.ShapeDtypeStruct((kernels * count, *dy.shape[1:]), jnp.float32),
        ),
        grid={"block": blocks, "part": parts, "k": kernels},
        scratch=[plgpu.SMEM((LANES,), jnp.float32)],
        barriers=False,
        name="trees_backward",
    )
    return jnp.sum(dc, axis=(0, 1)).reshape(kernels, gates, 4), dleaves


def _leaf_gradients_of_rows(
    dy_ref, place_ref, c_ref, pixels_ref, x_ref, dc_ref, dleaves_ref, _, *, block, part, k, geometry, rows
):
    """Compute the gradients of the coefficients and of the leaves for one tree, `rows` rows of pooling windows, and a
    block of examples."""
    lanes, tree = pl.ds(block * LANES, LANES), _Tree(c_ref, pixels_ref, k)
    (_, gates, _), count, N = c_ref.shape, pixels_ref.shape[1], dy_ref.shape[-1]

    def load_window(row, column):
        first = geometry.first(row, column)
        if place_ref is None:
            return tree.load_leaves(x_ref, first, lanes, geometry)[0]
        place = place_ref[k, row, column, lanes].astype(jnp.int32)
        return tree.gather_leaves(x_ref, N, first, lanes, place, geometry)

    def windows(row, columns, sums):
        operands = [(load_window(row, c), dy_ref[k, row, c, lanes].astype(jnp.float32)) for c in columns]
        for column, (values, dy) in zip(columns, operands, strict=True):
            dc, dleaves = gradients_of_tree(tree.c, levels_of_tree(tree.c, values), dy)
            for leaf, dleaf in enumerate(dleaves):
                dleaves_ref[k * count + leaf, row, column, lanes] = dleaf
            terms = itertools.chain.from_iterable(dc)
            sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
        return sums

    first = part * rows
    last = jnp.minimum(first + rows, geometry.rows)
    columns_per_turn = largest_divisor(geometry.columns, _MAX_COLUMNS_PER_TURN)
    zero = zeros_like(dy_ref[k, 0, 0, lanes].astype(jnp.float32))
    sums = _visit_windows(first, last, geometry.columns, windows, (zero,) * (4 * gates), columns_per_turn)
    for i, total in enumerate(sums):
        dc_ref[block, part, k, i] = jnp.sum(total)


# -------------------------------------------------------------------------------------------- the gradient of the image


def _input_unsupported(dleaves, places, leaves, readers, reader_offsets, *, size, window, stride, padding, pool):
    width, limit = size[2], device.target().shared_bytes
    if 4 * LANES * (width + 1) > limit:
        return f"images of width {width}, where a row of {LANES} examples does not fit into shared memory"
    return None


def _input_heuristic(dleaves, places, leaves, readers, reader_offsets, *, size, window, stride, padding, pool):
    channels, height, width = size
    rows = max(1, min(height, (_BAND_BYTES // (4 * LANES) - 1) // width))
    least_bands = _BANDS * device.target().multiprocessors * LANES / (channels * dleaves.shape[-1])
    # Make the bands of an image as equal as possible.
    return Config(-(-height // min(height, max(-(-height // rows), math.ceil(least_bands)))))


@kernel(unsupported=_input_unsupported, heuristic=_input_heuristic)
def input_gradient(
    dleaves: Array,
    places: Array | None,
    leaves: Array,
    readers: Array,
    reader_offsets: Array,
    *,
    size: tuple[int, int, int],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    pool: tuple[int, int],
    config: Config,
) -> Array:
    """Return dx `(channels, height, width, N)` float32, for the image without its padding. The kernel runs only on GPUs
    and in the simulator.

    Args:
      dleaves: the gradients of the leaves that `leaf_gradients` returned.
      places: the argument `places` of `leaf_gradients`.
      readers, reader_offsets: int32. The leaves that read channel c are
        `readers[reader_offsets[c] : reader_offsets[c + 1]]`. Each leaf is given as the number `kernel * leaves + leaf`.
      size: channels, height, and width of the image without its padding.
      padding: number of padding rows above the image, and of padding columns to its left.
    """
    (channels, height, width), N = size, dleaves.shape[-1]
    bands = _Bands(config.rows, height, width, stride, padding, pool)
    return launch(
        functools.partial(_input_gradient_of_band, bands=bands, count=leaves.shape[1]),
        dleaves,
        places,
        leaves.reshape(-1, 3),
        readers,
        reader_offsets,
        out=jax.ShapeDtypeStruct((*size, N), jnp.float32),
        grid={"block": N // LANES, "band": -(-height // config.rows), "channel": channels},
        scratch=[plgpu.SMEM(((bands.pixels + 1) * LANES,), jnp.float32)],
        barriers=False,
        sums_across_warps=False,
        name="trees_backward_input",
    )


@dataclasses.dataclass(frozen=True)
class _Bands:
    """An image divided into bands of rows, and the pooling windows whose leaves read them.

    Attributes:
      rows: rows per band.
      height, width: size of the image without its padding.
      stride, padding, pool: as in `input_gradient`.
    """

    rows: int
    height: int
    width: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    pool: tuple[int, int]

    @property
    def pixels(self) -> int:
        """Number of pixels of a band."""
        return self.rows * self.width

    @property
    def steps(self) -> tuple[int, int]:
        """Distance from one pooling window to the next, in rows and in columns of the image."""
        return self.pool[0] * self.stride[0], self.pool[1] * self.stride[1]

    def windows(self, leaf_row: Any, rows: int) -> tuple[Any, Any]:
        """Return the range (first, end) of those rows of pooling windows in which a leaf reads pixels of a band.

        Args:
          leaf_row: the row of pixels, relative to the band's first row, that the leaf reads at the first position of
            the first row of pooling windows.
          rows: number of rows of pooling windows.
        """
        p, s, step = self.pool[0], self.stride[0], self.steps[0]
        # In the last position of this row of pooling windows, the leaf reads the band's first row or a later row.
        first = jnp.clip((-leaf_row - (p - 1) * s + p * s - 1) // step, 0, rows)
        last = jnp.clip((self.rows - 1 - leaf_row) // step + 1, first, rows)
        return first, last

    def targets(self, row: Any, column: Any, place: Array | None, lane: Array) -> Array:
        """Return the index of the element of shared memory to which each lane adds a leaf's gradient.

        The element belongs to the pixel that the leaf reads at the lane's position in the pooling window. If this pixel
        is outside the band, the element is an unused one.

        Args:
          row, column: the pixel, relative to the band's first pixel, that the leaf reads at the window's first
            position.
          place: index of each lane's position in the window, or None if the window has only one position.
          lane: number of each lane.
        """
        (s, t), u = self.stride, lane * 0
        v = u
        for i, (row_step, column_step) in enumerate(itertools.product(*map(range, self.pool))):
            if i:
                u, v = (jnp.where(place == i, n, m) for n, m in ((row_step * s, u), (column_step * t, v)))
        row, column = row + u, column + v
        valid = (row >= 0) & (row < self.rows) & (column >= 0) & (column < self.width)
        return jnp.where(valid, row * self.width + column, self.pixels) * LANES + lane


def _input_gradient_of_band(
    dleaves_ref, place_ref, leaves_ref, readers_ref, offsets_ref, dx_ref, sums, *, block, band, channel, bands, count
):
    """Compute dx for one band of one channel, and a block of examples."""
    _, rows, columns, _ = dleaves_ref.shape
    lanes = pl.ds(block * LANES, LANES)
    lane = lane_and_column(LANES, 1)[0]
    top = band * bands.rows + bands.padding[0]  # The band's first row in the padded image.

    def add_reader(e, _):
        leaf = readers_ref[e]
        k = leaf // count
        leaf_row, leaf_column = leaves_ref[leaf, 1] - top, leaves_ref[leaf, 2] - bands.padding[1]
        first, last = bands.windows(leaf_row, rows)

        def add_windows(row, columns, _):
            targets, values, (row_step, column_step) = [], [], bands.steps
            for column in columns:
                place = None
                if place_ref is not None:
                    place = spread(place_ref[k, row, column, lanes].astype(jnp.int32), 1)
                targets.append(
                    bands.targets(row * row_step + leaf_row, column * column_step + leaf_column, place, lane)
                )
                values.append(spread(dleaves_ref[leaf, row, column, lanes], 1))
            # A leaf reads different pixels in different pooling windows, so the additions for several windows are
            # independent.
            old_sums = [gather_elements(sums, target) for target in targets]
            for target, old_sum, value in zip(targets, old_sums, values, strict=True):
                scatter_elements(sums, old_sum + value, target)

        _visit_windows(first, last, columns, add_windows, columns_per_turn=largest_divisor(columns, _UNROLLED_WINDOWS))

    def clear(pixel, _):
        sums[pl.ds(pixel * LANES, LANES)] = jnp.zeros((LANES,), jnp.float32)

    def write(pixel, _):
        row, column = band * bands.rows + pixel // bands.width, pixel % bands.width
        dx_ref[channel, row, column, lanes] = sums[pl.ds(pixel * LANES, LANES)]

    lax.fori_loop(0, bands.pixels + 1, clear, None)
    compiler_fence()
    lax.fori_loop(offsets_ref[channel], offsets_ref[channel + 1], add_reader, None)
    compiler_fence()
    lax.fori_loop(0, jnp.minimum(bands.rows, bands.height - band * bands.rows) * bands.width, write, None)
