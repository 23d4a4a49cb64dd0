import dataclasses
import itertools
import re
import shutil

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from verilog import in_icarus, needs_icarus, simulate

import jaxbp
from experiments.training.compiled import compiled
from jaxbp import Circuit, Netlist, Wires
from jaxbp.logic.circuits import netlist as netlist_module
from jaxbp.logic.circuits.netlist import FUNCTIONS
from jaxbp.logic.gates import TRUTH_TABLES

random = np.random.default_rng(0)
LAYERS = [
    (random.integers(0, 16, 40), Wires.random(14, 40, seed=0)),
    (random.integers(0, 16, 60), Wires.random(40, 60, seed=1)),
    (random.integers(0, 16, 12), Wires.random(60, 12, seed=2)),
]
CIRCUIT = Circuit.of(LAYERS)
NETLIST = Netlist.of(CIRCUIT).simplify()
BITS = random.random((200, 14)) < 0.5

few = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)


def every_row(inputs):
    return (np.arange(2**inputs)[:, None] >> np.arange(inputs) & 1).astype(bool)


def truth(netlist, bits):
    values = list(bits.T)
    for gate, a, b in zip(netlist.gates, netlist.a, netlist.b, strict=True):
        values.append(TRUTH_TABLES[gate, 2 * values[a] + values[b]].astype(bool))
    return np.stack([values[source] for source in netlist.results], axis=1)


@pytest.fixture(params=["truth tables", "structure alone"])
def by(request, monkeypatch):
    if request.param == "structure alone":
        monkeypatch.setattr(netlist_module, "TABULATED_LEAVES", 0)
    return request.param


@pytest.mark.parametrize("gate", range(16))
def test_each_function_is_its_gates_truth_table(gate):
    a, b = np.array([0, 0, 1, 1], np.uint8), np.array([0, 1, 0, 1], np.uint8)
    assert np.array_equal(FUNCTIONS[gate](a, b) & 1, TRUTH_TABLES[gate])
    assert FUNCTIONS[gate](0b0011, 0b0101) & 15 == gate


def test_a_circuits_netlist_has_its_gates_and_its_bits():
    netlist = Netlist.of(CIRCUIT)
    assert len(netlist) == 112 and np.array_equal(netlist.histogram(), CIRCUIT.histogram().sum(axis=0))
    assert np.array_equal(netlist(BITS), CIRCUIT(BITS)) and np.array_equal(truth(netlist, BITS), CIRCUIT(BITS))


def test_gates_of_a_group_have_one_function_and_do_not_read_each_other():
    assert NETLIST.groups[0][0] == 0 and NETLIST.groups[-1][1] == len(NETLIST)
    for (begin, end), (following, _) in itertools.pairwise([*NETLIST.groups, (len(NETLIST), None)]):
        assert begin < end == following and len(set(NETLIST.gates[begin:end].tolist())) == 1
        assert max(NETLIST.a[begin:end].max(), NETLIST.b[begin:end].max()) < NETLIST.inputs + begin


def test_the_constructor_sorts_gates_and_finds_their_groups():
    netlist = dataclasses.replace(PAIR, b=np.array([1, 2]))  # gate 1 reads gate 0, which was in the same group
    assert netlist.groups == ((0, 1), (1, 2)) and PAIR.groups == ((0, 2),)
    rebuilt = Netlist(14, *(getattr(NETLIST, name) for name in ("gates", "a", "b", "results")))
    assert rebuilt == NETLIST and rebuilt.groups == NETLIST.groups


def assert_simplified(netlist, before):
    """Only outputs may be constants, pass-throughs, or inverters."""
    read = {*netlist.a.tolist(), *netlist.b.tolist()}
    outputs = set(netlist.results.tolist())
    assert {netlist.inputs + g for g in range(len(netlist))} <= read | outputs
    gates = list(zip(netlist.gates.tolist(), netlist.a.tolist(), netlist.b.tolist(), strict=True))
    assert len({(gate, *sorted((a, b))) if gate in (1, 6, 7, 8, 9, 14) else (gate, a, b) for gate, a, b in gates}) == (
        len(gates)
    )
    for g, (gate, a, b) in enumerate(gates):
        if gate in (0, 12, 15):
            assert netlist.inputs + g in outputs - read
        else:
            assert gate not in (3, 5, 10) and a != b
    assert len(netlist) <= len(before) + len(set(before.results.tolist()))


def every_three_gates(inputs, first, second):
    """Return a netlist with the outputs h(f(first), g(second)) for all functions f, g, and h."""
    f, g, h = (a.ravel() for a in np.indices((16, 16, 16)))
    one = np.arange(16)
    return Netlist.from_gates(
        inputs,
        np.concatenate([one, one, h]),
        np.concatenate([np.full(16, first[0]), np.full(16, second[0]), inputs + f]),
        np.concatenate([np.full(16, first[1]), np.full(16, second[1]), inputs + 16 + g]),
        inputs + 32 + np.arange(16**3),
    )


