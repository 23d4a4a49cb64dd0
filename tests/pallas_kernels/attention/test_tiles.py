import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import masks_of

from pallas_kernels.attention.tiles import (
    COMPARE_SEGMENTS,
    Masks,
    segments_as_intervals,
    tiles_with_pairs,
    visited_tiles,
)

QUERIES, KEYS, TILE = 200, 150, (64, 32)


def valid_pairs(masks, batch):
    first, end, *segments = (None if a is None else np.asarray(a)[batch] for a in masks[:4])
    key = np.arange(KEYS)
    valid = (key >= first[:, None]) & (key < end[:, None])
    return valid if segments[0] is None else valid & (segments[0][:, None] == segments[1])


@pytest.mark.parametrize(
    "case",
    [
        dict(is_causal=True),
        dict(window=(30, 10), lengths=([200, 0, 90], [150, 20, 0])),
        dict(window=(None, 3), is_causal=True),
        dict(segments=4, is_causal=True),
        dict(segments=1),
    ],
    ids=str,
)
def test_tiles_with_a_valid_pair_are_visited_and_only_partial_ones_masked(case):
    masks = masks_of(dict(queries=QUERIES, keys=KEYS) | case)
    by_query, by_key = visited_tiles(masks, KEYS, TILE)
    for batch in range(len(by_query.counts)):
        valid = valid_pairs(masks, batch)
        padded = np.pad(valid, [(0, -n % size) for n, size in zip(valid.shape, TILE, strict=True)])
        tiles = padded.reshape(padded.shape[0] // TILE[0], TILE[0], -1, TILE[1])
        some, every = tiles.any((1, 3)), tiles.all((1, 3))
        for visits, any_valid, all_valid in ((by_query, some, every), (by_key, some.T, every.T)):
            for row, count in enumerate(np.asarray(visits.counts)[batch]):
                codes = np.asarray(visits.visits)[batch, row, :count]
                assert (np.diff(codes // 4) > 0).all()
                assert {*np.flatnonzero(any_valid[row])} <= {*(codes // 4)}
                assert {*np.flatnonzero(~all_valid[row])} & {*(codes // 4)} == {*(codes // 4)[codes % 4 > 0]}
                if case.get("segments", 1) == 1:  # random ids exclude no tile
                    assert {*np.flatnonzero(any_valid[row])} == {*(codes // 4)}


def test_sorted_segments_exclude_tiles():
    masks = masks_of(dict(queries=128, keys=128))
    ids = (np.arange(128)[None] // 40).astype(np.int32)
    by_query, by_key = visited_tiles(masks._replace(query_segments=ids, key_segments=ids), 128, (32, 32))
    np.testing.assert_array_equal(by_query.counts, [[2, 3, 3, 2]])
    np.testing.assert_array_equal(by_key.counts, by_query.counts)


def test_all_tiles_are_masked_under_a_mask_with_traced_segments_and_known_intervals():
    masks = Masks(mask=np.ones((1, 1, 1, 64), bool)).with_intervals(64, 64, np)
    visits = jax.jit(lambda ids: visited_tiles(masks._replace(query_segments=ids, key_segments=ids), 64, (32, 32)))
    for tiles in visits(jnp.zeros((1, 64), jnp.int32)):
        np.testing.assert_array_equal(tiles.visits % 4, 1)


@pytest.mark.parametrize("case", [dict(segments=4), dict(segments=4, is_causal=True, window=(40, 5))], ids=str)
def test_intervals_and_segments_that_remain_have_the_valid_pairs_of_all_segments(case):
    masks = masks_of(dict(queries=QUERIES, keys=KEYS) | case)
    masks = jax.tree.map(lambda a: jnp.concatenate([a, a]), masks)
    ids = masks.key_segments.at[0].set(jnp.sort(masks.key_segments[0]))  # not sorted in the other example
    masks = masks._replace(key_segments=ids)
    found = segments_as_intervals(masks)
    for batch in range(2):
        np.testing.assert_array_equal(valid_pairs(found, batch), valid_pairs(masks, batch))
    _, flags = tiles_with_pairs(found, KEYS, TILE)
    assert not np.any(found.key_segments[0]) and np.all(flags[0] < COMPARE_SEGMENTS)
    np.testing.assert_array_equal(found.key_segments[1], ids[1])
    assert np.any(flags[1] == COMPARE_SEGMENTS)


def test_segments_of_one_example_hold_for_all_queries():
    ids = np.array([[3, 3, 5, 9]], np.int32)
    queries = np.array([[5, 4, 3], [9, 9, 2]], np.int32)
    masks = Masks(query_segments=queries, key_segments=ids).with_intervals(3, 4, np)
    found = segments_as_intervals(masks)
    assert np.asarray(found.end - found.first).tolist() == [[1, 0, 2], [1, 1, 0]]
    assert np.asarray(found.first).tolist()[0] == [2, 2, 0] and found.first.dtype == np.int32
