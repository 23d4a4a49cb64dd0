"""Blocks of rows in registers, for the streamed LayerNorm and RMSNorm kernels.

A block has one row per warp, or one row for the whole warpgroup, as float32. A sum along a row uses shuffles within a
warp, and shared memory across warps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import load, store
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.norm.statistics import inverse_root


class Statistics(NamedTuple):
    """Statistics per row, or references to them: see `layer_norm.py`. `offset` is the mean minus the row's first
    element, or None for RMSNorm."""

    offset: Any
    inv_std: Any


class Block(NamedTuple):
    """Layout of `rows` rows in registers, as an array `(rows, hidden / piece, piece)`. A row is divided because
    an axis of a TMA copy has at most 256 elements."""

    hidden: int
    rows: int
    piece: int
    layout: Any

    @property
    def row_per_warp(self) -> bool:
        return self.rows > 1

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.hidden // self.piece, self.piece

    @property
    def row_layout(self) -> Any:
        return self.layout.reduce((1,)).reduce((1,))

    @property
    def column_layout(self) -> Any:
        return self.layout.reduce((0,))

    def split_columns(self, a: Array) -> Array:
        return a.reshape(*a.shape[:-1], -1, self.piece)

    def block_rows(self, ref: Any, row: Any) -> Any:
        return ref.at[pl.ds(row, self.rows)]

    def load(self, ref: Any, layout: Any = None) -> Array:
        return load(ref, layout or self.layout, optimized=False).astype(jnp.float32)

    def load_parameter(self, ref: Any) -> Array:
        a = lax.broadcast_in_dim(self.load(ref, self.column_layout), self.shape, (1, 2))
        return plgpu.layout_cast(a, self.layout)

    def load_row_values(self, ref: Any, row: Any) -> Array:
        return self.load(self.block_rows(ref, row), self.row_layout)

    def load_statistics(self, refs: Statistics, row: Any) -> Statistics:
        return jax.tree.map(lambda ref: self.load_row_values(ref, row), refs)

    def store_statistics(self, refs: Statistics, row: Any, statistics: Statistics) -> None:
        for ref, a in zip(jax.tree.leaves(refs), jax.tree.leaves(statistics), strict=True):
            if self.row_per_warp:
                store(self.block_rows(ref, row), a)
            else:
                ref[row] = jnp.sum(a)

    def broadcast_rows(self, a: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(a, self.shape, (0,)), self.layout)

    def mean(self, a: Array) -> Array:
        return jnp.sum(jnp.sum(a, axis=1), axis=1) * (1 / self.hidden)

    def partial_sum(self, a: Array) -> Array:
        return a if self.row_per_warp else jnp.sum(a, axis=0)

    def sum(self, partial_sum: Array) -> Array:
        return jnp.sum(partial_sum, axis=0) if self.row_per_warp else partial_sum

    def groups(self, rows: int) -> list[list[int]]:
        """Divide `rows` rows into groups of blocks to compute together, and return the first row of each block. All
        blocks form one group, to overlap their shuffles, unless a row needs all registers of a warpgroup."""
        blocks = range(0, rows, self.rows)
        return [list(blocks)] if self.row_per_warp else [[block] for block in blocks]

    def values(self, compute: Callable[[], Array]) -> Callable[[], Array]:
        """Return a function that returns `compute()`. If each warp has a separate row, every call runs
        `compute` again, to save registers. Otherwise, `compute` runs once."""
        if self.row_per_warp:
            return compute
        value = compute()
        return lambda: value

    def combine(self, operation: Callable, blocks: Sequence[Callable], row_values: Sequence[Array]) -> list[Callable]:
        """Apply `operation` to each block of rows and the block's array in `row_values`, one value per row. Blocks
        and results are functions that return arrays: see `values`."""

        def combine_block(block, a):
            return self.values(lambda: operation(block(), self.broadcast_rows(a)))

        return [combine_block(block, a) for block, a in zip(blocks, row_values, strict=True)]

    def normalize(
        self, refs: Sequence, known_statistics: Sequence[Statistics] | None, *, epsilon: float, center: bool
    ) -> tuple[list[Callable[[], Array]], list[Statistics]]:
        """Return x̂ of LayerNorm and the statistics for each block of rows in `refs`. Each x̂ is a function that returns
        an array. If `known_statistics` is None, compute the statistics."""
        x, offsets = [self.values(functools.partial(self.load, ref)) for ref in refs], [None] * len(refs)
        if center:
            first = [self.load(ref.at[:, 0, 0], self.row_layout) for ref in refs]
            x = self.combine(jnp.subtract, x, first)
            offsets = [a.offset for a in known_statistics] if known_statistics else [self.mean(block()) for block in x]
            x = self.combine(jnp.subtract, x, offsets)
        if known_statistics:
            inv_stds = [a.inv_std for a in known_statistics]
        else:
            inv_stds = [inverse_root(self.mean(jnp.square(block())), epsilon) for block in x]
        statistics = [Statistics(*a) for a in zip(offsets, inv_stds, strict=True)]
        return self.combine(jnp.multiply, x, inv_stds), statistics

    def means(
        self, ts: Sequence[Callable], hats: Sequence[Callable], *, center: bool
    ) -> list[tuple[Array, Array | None]]:
        projections = [self.mean(t() * hat()) for t, hat in zip(ts, hats, strict=True)]
        means = [self.mean(t()) if center else None for t in ts]
        return list(zip(projections, means, strict=True))

    def input_gradient(self, t: Array, hat: Array, inv_std: Array, projection: Array, mean: Array | None) -> Array:
        dx = t - hat * self.broadcast_rows(projection)
        if mean is not None:
            dx = dx - self.broadcast_rows(mean)
        return dx * self.broadcast_rows(inv_std)


def block_of(hidden: int) -> Block | None:
    if hidden <= 1024 and hidden % 128 == 0:
        layout = plgpu.Layout.TILED(plgpu.Tiling(((4, 1, 128), (4,))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
        return Block(hidden, 4, 128, layout)
    if hidden <= 8192 and hidden % 256 == 0:
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((1, 1, 256), (64,), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
        return Block(hidden, 1, 256, layout)
    return None
