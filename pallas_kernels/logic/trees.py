"""Convolutions whose filters are trees of gates, and the gradients of the coefficients and of the leaves.

A CTA computes rows of the pooled output for one tree and 128 examples, one per lane: see docs/kernels/logic.md.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.tree import gradients_of_tree, levels_of_tree
from pallas_kernels.logic.tree_windows import Config, Geometry, Tree, as_rows, unsupported, visit_windows

_PROGRAMS = 4
"""Wanted CTAs of `leaf_gradients` per multiprocessor. Four fit at 128 registers per thread."""
_MAX_COLUMNS_PER_TURN = 2
"""Pooling windows whose leaves a CTA reads at once. Not timed separately: docs/lab/2026-11-22-trees.md."""


def _unsupported(*arrays, pool, **options):
    *_, leaves, x = arrays
    return unsupported(leaves.shape, pool) or ("images of 2^31 or more elements" if x.size >= 2**31 else None)


def _forward_heuristic(coefficients, leaves, x, *, window, stride, pool):
    return Config(rows=1)  # The fastest number of rows in docs/lab/2026-11-22-trees.md.


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
    """Return each tree's largest value in each pooling window, and the index of the first position with this value.

    Args:
      coefficients: `(kernels, gates, 4)`, one tree per kernel.
      leaves: `(kernels, leaves, 3)` int32: each leaf's channel, and its row and column in the window.
      x: `(channels, height, width, N)` including padding, N a multiple of 128.

    Returns:
      y `(kernels, rows, columns, N)` in x's dtype, and uint8 indices `u * pool[1] + v` for position (u, v) in the
        pooling window, or None for windows of one position.
    """
    geometry = Geometry.from_image(x, window, stride, pool)
    kernels, N = leaves.shape[0], x.shape[-1]

    def body(c_ref, pixels_ref, x_ref, y_ref, place_ref, *, block, part, k):
        lanes, tree = pl.ds(block * LANES, LANES), Tree(c_ref, pixels_ref, k)

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
        visit_windows(first, last, geometry.columns, lambda row, columns, _: window(row, *columns))

    shape = (kernels, geometry.rows, geometry.columns, N)
    places = jax.ShapeDtypeStruct(shape, jnp.uint8) if len(geometry.places) > 1 else None
    return launch(
        body,
        coefficients.astype(jnp.float32),
        geometry.leaf_pixels(leaves),
        as_rows(x),
        out=(jax.ShapeDtypeStruct(shape, x.dtype), places),
        grid={"block": N // LANES, "part": -(-geometry.rows // config.rows), "k": kernels},
        barriers=False,
        name="trees",
    )


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
    """Return the float32 gradients of the coefficients, and of all trees' leaves,
    `(kernels * leaves.shape[1], rows, columns, N)`.

    Args:
      dy: `(kernels, rows, columns, N)`, the gradient with respect to the y of `forward`.
      places: the indices from `forward`. Other arguments: see `forward`.
    """
    geometry = Geometry.from_image(x, window, stride, pool)
    (kernels, gates, _), N, count = coefficients.shape, x.shape[-1], leaves.shape[1]
    blocks, parts = N // LANES, -(-geometry.rows // config.rows)
    dc, dleaves = launch(
        functools.partial(_leaf_gradients_of_rows, geometry=geometry, rows=config.rows),
        dy,
        places,
        coefficients.astype(jnp.float32),
        geometry.leaf_pixels(leaves),
        as_rows(x) if places is None else x.ravel(),
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


def _leaf_gradients_of_rows(
    dy_ref, place_ref, c_ref, pixels_ref, x_ref, dc_ref, dleaves_ref, _, *, block, part, k, geometry, rows
):
    lanes, tree = pl.ds(block * LANES, LANES), Tree(c_ref, pixels_ref, k)
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
            for leaf, dleaf in enumerate(dleaves if dleaves_ref is not None else ()):
                dleaves_ref[k * count + leaf, row, column, lanes] = dleaf
            terms = itertools.chain.from_iterable(dc if dc_ref is not None else ())
            sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
        return sums

    first = part * rows
    last = jnp.minimum(first + rows, geometry.rows)
    columns_per_turn = largest_divisor(geometry.columns, _MAX_COLUMNS_PER_TURN)
    zero = zeros_like(dy_ref[k, 0, 0, lanes].astype(jnp.float32))
    zeros = (zero,) * (4 * gates if dc_ref is not None else 0)
    sums = visit_windows(first, last, geometry.columns, windows, zeros, columns_per_turn)
    for i, total in enumerate(sums):
        dc_ref[block, part, k, i] = jnp.sum(total)
