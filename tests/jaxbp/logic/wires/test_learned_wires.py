import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from jaxbp import LearnedWires

UNEVEN = LearnedWires.from_candidates([[3, 0, 3], [0, 5, 1]], gates=4, inputs=6)


@pytest.mark.parametrize("wires", [UNEVEN, LearnedWires.random(7, 12, seed=0, candidates=5)], ids=["listed", "random"])
def test_the_readers_of_an_input_are_the_groups_that_have_it_as_a_candidate(wires):
    read, offsets = np.asarray(wires.candidates).ravel(), np.asarray(wires.reader_offsets)
    found = [wires.readers[first:end].tolist() for first, end in itertools.pairwise(offsets)]
    assert found == [np.flatnonzero(read == i).tolist() for i in range(wires.inputs)]
    assert wires.max_fan_out == max(map(len, found))


def test_gates_read_two_neighboring_wires():
    gate_wires = UNEVEN.gate_wires
    assert (gate_wires.a.tolist(), gate_wires.b.tolist(), gate_wires.inputs) == ([0, 2, 4, 6], [1, 3, 5, 7], 8)


def test_random_candidates_are_read_equally_often_and_seeds_differ():
    wires = LearnedWires.random(10, 24, seed=0, candidates=6)
    assert (wires.groups, wires.choices, wires.gates) == (3, 6, 24)
    counts = np.bincount(np.ravel(wires.candidates), minlength=10)
    assert counts.max() - counts.min() <= 1
    assert wires == LearnedWires.random(10, 24, seed=0, candidates=6) != LearnedWires.random(10, 24, 1, candidates=6)


@pytest.mark.parametrize(
    ("gates", "candidates", "wanted"),
    [(24, 8, 8), (24, 16, 8), (24, 18, 12), (7, 2, 7), (10, 2, 10), (50, 8, 10), (50, 2, 10), (9, 3, 9)],
)
def test_by_default_a_group_has_about_eight_gates(gates, candidates, wanted):
    wires = LearnedWires.random(100, gates, seed=0, candidates=candidates)
    assert gates // wires.groups == wanted


def test_all_inputs_may_be_candidates_also_of_a_layer_with_fewer_wires():
    wires = LearnedWires.random(9, 4, seed=0, candidates="all")
    assert wires.candidates.tolist() == [list(range(9))] and wires.max_fan_out == 1
    assert wires.initial_logits(jax.random.key(0)).shape == (8, 9)


def test_hardened_wires_lead_to_the_candidates_with_the_largest_logits():
    logits = np.zeros((8, 3), np.float32)
    logits[[1, 2, 4, 7], [1, 2, 2, 1]] = 1.0
    wires = UNEVEN.harden(logits)
    assert (wires.a.tolist(), wires.b.tolist()) == ([3, 3, 1, 0], [0, 3, 0, 5])
    assert wires.inputs == 6


def test_a_layer_on_learned_wires_equals_a_layer_on_its_hardened_wires():
    logits, wire_logits = jax.random.normal(jax.random.key(0), (4, 16)), UNEVEN.initial_logits(jax.random.key(1))
    x = jax.random.uniform(jax.random.key(2), (5, 6))
    y = jaxbp.gate_layer(logits, UNEVEN, x, wire_logits=wire_logits)
    assert wire_logits.shape == (8, 3)
    np.testing.assert_allclose(y, jaxbp.gate_layer(logits, UNEVEN.harden(wire_logits), x), rtol=1e-6)


NO_NUMBER = np.full((8, 3), np.nan, np.float32)
REFUSED = {
    "numbers": (
        lambda: LearnedWires.from_candidates([[0.5]], 1, 1),
        TypeError,
        "LearnedWires.from_candidates: candidates has dtype float64; wants integers",
    ),
    "a vector": (
        lambda: LearnedWires.from_candidates([0, 1], 2, 2),
        ValueError,
        "candidates has shape (2,); wants (groups, K), where groups divides 4, the number of wires",
    ),
    "uneven groups": (
        lambda: LearnedWires.from_candidates([[0]] * 3, 2, 2),
        ValueError,
        "candidates has shape (3, 1); wants (groups, K), where groups divides 4, the number of wires",
    ),
    "more candidates than wires": (
        lambda: LearnedWires.from_candidates([[0, 1, 2]] * 2, 2, 3),
        ValueError,
        "candidates has shape (2, 3); wants at most 4 candidates in all groups, the larger of the numbers of wires",
    ),
    "an input that does not exist": (
        lambda: LearnedWires.from_candidates([[0, 3]], 2, 3),
        ValueError,
        "candidates[0, 1] is 3; wants at least 0 and below 3, the number of inputs",
    ),
    "an unknown relaxation": (
        lambda: LearnedWires.random(16, 8, 0, relaxation="gumbel"),
        ValueError,
        "relaxation is 'gumbel'; wants one of straight_through, softmax",
    ),
    "few inputs": (
        lambda: LearnedWires.random(5, 8, 0),
        ValueError,
        "LearnedWires.random: candidates is 16; wants at most 5, for 5 inputs and 16 wires",
    ),
    "small groups": (
        lambda: LearnedWires.random(9, 8, 0, candidates=8, gates_per_group=2),
        ValueError,
        "gates_per_group is 2; wants a divisor of 8, the number of gates, that is at least 4",
    ),
    "groups with all candidates": (
        lambda: LearnedWires.random(9, 8, 0, candidates="all", gates_per_group=2),
        ValueError,
        "gates_per_group is 2; wants None or 8, the number of gates, because candidates is 'all'",
    ),
    "logits of other wires": (
        lambda: UNEVEN.harden(jnp.zeros((4, 3))),
        ValueError,
        "LearnedWires.harden: logits has shape (4, 3); wants (8, 3)",
    ),
    "logits without an order": (
        lambda: UNEVEN.harden(NO_NUMBER),
        ValueError,
        "LearnedWires.harden: the logits of 8 wires contain NaN; wants logits without NaN",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
