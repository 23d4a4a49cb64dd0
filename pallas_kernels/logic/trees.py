"""Convolutions of trees of gates, and their gradients; images have the examples last: `(channels, height, width, N)`.

A lane is an example. A program has a kernel of the convolution: its tree's coefficients and the places of its leaves
stay in registers, and the whole tree is evaluated there. What it reads is rows of examples, one a leaf and place, of
few channels: from memory once, and then from the caches.

With an or-pool, the forward computes the trees of all places of a window and writes the largest value and its place.
The backward computes the one tree at that place again. The gradients of coefficients are sums in a program's registers.
For the gradient of the image a program has an input channel instead, and goes over the kernels that read it: it adds
what each leaf contributes to rows of shared memory, in a fixed order, so that no two threads add to one number.
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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, zeros_like
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.tree import gradients_of_tree, levels_of_tree

_MOST_LEAVES = 16
"""Of a tree, whose coefficients and values are to fit into registers."""
_MOST_PLACES = 9
"""Of a pool's window, whose trees are evaluated one after the other in unrolled code."""
_PROGRAMS = 8
"""A multiprocessor is to have, at least: of fewer, the loads under way do not hide the memory's latency."""
_BAND_BYTES = 56 * 1024
"""Of shared memory for a program's part of an image's gradient, so that four programs run on a multiprocessor."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a program: of the pooled output, or of the image whose gradient it computes."""

    rows: int


