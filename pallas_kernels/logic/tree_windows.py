"""Loads of the leaves of trees of gates, and the positions of trees in an image and in its pooling windows.

A tree is a filter of a convolution. Its leaves are pixels in the convolution's window.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.gathers import columns, gather_elements, lane_and_column, spread
from pallas_kernels.core.layouts import LANES

_MAX_LEAVES = 16
"""Leaves per tree: its 60 coefficients and 31 values must fit in a thread's 255 registers."""
_MAX_PLACES = 9
"""Positions per pooling window: their code is unrolled. Not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Number of rows that a CTA computes: rows of the image in `input_gradient`, otherwise of the pooled output."""

    rows: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution: `height` and `width` of the padded image, `rows` and `columns` of the pooled output."""

    height: int
    width: int
    rows: int
    columns: int
    stride: tuple[int, int]
    pool: tuple[int, int]

    @classmethod
    def from_image(cls, x: Any, window: tuple[int, int], stride: tuple[int, int], pool: tuple[int, int]) -> "Geometry":
        sizes = [((size - f) // s + 1) // p for size, f, s, p in zip(x.shape[1:3], window, stride, pool, strict=True)]
        return cls(*x.shape[1:3], *sizes, stride, pool)

    @property
    def places(self) -> list[tuple[int, int]]:
        return list(itertools.product(*map(range, self.pool)))

    def first(self, row: Any, column: Any) -> Any:
        """Return the top left pixel, numbered within one channel, of the convolution's window at the first position of
        pooling window (row, column)."""
        return row * (self.pool[0] * self.stride[0] * self.width) + column * (self.pool[1] * self.stride[1])

    def step(self, place: tuple[int, int]) -> int:
        """Return the distance, in pixels of a flattened image, from a pooling window's first position to `place`."""
        return place[0] * self.stride[0] * self.width + place[1] * self.stride[1]

    def leaf_pixels(self, leaves: Array) -> Array:
        """Return each leaf's pixel in the flattened image if its tree is at the top left, `(kernels, leaves)`."""
        channel, row, column = jnp.moveaxis(leaves, -1, 0)
        return (channel * self.height + row) * self.width + column


class Tree:
    def __init__(self, c_ref: Any, pixels_ref: Any, k: Any):
        gates, count = c_ref.shape[1], pixels_ref.shape[1]
        self.c = [[c_ref[k, g, i] for i in range(4)] for g in range(gates)]
        self.pixels = [pixels_ref[k, leaf] for leaf in range(count)]

    def load_leaves(self, x_ref: Any, first: Any, lanes: Any, geometry: Geometry) -> list[list[Array]]:
        steps = [geometry.step(place) for place in geometry.places]
        # One address per leaf: the other positions are constant distances away.
        rows = [x_ref.at[pl.ds(first + pixel, 1 + steps[-1])] for pixel in self.pixels]
        return [[row[step, lanes].astype(jnp.float32) for row in rows] for step in steps]

    def gather_leaves(
        self, numbers: Any, N: int, first: Any, lanes: Any, place: Array, geometry: Geometry
    ) -> list[Array]:
        """Load the pixels that this tree's leaves read from `numbers`, the flattened `(channels, height, width, N)`
        images. Lane i loads for example `lanes.start + i`, for which the tree is at position `place[i]` of the pooling
        window that begins at pixel `first`."""
        lane = lane_and_column(LANES, 1)[0]
        step = lane * 0
        for i, pool_place in enumerate(geometry.places[1:], start=1):
            step = jnp.where(spread(place, 1) == i, geometry.step(pool_place), step)
        offsets = (first + step) * N + lanes.start + lane

        def gather(pixel):
            return columns(gather_elements(numbers, offsets + pixel * N))[0].astype(jnp.float32)

        return [gather(pixel) for pixel in self.pixels]


def unsupported(leaves: tuple[int, ...], pool: tuple[int, int]) -> str | None:
    if leaves[1] > _MAX_LEAVES:
        return f"trees of {leaves[1]} leaves, at most {_MAX_LEAVES}"
    if math.prod(pool) > _MAX_PLACES:
        return f"pool={pool}, which has more than {_MAX_PLACES} positions"
    return None


def as_rows(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def visit_windows(first: Any, last: Any, columns: int, body: Any, carry: Any = None, columns_per_turn: int = 1) -> Any:
    """Call `carry = body(row, neighbors, carry)` for the pooling windows in rows `first` to `last - 1`. `neighbors`
    lists the columns of `columns_per_turn` adjacent windows."""
    turns = columns // columns_per_turn

    def step(i, carry):
        first_column = i % turns * columns_per_turn
        return body(first + i // turns, [first_column + n for n in range(columns_per_turn)], carry)

    return lax.fori_loop(0, (last - first) * turns, step, carry)
