import jax
import numpy as np
import pytest

from jaxbp import Wires


def pairs(wires):
    return list(zip(np.asarray(wires.a).tolist(), np.asarray(wires.b).tolist(), strict=True))


def consumers_of(wires, i):
    first, end = wires.offsets[2 * i], wires.offsets[2 * i + 2]
    return np.asarray(wires.consumers[first:end]).tolist(), np.asarray(wires.partners[first:end]).tolist()


@pytest.mark.parametrize(
    "wires",
    [
        Wires.from_pairs([2, 0, 0, 2], [0, 0, 4, 2], 5),  # shared, unused, and read twice by one gate
        Wires.random(7, 11, seed=0),
        Wires.unique(7, 11, seed=0),
    ],
    ids=["listed", "random", "unique"],
)
def test_the_consumers_of_an_input_are_the_gates_that_read_it(wires):
    for i in range(wires.inputs):
        expected = [
            (2 * g + role, pair[1 - role]) for role in (0, 1) for g, pair in enumerate(pairs(wires)) if pair[role] == i
        ]
        assert list(zip(*consumers_of(wires, i), strict=True)) == expected
        assert wires.offsets[2 * i + 1] - wires.offsets[2 * i] == sum(slot % 2 == 0 for slot, _ in expected)
    assert wires.max_fan_out == max(len(consumers_of(wires, i)[0]) for i in range(wires.inputs))
    assert wires.gates == len(pairs(wires))


@pytest.mark.parametrize("make", [Wires.random, Wires.unique])
def test_the_trail_goes_over_every_gate_once_and_neighbors_share_an_input(make):
    wires = make(50, 100, seed=0)
    gates, a, b = np.asarray(wires.trail)
    assert sorted(gates.tolist()) == list(range(100))
    assert list(zip(a, b, strict=True)) == [pairs(wires)[g] for g in gates]
    shared = [bool({a[k], b[k]} & {a[k + 1], b[k + 1]}) for k in range(99)]
    assert np.mean(shared) > 0.9
    assert sorted(wires.trail_inputs.tolist()) == list(range(50))


