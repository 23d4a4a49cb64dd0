import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import automaton_first_gates as first_gates
from experiments.configs.automaton_experiments import LizardConfig
from jaxbp.logic import gates


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


def confused(config, model):
    """Return the number of cells that the best last tick leaves wrong, from the states of the hard automaton."""
    state = model(config.starts(jnp.zeros(1, jnp.uint32)).astype(jnp.float32), config.steps - 1, hard=True)[0]
    seen = np.pad(np.asarray(state), ((1, 1), (1, 1), (0, 0)), mode="wrap" if config.periodic else "constant")
    kinds = {}
    for y, x in np.ndindex(config.grid):
        kinds.setdefault(seen[y : y + 3, x : x + 3].tobytes(), []).append(config.pattern()[y, x].tobytes())
    return sum(len(targets) - max(map(targets.count, targets)) for targets in kinds.values())


@pytest.mark.parametrize("periodic", [True, False])
def test_copied_values_tell_cells_apart_like_the_states_of_the_automaton(monkeypatch, periodic):
    monkeypatch.setattr(LizardConfig, "periodic", periodic)
    config = LizardConfig(first_gates="drawn")
    model, _ = config.build(jax.random.key(0))
    automaton = model.automaton.get_value()
    choice = jax.tree.map(lambda layer: gates.harden(layer) == 5, model.logits)
    start, wanted = np.asarray(config.starts(jnp.zeros(1, jnp.uint32)))[0], jnp.asarray(config.pattern().ravel(), int)
    weights = jax.random.bits(jax.random.key(1), (9, automaton.channels))
    count = first_gates.confused(automaton, choice, start, wanted, weights, steps=config.steps, targets=2)
    assert count == confused(config, model) > 0


def test_searches_find_first_gates_that_tell_more_cells_apart(monkeypatch):
    counts = []
    for rounds in (0, 60):
        monkeypatch.setattr(first_gates, "ROUNDS", rounds)
        monkeypatch.setattr(first_gates, "SEARCHES", 4)
        monkeypatch.setattr(first_gates, "SPREAD", 30)
        first_gates._search.clear_cache()
        config = LizardConfig(first_gates="separating")
        counts.append(confused(config, config.build(jax.random.key(0))[0]))
    assert counts[1] < counts[0]


def test_gates_are_a_little_like_or_at_first(tiny_automaton):
    config = tiny_automaton(or_logit=5.0, pass_through=9.0, first_gates="drawn")
    for layer in jax.tree.leaves(config.build(jax.random.key(0))[0].logits):
        assert (layer[..., 7] == 5).all() and (jnp.sort(layer)[..., -3:] == jnp.array([0.0, 5.0, 9.0])).all()


def test_only_softmax_has_a_logit_of_or():
    softmax, walsh = (LizardConfig(parametrization=name) for name in ("softmax", "walsh"))
    assert (softmax.or_logit, walsh.or_logit) == (5.0, 0.0)
    with pytest.raises(ValueError, match=r"or_logit is 3.0; wants 0, because the parametrization 'walsh' has no such"):
        LizardConfig(parametrization="walsh", or_logit=3.0)
