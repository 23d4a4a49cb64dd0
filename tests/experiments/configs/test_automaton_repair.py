import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.configs import automaton_repair
from experiments.configs.automaton_base import SEARCHED
from jaxbp.logic import gates
from jaxbp.nn import LogicAutomaton


@pytest.fixture(scope="module", params=[False, True], ids=["zeros outside", "periodic"])
def case(request):
    model = LogicAutomaton(3, 2, [8, 4, 2], [8, 6, 3], request.param, seed=1, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    functions = jax.tree.map(lambda x: jnp.asarray(random.integers(16, size=x.shape[:-1])), model.logits)
    starts = jnp.asarray(random.random((2, 5, 4, 3)) < 0.5)
    return model, functions, starts


def last_state(model, functions, starts, ticks):
    for layers, numbers in zip((model.perception, model.update), functions, strict=True):
        for layer, number in zip(layers, numbers, strict=True):
            layer[...] = gates.hard_logits(number.astype(jnp.uint8))
    return model.harden().run(np.asarray(starts), ticks)


def test_a_changed_gate_is_repaired_and_errors_are_those_of_the_circuit(case):
    model, functions, starts = case
    target = last_state(model, functions, starts, 3)[..., :2]
    perception, update = functions
    broken = perception, [*update[:-1], update[-1] ^ 6]  # every gate of the last layer
    wrong = (last_state(model, broken, starts, 3)[..., :2] != target).sum()
    options = dict(ticks=3, steps=2000, most=1000)
    automaton = model.automaton.get_value()
    found, before, after = automaton_repair.repaired(broken, automaton, starts, target, jax.random.key(0), **options)
    assert before == wrong > 0 == after
    assert (last_state(model, found, starts, 3)[..., :2] == target).all()
    kept, before, after = automaton_repair.repaired(
        broken, automaton, starts, target, jax.random.key(0), **options | dict(most=int(wrong) - 1)
    )
    assert before == after == wrong
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(broken), strict=True))


def test_an_attempt_ends_with_a_search(tiny_automaton, monkeypatch):
    config = tiny_automaton(updates=80, epochs=8, restart_after=20, search_steps=300)
    model, _ = config.build(jax.random.key(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert config.repaired(model, params, 1) is params  # epochs 1 and 2 are one attempt
    monkeypatch.setattr("experiments.configs.automaton_base.MOST_WRONG", 1.0)
    found = nnx.merge(graph, config.repaired(model, params, 2), rest)
    starts = config.starts(SEARCHED + jnp.arange(4, dtype=jnp.uint32))

    def wrong(model):
        return int((~model.harden().run(np.asarray(starts), config.steps)[..., 0]).sum())

    assert wrong(found) == 0 < wrong(model)
