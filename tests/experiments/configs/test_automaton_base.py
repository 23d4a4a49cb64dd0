import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbp
from experiments.configs.automaton_experiments import CheckerboardConfig, LifeConfig
from experiments.data import patterns
from jaxbp.logic import gates


def seeds(*numbers):
    return jnp.array(numbers, jnp.uint32)


def examples(*numbers, update=0):
    return jnp.stack([seeds(*numbers), jnp.full_like(seeds(*numbers), update)], axis=1)


def test_the_published_optimizer_clips_and_decays():
    adamw = optax.adamw(0.05, b1=0.9, b2=0.99, weight_decay=1e-2)
    params, updates = jnp.array([2.0, -1.0]), []
    for optimizer, first in ((LifeConfig(recipe="published").optimizer(10), 1e9), (adamw, 100.0)):
        state = optimizer.init(params)
        for gradient in (first, 3.0, -1.0):
            update, state = optimizer.update(jnp.array([gradient, 2.0]), state, params)
        updates.append(update)
    np.testing.assert_allclose(*updates, rtol=1e-6)


def test_seeds_are_drawn_anew_for_every_update_and_know_its_number():
    draw = CheckerboardConfig().augmentation()
    drawn = np.stack([draw(jax.random.key(i), examples(0, 1), i) for i in range(3)])
    assert len(set(drawn[..., 0].ravel().tolist())) == 6
    assert drawn[..., 1].tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("fire_rate", [1.0, 0.5])
def test_the_loss_is_the_squared_error_of_the_visible_channels(tiny_automaton, monkeypatch, fire_rate):
    monkeypatch.setattr(tiny_automaton.func, "fire_rate", fire_rate)
    config = tiny_automaton(pass_through=2.0, hard_share=0.0)
    model, loss = config.build(jax.random.key(0))
    x = examples(5, 6)
    starts = config.starts(seeds(5, 6)).astype(jnp.float32)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(5), 1))
    for hard, function, key in ((False, loss, keys[1]), (True, config.evaluation(loss), keys[0])):
        losses, right = function(model, x, jnp.ones(2, bool))
        errors = model(starts, config.steps, key=key, fire_rate=fire_rate, hard=hard)[..., :1] - config.pattern()
        np.testing.assert_allclose(losses, (errors**2).sum(axis=(1, 2, 3)), rtol=1e-5)
        assert hard or right.tolist() == (abs(errors) < 0.5).all(axis=(1, 2, 3)).tolist()


def test_a_checkerboard_is_right_if_it_still_is_as_many_ticks_later(tiny_automaton, monkeypatch):
    on, off = jnp.ones((1, 4, 3, 2)), jnp.zeros((1, 4, 3, 2))

    def right(*states):
        states = iter(states)
        evaluate = tiny_automaton().evaluation(None)
        return evaluate(lambda state, **options: next(states), examples(0), None)[1].tolist()

    assert (right(on, on), right(on, off), right(off, on)) == ([True], [False], [False])
    monkeypatch.setattr(tiny_automaton.func, "stands", False)
    assert right(on) == [True]


def test_noise_is_of_training_alone_and_follows_from_the_seeds(tiny_automaton):
    config = tiny_automaton(noise=0.5, pass_through=2.0)
    model, loss = config.build(jax.random.key(0))
    train, hard = nnx.jit(loss), nnx.jit(config.evaluation(loss))
    noisy, again, other = (float(train(model, examples(s, 7), None)[0][1]) for s in (5, 5, 6))
    assert noisy == again != other
    assert hard(model, examples(5, 7), None)[0][1] == hard(model, examples(6, 7), None)[0][1]


@pytest.mark.parametrize("field", ["hard_share", "certainty"])
def test_hard_gates_and_certainty_grow_in_a_line(field):
    config = LifeConfig(updates=101, hard_from=0.2, **{field: 0.8})
    values = [float(config.as_of(jnp.float32(update), field)) for update in (0, 20, 60, 100)]
    np.testing.assert_allclose(values, [0, 0, 0.8 * 39.8 / 79.8, 0.8], rtol=1e-5)