@pytest.mark.parametrize(("inputs", "gates"), [(12, 12), (6, 12), (9, 20)])
def test_the_trail_lists_consumers_by_input_and_leaves_each_as_often_as_it_comes(inputs, gates):
    wires = Wires.random(inputs, gates, seed=0)
    reads = np.ravel(pairs(wires))
    along, partners, places = map(np.asarray, (wires.trail_consumers, wires.trail_partners, wires.trail_places))
    counts = np.bincount(reads, minlength=inputs)[wires.trail_inputs]
    assert np.array_equal(reads[along], np.repeat(wires.trail_inputs, counts))
    assert sorted(along) == list(range(2 * gates))
    assert np.array_equal(partners, reads[along ^ 1])
    assert np.array_equal(along[places] // 2, np.arange(gates))
    assert wires.regular == (len(set(counts)) == 1) == (inputs != 9)
    if wires.regular:
        assert np.array_equal(np.bincount(reads[along[places]]), counts // 2)
        assert np.all(places % counts[0] < counts[0] // 2)


def test_random_wires_read_every_input_equally_often():
    wires = Wires.random(10, 26, seed=3)
    counts = np.bincount(np.concatenate([wires.a, wires.b]), minlength=10)
    assert set(counts.tolist()) == {5, 6}


@pytest.mark.parametrize(
    ("inputs", "gates"),
    [(2, 1), (9, 5), (9, 36), (9, 20), (264, 256), (785, 2000), (50, 300)],
    ids=lambda n: str(n),
)
def test_unique_wires_have_no_pair_twice_and_read_every_input(inputs, gates):
    wires = Wires.unique(inputs, gates, seed=1)
    unordered = {frozenset(pair) for pair in pairs(wires)}
    assert len(unordered) == wires.gates == gates
    assert all(len(pair) == 2 for pair in unordered)
    counts = np.bincount(np.ravel(pairs(wires)), minlength=inputs)
    assert counts.min() > 0
    if 8 * gates <= inputs * (inputs - 1):
        assert counts.max() <= counts.min() + 1


@pytest.mark.parametrize("make", [Wires.random, Wires.unique])
def test_the_same_seed_gives_the_same_wires_and_another_gives_others(make):
    assert pairs(make(20, 30, seed=0)) == pairs(make(20, 30, seed=0)) != pairs(make(20, 30, seed=1))


def test_sizes_may_be_numpys_and_do_not_overflow():
    for make in (Wires.random, Wires.unique):
        wires = make(np.uint8(200), np.uint8(200), seed=0)
        assert wires.regular and (wires.inputs, wires.gates) == (200, 200)
        assert pairs(wires) == pairs(make(200, 200, seed=0))


def test_moore_wires_join_each_neighbor_to_the_center():
    assert pairs(Wires.moore()) == [(neighbor, 4) for neighbor in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert sorted(pairs(Wires.moore(seed=0))) == pairs(Wires.moore()) != pairs(Wires.moore(seed=0))


def test_wires_are_a_pytree_whose_sizes_are_static():
    wires = Wires.random(5, 6, seed=0)
    assert jax.jit(lambda wires: wires.a[wires.gates - 1] + wires.inputs)(wires) == wires.a[5] + 5
    assert {leaf.dtype for leaf in jax.tree.leaves(wires)} == {np.dtype("int32")}


def test_wires_made_within_jit_are_arrays_outside_of_it():
    made = []
    jax.jit(lambda x: made.append(Wires.random(5, 6, seed=0)) or x)(0)
    assert pairs(made[0]) == pairs(Wires.random(5, 6, seed=0))


REFUSED = {
    "an input that is not there": (
        lambda: Wires.from_pairs([0, 5], [1, 2], 5),
        ValueError,
        "Wires.from_pairs: a[1] is 5; wants at least 0 and below 5, the number of inputs",
    ),
    "a negative input": (
        lambda: Wires.from_pairs([0], [-1], 5),
        ValueError,
        "Wires.from_pairs: b[0] is -1; wants at least 0 and below 5, the number of inputs",
    ),
    "lists of two lengths": (
        lambda: Wires.from_pairs([0, 1], [1], 5),
        ValueError,
        "Wires.from_pairs: a has 2 wires and b has 1; wants one wire a and one wire b per gate",
    ),
    "no gates": (
        lambda: Wires.from_pairs(np.zeros(0, int), np.zeros(0, int), 5),
        ValueError,
        "Wires.from_pairs: there are no gates; wants at least one gate",
    ),
    "a matrix": (
        lambda: Wires.from_pairs([[0]], [1], 5),
        ValueError,
        "Wires.from_pairs: a has shape (1, 1); wants (gates,)",
    ),
    "numbers that are no indices": (
        lambda: Wires.from_pairs([0.0], [1], 5),
        TypeError,
        "Wires.from_pairs: a has dtype float64; wants integers",
    ),
    "too few gates to read all": (
        lambda: Wires.unique(9, 4, seed=0),
        ValueError,
        "Wires.unique: 4 gates read at most 8 inputs; wants at least 5 gates to read all 9",
    ),
    "too few pairs": (
        lambda: Wires.unique(9, 37, seed=0),
        ValueError,
        "Wires.unique: 9 inputs have 36 pairs; wants at most 36 gates, not 37",
    ),
    "one input has no pair": (
        lambda: Wires.unique(1, 1, seed=0),
        ValueError,
        "Wires.unique: inputs is 1; wants an int of at least 2",
    ),
    "no inputs": (
        lambda: Wires.random(0, 1, seed=0),
        ValueError,
        "Wires.random: inputs is 0; wants an int of at least 1",
    ),
    "more inputs than 32 bits count": (
        lambda: Wires.from_pairs([0], [1], 2**32),
        ValueError,
        "Wires.from_pairs: inputs is 4294967296; wants an int below 1073741824, because wires have 32 bits",
    ),
    "more random inputs than 32 bits count": (
        lambda: Wires.random(2**32, 1, seed=0),
        ValueError,
        "Wires.random: inputs is 4294967296; wants an int below 1073741824, because wires have 32 bits",
    ),
    "half a gate": (
        lambda: Wires.random(4, 1.5, seed=0),
        ValueError,
        "Wires.random: gates is 1.5; wants an int of at least 1",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_wires_that_cannot_be_are_refused_with_the_numbers(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
