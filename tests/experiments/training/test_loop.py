import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.configs import LogicConfig
from experiments.data import augmentation
from experiments.training import loop as training
from jaxbp.training import loop
from jaxbp.training.loop import TIMINGS
from jaxbp.training.precision import LossScale


def run(config, dataset=None, state=None, epochs_done=0):
    prepared = training.prepare(config, config.load() if dataset is None else dataset)
    start = prepared.state if state is None else jax.tree.map(jnp.array, state)
    for metrics, state, _ in loop.run(prepared, start, epochs_done):
        yield metrics, jax.tree.map(np.array, state)


def deterministic(metrics):
    return {name: value for name, value in metrics._asdict().items() if name not in TIMINGS}


def same_bits(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_the_same_seed_gives_the_same_bits(toy_config):
    for (metrics, state), (metrics_again, state_again) in zip(run(toy_config()), run(toy_config()), strict=True):
        assert deterministic(metrics) == deterministic(metrics_again)
        assert same_bits(state, state_again)


def test_another_seed_gives_other_bits(toy_config):
    (metrics, state), *_ = run(toy_config(seed=0))
    (other_metrics, other_state), *_ = run(toy_config(seed=1))
    assert deterministic(metrics) != deterministic(other_metrics)
    assert not same_bits(state, other_state)


@pytest.mark.parametrize(
    "augment", [None, lambda key, images, step: augmentation.shift(key, images, 1)], ids=["plain", "shifted"]
)
def test_going_on_from_an_epoch_gives_the_same_bits_as_never_stopping(toy_config, monkeypatch, augment):
    monkeypatch.setattr(toy_config, "augmentation", lambda config: augment)
    *_, second, third, fourth = run(toy_config())
    resumed = run(toy_config(), state=second[1], epochs_done=2)
    for (metrics, state), (wanted_metrics, wanted_state) in zip(resumed, (third, fourth), strict=True):
        assert deterministic(metrics) == deterministic(wanted_metrics)
        assert same_bits(state, wanted_state)


def test_every_attempt_begins_anew_also_in_a_resumed_run(toy_config, monkeypatch):
    *_, (_, without) = run(toy_config())
    monkeypatch.setattr(toy_config, "attempt", lambda config, epoch: (epoch - 1) // 2)
    config = toy_config()
    prepared = training.prepare(config, config.load())
    assert [prepared.restarted(epoch) is None for epoch in (1, 2, 3, 4)] == [True, True, False, True]
    anew = config.build(jax.random.fold_in(jax.random.split(jax.random.key(config.seed))[0], 1))[0]
    assert same_bits(prepared.restarted(3), prepared.state._replace(params=nnx.state(anew, nnx.Param)))
    assert not same_bits(prepared.restarted(3), prepared.state)
    *_, second, third, fourth = run(config)
    resumed = [list(run(config, state=state, epochs_done=done)) for state, done in ((second[1], 2), (third[1], 3))]
    assert same_bits(resumed[0][0][1], third[1]) and same_bits(resumed[1][0][1], fourth[1])
    assert not same_bits(fourth[1].params, without.params)


def test_training_learns(toy_config):
    *_, (metrics, _) = run(toy_config(epochs=20))
    assert metrics.test_accuracy > 0.9
    assert metrics.train_loss < 0.5


def test_an_augmentation_is_for_training_and_not_for_the_evaluation(toy_config, monkeypatch):
    monkeypatch.setattr(toy_config, "augmentation", lambda config: lambda key, images, step: jnp.zeros_like(images))
    config, dataset = toy_config(epochs=1), toy_config().load()
    ((metrics, state),) = run(config, dataset)
    initial, loss = loop.split(*config.build(jax.random.split(jax.random.key(config.seed))[0]))
    before, after = initial["linear"], state.params["linear"]
    np.testing.assert_array_equal(after["kernel"][...], before["kernel"][...])
    assert np.all(after["bias"][...] != before["bias"][...])
    losses, _ = loss(state.params, dataset.test_images, dataset.test_labels)
    assert metrics.test_loss == pytest.approx(float(losses.mean()), rel=1e-5)


def test_an_epoch_is_the_plain_loop_of_optimizer_steps(toy_config):
    config, dataset = toy_config(epochs=1), toy_config().load()
    (metrics, trained), *_ = run(config, dataset)

    init_key, shuffle_key = jax.random.split(jax.random.key(config.seed))
    params, loss = loop.split(*config.build(init_key))
    optimizer = training.make_optimizer(config.learning_rate, 6)
    opt_state = optimizer.init(params)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(shuffle_key, 1), 100))
    losses = []
    for batch in order[:96].reshape(6, 16):
        images, labels = dataset.train_images[batch], jnp.asarray(dataset.train_labels[batch])
        value, grads = jax.value_and_grad(lambda p, x, y: loss(p, x, y)[0].mean())(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    assert metrics.train_loss == pytest.approx(np.mean(losses), rel=1e-5)
    for got, wanted in zip(jax.tree.leaves(trained.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_nothing_is_compiled_after_the_preparation(toy_config, caplog):
    config = toy_config()
    prepared = training.prepare(config, config.load())
    with jax.log_compiles():
        for _ in loop.run(prepared, prepared.state):
            pass
        assert not [message for message in caplog.messages if "ompil" in message]
        jax.jit(lambda x: x + 1)(1.0)
    assert [message for message in caplog.messages if "ompil" in message]


def test_metrics_describe_the_epoch(toy_config):
    for number, (metrics, _) in enumerate(run(toy_config()), start=1):
        assert (metrics.epoch, metrics.step) == (number, 6 * number)
        assert metrics.images_per_second == pytest.approx(96 / metrics.seconds)
        assert metrics.evaluation_seconds > 0
        assert (metrics.compile_seconds > 0) == (number == 1)
        assert (metrics.test_accuracy * 37).is_integer()


def test_an_epoch_has_at_most_the_steps_of_the_settings(toy_config, monkeypatch):
    for steps, wanted in ((2, 2), (50, 6)):
        monkeypatch.setattr(toy_config, "steps_per_epoch", steps)
        assert [metrics.step for metrics, _ in run(toy_config(epochs=2))] == [wanted, 2 * wanted]


def test_the_learning_rate_warms_up_to_its_peak_and_decays_to_nothing():
    optimizer, rates = training.make_optimizer(0.1, 100), []
    params = jnp.zeros(())
    state = optimizer.init(params)
    for _ in range(100):
        # If the gradient is always 1, Adam's step is the learning rate.
        update, state = optimizer.update(jnp.ones(()), state, params)
        rates.append(-float(update))
    assert rates[0] < 0.01
    assert max(rates) == pytest.approx(0.1, rel=1e-3)
    assert np.argmax(rates) == 5
    assert rates[-1] < 1e-3
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))


def test_a_run_of_a_single_step_trains(toy_config):
    config = toy_config(epochs=1, batch_size=100)
    before = jax.tree.map(np.array, training.prepare(config, config.load()).state)
    ((_, after),) = run(config)
    assert not same_bits(before.params, after.params)


def test_a_batch_larger_than_the_training_set_is_refused(toy_config):
    with pytest.raises(ValueError, match="batch_size is 101; wants at most 100"):
        training.prepare(toy_config(batch_size=101), toy_config().load())


def test_more_steps_than_an_int32_can_count_are_refused(toy_config):
    with pytest.raises(ValueError, match="epochs is 429496730; wants at most 429496729"):
        training.prepare(toy_config(batch_size=20, epochs=429496730), toy_config().load())


@pytest.fixture
def any_input(monkeypatch):
    monkeypatch.setattr(training, "MOST_INPUT", np.inf)


def test_a_training_loss_that_is_not_finite_stops_the_run(toy_config, any_input):
    dataset = toy_config().load()
    dataset.train_images[:] = np.inf
    with pytest.raises(FloatingPointError, match="training loss became nan at step 1 of 6 in epoch 1"):
        next(run(toy_config(), dataset))


def test_parameters_that_break_in_an_epochs_last_update_stop_the_run(toy_config, any_input):
    dataset = toy_config().load()
    dataset.test_images[:] = np.inf
    with pytest.raises(FloatingPointError, match="test loss became nan after epoch 1"):
        next(run(toy_config(), dataset))


@pytest.mark.parametrize("rate", [1e3, 1e6, 1e30])
def test_a_run_that_diverges_stops_with_a_finite_loss_too(toy_config, rate):
    with pytest.raises(
        FloatingPointError, match=r"diverged: the training loss is .* after epoch 1.* smaller learning rate"
    ):
        list(run(toy_config(learning_rate=rate)))


def test_gates_that_diverge_stop_the_run_although_their_loss_is_bounded():
    config = LogicConfig(layers=2, gates=400, levels=1, learning_rate=1e6, epochs=2)
    with pytest.raises(
        FloatingPointError, match=r"diverged: the largest parameter is .* after epoch 1, above the limit 10000"
    ):
        list(run(config))


def test_variables_that_are_no_parameters_stay_as_they_are(toy_config):
    model, loss = toy_config().build(jax.random.key(0))
    mask = np.array(model.mask[...])
    params, pure_loss = loop.split(model, loss)
    assert len(jax.tree.leaves(params)) == 2
    images, labels = jnp.ones((1, 1, 28, 28)), jnp.zeros(1, jnp.int32)
    grads = jax.grad(lambda params: pure_loss(params, images, labels)[0].sum())(params)
    np.testing.assert_array_equal(np.any(np.asarray(grads["linear"]["kernel"][...]) != 0, axis=1), mask == 1)


def test_a_run_in_mixed_float16_has_its_scale_in_the_metrics_and_resumes_with_the_same_bits(toy_config):
    config = toy_config(precision="mixed_float16")
    _, second, _, fourth = run(config)
    assert all(metrics.loss_scale == 2.0**15 and metrics.skipped_steps == 0 for metrics, _ in (second, fourth))
    *_, (metrics, state) = run(config, state=second[1], epochs_done=2)
    assert deterministic(metrics) == deterministic(fourth[0]) and same_bits(state, fourth[1])
    assert state.loss_scale.finite_steps > 0


def test_a_few_steps_an_epoch_may_all_be_skipped_until_the_scale_fits(toy_config, monkeypatch):
    large = LossScale.create(initial=2.0**127)
    monkeypatch.setattr(training.LossScale, "create", lambda: large)
    monkeypatch.setattr(toy_config, "build", overflowing(toy_config.build))
    first = next(run(toy_config(precision="mixed_float16", batch_size=100)))[0]
    assert (first.skipped_steps, first.loss_scale) == (1, 2.0**126) and np.isfinite(first.train_loss)


def overflowing(build):
    def with_half_precision(config, key):
        model, loss = build(config, key)

        def through_half(*arguments):
            losses, predictions = loss(*arguments)
            return losses.astype(jnp.float16).astype(jnp.float32), predictions

        return model, through_half

    return with_half_precision


def test_gradients_that_are_never_finite_end_in_an_error(toy_config, monkeypatch):
    monkeypatch.setattr(loop, "MOST_SKIPPED", 10)
    static = LossScale.static(2.0**127)
    monkeypatch.setattr(training.LossScale, "create", lambda: static)
    monkeypatch.setattr(toy_config, "build", overflowing(toy_config.build))
    with pytest.raises(FloatingPointError, match=r"last 12 steps were skipped.* look for NaN or infinity in the data"):
        list(run(toy_config(precision="mixed_float16")))


def test_data_that_are_never_finite_end_in_an_error(toy_config, any_input):
    config = toy_config(precision="mixed_float16")
    data = config.load()
    broken = data._replace(train_images=np.full_like(data.train_images, np.inf))
    with pytest.raises(FloatingPointError, match=r"the training loss became nan at step .* in epoch 1"):
        list(run(config, broken))


def test_weight_decay_is_a_share_of_the_parameters_times_the_learning_rate():
    optimizer = training.make_optimizer(0.1, 10, weight_decay=0.5)
    params = jnp.array([2.0, -4.0])
    updates, _ = optimizer.update(jnp.zeros(2), optimizer.init(params), params)
    np.testing.assert_allclose(updates, -0.1 * 0.5 * params, rtol=1e-6)


@pytest.mark.parametrize("value", [3e38, np.nan])
def test_an_input_that_would_overflow_is_refused(toy_config, value):
    dataset = toy_config().load()
    images = np.array(dataset.test_images)
    images.flat[3] = value
    with pytest.raises(ValueError, match=r"test_images of the dataset toy has the value (3e\+38|nan); wants numbers"):
        training.prepare(toy_config(), dataset._replace(test_images=images))
