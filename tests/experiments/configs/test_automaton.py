import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbp
from experiments.configs import AUTOMATA, automaton
from experiments.configs.automaton import CheckerboardConfig, LetterConfig, LifeConfig, LizardConfig
from experiments.data import patterns
from jaxbp import Automaton
from jaxbp.logic import gates

# Channels, kernels times bits per channel, ticks, gates of the first update layer, learning rate, batch, updates.
TABLE = {
    "ca-life": (1, 16, 1, 128, 0.05, 20, 3000),
    "ca-checkerboard": (8, 32, 20, 256, 0.05, 2, 500),
    "ca-checkerboard-async": (8, 32, 50, 256, 0.05, 1, 800),
    "ca-lizard": (128, 4, 12, 512, 0.06, 1, 3500),
    "ca-letter": (64, 8, 15, 512, 0.06, 1, 3000),
}


def seeds(*numbers):
    return jnp.array(numbers, jnp.uint32)


def examples(*numbers, update=0):
    return jnp.stack([seeds(*numbers), jnp.full_like(seeds(*numbers), update)], axis=1)


@pytest.mark.parametrize("name", AUTOMATA)
def test_the_published_settings(name):
    channels, bits, *_, rate, batch, updates = TABLE[name]
    config = AUTOMATA[name](recipe="published")
    wires = Automaton.create(config.channels, *config.perception, config.update, config.periodic, seed=0)
    assert (wires.channels, wires.kernels * wires.bits, config.steps, wires.update[0].gates) == TABLE[name][:4]
    assert wires.update[0].inputs == channels * (1 + bits)
    assert (config.learning_rate, config.batch_size, config.updates) == (rate, batch, updates)
    assert (config.weight_decay, config.pass_through, config.gradient_clip, config.schedule) == (
        1e-2,
        10,
        100,
        "constant",
    )
    assert (config.hard_share, config.noise, config.target_accuracy) == (0, 0, None)
    assert (config.first_gates, config.shrink, config.restart_after) == ("a", 1, 0)
    assert len(config.load().train_images) == batch * updates // config.epochs
    targets = config.targets(config.starts(seeds(0)))
    assert targets.shape[-3:] == (*config.grid, config.visible)


def test_the_published_optimiser_clips_and_decays():
    adamw = optax.adamw(0.05, b1=0.9, b2=0.99, weight_decay=1e-2)
    params, updates = jnp.array([2.0, -1.0]), []
    for optimizer, first in ((LifeConfig(recipe="published").optimizer(10), 1e9), (adamw, 100.0)):
        state = optimizer.init(params)
        for gradient in (first, 3.0, -1.0):
            update, state = optimizer.update(jnp.array([gradient, 2.0]), state, params)
        updates.append(update)
    np.testing.assert_allclose(*updates, rtol=1e-6)


def test_every_board_of_the_game_of_life_is_an_example():
    boards = np.asarray(LifeConfig().starts(jnp.arange(512, dtype=jnp.uint32)))
    assert len({board.tobytes() for board in boards}) == 512


