import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbp
from jaxbp.logic.gates import PARAMETERS
from jaxbp.nn import LogicAutomaton

SIZES = dict(channels=3, perception_kernels=2, perception_widths=[8, 4, 2], update_widths=[12, 8, 5, 3])


def automaton(periodic=False, **options):
    defaults = dict(seed=1, implementation="xla", rngs=nnx.Rngs(0))
    return LogicAutomaton(**SIZES, periodic=periodic, **defaults | options)


def bits(*shape, seed=0):
    return np.random.default_rng(seed).random(shape) < 0.5


def test_it_is_the_op_with_its_parameters():
    model, state, key = automaton(initialization="normal"), jnp.asarray(bits(2, 3, 4, 3), float), jax.random.key(1)
    options = dict(key=key, fire_rate=0.6, rounding_rate=0.5)
    wires = jaxbp.Automaton.create(**SIZES, periodic=False, seed=1)
    wanted = jaxbp.automaton_rollout(model.logits, wires, state, 3, **options, implementation="xla")
    assert jnp.array_equal(model(state, 3, **options), wanted)


@pytest.mark.parametrize("periodic", [False, True], ids=["zero", "periodic"])
@pytest.mark.parametrize("parametrization", PARAMETERS)
def test_the_hardened_automaton_is_its_circuit_bit_for_bit(parametrization, periodic):
    rngs = nnx.Rngs(1 if parametrization == "walsh" else 2)  # with other seeds, the state soon stops changing
    model = automaton(periodic, initialization="normal", parametrization=parametrization, rngs=rngs)
    circuit, state = model.harden(), bits(4, 5, 7, 3)
    assert (circuit.channels, circuit.periodic) == (3, periodic)
    states = circuit.states(state, 6)
    assert len({now.tobytes() for now in states}) > 5
    for ticks in (1, 6):
        last = model(jnp.asarray(state, jnp.float32), ticks, hard=True)
        assert np.array_equal(last, states[ticks])
    assert not np.array_equal(model(jnp.asarray(state, jnp.float32)), states[1])


def test_only_the_logits_are_trained():
    params = jax.tree.leaves(nnx.state(automaton(), nnx.Param))
    shapes = [(2, 8, 16), (2, 4, 16), (2, 2, 16), (12, 16), (8, 16), (5, 16), (3, 16)]
    assert sorted(leaf.shape for leaf in params) == sorted(shapes)


def test_seeds_tell_the_wires_apart():
    def wires(seed):
        return [np.asarray(w.a).tolist() for w in automaton(seed=seed).automaton.get_value().update]

    assert wires(0) == wires(0) != wires(7)


def test_gates_pass_on_an_input_as_surely_as_asked():
    model = automaton(residual_logit=10.0)
    for layer in (*model.perception, *model.update):
        np.testing.assert_allclose(jax.nn.softmax(layer[...])[..., 3], 1 / (1 + 15 * np.exp(-10)), rtol=1e-6)
