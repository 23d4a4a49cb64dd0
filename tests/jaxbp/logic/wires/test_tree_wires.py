import re

import jax
import numpy as np
import pytest

from jaxbp import TreeWires


def test_random_trees_read_channels_evenly_and_no_place_twice():
    wires = TreeWires.random(6, 20, (3, 3), channels_per_kernel=2, seed=0)
    leaves = np.asarray(wires.leaves)
    assert (wires.kernels, wires.gates, wires.depth, wires.channels, wires.window) == (20, 7, 3, 6, (3, 3))
    assert leaves.min() >= 0
    assert (leaves.max((0, 1)) < [6, 3, 3]).all()
    kernels_of_channel = np.zeros(6, int)
    for kernel in leaves:
        channels, counts = np.unique(kernel[:, 0], return_counts=True)
        assert counts.tolist() == [4, 4]
        assert len(np.unique(kernel, axis=0)) == 8
        kernels_of_channel[channels] += 1
    assert np.ptp(kernels_of_channel) <= 1


def test_a_window_with_fewer_places_than_leaves_is_read_as_evenly_as_can_be():
    leaves = np.asarray(TreeWires.random(1, 3, (1, 3), depth=3, seed=0).leaves)
    for kernel in leaves:
        assert sorted(np.unique(kernel, axis=0, return_counts=True)[1]) == [2, 3, 3]


def test_the_same_seed_gives_the_same_trees_and_another_others():
    same, again, other = (TreeWires.random(4, 5, 3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(same.leaves, again.leaves)
    assert (same.leaves != other.leaves).any()


def test_readers_list_each_leaf_once_by_the_channel_that_it_reads():
    wires = TreeWires.random(5, 7, (2, 3), depth=2, seed=0)
    channel = np.asarray(wires.leaves).reshape(-1, 3)[:, 0]
    assert sorted(wires.readers.tolist()) == list(range(28))
    for c in range(5):
        readers = wires.readers[wires.reader_offsets[c] : wires.reader_offsets[c + 1]]
        assert (channel[readers] == c).all()


def test_wires_are_a_pytree_with_sizes_that_are_static():
    wires = TreeWires.random(2, 3, 3, depth=1, seed=0)
    again = jax.jit(lambda wires: wires)(wires)
    assert (again.channels, again.window, again.gates) == (2, (3, 3), 1)


LEAVES = np.zeros((1, 2, 3), int)
REFUSED = {
    "three leaves": (
        lambda: TreeWires.from_leaves(np.zeros((1, 3, 3), int), 1, 3),
        "TreeWires.from_leaves: leaves has shape (1, 3, 3); wants (kernels, leaves, 3), where leaves is a power of two",
    ),
    "one leaf": (
        lambda: TreeWires.from_leaves(np.zeros((1, 1, 3), int), 1, 3),
        "TreeWires.from_leaves: a kernel has 1 leaf; wants at least 2, the number of inputs of one gate",
    ),
    "a row below the window": (
        lambda: TreeWires.from_leaves(np.add(LEAVES, [0, 2, 0]), 1, (2, 3)),
        "TreeWires.from_leaves: leaves[0, 0, 1] is 2; wants at least 0 and below 2, the height of the window",
    ),
    "no kernels": (
        lambda: TreeWires.random(1, 0, 3, seed=0),
        "TreeWires.random: kernels is 0; wants an int of at least 1",
    ),
    "no window": (
        lambda: TreeWires.random(1, 1, 0, seed=0),
        "TreeWires.random: window is 0; wants an int of at least 1, or a pair of such ints",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()


def test_leaves_in_floats_are_refused():
    with pytest.raises(TypeError, match=r"^TreeWires.from_leaves: leaves has dtype float64; wants integers$"):
        TreeWires.from_leaves(LEAVES + 0.0, 1, 3)
