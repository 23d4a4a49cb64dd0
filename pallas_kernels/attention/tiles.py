"""The tiles of the scores that attention kernels visit, computed by XLA from the masks.

A query attends to the keys `first <= key < end` with the segment id of the query. Causal masks, windows, and lengths
are such intervals. A tile is visited if the bounds of its intervals and segment ids do not exclude it, so unsorted
segment ids cost time, but never change a result.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MOST_CONSTANTS = 2**20
"""Maximum visits that NumPy computes when JAX traces a program, because the program contains them as constants."""


FEW_KEYS = 2048
"""Up to this number of keys per query, the CTAs of the two backward kernels for heads of 128 compute several rows of
tiles, and load the next row early. With more keys, this was slower when the loop over rows spilled 48 bytes or more
per thread, and was not measured since."""

COMPARE_SEGMENTS = 3
"""The flags of a tile whose pairs may have different segments. Smaller flags: see `tiles_with_pairs`."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Known:
    """Facts about masks that JAX knows when it traces a program.

    Attributes:
      before, after: the number of keys before and after its position to which a query attends. None means all.
      has_keys: whether each query surely has a valid key.
    """

    before: int | None = None
    after: int | None = None
    has_keys: bool = False


class Masks(NamedTuple):
    """Which keys each query attends to. The batch axis of an array may be 1, if it is the same for all examples.

    Attributes:
      first, end: int32 `(batch, queries)`, the interval of keys of each query. If they are None, `with_intervals`
        computes them from `known`.
      query_segments, key_segments: int32 `(batch, queries)` and `(batch, keys)`, or None.
      mask: bool `(batch, heads, queries, keys)`, or None. Each axis may be 1.
      bias: as `mask`, in floating point, or None. It is added to the scores.
      known: facts about the masks that are known when JAX traces the program.
    """

    first: Array | None = None
    end: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    mask: Array | None = None
    bias: Array | None = None
    known: Known = Known()

    def with_intervals(self, queries: Any, keys: Any, array_module: ModuleType = jnp) -> "Masks":
        if self.first is not None:
            return self
        first, end = intervals(queries, keys, self.known, array_module=array_module)
        return self._replace(first=first, end=end)


class Visits(NamedTuple):
    """The tiles to visit in each row of tiles: `visits (batch, rows, tiles)` and `counts (batch, rows)`, both int32. A
    visit is four times the index of the tile, plus its flags (`tiles_with_pairs`). The first `counts` are valid."""

    visits: Array
    counts: Array


def intervals(
    queries: Any,
    keys: Any,
    known: Known = Known(),
    *,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    array_module: ModuleType = jnp,
) -> tuple[Array, Array]:
    """Return the arrays `first` and `end` of `Masks`, `(batch, queries)`, or `(1, queries)` without lengths.

    Args:
      queries, keys: the number of queries and of keys.
      known: `before` and `after` limit the keys of each query.
      query_lengths, key_lengths: int32 `(batch,)`. Later queries and keys are excluded.
      array_module: `jax.numpy`, or without lengths also NumPy.
    """
    xp = array_module
    position = xp.arange(queries, dtype=np.int32)[None]
    first = xp.zeros_like(position) if known.before is None else xp.maximum(position - known.before, 0)
    end = xp.full_like(position, keys)
    if known.after is not None:
        end = xp.minimum(end, position + known.after + 1)
    if key_lengths is not None:
        end = jnp.minimum(end, key_lengths[:, None])
    if query_lengths is not None:
        end = jnp.where(position < query_lengths[:, None], end, 0)
    return xp.broadcast_to(first, end.shape), xp.maximum(end, 0)


def mean_keys(masks: Masks) -> float:
    """Return the mean number of keys per query of masks that are known when JAX traces the program."""
    return np.maximum(masks.end - masks.first, 0).mean()


def attends_to_few(masks: Masks | None) -> bool:
    """Return whether the queries attend to at most `FEW_KEYS` keys on average. If the intervals are only known when the
    program runs, assume so: they are documents, which are mostly short."""
    if masks is None:
        return False
    return not isinstance(masks.first, np.ndarray) or mean_keys(masks) <= FEW_KEYS


