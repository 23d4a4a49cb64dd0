"""Convolutions whose filters are trees of gates, and their gradients: see docs/kernels/logic.md.

A tree's leaves are pixels in the convolution's window. In `forward` and `leaf_gradients`, a CTA computes rows of the
pooled output for one tree and 128 examples, one per lane. In `input_gradient`, a CTA computes a band, some rows of one
channel of the image, for 128 examples. A pixel's gradient is the sum of the gradients of the leaves that read it, in a
fixed order.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

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
"""Leaves per tree: its 60 coefficients and 31 values must fit in a thread's 255 registers."""
_MAX_PLACES = 9
"""Positions per pooling window: their code is unrolled. Not tuned."""
_PROGRAMS = 4
"""Wanted CTAs of `leaf_gradients` per multiprocessor. Four fit at 128 registers per thread."""
_MAX_COLUMNS_PER_TURN = 2
"""Pooling windows whose leaves a CTA reads at once. Not timed separately: docs/lab/2026-11-22-trees.md."""


class Config(NamedTuple):
    """Number of rows that a CTA computes: rows of the image in `input_gradient`, otherwise of the pooled output."""

    rows: int


def unsupported_trees(leaves: Any, pool: tuple[int, int]) -> str | None:
    if leaves.shape[1] > _MAX_LEAVES:
        return f"trees of {leaves.shape[1]} leaves, at most {_MAX_LEAVES}"
    if math.prod(pool) > _MAX_PLACES:
        return f"pool={pool}, which has more than {_MAX_PLACES} positions"
    return None


def _unsupported(leaves, x, pool):
    return unsupported_trees(leaves, pool) or ("images of 2^31 or more elements" if x.size >= 2**31 else None)


def _forward_plan(coefficients, leaves, x, *, window, stride, pool):
    # One row was the fastest in docs/lab/2026-11-22-trees.md.
    return _unsupported(leaves, x, pool) or Config(rows=1)


