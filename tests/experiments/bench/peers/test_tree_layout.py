import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from experiments.bench.peers.tree_layout import from_levels, pairs_of_leaves, to_levels


def theirs(x, pairs, levels):
    places = np.stack(np.mgrid[:3, :3], axis=-1).reshape(-1, 2)
    row, column, channel = np.moveaxis(pairs[:, :, None], -1, 0)  # (2, kernels, 1, gates)
    row, column = row + places[:, :1], column + places[:, 1:]
    a, b = x[:, channel, row, column].swapaxes(0, 1)  # (batch, kernels, places, gates) each
    for is_or in levels:
        of_gate = is_or[..., 0].T[:, None]
        y = np.where(of_gate, a + b - a * b, a * b)
        a, b = y[..., ::2], y[..., 1::2]
    return y[..., 0].reshape(*y.shape[:2], 3, 3)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_trees_read_the_same_leaves_by_the_same_gates(depth):
    random = np.random.default_rng(0)
    wires = jaxbp.TreeWires.random(3, 4, 3, depth=depth, seed=0)
    x = random.random((2, 3, 5, 5), np.float32)
    is_or = random.integers(2, size=(4, wires.gates, 1))
    logits = jnp.where(jnp.arange(16) == jnp.where(is_or, 7, 1), 0.0, -100.0)
    y = theirs(x, pairs_of_leaves(np.asarray(wires.leaves)), to_levels(is_or))
    np.testing.assert_allclose(y, jaxbp.logic_conv2d(logits, wires, x, implementation="xla"), rtol=1e-5)


def test_parameters_come_back_from_their_levels():
    parameters = np.random.default_rng(0).random((5, 7, 4))
    levels = to_levels(parameters)
    assert [level.shape for level in levels] == [(4, 5, 4), (2, 5, 4), (1, 5, 4)]
    np.testing.assert_array_equal(from_levels(levels), parameters)
