import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense.group_tiles import group_ranges, row_tiles

ROWS = 40
CASES = {
    "every row": [3, 0, 17, 20],
    "rows beyond": [0, 5, 0, 12],
    "one group": [0, 0, 40, 0],
    "no rows": [0, 0, 0, 0],
    "short": [1, 1, 1, 1],
}


def covered(tiles, size):
    """Map each row that a tile stores to the tile's group, or to None, and require that it is stored once."""
    groups = {}
    with_group, count = tiles.counts
    for i in range(count):
        first, end = max(tiles.row[i], tiles.start[i]), min(tiles.row[i] + size, tiles.end[i])
        assert first < end, "an empty tile"
        for row in range(first, end):
            assert row not in groups
            groups[row] = tiles.group[i] if i < with_group else None
    return groups


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("alignment", [1, 8])
def test_tiles_cover_every_row_once_with_its_group(alignment, before):
    tiles_of = jax.jit(functools.partial(row_tiles, rows=ROWS, size=16, alignment=alignment))
    for sizes in CASES.values():
        ranges = np.minimum(np.asarray(group_ranges(jnp.array(sizes), ROWS)) + before, ROWS)
        tiles = jax.tree.map(np.asarray, tiles_of(ranges))
        assert tiles.counts[1] <= len(tiles.row)
        assert (tiles.row[: tiles.counts[1]] % alignment == 0).all()
        wanted = dict.fromkeys(range(ROWS)) | {row: g for g, of_group in enumerate(ranges) for row in range(*of_group)}
        assert covered(tiles, 16) == wanted


def test_groups_end_at_the_last_row():
    np.testing.assert_array_equal(group_ranges(jnp.array([3, 4, 5], jnp.int8), 6), [[0, 3], [3, 6], [6, 6]])
    most = np.iinfo(np.int32).max  # the rest of the rows, whatever their number
    np.testing.assert_array_equal(group_ranges(jnp.array([2, most, most], jnp.int32), 6), [[0, 2], [2, 6], [6, 6]])


@pytest.mark.parametrize("alignment", [1, 8])
def test_the_list_is_long_enough(alignment):
    # Each group begins at the last row of a tile.
    sizes = np.array([alignment - 1, *[16 * 2 + 2 - alignment] * 3], np.int32)
    rows = int(sizes.sum()) + 1
    tiles = row_tiles(group_ranges(jnp.asarray(sizes), rows), rows, 16, alignment)
    assert tiles.counts[1] <= len(tiles.row)
    assert sorted(covered(jax.tree.map(np.asarray, tiles), 16)) == list(range(rows))