def test_every_circuit_of_three_gates_on_two_inputs_is_a_function_of_them(by):
    netlist, rows = every_three_gates(2, (0, 1), (1, 0)), every_row(2)
    simple = netlist.simplify()
    assert np.array_equal(truth(simple, rows), truth(netlist, rows))
    assert len(simple) == 14
    assert_simplified(simple, netlist)


def test_every_circuit_of_three_gates_on_three_inputs(by):
    netlist, rows = every_three_gates(3, (0, 1), (1, 2)), every_row(3)
    simple, expected = netlist.simplify(), truth(netlist, rows)
    assert np.array_equal(truth(simple, rows), expected)
    assert_simplified(simple, netlist)
    assert len(simple) == {"truth tables": 189, "structure alone": 385}[by]


@st.composite
def netlists(draw):
    inputs, gates, outputs = draw(st.integers(1, 6)), draw(st.integers(0, 25)), draw(st.integers(1, 5))
    sources = [st.integers(0, inputs + g - 1) for g in range(gates)]
    a, b = ([draw(source) for source in sources] for _ in range(2))
    last = st.lists(st.integers(0, inputs + gates - 1), min_size=outputs, max_size=outputs)
    return Netlist.from_gates(inputs, [draw(st.integers(0, 15)) for _ in range(gates)], a, b, draw(last))


@pytest.mark.parametrize("tabulated", [netlist_module.TABULATED_LEAVES, 0])
def test_simplified_netlists_have_the_same_bits_and_no_gate_too_many(tabulated):
    @few
    @hypothesis.given(netlists())
    def check(netlist):
        rows = every_row(netlist.inputs)
        expected = truth(netlist, rows)
        simple = netlist.simplify()
        assert np.array_equal(netlist(rows), expected)
        assert np.array_equal(truth(simple, rows), expected) and np.array_equal(simple(rows), expected)
        assert_simplified(simple, netlist)
        assert len(simple.simplify()) <= len(simple)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(netlist_module, "TABULATED_LEAVES", tabulated)
        check()


def test_a_layered_circuit_simplified_is_the_circuit_and_no_larger():
    assert len(NETLIST) < 100
    assert np.array_equal(NETLIST(BITS), CIRCUIT(BITS)) and np.array_equal(truth(NETLIST, BITS), CIRCUIT(BITS))
    assert_simplified(NETLIST, Netlist.of(CIRCUIT))


def test_pass_throughs_are_no_gates():
    straight = Circuit.of([(np.full(5, 3), Wires.from_pairs(np.arange(5), np.arange(5)[::-1].copy(), 5))] * 3)
    simple = Netlist.of(straight).simplify()
    assert len(simple) == 0 and simple.results.tolist() == [0, 1, 2, 3, 4]
    bits = every_row(5)
    assert np.array_equal(simple(bits), bits)


def test_an_inverter_remains_where_an_output_needs_it():
    simple = Netlist.from_gates(2, [1, 14, 12, 15], [0, 1, 0, 0], [1, 0, 0, 0], [2, 3, 4, 5]).simplify()
    assert sorted(simple.gates.tolist()) == [1, 12, 12, 15]
    assert Netlist.from_gates(2, [1, 12], [0, 2], [1, 2], [3]).simplify().gates.tolist() == [14]


def test_equal_truth_tables_are_one_gate_where_there_are_few_inputs(monkeypatch):
    # (a and b) and c differs from a and (b and c).
    netlist = Netlist.from_gates(3, [1, 1, 1, 1], [0, 3, 1, 0], [1, 2, 2, 5], [4, 6])
    assert len(netlist.simplify()) == 2
    monkeypatch.setattr(netlist_module, "TABULATED_LEAVES", 0)
    assert len(netlist.simplify()) == 4


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_words_of_any_width_are_evaluated_bit_by_bit(dtype):
    x = random.integers(0, np.iinfo(dtype).max, (14, 3, 2), dtype, endpoint=True)
    y = NETLIST.evaluate(x)
    assert y.dtype == dtype and y.shape == (12, 3, 2)
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(14, -1), axis=1).T.astype(bool)
    expected = np.packbits(np.ascontiguousarray(truth(NETLIST, bits).T), axis=1).view(dtype).reshape(y.shape)
    assert np.array_equal(y, expected)


def test_words_are_evaluated_within_jit_too():
    words = jaxbp.pack_bits(BITS)
    y = jax.jit(NETLIST.evaluate)(jnp.asarray(words))
    assert y.dtype == jnp.uint32 and np.array_equal(y, NETLIST.evaluate(words))


