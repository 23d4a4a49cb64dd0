"""The tiles of the scores that attention kernels visit, computed by XLA from the masks.

A query attends to the keys `first <= key < end` with the segment id of the query. Causal masks, windows, and lengths
are such intervals. A tile is visited if the bounds of its intervals and segment ids do not exclude it, so unsorted
segment ids cost time, but never change a result.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Masks(NamedTuple):
    """Which keys each query attends to. The batch axis of an array may be 1, if it is the same for all examples.

    Attributes:
      first, end: int32 `(batch, queries)`, the interval of keys of each query.
      query_segments, key_segments: int32 `(batch, queries)` and `(batch, keys)`, or None.
      mask: bool `(batch, heads, queries, keys)`, or None. Each axis may be 1.
      bias: as `mask`, in floating point, or None. It is added to the scores.
    """

    first: Array
    end: Array
    query_segments: Array | None = None
    key_segments: Array | None = None
    mask: Array | None = None
    bias: Array | None = None


class Visits(NamedTuple):
    """The tiles to visit in each row of tiles: `visits (batch, rows, tiles)` and `counts (batch, rows)`, both int32. A
    visit is twice the index of the tile, plus one if some of its pairs are masked. The first `counts` are valid."""

    visits: Array
    counts: Array


def intervals(
    queries: int,
    keys: int,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
) -> tuple[Array, Array]:
    """Return `first` and `end (batch or 1, queries)` of `Masks`.

    Args:
      window: keys before and after a query's position that it attends to, each None for all.
      query_lengths, key_lengths: int32 `(batch,)`. Later queries and keys are excluded.
    """
    left, right = window or (None, None)
    position = jnp.arange(queries, dtype=jnp.int32)[None]
    first = jnp.zeros_like(position) if left is None else jnp.maximum(position - left, 0)
    end = jnp.full_like(position, keys)
    for after in ([right] if right is not None else []) + [0] * is_causal:
        end = jnp.minimum(end, position + after + 1)
    if key_lengths is not None:
        end = jnp.minimum(end, key_lengths[:, None])
    if query_lengths is not None:
        end = jnp.where(position < query_lengths[:, None], end, 0)
    return jnp.broadcast_to(first, end.shape), jnp.maximum(end, 0)


def visited_tiles(masks: Masks, keys: int, tile: tuple[int, int]) -> tuple[Visits, Visits]:
    """Return which tiles of keys each tile of queries visits, and the other way round. A tile has `tile` queries and
    keys."""
    visited, full = tiles_with_pairs(masks, keys, tile)
    return listed(visited, full), listed(visited.swapaxes(1, 2), full.swapaxes(1, 2))


def tiles_with_pairs(masks: Masks, keys: int, tile: tuple[int, int]) -> tuple[Array, Array]:
    """Return whether each tile may have a valid pair, and whether all its pairs are valid, as booleans `(batch or 1,
    tiles of queries, tiles of keys)`."""
    queries_per_tile, keys_per_tile = tile
    start = jnp.arange(-(-keys // keys_per_tile), dtype=jnp.int32)[None, None] * keys_per_tile
    is_empty = masks.first >= masks.end
    least_first = _extreme(jnp.min, jnp.where(is_empty, keys, masks.first), queries_per_tile, keys)
    last_end = _extreme(jnp.max, jnp.where(is_empty, 0, masks.end), queries_per_tile, 0)
    visited = (least_first < start + keys_per_tile) & (last_end > start)
    # Rows of padding are masked, so a partial tile of queries is masked, too.
    greatest_first = _extreme(jnp.max, masks.first, queries_per_tile, keys)
    least_end = _extreme(jnp.min, masks.end, queries_per_tile, 0)
    full = (greatest_first <= start) & (least_end >= start + keys_per_tile)
    if masks.query_segments is not None:
        query_least, query_greatest = _bounds(masks.query_segments, queries_per_tile)
        key_least, key_greatest = (a.swapaxes(1, 2) for a in _bounds(masks.key_segments, keys_per_tile))
        visited &= (query_least <= key_greatest) & (key_least <= query_greatest)
        full &= (query_least == key_greatest) & (key_least == query_greatest)
    if masks.mask is not None:
        full = jnp.zeros_like(full)
    return tuple(jnp.broadcast_arrays(visited, full))


def _bounds(ids, size):
    integers = jnp.iinfo(ids.dtype)
    return _extreme(jnp.min, ids, size, integers.max), _extreme(jnp.max, ids, size, integers.min)


def _extreme(reduce, values, size, padding):
    batch, length = values.shape
    tiles = -(-length // size)
    values = jnp.pad(values, ((0, 0), (0, tiles * size - length)), constant_values=padding)
    return reduce(values.reshape(batch, tiles, size), axis=2)[:, :, None]


def listed(visited: Array, full: Array) -> Visits:
    """Return the tiles to visit in each row of tiles, given the booleans `(batch, rows, tiles)` of
    `tiles_with_pairs`."""
    order = jnp.argsort(~visited, axis=2, stable=True).astype(jnp.int32)
    masked = jnp.take_along_axis(~full, order, axis=2).astype(jnp.int32)
    return Visits(2 * order + masked, jnp.sum(visited, axis=2, dtype=jnp.int32))
