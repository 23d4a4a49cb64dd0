import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxbp.training import loop
from jaxbp.training.loop import TrainState
from jaxbp.training.precision import LossScale


def count_visits(epoch, examples=23, batch_size=5, seed=0, steps=None):
    state = TrainState(jnp.zeros(examples), optax.sgd(batch_size).init(jnp.zeros(examples)))
    state, losses, *_ = loop.train_epoch(
        state,
        jnp.arange(examples),
        jnp.zeros(examples),
        jax.random.key(seed),
        epoch,
        loss=lambda visits, example, target: (-visits[example], target),
        optimizer=optax.sgd(batch_size),
        batch_size=batch_size,
        steps=steps,
    )
    assert losses.shape == (steps or examples // batch_size,)
    return np.asarray(state.params)


def test_an_epoch_sees_every_example_once_but_for_an_incomplete_batch():
    visits = count_visits(epoch=1)
    assert sorted(visits) == [0.0] * 3 + [1.0] * 20


def test_epochs_leave_out_different_examples():
    assert len({tuple(count_visits(epoch)) for epoch in range(1, 6)}) == 5


def test_an_epoch_of_fewer_steps_sees_other_examples_than_the_last():
    first, second = count_visits(1, steps=2), count_visits(2, steps=2)
    assert sorted(first) == sorted(second) == [0.0] * 13 + [1.0] * 10
    assert (first != second).any()


def test_a_loss_without_predictions_has_no_accuracy():
    options = dict(loss=lambda p, x, y: (p * x + y, None), batch_size=2)
    state, x = TrainState(jnp.ones(()), optax.sgd(0.0).init(jnp.ones(()))), jnp.arange(4.0)
    _, losses, accuracies, _ = loop.train_epoch(state, x, x, jax.random.key(0), 1, optimizer=optax.sgd(0.0), **options)
    assert losses.mean() == 3 and accuracies is None
    assert loop.evaluate(state.params, x, x, **options) == (3, None, None)


def losses_of_augmented(epoch, augment, seed=0):
    _, losses, *_ = loop.train_epoch(
        TrainState(jnp.zeros(()), optax.sgd(1.0).init(jnp.zeros(()))),
        jnp.zeros(23),
        jnp.zeros(23),
        jax.random.key(seed),
        epoch,
        loss=lambda _, noise, target: (noise, target),
        optimizer=optax.sgd(1.0),
        batch_size=5,
        augment=augment,
    )
    return losses.tolist()


def test_every_step_of_every_epoch_and_seed_is_augmented_differently():
    def noise(key, inputs, step):
        return jax.random.uniform(key, inputs.shape)

    losses = [loss for seed in (0, 1) for epoch in range(1, 4) for loss in losses_of_augmented(epoch, noise, seed)]
    assert len(set(losses)) == len(losses) == 2 * 3 * 4


def test_an_augmentation_knows_the_number_of_the_step_in_the_run():
    for epoch, numbers in ((1, [0, 1, 2, 3]), (3, [8, 9, 10, 11])):
        assert losses_of_augmented(epoch, lambda key, inputs, step: jnp.full(inputs.shape, step, float)) == numbers


@pytest.mark.parametrize("batch_size", [1, 4, 5, 37, 50])
def test_evaluation_counts_every_example_exactly_once(batch_size):
    inputs, targets = jnp.arange(37.0), jnp.arange(37) % 3
    loss, correct, predictions = loop.evaluate(
        None,
        inputs,
        targets,
        loss=lambda _, x, y: (x, jnp.zeros_like(y)),
        batch_size=batch_size,
    )
    assert (float(loss), int(correct)) == (18.0, 13)
    np.testing.assert_array_equal(predictions, np.zeros(37))


def scaled_epoch(values, scale, steps=8):
    """Minimize `4 * p` in float16. Each batch's loss is multiplied by one of the values."""

    def loss(p, factor, target):
        return (p.astype(jnp.float16) * jnp.float16(4)).astype(jnp.float32) * factor, target

    state = TrainState(jnp.zeros(()), optax.adam(0.1).init(jnp.zeros(())), scale)
    values = jnp.resize(jnp.asarray(values), steps)
    options = dict(loss=loss, optimizer=optax.adam(0.1), batch_size=1)
    return loop.train_epoch(state, values, jnp.zeros(steps), jax.random.key(0), 1, **options)


def test_a_step_that_overflows_changes_the_loss_scale_alone():
    state, _, _, finite = scaled_epoch([1.0], LossScale.create(initial=2.0**17))
    # In float16, 4 times 2^14 overflows.
    assert finite.tolist() == [False] * 4 + [True] * 4
    assert state.loss_scale.value == 2.0**13 and state.opt_state[0].count == 4
    plain = scaled_epoch([1.0], None, steps=4)[0]
    np.testing.assert_allclose(state.params, plain.params, rtol=1e-6)


def test_without_a_loss_scale_every_step_counts():
    state, losses, _, finite = scaled_epoch([1.0], None)
    assert state.loss_scale is None and finite.all() and state.opt_state[0].count == 8 == len(losses)