def test_values_are_rounded_before_a_tick_with_their_own_gradients_from_the_first_update(tiny_automaton):
    config = tiny_automaton(pass_through=3.0, hard_share=0.0, rounded_share=1.0)
    model, loss = config.build(jax.random.key(0))
    automaton = model.automaton.get_value()

    def definition(logits):
        state = config.starts(seeds(3)).astype(jnp.float32)
        for _ in range(config.steps):
            state = state + jax.lax.stop_gradient(jnp.round(state) - state)
            state = jaxbp.automaton_step(logits, automaton, state, implementation="xla")
        return jnp.sum((state[..., :1] - config.pattern()) ** 2)

    value, gradients = nnx.jit(nnx.value_and_grad(lambda m: loss(m, examples(3), None)[0][0]))(model)
    wanted, wanted_gradients = jax.jit(jax.value_and_grad(definition))(model.logits)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    got = [jax.tree.leaves(gradients["perception"]), jax.tree.leaves(gradients["update"])]
    for ours, theirs in zip([*got[0], *got[1]], jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    _, relaxed_loss = dataclasses.replace(config, rounded_share=0.0).build(jax.random.key(0))
    assert abs(nnx.jit(relaxed_loss)(model, examples(3), None)[0][0] - value) > 0.1


def test_training_on_a_smaller_grid_has_fewer_ticks_and_its_own_target(tiny_automaton, monkeypatch):
    monkeypatch.setattr(tiny_automaton.func, "pattern", lambda config, grid=None: patterns.checkerboard(*grid))
    config = tiny_automaton(pass_through=2.0, hard_share=0.0, shrink=2)  # 2 x 1 cells, one tick
    model, loss = config.build(jax.random.key(0))
    starts = config.starts(seeds(5, 6), (2, 1)).astype(jnp.float32)
    wanted = ((model(starts, 1)[..., :1] - patterns.checkerboard(2, 1)) ** 2).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(loss(model, examples(5, 6), None)[0], wanted, rtol=1e-5)


def test_attempts_are_of_as_many_updates_and_schedules_are_theirs(tiny_automaton):
    config = tiny_automaton(updates=80, epochs=8, restart_after=20, hard_from=0.0, schedule="cosine")
    assert [config.attempt(epoch) for epoch in range(1, 9)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [float(config.as_of(jnp.float32(update), "hard_share")) for update in (0, 19, 20, 39)] == [0, 1, 0, 1]
    assert tiny_automaton().attempt(4) == 0
    state = config.optimizer(80).init(jnp.ones(1))
    updates = []
    for _ in range(21):
        update, state = config.optimizer(80).update(jnp.ones(1), state, jnp.zeros(1))
        updates.append(float(update[0]))
    assert updates[0] < 0 and updates[20] == 0


def test_certainty_adds_the_variance_of_the_truth_tables(tiny_automaton):
    with_it, without = (tiny_automaton(pass_through=0.5, hard_share=0.0, certainty=c) for c in (0.3, 0.0))
    model, loss = with_it.build(jax.random.key(0))
    x = examples(3, update=with_it.updates - 1)
    added = loss(model, x, None)[0] - without.build(jax.random.key(0))[1](model, x, None)[0]
    variances = [float(gates.variance(layer).sum()) for layer in jax.tree.leaves(model.logits)]
    np.testing.assert_allclose(added, 0.3 * sum(variances), rtol=1e-4)


def test_in_the_last_update_all_gates_are_hard(tiny_automaton):
    config = tiny_automaton(pass_through=0.5)
    model, loss = config.build(jax.random.key(0))
    relaxed, hard = (loss(model, examples(3, update=update), None)[0] for update in (0, config.updates - 1))
    np.testing.assert_allclose(hard, config.evaluation(loss)(model, examples(3), None)[0], atol=1e-5)
    assert abs(relaxed - hard) > 0.1


def test_our_recipe_stops_when_the_hard_automaton_is_right():
    assert LifeConfig().is_last(3, 1.0) and not LifeConfig().is_last(3, 0.99)
    assert not LifeConfig(recipe="published").is_last(3, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("updates", 0),
        ("noise", -1.0),
        ("weight_decay", float("inf")),
        ("pass_through", "large"),
        ("hard_share", 1.5),
        ("rounded_share", -0.5),
        ("certainty", float("nan")),
        ("hard_from", -0.1),
        ("first_gates", "b"),
        ("shrink", 2),
        ("restart_after", -1),
        ("search_steps", -1),
        ("schedule", "linear"),
        ("parametrization", "sigmoid"),
        ("implementation", "cuda"),
        ("recipe", "ours"),
    ],
)
def test_an_invalid_setting_is_refused_at_once(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}; wants "):
        LifeConfig(**{field: value})