def _leaves_plan(dy, places, coefficients, leaves, x, *, window, stride, pool):
    if reason := _unsupported(leaves, x, pool):
        return reason
    rows, warpgroups_per_row = dy.shape[1], leaves.shape[0] * (x.shape[-1] // LANES)
    return Config(max(1, min(rows, rows * warpgroups_per_row // (_PROGRAMS * device.target().multiprocessors))))


@kernel(plan=_forward_plan)
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
    """Return each tree's largest value in each pooling window, and the index of the first position with this value.

    Args:
      coefficients: `(kernels, gates, 4)`, one tree per kernel.
      leaves: `(kernels, leaves, 3)` int32: each leaf's channel, and its row and column in the window.
      x: `(channels, height, width, N)` including padding, N a multiple of 128.

    Returns:
      y `(kernels, rows, columns, N)` in x's dtype, and uint8 indices `u * pool[1] + v` for position (u, v) in the
        pooling window, or None for windows of one position.
    """
    geometry, kernels, N = _Geometry.of_image(x, window, stride, pool), leaves.shape[0], x.shape[-1]

    def body(c_ref, pixels_ref, x_ref, y_ref, place_ref, *, block, part, k):
        lanes, (c, pixels) = pl.ds(block * LANES, LANES), _load_tree(c_ref, pixels_ref, k)

        def compute(row, columns, _):
            (column,), largest, place = columns, None, None
            for i, leaves in enumerate(_load_leaves(x_ref, pixels, geometry.first(row, column), lanes, geometry.steps)):
                *_, (value,) = levels_of_tree(c, leaves)
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
        _visit_windows(first, jnp.minimum(first + config.rows, geometry.rows), geometry.columns, compute)

    shape = (kernels, geometry.rows, geometry.columns, N)
    places = jax.ShapeDtypeStruct(shape, jnp.uint8) if len(geometry.steps) > 1 else None
    return launch(
        body,
        coefficients.astype(jnp.float32),
        _leaf_pixels(leaves, x),
        _as_rows(x),
        out=(jax.ShapeDtypeStruct(shape, x.dtype), places),
        grid={"block": N // LANES, "part": -(-geometry.rows // config.rows), "k": kernels},
        barriers=False,
        name="trees",
    )


@kernel(plan=_leaves_plan)
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
    """Return the float32 gradients of the coefficients, and of all trees' leaves,
    `(kernels * leaves.shape[1], rows, columns, N)`.

    Args:
      dy: `(kernels, rows, columns, N)`, the gradient with respect to the y of `forward`.
      places: the indices from `forward`. Other arguments: see `forward`.
    """
    geometry = _Geometry.of_image(x, window, stride, pool)
    (kernels, gates, _), N, count = coefficients.shape, x.shape[-1], leaves.shape[1]
    blocks, parts = N // LANES, -(-geometry.rows // config.rows)

    def body(dy_ref, place_ref, c_ref, pixels_ref, x_ref, dc_ref, dleaves_ref, _, *, block, part, k):
        lanes, (c, pixels) = pl.ds(block * LANES, LANES), _load_tree(c_ref, pixels_ref, k)

        def load_leaves(row, column):
            first = geometry.first(row, column)
            if place_ref is None:
                return _load_leaves(x_ref, pixels, first, lanes, geometry.steps)[0]
            place = place_ref[k, row, column, lanes].astype(jnp.int32)
            lane = lane_and_column(LANES, 1)[0]
            step = lane * 0
            for i, distance in enumerate(geometry.steps[1:], start=1):
                step = jnp.where(spread(place, 1) == i, distance, step)
            offsets = (first + step) * N + lanes.start + lane
            return [columns(gather_elements(x_ref, offsets + pixel * N))[0].astype(jnp.float32) for pixel in pixels]

        def add_gradients(row, columns, sums):
            operands = [(load_leaves(row, j), dy_ref[k, row, j, lanes].astype(jnp.float32)) for j in columns]
            for column, (values, dy) in zip(columns, operands, strict=True):
                dc, dleaves = gradients_of_tree(c, levels_of_tree(c, values), dy)
                for leaf, dleaf in enumerate(dleaves if dleaves_ref is not None else ()):
                    dleaves_ref[k * count + leaf, row, column, lanes] = dleaf
                terms = itertools.chain.from_iterable(dc if dc_ref is not None else ())
                sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
            return sums

        first = part * config.rows
        last = jnp.minimum(first + config.rows, geometry.rows)
        zero = zeros_like(dy_ref[k, 0, 0, lanes].astype(jnp.float32))
        zeros = (zero,) * (4 * gates if dc_ref is not None else 0)
        columns_per_turn = largest_divisor(geometry.columns, _MAX_COLUMNS_PER_TURN)
        sums = _visit_windows(first, last, geometry.columns, add_gradients, zeros, columns_per_turn)
        for i, total in enumerate(sums):
            dc_ref[block, part, k, i] = jnp.sum(total)

    dc, dleaves = launch(
        body,
        dy,
        places,
        coefficients.astype(jnp.float32),
        _leaf_pixels(leaves, x),
        _as_rows(x) if places is None else x.ravel(),
        out=(
            jax.ShapeDtypeStruct((blocks, parts, kernels, 4 * gates), jnp.float32),
            jax.ShapeDtypeStruct((kernels * count, *dy.shape[1:]), jnp.float32),
        ),
        skippable=[0, 1],
        grid={"block": blocks, "part": parts, "k": kernels},
        scratch=[plgpu.SMEM((LANES,), jnp.float32)],
        barriers=False,
        name="trees_backward",
    )
    return jnp.sum(dc, axis=(0, 1)).reshape(kernels, gates, 4), dleaves


_BAND_BYTES = 17 * 1024
"""Maximum bytes of a band. With smaller bands, more CTAs run per multiprocessor, but more leaves add to two bands:
docs/lab/2026-11-22-trees.md."""
_BANDS = 8
"""Wanted bands per multiprocessor: docs/lab/2026-11-22-trees.md."""
_UNROLLED_WINDOWS = 8
"""Maximum pooling windows for which a CTA fetches a leaf's gradients at once. Not tuned."""


def _input_plan(dleaves, places, leaves, readers, reader_offsets, *, size, stride, padding, pool):
    channels, height, width = size
    if 4 * LANES * (width + 1) > device.target().shared_bytes:
        return f"images of width {width}, where a row of {LANES} examples does not fit into shared memory"
    rows = max(1, min(height, (_BAND_BYTES // (4 * LANES) - 1) // width))
    least_bands = _BANDS * device.target().multiprocessors * LANES / (channels * dleaves.shape[-1])
    return Config(-(-height // min(height, max(-(-height // rows), math.ceil(least_bands)))))


@kernel(plan=_input_plan)
def input_gradient(
    dleaves: Array,
    places: Array | None,
    leaves: Array,
    readers: Array,
    reader_offsets: Array,
    *,
    size: tuple[int, int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    pool: tuple[int, int],
    config: Config,
) -> Array:
    """Return the gradient with respect to the images without padding, `(channels, height, width, N)` float32.

    Args:
      dleaves: the gradients of the leaves, from `leaf_gradients`.
      places, leaves: arguments of `leaf_gradients`.
      readers, reader_offsets: int32. `readers[reader_offsets[c] : reader_offsets[c + 1]]` are the leaves that read
        channel c. Leaf l of kernel k is `k * leaves.shape[1] + l`.
      size: channels, height, and width without the padding.
      padding: rows above the image, and columns to its left.
    """
    (channels, height, width), (_, rows, columns, N), count = size, dleaves.shape, leaves.shape[1]
    pixels, row_step, column_step = config.rows * width, pool[0] * stride[0], pool[1] * stride[1]

    def body(dleaves_ref, place_ref, leaves_ref, readers_ref, offsets_ref, dx_ref, sums, *, block, band, channel):
        lanes, lane = pl.ds(block * LANES, LANES), lane_and_column(LANES, 1)[0]
        top = band * config.rows + padding[0]  # in the padded image

        def clear(pixel, _):
            sums[pl.ds(pixel * LANES, LANES)] = jnp.zeros((LANES,), jnp.float32)

        def windows(leaf_row):
            """Return (first, end): a leaf can read the band only for rows first to end - 1 of the pooled output. The
            leaf reads `leaf_row`, relative to the band, at the first position of the first pooling window."""
            # At the last position of row `first`, the leaf reads the band's first row or a later row.
            first = jnp.clip((-leaf_row - (pool[0] - 1) * stride[0] + row_step - 1) // row_step, 0, rows)
            return first, jnp.clip((config.rows - 1 - leaf_row) // row_step + 1, first, rows)

        def targets(row, column, place):
            """Return, for each of 128 images, the index in shared memory for the pixel that one leaf reads. Pixels
            outside of the band get an unused index.

            Args:
              row, column: the pixel that the leaf reads at the first position of the pooling window, relative to the
                band.
              place: for each image, the index of its maximum in the pooling window. The pixel shifts by one `stride`
                per position. None for windows of one position.
            """
            u = lane * 0
            v = u
            for i, (m, n) in enumerate(itertools.product(*map(range, pool))):
                if i:
                    u, v = jnp.where(place == i, m * stride[0], u), jnp.where(place == i, n * stride[1], v)
            row, column = row + u, column + v
            valid = (row >= 0) & (row < config.rows) & (column >= 0) & (column < width)
            return jnp.where(valid, row * width + column, pixels) * LANES + lane

        def add_reader(e, _):
            leaf = readers_ref[e]
            k = leaf // count
            leaf_row, leaf_column = leaves_ref[leaf, 1] - top, leaves_ref[leaf, 2] - padding[1]
            first, last = windows(leaf_row)

            def add_windows(row, columns, _):
                indices, values = [], []
                for column in columns:
                    place = None
                    if place_ref is not None:
                        place = spread(place_ref[k, row, column, lanes].astype(jnp.int32), 1)
                    indices.append(targets(row * row_step + leaf_row, column * column_step + leaf_column, place))
                    values.append(spread(dleaves_ref[leaf, row, column, lanes], 1))
                # A leaf reads different pixels in different windows, so these additions are independent.
                old_sums = [gather_elements(sums, index) for index in indices]
                for index, old_sum, value in zip(indices, old_sums, values, strict=True):
                    scatter_elements(sums, old_sum + value, index)

            turns = largest_divisor(columns, _UNROLLED_WINDOWS)
            _visit_windows(first, last, columns, add_windows, columns_per_turn=turns)

        def write(pixel, _):
            row, column = band * config.rows + pixel // width, pixel % width
            dx_ref[channel, row, column, lanes] = sums[pl.ds(pixel * LANES, LANES)]

        lax.fori_loop(0, pixels + 1, clear, None)
        compiler_fence()
        lax.fori_loop(offsets_ref[channel], offsets_ref[channel + 1], add_reader, None)
        compiler_fence()
        lax.fori_loop(0, jnp.minimum(config.rows, height - band * config.rows) * width, write, None)

    return launch(
        body,
        dleaves,
        places,
        leaves.reshape(-1, 3),
        readers,
        reader_offsets,
        out=jax.ShapeDtypeStruct((*size, N), jnp.float32),
        grid={"block": N // LANES, "band": -(-height // config.rows), "channel": channels},
        scratch=[plgpu.SMEM(((pixels + 1) * LANES,), jnp.float32)],
        barriers=False,
        sums_across_warps=False,
        name="trees_backward_input",
    )


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """Sizes of a convolution.

    Attributes:
      rows, columns: height and width of the pooled output.
      window_steps: the distances, in pixels of a flattened image, between pooling windows that are neighbors in a
        column or in a row.
      steps: the distances from a pooling window's first position to each of its positions.
    """

    rows: int
    columns: int
    window_steps: tuple[int, int]
    steps: list[int]

    @classmethod
    def of_image(cls, x: Array, window: tuple[int, int], stride: tuple[int, int], pool: tuple[int, int]) -> "_Geometry":
        _, height, width, _ = x.shape
        sizes = [((n - f) // s + 1) // p for n, f, s, p in zip((height, width), window, stride, pool, strict=True)]
        row_step, column_step = stride[0] * width, stride[1]
        steps = [u * row_step + v * column_step for u, v in itertools.product(*map(range, pool))]
        return cls(*sizes, (pool[0] * row_step, pool[1] * column_step), steps)

    def first(self, row: Any, column: Any) -> Any:
        """Return the top left pixel, numbered within one channel, of the convolution's window at the first position of
        pooling window (row, column)."""
        return row * self.window_steps[0] + column * self.window_steps[1]


def _leaf_pixels(leaves: Array, x: Array) -> Array:
    """Return each leaf's pixel in the flattened image if its tree is at the top left, `(kernels, leaves)`."""
    channel, row, column = jnp.moveaxis(leaves, -1, 0)
    return (channel * x.shape[1] + row) * x.shape[2] + column


def _as_rows(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _load_tree(c_ref, pixels_ref, k):
    c = [[c_ref[k, g, i] for i in range(4)] for g in range(c_ref.shape[1])]
    return c, [pixels_ref[k, leaf] for leaf in range(pixels_ref.shape[1])]


def _load_leaves(x_ref, pixels, first, lanes, steps):
    # One address per leaf: the other positions are constant distances away.
    rows = [x_ref.at[pl.ds(first + pixel, 1 + steps[-1])] for pixel in pixels]
    return [[row[step, lanes].astype(jnp.float32) for row in rows] for step in steps]


def _visit_windows(first: Any, last: Any, columns: int, body: Any, carry: Any = None, columns_per_turn: int = 1) -> Any:
    """Call `carry = body(row, neighbors, carry)` for the pooling windows in rows `first` to `last - 1`, each with
    `columns` windows. `neighbors` lists the columns of `columns_per_turn` adjacent windows. Return the last carry."""
    turns = columns // columns_per_turn

    def step(i, carry):
        first_column = i % turns * columns_per_turn
        return body(first + i // turns, [first_column + n for n in range(columns_per_turn)], carry)

    return lax.fori_loop(0, (last - first) * turns, step, carry)
