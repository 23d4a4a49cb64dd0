import jax
import numpy as np
import pytest

from jaxbp.estimators.training import Examples, Network, Settings, padded, program, training
from jaxbp.training import loop

random = np.random.default_rng(0)


def test_sizes_are_padded_by_less_than_half():
    assert padded(np.int64(5)) == 6
    sizes = np.arange(1, 2000)
    got = np.array([padded(size) for size in sizes.tolist()])
    assert (got >= sizes).all() and (got < 1.5 * sizes).all()
    assert len(set(got.tolist())) < 24
    assert padded(3, least=64) == 64


def test_equal_examples_are_merged_whatever_their_order():
    bits, targets = random.random((40, 3)) < 0.5, random.integers(0, 2, 40).astype(np.int32)
    weights, order = random.integers(1, 4, 40).astype(float), random.permutation(40)
    merged = Examples.merged(bits, targets, weights)
    assert 1 < len(merged.targets) <= 16 and np.isclose(merged.weights.mean(), 1)
    shuffled = Examples.merged(bits[order], targets[order], weights[order])
    repeated = Examples.merged(
        *(array.repeat(weights.astype(int), axis=0) for array in (bits, targets)), np.ones(int(weights.sum()))
    )
    for other in (shuffled, repeated):
        assert all(np.array_equal(a, b) for a, b in zip(merged, other, strict=True))


def test_padding_keeps_the_share_of_each_examples_weight():
    examples = Examples(np.eye(3, dtype=bool), np.arange(3), np.array([0.5, 1.0, 1.5]))
    padded = examples.repeated(8)
    assert np.allclose(np.bincount(padded.targets, padded.weights) / 8, examples.weights / 3)


def trained(bits, targets, groups, **settings):
    made = program(Network(64, (96, 96), groups), 32)
    examples = Examples.merged(bits, targets, np.ones(len(bits)))
    prepared = training(made, examples, Settings(**settings), 32, 30, seed=0)
    *_, (metrics, state, _) = loop.run(prepared, made.restored(None))
    return made, metrics, state


def test_a_network_learns_and_another_data_set_of_its_padded_size_shares_its_program():
    bits = random.random((120, 64)) < 0.5
    targets = (bits[:, 5] & ~bits[:, 9]).astype(np.int32)
    made, metrics, state = trained(bits, targets, 2, learning_rate=0.1, steps=120, scale=5.0)
    assert metrics.train_accuracy > 0.95
    votes = made.harden(state.params)(bits).reshape(120, 2, -1).sum(axis=-1)
    assert np.mean(votes.argmax(axis=-1) == targets) > 0.95
    before = made.train_epoch._cache_size()
    trained(bits[:110], 1 - targets[:110], 2, learning_rate=0.05, steps=90, scale=4.0)
    assert made.train_epoch._cache_size() == before == 1


@pytest.mark.parametrize(("arity", "candidates", "choices"), [(2, 8, (8, 8)), (4, "all", (64, 96))])
def test_with_candidates_the_wires_of_layers_are_learned_and_harden(arity, candidates, choices):
    model = Network(64, (96, 96), 2, arity=arity, candidates=candidates).build()
    assert [layer.wire_logits.shape for layer in model.layers] == [(96 * arity, k) for k in choices]
    assert model.harden()(random.random((3, 64)) < 0.5).shape == (3, 96)


def test_training_starts_from_given_parameters():
    made = program(Network(64, (96, 96), 2), 32)
    leaves = [np.ones_like(leaf) for leaf in jax.tree.leaves(made.state)]
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(made.restored(leaves)))