def test_where_automata_start():
    first, other = CheckerboardConfig().starts(seeds(3, 4))
    assert (first != other).any() and 0.4 < first.mean() < 0.6
    assert np.argwhere(LizardConfig().starts(seeds(0))[0, ..., 0]).tolist() == [[10, 10]]
    assert not LetterConfig().starts(seeds(0)).any()
    assert CheckerboardConfig().starts(seeds(3), (5, 6)).shape == (1, 5, 6, 8)


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
    noisy, again, other = (float(loss(model, examples(s, 7), None)[0][1]) for s in (5, 5, 6))
    assert noisy == again != other
    hard = config.evaluation(loss)
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

    value, gradients = nnx.value_and_grad(lambda m: loss(m, examples(3), None)[0][0])(model)
    wanted, wanted_gradients = jax.value_and_grad(definition)(model.logits)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    got = [jax.tree.leaves(gradients["perception"]), jax.tree.leaves(gradients["update"])]
    for ours, theirs in zip([*got[0], *got[1]], jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    relaxed = dataclasses.replace(config, rounded_share=0.0).build(jax.random.key(0))[1](model, examples(3), None)
    assert abs(relaxed[0][0] - value) > 0.1


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


@pytest.mark.parametrize("parametrization", ["softmax", "walsh", "input_wise"])
def test_gates_pass_on_either_input_at_first(tiny_automaton, parametrization):
    drawn = [
        tiny_automaton(first_gates="drawn", pass_through=5.0, parametrization=parametrization).build(jax.random.key(k))
        for k in (0, 0, 1)
    ]
    numbers = [
        np.concatenate([gates.harden(x.reshape(-1, x.shape[-1]), parametrization) for x in jax.tree.leaves(m.logits)])
        for m, _ in drawn
    ]
    assert set(numbers[0].tolist()) == {3, 5}  # a, b
    assert (numbers[0] == numbers[1]).all() and (numbers[0] != numbers[2]).any()


def test_the_first_channel_comes_back_along_a_diagonal(tiny_automaton):
    model, _ = tiny_automaton(first_gates="returning").build(jax.random.key(0))
    start = jax.random.bernoulli(jax.random.key(1), shape=(1, 12, 12, 2)).astype(jnp.float32)
    end = model(start, 2, hard=True)[0, 2:-2, 2:-2, 0]
    diagonals = [start[0, 2 + i : 10 + i, 2 + j : 10 + j, 0] for i in (-2, 2) for j in (-2, 2)]
    assert sum(bool((end == diagonal).all()) for diagonal in diagonals) == 1


def test_automata_that_cannot_return_are_refused(tiny_automaton, monkeypatch):
    with pytest.raises(ValueError, match="first_gates = 'returning': wanted another one: an automaton of one channel"):
        LifeConfig(first_gates="returning")
    monkeypatch.setattr(automaton, "_MOST_DRAWS", 1)
    with pytest.raises(ValueError, match="these wires gave no such start in 1 draws"):
        tiny_automaton(first_gates="returning").build(jax.random.key(0))


def test_of_many_draws_the_one_is_taken_that_tells_most_cells_apart(monkeypatch):
    config = LizardConfig(first_gates="separating")
    scores, score = [], LizardConfig._confused
    monkeypatch.setattr(automaton, "_SEPARATING_DRAWS", 5)
    monkeypatch.setattr(LizardConfig, "_confused", lambda *args: scores.append(score(*args)) or scores[-1])
    model, _ = config.build(jax.random.key(0))
    seen = np.pad(
        np.asarray(model(config.starts(seeds(0)).astype(jnp.float32), config.steps - 1, hard=True))[0],
        ((1, 1), (1, 1), (0, 0)),
        mode="wrap",
    )
    kinds = {}
    for y, x in np.ndindex(config.grid):
        kinds.setdefault(seen[y : y + 3, x : x + 3].tobytes(), []).append(bool(config.pattern()[y, x, 0]))
    assert sum(min(kind.count(False), kind.count(True)) for kind in kinds.values()) == min(scores) < max(scores)
    assert len(scores) == 5


def test_an_automaton_of_random_starts_is_not_begun_by_one():
    with pytest.raises(
        ValueError, match="first_gates = 'separating': wanted another one: this automaton has more than"
    ):
        CheckerboardConfig(first_gates="separating")


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
        ("schedule", "linear"),
        ("parametrization", "sigmoid"),
        ("implementation", "cuda"),
        ("recipe", "ours"),
    ],
)
def test_an_invalid_setting_is_refused_at_once(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value!r}: wanted "):
        LifeConfig(**{field: value})


def test_the_letter_is_in_the_colours_of_three_channels():
    assert np.array_equal(LetterConfig().pattern(), patterns.letter())
