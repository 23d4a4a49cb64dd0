import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import automaton_first_gates
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


def test_the_best_of_many_draws_is_changed_until_it_tells_more_cells_apart(monkeypatch):
    config = LizardConfig(first_gates="separating")
    scores, score = [], automaton_first_gates.confused
    monkeypatch.setattr(automaton_first_gates, "SEPARATING_DRAWS", 5)
    monkeypatch.setattr(automaton_first_gates, "SEPARATING_CHANGES", 80)
    monkeypatch.setattr(automaton_first_gates, "confused", lambda *args: scores.append(score(*args)) or scores[-1])
    model, _ = config.build(jax.random.key(0))
    seen = np.pad(
        np.asarray(model(config.starts(jnp.zeros(1, jnp.uint32)).astype(jnp.float32), config.steps - 1, hard=True))[0],
        ((1, 1), (1, 1), (0, 0)),
        mode="wrap",
    )
    kinds = {}
    for y, x in np.ndindex(config.grid):
        kinds.setdefault(seen[y : y + 3, x : x + 3].tobytes(), []).append(bool(config.pattern()[y, x, 0]))
    assert sum(min(kind.count(False), kind.count(True)) for kind in kinds.values()) == min(scores) < min(scores[:5])
    assert len(scores) == 85
