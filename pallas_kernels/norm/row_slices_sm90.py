"""Arithmetic of LayerNorm on a block of 64 rows in registers, in float32, one slice of 64 columns at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import load, value_a_column
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.norm.statistics import inverse_root

ROWS = 64
"""Rows per block: the rows of a `wgmma` (PTX ISA)."""
COLUMNS = 64
"""Columns per slice: 128 bytes in half precision, the widest row of a tile of an operand."""


def column_slices(width: int) -> list[Any]:
    return [pl.ds(start, COLUMNS) for start in range(0, width, COLUMNS)]


def columns_of(a: Array, columns: Any) -> Array:
    return a[..., columns.start : columns.start + columns.size]


def broadcast_rows(a: Array) -> Array:
    return lax.broadcast_in_dim(a, (ROWS, COLUMNS), (0,))


def broadcast_columns(a: Array) -> Array:
    return lax.broadcast_in_dim(a.astype(jnp.float32), (ROWS, COLUMNS), (1,))


def load_columns(ref: Any, columns: Any) -> Array:
    return broadcast_columns(load(ref.at[columns], value_a_column(), optimized=False))


def first_values_of(x: Array) -> Array:
    first_columns = columns_of(x, pl.ds(0, 8)).astype(jnp.float32)
    column = plgpu.broadcasted_iota(jnp.int32, first_columns.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.sum(jnp.where(column == 0, first_columns, 0.0), axis=1)


def sum_slices(function: Callable[[Any], Array], pieces: Sequence) -> Array:
    """Return the sum along each row of a matrix. `pieces` are slices of its columns. `function(piece)` returns the
    values in one slice."""
    return jnp.sum(functools.reduce(jnp.add, map(function, pieces)), axis=1)


def normalise_rows(x: Array, first_values: Array, epsilon: float) -> tuple[Callable[[Any], Array], Array, Array]:
    """Return LayerNorm's x̂ as a function of a slice of columns, and offset (mean minus first value) and inv_std per
    row."""
    pieces, share = column_slices(x.shape[1]), 1 / x.shape[1]

    def difference(columns):
        return columns_of(x, columns).astype(jnp.float32) - broadcast_rows(first_values)

    offset = sum_slices(difference, pieces) * share

    def deviation(columns):
        return difference(columns) - broadcast_rows(offset)

    inv_std = inverse_root(sum_slices(lambda columns: jnp.square(deviation(columns)), pieces) * share, epsilon)
    return lambda columns: deviation(columns) * broadcast_rows(inv_std), offset, inv_std
