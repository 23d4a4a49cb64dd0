"""Attention and its gradients one tile of scores at a time, in memory linear in the number of queries and keys
(docs/attention.md)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim

from jaxbp.common.numerics import upcast, wide
from jaxbp.ops.attention._formulas import (
    grouped,
    product,
    scores_and_slope,
    valid_pairs,
    weighted_queries,
    weighted_values,
    where_key,
)
from jaxbp.pairing import differentiable
from jaxbp.pairing.mesh import device_parts, whole_along
from pallas_kernels.attention.tiles import Masks, listed, tiles_with_pairs
from pallas_kernels.core.launch import unify_varying_axes

LARGEST_SIDE, SMALLEST_SIDE, SYMBOLIC_SIDE = 512, 32, 128
"""Numbers of queries and of keys per tile. Not tuned."""
TILE_ELEMENTS = 2**24
"""The scores of one tile for all examples and heads are at most this many, unless the side is the smallest."""


def tile_sides(batch: Any, heads: int, *sizes: Any) -> tuple[int, ...]:
    if any(map(is_symbolic_dim, (batch, *sizes))):
        return (SYMBOLIC_SIDE,) * len(sizes)
    side = LARGEST_SIDE
    while side > SMALLEST_SIDE and batch * heads * side * side > TILE_ELEMENTS:
        side //= 2
    # Sides of nearly equal tiles need the least padding.
    return tuple(-(-size // -(-size // side)) for size in sizes)


class _Axis:
    """Queries or keys, divided into `count` blocks of `side` positions."""

    def __init__(self, size: Any, side: int):
        self.size, self.side, self.count = size, side, -(-size // side)
        self.is_even = not is_symbolic_dim(size) and size % side == 0
        self.is_one = not is_symbolic_dim(self.count) and self.count == 1

    def padded(self, a: Array | None, axis: int) -> Array | None:
        if a is None or a.shape[axis] == 1:
            return a
        a = whole_along(a, axis)  # or XLA would gather it in each iteration
        if self.is_even:
            return a
        shape = [*a.shape[:axis], jax.core.max_dim(self.count * self.side - self.size, 0), *a.shape[axis + 1 :]]
        return jnp.concatenate([a, jnp.zeros(shape, a.dtype)], axis=axis)

    def block(self, a: Array | None, i: Array, axis: int) -> Array | None:
        if a is None or a.shape[axis] == 1:
            return a
        return lax.dynamic_slice_in_dim(a, i * self.side, self.side, axis)

    def positions(self, i: Array) -> Array:
        return i * self.side + jnp.arange(self.side, dtype=jnp.int32)

    def joined(self, blocks: Array, axis: int) -> Array:
        """Undo the division of an axis into blocks, which `lax.scan` stacks on axis 0."""
        a = jnp.moveaxis(blocks, 0, axis)
        a = a.reshape(*a.shape[:axis], self.count * self.side, *a.shape[axis + 2 :])
        return lax.slice_in_dim(a, 0, self.size, axis=axis)


class _Tiles:
    """The arrays of one call, divided into tiles."""

    def __init__(self, q, k, v, bias, masks, *, scale, softcap, skips):
        sizes = q.shape[1], k.shape[1]
        sides = tile_sides(q.shape[0], q.shape[2], *sizes)
        self.rows, self.columns = map(_Axis, sizes, sides)
        self.options, self.skips = dict(scale=scale, softcap=softcap), skips
        masks = masks.with_intervals(*sizes)
        visited, flags = tiles_with_pairs(masks, k.shape[1], sides)
        self.visits = listed(jnp.any(visited, axis=0, keepdims=True), jnp.max(flags, axis=0, keepdims=True, initial=0))
        self.q, self.k, self.v = self.rows.padded(q, 1), self.columns.padded(k, 1), self.columns.padded(v, 1)
        self.bias, mask = (self.columns.padded(self.rows.padded(a, 2), 3) for a in (bias, masks.mask))
        # Padding with 0 gives an empty interval.
        of_queries = (self.rows.padded(a, 1) for a in (masks.first, masks.end, masks.query_segments))
        self.masks = Masks(*of_queries, self.columns.padded(masks.key_segments, 1), mask)

    def scores(self, q, k, i, j):
        """Return the scores of the tile in row i and column j, the derivative of the softcap for each score, and which
        pairs of a query and a key are valid."""
        mask, bias = (self.columns.block(self.rows.block(a, i, 2), j, 3) for a in (self.masks.mask, self.bias))
        of_queries = (self.rows.block(a, i, 1) for a in self.masks[:3])
        masks = Masks(*of_queries, self.columns.block(self.masks.key_segments, j, 1), mask)
        valid = valid_pairs(self.columns.positions(j), bias, masks)
        return *scores_and_slope(q, k, bias, valid, **self.options), valid

    def over_rows(self, row: Callable, sums: Any) -> tuple[Any, Any]:
        """Return the final sums and the stacked results of `row(sums, i) -> (sums, results)` for each row i."""
        row = row if self.skips else jax.checkpoint(row)
        return lax.scan(row, self.varying(sums), jnp.arange(self.rows.count, dtype=jnp.int32))

    def over_columns(self, i: Array, step: Callable, state: Any) -> Any:
        """Call `state = step(j, state)` for each tile in row i and column j of the tiles of scores.

        `state` is the initial state. Return the last state. With `skips`, leave out the tiles that the intervals and
        segments of the masks exclude for all examples.
        """
        columns, state = self.visits.visits[0, i] // 4, self.varying(state)
        if self.skips:
            body = lambda slot, state: step(columns[slot], state)  # noqa: E731
            return lax.fori_loop(0, self.visits.counts[0, i], body, state)
        # JAX cannot differentiate a loop of unknown length in reverse mode.
        step = jax.checkpoint(step)
        return lax.scan(lambda state, j: (step(j, state), None), state, columns)[0]

    def varying(self, state):
        return unify_varying_axes((self.q, state))[1]


def _attend(q, k, v, bias, masks, **options):
    """Return the result, and the largest score of each query and `total = Σ exp(score - largest)`, in float32 or wider.
    For a query without a valid key, these are 0, -inf, and 1."""
    tiles = _Tiles(q, k, v, bias, masks, **options)
    batch, _, heads, _ = q.shape
    statistics, dtype = (batch, heads, tiles.rows.side), wide(q.dtype)

    def row(_, i):
        q = tiles.rows.block(tiles.q, i, 1)

        def step(j, state):
            largest, total, weighted, has_key = state
            k, v = tiles.columns.block(tiles.k, j, 1), tiles.columns.block(tiles.v, j, 1)
            scores, _, valid = tiles.scores(q, k, i, j)
            has_key |= True if valid is None else jnp.any(valid, axis=3)
            larger = lax.stop_gradient(jnp.maximum(largest, jnp.max(scores, axis=3)))
            shift = jnp.where(larger == -jnp.inf, 0.0, larger)
            e, rescale = jnp.exp(scores - shift[..., None]), jnp.exp(largest - shift)
            weighted = weighted * jnp.swapaxes(rescale, 1, 2)[..., None] + weighted_values(e, v)
            return larger, total * rescale + jnp.sum(e, axis=3), weighted, has_key

        weighted = jnp.zeros((batch, tiles.rows.side, heads, v.shape[3]), dtype)
        state = *(jnp.full(statistics, a, dtype) for a in (-jnp.inf, 0.0)), weighted, jnp.zeros(statistics, bool)
        largest, total, weighted, has_key = tiles.over_columns(i, step, state)
        # If the scores of all valid pairs overflow to -inf, their softmax is unknown.
        total = jnp.where(has_key, jnp.where(total == 0, jnp.nan, total), 1.0)
        y = weighted / jnp.swapaxes(total, 1, 2)[..., None]
        return None, (y, largest, total)

    _, (y, *statistics) = tiles.over_rows(row, None)
    return tiles.rows.joined(y, 1), *(tiles.rows.joined(a, 2) for a in statistics)


def _gradients(dy, dlogsumexp, q, k, v, bias, masks, largest, total, **options):
    """Return dq, dk, dv, and dbias. dbias is None if bias is None. `largest` and `total` are results of `_attend`.
    dlogsumexp may be None."""
    tiles = _Tiles(q, k, v, bias, masks, **options)
    has_key = largest + jnp.log(total) != -jnp.inf
    dy = tiles.rows.padded(where_key(has_key, dy), 1)
    delta = jnp.zeros_like(largest) if dlogsumexp is None else jnp.where(has_key, -dlogsumexp, 0.0)
    # `exp(score - largest) / total` is more accurate than `exp(score - logsumexp)`.
    statistics = [tiles.rows.padded(a, 2) for a in (jnp.where(has_key, largest, 0.0), 1 / total, delta)]

    def row(sums, i):
        q, dy_i = tiles.rows.block(tiles.q, i, 1), tiles.rows.block(dy, i, 1)
        largest, inverse_total, delta = (tiles.rows.block(a, i, 2) for a in statistics)

        def tile(j):
            k, v = tiles.columns.block(tiles.k, j, 1), tiles.columns.block(tiles.v, j, 1)
            scores, slope, _ = tiles.scores(q, k, i, j)
            p = jnp.exp(scores - largest[..., None]) * inverse_total[..., None]
            return k, v, p, product("btkgh,bskh->bkgts", grouped(dy_i, v), v).reshape(p.shape), slope

        def row_sums(p, dp):
            return jnp.sum(p, axis=3), jnp.sum(p * dp, axis=3)

        def add_row_sums(j, sums):
            _, _, p, dp, _ = tile(j)
            return tuple(map(jnp.add, sums, row_sums(p, dp)))

        zeros, one_tile = jnp.zeros_like(delta), tiles.columns.is_one
        given = None if one_tile else tiles.over_columns(i, add_row_sums, (zeros, zeros))

        def step(j, state):
            dq, dk, dv, dbias = state
            k, v, p, dp, slope = tile(j)
            # `total` is 1 except for rounding errors of the scores, which may differ from the errors in the forward.
            # `dy * y` would equal `weighted`, but other rounding errors would remain where p is nearly 1.
            total, weighted = row_sums(p, dp) if one_tile else given
            inverse = 1 / jnp.where(total == 0, 1.0, total)
            p = p * inverse[..., None]
            ds = p * (dp - (delta + weighted * inverse)[..., None])
            dz = ds * slope
            dq += weighted_values(dz, k)
            dk = _add_block(tiles.columns, dk, weighted_queries(dz, q, k), j)
            dv = _add_block(tiles.columns, dv, weighted_queries(p, dy_i, v), j)
            dbias = None if bias is None else _add_tile(tiles, dbias, ds, i, j)
            return dq, dk, dv, dbias

        dq = jnp.zeros(q.shape, wide(q.dtype))
        dq, *sums = tiles.over_columns(i, step, (dq, *sums))
        return tuple(sums), dq.astype(q.dtype)

    zeros = [None if a is None else jnp.zeros(a.shape, wide(a.dtype)) for a in (tiles.k, tiles.v, tiles.bias)]
    if bias is not None and bias.shape[0] == 1:
        # One sum per device, or XLA would add each tile over the devices.
        zeros[2] = jnp.repeat(zeros[2], device_parts(q.shape[0], q), axis=0)
    (dk, dv, dbias), dq = tiles.over_rows(row, tuple(zeros))
    dk, dv = (lax.slice_in_dim(a, 0, k.shape[1], axis=1).astype(k.dtype) for a in (dk, dv))
    if bias is not None:
        dbias = jnp.sum(dbias, axis=0, keepdims=True) if dbias.shape[0] != bias.shape[0] else dbias
        dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return tiles.rows.joined(dq, 1), dk, dv, dbias


def _add_block(columns, total, part, j):
    part = columns.block(total, j, 1) + part
    return lax.dynamic_update_slice_in_dim(total, part, j * columns.side, 1)


def _add_tile(tiles, total, ds, i, j):
    """Add ds, the gradient for the tile of scores in row i and column j, to `total`, and return the new `total`.

    `total` is the gradient with respect to the padded bias. ds is first summed over the axes along which the bias
    broadcasts. If the bias broadcasts over the examples, axis 0 of `total` may have one sum per device.
    """
    tile = tiles.columns.block(tiles.rows.block(total, i, 2), j, 3)
    if tile.shape[0] not in (1, ds.shape[0]):
        ds = jnp.sum(ds.reshape(tile.shape[0], -1, *ds.shape[1:]), axis=1)
    broadcast = [axis for axis, size in enumerate(tile.shape) if size == 1]
    part = tile + jnp.sum(ds, axis=broadcast, keepdims=True)
    start = [jnp.zeros((), jnp.int32)] * 4
    for axis, n, of in ((2, i, tiles.rows), (3, j, tiles.columns)):
        start[axis] = start[axis] if total.shape[axis] == 1 else n * of.side
    return lax.dynamic_update_slice(total, part, start)


def _attend_for_autodiff(*arrays, **options):
    return _attend(*_in_wide(arrays), skips=False, **options)


def _gradients_for_autodiff(dy, dlogsumexp, q, k, v, bias, masks, largest, total, **options):
    dy, dlogsumexp, *arrays = _in_wide((dy, dlogsumexp, q, k, v, bias, masks))
    # Derivatives through given statistics would be rounded separately, and cancel with the others.
    _, *statistics = _attend(*arrays, skips=False, **options)
    found = _gradients(dy, dlogsumexp, *arrays, *statistics, skips=False, **options)
    return tuple(None if a is None else a.astype(of.dtype) for a, of in zip(found, (q, k, v, bias), strict=True))


def _in_wide(arrays):
    # After one conversion, autodiff rounds each derivative once. After several, it would add rounded derivatives.
    return jax.tree.map(upcast, arrays)


attend = differentiable(functools.partial(_attend, skips=True), _attend_for_autodiff)
"""`attend(q, k, v, bias, masks, *, scale, softcap) -> (y, largest, total)`."""
gradients = differentiable(functools.partial(_gradients, skips=True), _gradients_for_autodiff)
"""`gradients(dy, dlogsumexp, q, k, v, bias, masks, largest, total, **options) -> (dq, dk, dv, dbias)`."""
