import jax
import numpy as np
import pytest

from jaxbp import Wires


@pytest.fixture(params=[(5, 6), (6, 6), (8, 4)], ids=str)
def graph(request):
    return Wires.random(*request.param, seed=0)


def test_it_is_a_pytree_whose_static_fields_are_part_of_jits_cache_key(graph):
    leaves, structure = jax.tree.flatten(graph)
    assert len(leaves) == 10 and all(a.dtype == np.int32 for a in leaves)
    assert jax.jit(lambda graph: graph.max_fan_out + graph.a[0])(graph) == graph.max_fan_out + graph.a[0]
    assert structure != jax.tree.structure(Wires.random(4, 8, seed=0))


def test_consumers_and_partners_are_those_of_each_input(graph):
    a, b, consumers, partners, offsets = (
        np.asarray(x) for x in (graph.a, graph.b, graph.consumers, graph.partners, graph.offsets)
    )
    inputs = (len(offsets) - 1) // 2
    for i in range(inputs):
        for role, (read, other) in enumerate([(a, b), (b, a)]):
            slots = consumers[offsets[2 * i + role] : offsets[2 * i + role + 1]]
            assert sorted(slots) == [2 * gate + role for gate in np.flatnonzero(read == i)]
            places = range(offsets[2 * i + role], offsets[2 * i + role + 1])
            assert [partners[place] for place in places] == [other[slot // 2] for slot in slots]
    counts = np.diff(offsets[::2])
    assert graph.max_fan_out == counts.max()
    assert graph.regular == (counts.min() == counts.max())


def test_the_trail_takes_every_gate_once_with_its_inputs(graph):
    gates, a, b = np.asarray(graph.trail)
    assert sorted(gates) == list(range(len(graph.a)))
    np.testing.assert_array_equal(a, np.asarray(graph.a)[gates])
    np.testing.assert_array_equal(b, np.asarray(graph.b)[gates])
    assert sorted(np.asarray(graph.trail_consumers)) == sorted(np.asarray(graph.consumers))
