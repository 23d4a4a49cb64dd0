"""Lists of tiles of rows that are sorted by group.

Group g has the rows from `ranges[g, 0]` to `ranges[g, 1]`, where group g + 1 begins. Rows before the first group and
after the last have no group.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class RowTiles(NamedTuple):
    """Tiles of consecutive rows. Each has rows of one group, or rows without a group.

    Attributes:
      group: int32 `(tiles,)`, the tile's group. For a tile without a group, it is arbitrary.
      row: int32 `(tiles,)`, the tile's first row, which may precede the group.
      start, end: int32 `(tiles,)`, the range of rows of the group.
      counts: int32 `(2,)`, the number of tiles with a group, and the number of all tiles that have rows. Tiles with a
        group come first.
    """

    group: Array
    row: Array
    start: Array
    end: Array
    counts: Array


def group_ranges(group_sizes: Array, rows: int) -> Array:
    """Return int32 `(groups, 2)`, the first row and the end of each group. No group extends beyond `rows`."""
    sizes = jnp.minimum(group_sizes, rows).astype(jnp.int32)
    # Each sum ends at `rows`, so that it does not overflow.
    ends = lax.associative_scan(lambda a, b: a + jnp.minimum(b, rows - a), sizes).astype(jnp.int32)
    return jnp.stack([jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends], axis=1)


def row_tiles(ranges: Array, rows: int, size: int, alignment: int = 1) -> RowTiles:
    """Return tiles of `size` rows that together have all rows, also those without a group.

    Only a tile's rows in the range from `start` to `end` are valid. They have one group, or no group. Each tile begins
    at a multiple of `alignment`, which divides `size`, so its first rows may precede the group.

    Args:
      ranges: as returned by `group_ranges`.
      rows: the number of rows.
    """
    groups, (starts, ends) = len(ranges), ranges.T
    starts, ends = (
        jnp.concatenate([starts, jnp.zeros_like(starts[:1]), ends[-1:]]),
        jnp.concatenate([ends, starts[:1], jnp.full_like(ends[:1], rows)]),
    )
    aligned = starts - starts % alignment
    counts = jnp.where(ends > starts, -((aligned - ends) // size), 0)
    last = jnp.cumsum(counts)
    # A part has at most `alignment - 1` rows before it, and `size - 1` rows after it, in its tiles.
    most = (rows + (groups + 2) * (size + alignment - 2)) // size
    tile = jnp.arange(most, dtype=jnp.int32)
    part = jnp.minimum(jnp.searchsorted(last, tile, side="right", method="compare_all"), groups + 1)
    row = aligned[part] + (tile - (last - counts)[part]) * size
    return RowTiles(jnp.minimum(part, groups - 1), row, starts[part], ends[part], last[jnp.array([groups - 1, -1])])
