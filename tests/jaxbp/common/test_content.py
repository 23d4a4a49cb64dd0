import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from jaxbp import Automaton, Circuit, ConvolutionalCircuit, Netlist, TreeWires, Wires


def circuit(seed):
    return Circuit.of([(np.full(6, 7, np.uint8), Wires.random(4, gates=6, seed=seed))])


def trees(seed):
    return TreeWires.random(1, 3, (2, 2), depth=1, channels_per_kernel=1, seed=seed)


MAKERS = {
    "Wires": lambda seed: Wires.random(4, gates=6, seed=seed),
    "TreeWires": trees,
    "Automaton": lambda seed: Automaton.create(2, 2, [8, 4], [9, 5, 3, 2], True, seed=seed),
    "Circuit": circuit,
    "Netlist": lambda seed: Netlist.of(circuit(seed)),
    "ConvolutionalCircuit": lambda seed: ConvolutionalCircuit.of((1, 4, 4), [(np.full((3, 1), 6), trees(seed))]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_objects_with_the_same_content_are_equal_and_have_one_hash(make):
    one, same, other = make(0), make(0), make(1)
    assert one == same and hash(one) == hash(same)
    assert one != other and one != "text"
    again = pickle.loads(pickle.dumps(one))
    assert {one: "found"}[again] == "found"


def test_a_circuit_that_is_loaded_again_does_not_compile_again():
    traced = []

    def evaluate(circuit, x):
        traced.append(circuit)
        return circuit.evaluate(x)

    jitted, x = jax.jit(evaluate, static_argnums=0), jnp.arange(8, dtype=jnp.uint32).reshape(4, 2)
    results = [jitted(each, x) for each in (circuit(0), pickle.loads(pickle.dumps(circuit(0))), circuit(1))]
    assert traced == [circuit(0), circuit(1)]
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


def test_dtypes_and_values_that_are_not_arrays_count():
    wires = Wires.random(4, gates=6, seed=0)
    assert dataclasses.replace(wires, inputs=5) != wires
    assert dataclasses.replace(wires, a=np.asarray(wires.a)) == wires
    assert dataclasses.replace(wires, a=np.asarray(wires.a, np.int64)) != wires


def test_traced_wires_equal_only_themselves():
    @jax.jit
    def compared(wires, x):
        assert wires == wires and hash(wires) == hash(wires)
        assert wires != Wires.random(4, gates=6, seed=0)
        return jaxbp.gate_layer(jnp.zeros((6, 16)), wires, x)

    assert compared(Wires.random(4, gates=6, seed=0), jnp.ones((2, 4))).shape == (2, 6)