def visited_tiles(masks: Masks, keys: int, tile: tuple[int, int]) -> tuple[Visits, Visits]:
    """Return the tiles of keys that each tile of queries visits, and the tiles of queries that visit each tile of keys.

    `keys` is the number of keys. `tile` has the numbers of queries and of keys per tile.
    """
    visited, flags = tiles_with_pairs(masks, keys, tile)
    return listed(visited, flags), listed(visited.swapaxes(1, 2), flags.swapaxes(1, 2))


def segments_as_intervals(masks: Masks) -> Masks:
    """Where the keys of an example are sorted by segment, restrict the interval of each query to the keys of its
    segment. The segments are then 0, so that kernels need not compare them."""
    queries, keys = masks.query_segments, masks.key_segments
    if queries is None:
        return masks
    is_sorted = jnp.all(keys[:, 1:] >= keys[:, :-1], axis=1, keepdims=True)
    examples = max(len(queries), len(keys))
    arrays = [jnp.broadcast_to(a, (examples, a.shape[1])) for a in (keys, queries)]
    first, end = (
        jax.vmap(functools.partial(jnp.searchsorted, side=side, method="scan_unrolled"))(*arrays).astype(jnp.int32)
        for side in ("left", "right")
    )
    return masks._replace(
        first=jnp.where(is_sorted, jnp.maximum(masks.first, first), masks.first),
        end=jnp.where(is_sorted, jnp.minimum(masks.end, end), masks.end),
        query_segments=jnp.where(is_sorted, 0, queries),
        key_segments=jnp.where(is_sorted, 0, keys),
    )


def tiles_with_pairs(masks: Masks, keys: int, tile: tuple[int, int]) -> tuple[Array, Array]:
    """Return whether each tile may have a valid pair, as booleans, and its flags, as int32, both `(batch or 1, tiles of
    queries, tiles of keys)`. The flags are 0 if all pairs are valid, `COMPARE_SEGMENTS` if pairs may have different
    segments, and 1 otherwise."""
    queries_per_tile, keys_per_tile = tile
    xp = _module_of(masks.first)
    start = xp.arange(-(-keys // keys_per_tile), dtype=np.int32)[None, None] * keys_per_tile
    is_empty = masks.first >= masks.end
    least_first = _extreme(xp.min, xp.where(is_empty, keys, masks.first), queries_per_tile, keys)
    last_end = _extreme(xp.max, xp.where(is_empty, 0, masks.end), queries_per_tile, 0)
    visited = (least_first < start + keys_per_tile) & (last_end > start)
    # Rows of padding are masked, so a partial tile of queries is masked, too.
    greatest_first = _extreme(xp.max, masks.first, queries_per_tile, keys)
    least_end = _extreme(xp.min, masks.end, queries_per_tile, 0)
    is_full = (greatest_first <= start) & (least_end >= start + keys_per_tile)
    flags = xp.where(is_full & (masks.mask is None), np.int32(0), np.int32(1))
    if masks.query_segments is not None:
        query_least, query_greatest = _bounds(masks.query_segments, queries_per_tile)
        key_least, key_greatest = (a.swapaxes(1, 2) for a in _bounds(masks.key_segments, keys_per_tile))
        visited = visited & (query_least <= key_greatest) & (key_least <= query_greatest)
        flags = jnp.where((query_least == key_greatest) & (key_least == query_greatest), flags, COMPARE_SEGMENTS)
    return tuple(_module_of(visited).broadcast_arrays(visited, flags))


def _module_of(a):
    return np if isinstance(a, np.ndarray) else jnp


def _bounds(ids, size):
    integers = jnp.iinfo(ids.dtype)
    return _extreme(jnp.min, ids, size, integers.max), _extreme(jnp.max, ids, size, integers.min)


def _extreme(reduce, values, size, padding):
    batch, length = values.shape
    tiles = -(-length // size)
    values = _module_of(values).pad(values, ((0, 0), (0, tiles * size - length)), constant_values=padding)
    return reduce(values.reshape(batch, tiles, size), axis=2)[:, :, None]


def listed(visited: Array, flags: Array) -> Visits:
    """Return the tiles to visit in each row of tiles, given the results of `tiles_with_pairs`."""
    xp = _module_of(visited)
    order = xp.argsort(~visited, axis=2, stable=True).astype(np.int32)
    return Visits(4 * order + xp.take_along_axis(flags, order, axis=2), xp.sum(visited, axis=2, dtype=np.int32))