# -------------------------------------------------------------------------------------------------------- the geometry


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """Where trees and pools stand.

    Attributes:
      height, width: of the padded image.
      rows, columns: of the pooled output.
      stride, pool: of the trees, and of the windows.
    """

    height: int
    width: int
    rows: int
    columns: int
    stride: tuple[int, int]
    pool: tuple[int, int]

    @classmethod
    def of(cls, x: Any, window: tuple[int, int], stride: tuple[int, int], pool: tuple[int, int]) -> "_Geometry":
        sizes = [((size - f) // s + 1) // p for size, f, s, p in zip(x.shape[1:3], window, stride, pool, strict=True)]
        return cls(*x.shape[1:3], *sizes, stride, pool)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of a window in row-major order."""
        return list(itertools.product(*map(range, self.pool)))

    def first(self, row: Any, column: Any) -> Any:
        """The padded image's pixel, of all in row-major order, at which the trees of a window begin."""
        return row * (self.pool[0] * self.stride[0] * self.width) + column * (self.pool[1] * self.stride[1])

    def step(self, place: tuple[int, int]) -> int:
        """From there to where the tree at a place of the window begins."""
        return place[0] * self.stride[0] * self.width + place[1] * self.stride[1]

    def of_leaves(self, leaves: Array) -> Array:
        """From there to the pixel of each leaf, over all channels: `(kernels, leaves)`."""
        channel, row, column = jnp.moveaxis(leaves, -1, 0)
        return (channel * self.height + row) * self.width + column


class _Tree:
    """A kernel's tree in registers."""

    def __init__(self, c_ref: Any, pixels_ref: Any, k: Any):
        gates, count = c_ref.shape[1], pixels_ref.shape[1]
        self.c = [[c_ref[k, g, i] for i in range(4)] for g in range(gates)]
        self.pixels = [pixels_ref[k, leaf] for leaf in range(count)]

    def leaves(self, x_ref: Any, first: Any, lanes: Any) -> list[Array]:
        """What the leaves read of the tree that begins at a pixel."""
        return [x_ref[first + pixel, lanes].astype(jnp.float32) for pixel in self.pixels]

    def leaves_at(self, x_ref: Any, first: Any, lanes: Any, place: Array | None, geometry: _Geometry) -> list[Array]:
        """What they read of the trees at the places of the lanes' windows."""
        if place is None:
            return self.leaves(x_ref, first, lanes)
        # All rows of a window are read: the lanes' places are all over it, and so are the bytes that would be fetched.
        read = [self.leaves(x_ref, first + geometry.step(p), lanes) for p in geometry.places]
        chosen = read[0]
        for i, values in enumerate(read[1:], start=1):
            chosen = [jnp.where(place == i, new, old) for new, old in zip(values, chosen, strict=True)]
        return chosen


def supports(leaves: tuple[int, ...], pool: tuple[int, int]) -> str | None:
    """What no kernel takes of trees `(kernels, leaves, 3)` and of a pool's window."""
    if leaves[1] > _MOST_LEAVES:
        return f"trees of {leaves[1]} leaves, at most {_MOST_LEAVES}"
    if math.prod(pool) > _MOST_PLACES:
        return f"pool={pool}, at most {_MOST_PLACES} places"
    return None


def _supports_forward(coefficients, leaves, x, *, window, stride, pool):
    return supports(leaves.shape, pool) or _too_many(x)


def _supports_backward(dy, places, coefficients, leaves, x, *, window, stride, pool):
    return supports(leaves.shape, pool) or _too_many(x)


def _too_many(x):
    return "images of 2^31 or more numbers" if x.size >= 2**31 else None


def _programs_rows(programs_per_row: int, rows: int) -> int:
    """The most rows of a program, of so many, with which there are enough programs."""
    wanted = _PROGRAMS * device.target().multiprocessors
    return max(1, min(rows, rows * programs_per_row // wanted))


# ------------------------------------------------------------------------------------------------------------- forward


def _forward_heuristic(coefficients, leaves, x, *, window, stride, pool):
    rows = _Geometry.of(x, window, stride, pool).rows
    return Config(_programs_rows(leaves.shape[0] * (x.shape[-1] // LANES), rows))


@kernel(supports=_supports_forward, heuristic=_forward_heuristic)
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
    """(y, places): the largest value of the trees in each pool's window, and the first place that has it.

    Args:
      coefficients: `(kernels, gates, 4)`.
      leaves: `(kernels, leaves, 3)` int32, channel, row and column in the window.
      x: `(channels, height, width, N)` with its padding, N a multiple of `LANES`.

    Returns:
      `(kernels, rows, columns, N)` in x's dtype, computed in float32, and uint8 of that shape, `u * width + v`; None
      for a pool of one place.
    """
    geometry = _Geometry.of(x, window, stride, pool)
    kernels, N = leaves.shape[0], x.shape[-1]

    def body(c_ref, pixels_ref, x_ref, y_ref, *place_ref, block, part, k):
        lanes, tree = pl.ds(block * LANES, LANES), _Tree(c_ref, pixels_ref, k)

        def window(row, column):
            first = geometry.first(row, column)
            largest = at = None
            for i, place in enumerate(geometry.places):
                *_, (value,) = levels_of_tree(tree.c, tree.leaves(x_ref, first + geometry.step(place), lanes))
                if i == 0:
                    largest, at = value, jnp.where(value != value, 0, 0)
                else:
                    # Of equals the first stays, and so does a NaN.
                    larger = ~(value <= largest) & (largest == largest)
                    largest, at = jnp.where(larger, value, largest), jnp.where(larger, i, at)
            y_ref[k, row, column, lanes] = largest.astype(y_ref.dtype)
            if place_ref:
                place_ref[0][k, row, column, lanes] = at.astype(jnp.uint8)

        _for_windows(geometry, part, config, window)

    shape = (kernels, geometry.rows, geometry.columns, N)
    out = (jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct(shape, jnp.uint8))
    y, *places = launch(
        body,
        coefficients.astype(jnp.float32),
        geometry.of_leaves(leaves),
        _as_rows(x),
        out=out if len(geometry.places) > 1 else out[:1],
        grid={"block": N // LANES, "part": -(-geometry.rows // config.rows), "k": kernels},
        barriers=False,
        name="trees",
    )
    return y, places[0] if places else None


def _as_rows(x):
    """A row of examples a pixel."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _for_windows(geometry: _Geometry, part: Any, config: Config, window: Any, carry: Any = None) -> Any:
    """`window(row, column)`, or `window(row, column, carry) -> carry`, for each of a program's rows and all columns."""
    first = part * config.rows
    last = jnp.minimum(first + config.rows, geometry.rows)

    def step(i, carry):
        row, column = first + i // geometry.columns, i % geometry.columns
        return window(row, column) if carry is None else window(row, column, carry)

    return lax.fori_loop(0, (last - first) * geometry.columns, step, carry)


# -------------------------------------------------------------------------------------- the gradient of coefficients


def _coefficients_heuristic(dy, places, coefficients, leaves, x, *, window, stride, pool):
    return Config(_programs_rows(leaves.shape[0] * (x.shape[-1] // LANES), dy.shape[1]))


@kernel(supports=_supports_backward, heuristic=_coefficients_heuristic)
def coefficients_gradient(
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
) -> Array:
    """dc `(kernels, gates, 4)` float32: for each gate the sums of `dy (1, a, b, ab)`, dy the gradient of its value.

    Args:
      dy: `(kernels, rows, columns, N)`.
      places: of the largest values, of dy's shape, as from `forward`; None for a pool of one place.
      coefficients, leaves, x: as in `forward`.
    """
    geometry = _Geometry.of(x, window, stride, pool)
    (kernels, gates, _), N = coefficients.shape, x.shape[-1]
    blocks, parts = N // LANES, -(-geometry.rows // config.rows)

    def body(dy_ref, *refs, block, part, k):
        *place_ref, c_ref, pixels_ref, x_ref, dc_ref = refs
        lanes, tree = pl.ds(block * LANES, LANES), _Tree(c_ref, pixels_ref, k)

        def window(row, column, sums):
            at = (k, row, column, lanes)
            values = tree.leaves_at(x_ref, geometry.first(row, column), lanes, _place(place_ref, at), geometry)
            dc, _ = gradients_of_tree(tree.c, levels_of_tree(tree.c, values), dy_ref[at].astype(jnp.float32))
            terms = itertools.chain.from_iterable(dc)
            return tuple(total + term for total, term in zip(sums, terms, strict=True))

        zero = zeros_like(dy_ref[k, 0, 0, lanes].astype(jnp.float32))
        sums = _for_windows(geometry, part, config, window, (zero,) * (4 * gates))
        for i, total in enumerate(sums):
            dc_ref[block, part, k, i] = jnp.sum(total)

    dc = launch(
        body,
        *_given(dy, places, coefficients.astype(jnp.float32), geometry.of_leaves(leaves), _as_rows(x)),
        out=jax.ShapeDtypeStruct((blocks, parts, kernels, 4 * gates), jnp.float32),
        grid={"block": blocks, "part": parts, "k": kernels},
        name="trees_backward_coefficients",
    )
    return jnp.sum(dc, axis=(0, 1)).reshape(kernels, gates, 4)


def _given(*arrays):
    return [a for a in arrays if a is not None]


def _place(place_ref, at):
    return place_ref[0][at].astype(jnp.int32) if place_ref else None


# -------------------------------------------------------------------------------------------- the gradient of the image


def _input_supports(dy, places, coefficients, leaves, readers, reader_offsets, x, *, window, stride, padding, pool):
    width, limit = x.shape[2] - sum(padding[1]), device.target().shared_bytes
    if 4 * LANES * (width + 1) > limit:
        return f"images of width {width}, of which a row of {LANES} examples does not fit into shared memory"
    return supports(leaves.shape, pool) or _too_many(x)


def _input_heuristic(dy, places, coefficients, leaves, readers, reader_offsets, x, *, window, stride, padding, pool):
    height, width = (size - sum(around) for size, around in zip(x.shape[1:3], padding, strict=True))
    return Config(max(1, min(height, (_BAND_BYTES // (4 * LANES) - 1) // width)))


@kernel(supports=_input_supports, heuristic=_input_heuristic)
def input_gradient(
    dy: Array,
    places: Array | None,
    coefficients: Array,
    leaves: Array,
    readers: Array,
    reader_offsets: Array,
    x: Array,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    pool: tuple[int, int],
    config: Config,
) -> Array:
    """dx `(channels, height, width, N)` in x's dtype, of the image without its padding. On GPUs and in the simulator.

    Args:
      readers, reader_offsets: int32, the kernels that read a channel are `readers[offsets[c] : offsets[c + 1]]`.
      padding: rows above and below, and columns to the left and to the right.
      The rest as in `coefficients_gradient`.
    """
    geometry = _Geometry.of(x, window, stride, pool)
    height, width = (size - sum(around) for size, around in zip(x.shape[1:3], padding, strict=True))
    channels, N, pixels = x.shape[0], x.shape[-1], config.rows * width
    reach = (pool[0] - 1) * stride[0] + window[0]  # rows that a window's trees read
    step = pool[0] * stride[0]

    def body(dy_ref, *refs, block, band, channel):
        *place_ref, c_ref, pixels_ref, leaves_ref, readers_ref, offsets_ref, x_ref, dx_ref, sums = refs
        lanes = pl.ds(block * LANES, LANES)
        top = band * config.rows + padding[0][0]  # of the band, in the padded image
        first = jnp.clip((top - reach + step) // step, 0, geometry.rows)
        last = jnp.clip((top + config.rows - 1) // step + 1, first, geometry.rows)

        def clear(pixel, _):
            sums[pixel] = jnp.zeros((LANES,), jnp.float32)

        def add_reader(e, _):
            k = readers_ref[e]
            tree = _Tree(c_ref, pixels_ref, k)
            at_leaf = [[leaves_ref[k, leaf, i] for i in range(3)] for leaf in range(len(tree.pixels))]

            def add_window(i, _):
                row, column = first + i // geometry.columns, i % geometry.columns
                at = (k, row, column, lanes)
                place, dy = _place(place_ref, at), dy_ref[at].astype(jnp.float32)
                values = tree.leaves_at(x_ref, geometry.first(row, column), lanes, place, geometry)
                _, dleaves = gradients_of_tree(tree.c, levels_of_tree(tree.c, values), dy)
                for (read, of_row, of_column), dleaf in zip(at_leaf, dleaves, strict=True):
                    begin = row * step + of_row - top, column * (pool[1] * stride[1]) + of_column - padding[1][0]
                    add = functools.partial(_add, sums, begin, dleaf, place, geometry, config.rows, width)
                    pl.when(read == channel)(add)

            lax.fori_loop(0, (last - first) * geometry.columns, add_window, None)

        def write(pixel, _):
            row, column = band * config.rows + pixel // width, pixel % width
            dx_ref[channel, row, column, lanes] = sums[pixel].astype(dx_ref.dtype)

        lax.fori_loop(0, pixels, clear, None)
        lax.fori_loop(offsets_ref[channel], offsets_ref[channel + 1], add_reader, None)
        lax.fori_loop(0, jnp.minimum(config.rows, height - band * config.rows) * width, write, None)

    return launch(
        body,
        *_given(dy, places, coefficients.astype(jnp.float32), geometry.of_leaves(leaves)),
        leaves,
        readers,
        reader_offsets,
        _as_rows(x),
        out=jax.ShapeDtypeStruct((channels, height, width, N), x.dtype),
        grid={"block": N // LANES, "band": -(-height // config.rows), "channel": channels},
        scratch=[plgpu.SMEM((pixels + 1, LANES), jnp.float32)],
        barriers=False,
        sums_across_warps=False,
        name="trees_backward_input",
    )


def _add(sums, begin, dleaf, place, geometry, rows, width):
    """Adds a leaf's gradient to the rows of shared memory that the lanes' places read; elsewhere, to a spare one."""
    targets = []
    for u, v in geometry.places:
        row, column = begin[0] + u * geometry.stride[0], begin[1] + v * geometry.stride[1]
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < width)
        targets.append(jnp.where(inside, row * width + column, rows * width))
    before = [sums[target] for target in targets]
    for i, (target, total) in enumerate(zip(targets, before, strict=True)):
        sums[target] = total + (dleaf if place is None else jnp.where(place == i, dleaf, 0.0))