WRITTEN = {
    "simplified": NETLIST,
    "as it was": Netlist.of(CIRCUIT),
    "no gates": Netlist.from_gates(14, [], [], [], [3, 0, 3]),
    "constants": Netlist.from_gates(14, [0, 15], [0, 0], [0, 0], [15, 14]),
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("netlist", WRITTEN.values(), ids=WRITTEN)
def test_compiled_c_gives_the_same_words(tmp_path, netlist):
    x = random.integers(0, 2**32, (14, 19), np.uint32)
    y = netlist.evaluate(x)
    assert np.array_equal(compiled(netlist, shutil.which("cc"), tmp_path)(x), y)


def steps_and_rows(source):
    (rows,) = re.findall(r"memory\[\w+ \* \((\d+) ", source)
    return len(re.findall(r"^  {circuit_function", source, re.MULTILINE)), int(rows)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_c_of_many_gates_computes_one_group_of_outputs_after_the_other(tmp_path, monkeypatch):
    netlist, x = Netlist.of(CIRCUIT), random.integers(0, 2**32, (14, 2), np.uint32)
    together = steps_and_rows(netlist.to_c())
    monkeypatch.setattr("jaxbp.logic.circuits.netlist.GATES_AT_A_TIME", 10)
    steps, rows = steps_and_rows(netlist.to_c())
    assert steps > together[0] and rows < together[1]
    assert np.array_equal(compiled(netlist, shutil.which("cc"), tmp_path)(x), netlist.evaluate(x))


def test_c_uses_the_rows_of_values_again():
    chain = Netlist.from_gates(2, [14] * 100, [0, *range(2, 101)], [1] * 100, [101])
    assert steps_and_rows(chain.to_c())[1] == 4


@pytest.mark.parametrize("netlist", WRITTEN.values(), ids=WRITTEN)
def test_simulated_verilog_gives_the_same_bits(netlist):
    assert np.array_equal(simulate(netlist.to_verilog(), BITS.T.astype(int)).T, netlist(BITS))


@needs_icarus
@pytest.mark.parametrize("netlist", WRITTEN.values(), ids=WRITTEN)
def test_verilog_in_icarus_gives_the_same_bits(tmp_path, netlist):
    assert np.array_equal(in_icarus(netlist.to_verilog(), BITS, netlist.outputs, tmp_path), netlist(BITS))


PAIR = Netlist.from_gates(2, [1, 1], [0, 1], [1, 1], [2, 3])
REFUSED = {
    "no inputs": (
        lambda: Netlist.from_gates(0, [], [], [], [0]),
        "Netlist: inputs is 0; wants an int of at least 1",
    ),
    "no outputs": (
        lambda: Netlist.from_gates(2, [], [], [], []),
        "Netlist: there are no outputs; wants at least one output",
    ),
    "another number of sources": (
        lambda: Netlist.from_gates(2, [1, 1], [0], [1, 1], [0]),
        "Netlist: there are 2 gates, 1 inputs a, and 2 inputs b; wants one a and one b per gate",
    ),
    "sources that are no integers": (
        lambda: Netlist.from_gates(2, [1], [0.5], [1], [0]),
        "Netlist: a has shape (1,) and dtype float64; wants a vector of integers",
    ),
    "a gate that is none": (
        lambda: Netlist.from_gates(2, [1, 16], [0, 0], [1, 1], [0]),
        "Netlist: gates[1] is 16; wants at least 0 and below 16, the number of functions",
    ),
    "a gate that reads itself": (
        lambda: Netlist.from_gates(2, [1, 1], [0, 0], [1, 3], [0]),
        "Netlist: b[1] is 3; wants at least 0 and below 3, the source of the gate itself",
    ),
    "an output from nowhere": (
        lambda: Netlist.from_gates(2, [1], [0], [1], [2, -1]),
        "Netlist: outputs[1] is -1; wants at least 0 and below 3, the number of sources",
    ),
    "a result from nowhere": (
        lambda: dataclasses.replace(PAIR, results=np.array([4])),
        "Netlist: outputs[0] is 4; wants at least 0 and below 4, the number of sources",
    ),
    "too many inputs": (
        lambda: Netlist.from_gates(2**32, [1], [0], [1], [0]),
        "Netlist: inputs is 4294967296; wants an int below 1073741824, because wires have 32 bits",
    ),
    "other inputs": (
        lambda: NETLIST(BITS[:, :4]),
        f"Netlist: bits has shape ({len(BITS)}, 4); wants (samples, 14)",
    ),
    "words of other inputs": (
        lambda: NETLIST.evaluate(np.zeros((4, 7), np.uint32)),
        "Netlist: x has shape (4, 7); wants (14, words)",
    ),
    "a keyword of C": (
        lambda: NETLIST.to_c("while"),
        "Netlist: name is 'while', which is reserved in C; wants another name",
    ),
    "no class": (
        lambda: NETLIST.to_c(classes=0),
        f"Netlist: classes is 0; wants None or a divisor of the {NETLIST.outputs} outputs",
    ),
    "a keyword of Verilog": (
        lambda: NETLIST.to_verilog("wire"),
        "Netlist: name is 'wire', which is reserved in Verilog; wants another name",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_netlist_is_refused(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message
