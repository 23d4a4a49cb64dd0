import ctypes
import itertools
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import life
from verilog import in_icarus, needs_icarus, needs_yosys, run_in_icarus, simulate

import jaxbp
from experiments.training.compiled import compiled, load
from jaxbp import Circuit, ConvolutionalCircuit, Netlist, TreeWires, Wires
from jaxbp.logic.gates import TRUTH_TABLES

random = np.random.default_rng(0)
LAYERS = [
    (np.arange(16, dtype=np.uint8), Wires.random(9, 16, seed=0)),
    (random.integers(0, 16, 1030), Wires.random(16, 1030, seed=1)),
    (random.integers(0, 2**16, 20, np.uint16), Wires.random(1030, 40, seed=2)),  # gates of four inputs
]
CIRCUIT = Circuit.of(LAYERS)
BITS = random.random((75, 9)) < 0.5  # three words, the last one not full


@pytest.fixture(scope="module")
def expected():
    x = BITS
    for gates, wires in LAYERS:
        inputs = x[:, np.stack([wires.a, wires.b], axis=1).reshape(len(gates), -1)]
        rows = inputs @ (1 << np.arange(inputs.shape[-1])[::-1])
        x = (gates >> 2 ** inputs.shape[-1] - 1 - rows & 1).astype(bool)
    return x


@pytest.mark.parametrize("number", [0.5, np.nan, 2])
def test_numbers_that_are_no_bits_are_refused(number):
    bits = BITS.astype(np.float32)
    assert np.array_equal(CIRCUIT(bits), CIRCUIT(BITS))
    bits[3, 4] = number
    for op, call in ("Circuit", CIRCUIT), ("Netlist", Netlist.of(CIRCUIT)), ("pack_bits", jaxbp.pack_bits):
        with pytest.raises(ValueError, match=rf"^{op}: bits contains .*; wants only 0 and 1, as jaxbp.nn.thermometer"):
            call(bits)


def test_the_relaxed_network_of_hard_logits_is_the_circuit_exactly(expected):
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(BITS, dtype)
        for gates, wires in LAYERS[:2]:
            x = jaxbp.gate_layer(jaxbp.hard_logits(jnp.asarray(gates)), wires, x)
        x = jaxbp.lut_layer(jaxbp.hard_logits(LAYERS[2][0], "input_wise", arity=4), LAYERS[2][1], x)
        assert np.array_equal(x, expected.astype(np.float32))


def test_words_are_evaluated_as_samples_are(expected):
    assert np.array_equal(CIRCUIT(BITS), expected)


def test_words_are_evaluated_within_jit_too():
    words = jaxbp.pack_bits(BITS)
    y = jax.jit(CIRCUIT.evaluate)(jnp.asarray(words))
    assert y.dtype == jnp.uint32
    assert np.array_equal(y, CIRCUIT.evaluate(words))


def test_the_histogram_counts_each_layers_gates():
    *counts, of_last = CIRCUIT.histogram().tolist()
    assert counts == [np.bincount(gates, minlength=16).tolist() for gates, _ in LAYERS[:2]]
    last = Netlist.of(Circuit.of(LAYERS[2:]))
    assert of_last == last.histogram().tolist() and len(last) == sum(of_last) > 60


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("words", [0, 1, 16, 35])
def test_compiled_c_gives_the_same_words(tmp_path, words):
    x = random.integers(0, 2**32, (CIRCUIT.inputs, words), np.uint32)
    assert np.array_equal(compiled(CIRCUIT, shutil.which("cc"), tmp_path)(x), CIRCUIT.evaluate(x))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_compiled_c_counts_beyond_16_bits_and_may_stand_beside_another(tmp_path):
    wide = Circuit.of([(random.integers(0, 16, 70_000), Wires.random(2, 70_000, seed=0))])
    x = random.integers(0, 2**32, (2, 1), np.uint32)
    assert np.array_equal(compiled(wide, shutil.which("cc"), tmp_path)(x), wide.evaluate(x))
    both = tmp_path / "both.c"
    both.write_text(CIRCUIT.to_c("one") + CIRCUIT.to_c("other"))
    subprocess.run(
        ["cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-c", both, "-o", "/dev/null"], check=True
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_compiled_c_needs_no_library(tmp_path):
    source, compiled = tmp_path / "circuit.c", tmp_path / "circuit.o"
    source.write_text(CIRCUIT.to_c(classes=2) + life(True).to_c())
    subprocess.run(["cc", "-std=c99", "-O2", "-ffreestanding", "-c", source, "-o", compiled], check=True)
    undefined = subprocess.run(["nm", "-u", compiled], check=True, capture_output=True, text=True).stdout.split()
    # Every compiler provides these functions, also without an operating system.
    assert {name for name in undefined if name != "U" and not name.startswith("_")} == {"memcpy", "memset"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_threads_may_call_compiled_c_at_the_same_time(tmp_path):
    run, inputs = compiled(CIRCUIT, shutil.which("cc"), tmp_path), random.integers(0, 2**32, (4, 9, 2000), np.uint32)
    with ThreadPoolExecutor(4) as threads:
        for x, y in zip(inputs, threads.map(run, inputs), strict=True):
            assert np.array_equal(y, CIRCUIT.evaluate(x))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_c_of_one_word_at_a_time_with_one_memory_for_all_threads(tmp_path, expected):
    defined = "#define net_block 1\n#define net_static static\n"
    library = load(defined + CIRCUIT.to_c("net", classes=5), shutil.which("cc"), tmp_path)
    wanted = expected.reshape(len(BITS), 5, 4).sum(axis=-1).argmax(axis=-1)
    assert [library.net_classify(bits.tobytes()) for bits in BITS[:9].astype(np.uint8)] == wanted[:9].tolist()
    assert classified(library.net_classify_words, jaxbp.pack_bits(BITS))[: len(BITS)].tolist() == wanted.tolist()


def classified(function, x):
    function.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    classes = np.empty(32 * x.shape[1], np.intc)
    function(x.shape[1], x.ctypes.data, classes.ctypes.data)
    return classes


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("written", [CIRCUIT, Netlist.of(CIRCUIT).simplify()], ids=["circuit", "netlist"])
def test_compiled_c_classifies_by_the_first_of_the_largest_groups(tmp_path, expected, written):
    library = load(written.to_c("net", classes=5), shutil.which("cc"), tmp_path)
    wanted = expected.reshape(len(BITS), 5, 4).sum(axis=-1).argmax(axis=-1)
    assert len(set(wanted.tolist())) > 2
    on = 2 * BITS.astype(np.uint8)  # any nonzero number is true
    assert [library.net_classify(bits.tobytes()) for bits in on] == wanted.tolist()
    assert classified(library.net_classify_words, jaxbp.pack_bits(BITS))[: len(BITS)].tolist() == wanted.tolist()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("classes", "group"), [(1, 3), (2, 1), (9, 3), (3, 64), (2, 255)])
def test_compiled_c_classifies_blocks_of_words(tmp_path, classes, group):
    wires = Wires.random(40, classes * group, seed=0)
    circuit = Circuit.of([(random.integers(1, 15, classes * group), wires)])
    library = load(circuit.to_c("net", classes=classes), shutil.which("cc"), tmp_path)
    x = random.integers(0, 2**32, (40, 19), np.uint32)
    sums = jaxbp.unpack_bits(circuit.evaluate(x), 19 * 32).reshape(-1, classes, group).sum(axis=-1)
    assert np.array_equal(classified(library.net_classify_words, x), sums.argmax(axis=-1))


def test_simulated_verilog_gives_the_same_bits(expected):
    assert np.array_equal(simulate(CIRCUIT.to_verilog(), BITS.T.astype(int)).T, expected)


def test_the_simulation_sees_a_wrong_gate_and_a_bit_that_nothing_drives(expected):
    source = CIRCUIT.to_verilog()
    (last,) = re.findall(r"assign y\[0\] = (\w+);", source)
    wrong = re.sub(rf"(wire {last} = )(.*);", r"\1~(\2);", source)
    assert not np.array_equal(simulate(wrong, BITS.T.astype(int)).T, expected)
    with pytest.raises(AssertionError, match="no driver"):
        simulate(re.sub(r".*assign y\[3\].*\n", "", source), BITS.T.astype(int))


@needs_icarus
def test_verilog_in_icarus_gives_the_same_bits(tmp_path, expected):
    assert np.array_equal(in_icarus(CIRCUIT.to_verilog(), BITS[:9], CIRCUIT.outputs, tmp_path), expected[:9])


@needs_icarus
@pytest.mark.parametrize(("classes", "registers"), [(1, None), (5, None), (20, None), (1, 1), (5, 2), (20, 9)])
def test_the_label_in_verilog_is_the_first_of_the_largest_groups(tmp_path, expected, classes, registers):
    source, digits = CIRCUIT.to_verilog(classes=classes, registers=registers), max(1, (classes - 1).bit_length())
    labels = in_icarus(source, BITS[:30], digits, tmp_path, port="label") @ (1 << np.arange(digits))
    assert np.array_equal(labels, expected[:30].reshape(30, classes, -1).sum(axis=2).argmax(axis=1))


@needs_icarus
def test_a_pipeline_takes_a_sample_at_each_edge(tmp_path, expected):
    source = CIRCUIT.to_verilog(registers=2)  # A gate of four inputs has several levels of gates of two inputs.
    assert source.count("localparam LATENCY = 4;") == 1
    assert np.array_equal(in_icarus(source, BITS[:9], CIRCUIT.outputs, tmp_path), expected[:9])


@needs_icarus
def test_the_test_bench_in_verilog_passes_and_finds_a_wrong_gate(tmp_path):
    source, bench = CIRCUIT.to_verilog(), CIRCUIT.to_verilog_testbench(BITS[:9])
    assert run_in_icarus(source + bench, tmp_path) == ["PASS:", "9", "samples"]
    wrong = re.sub(r"assign y\[3\] = (\w+);", r"assign y[3] = ~\1;", source)
    assert run_in_icarus(wrong + bench, tmp_path)[-5:] == ["FAIL:", "9", "of", "9", "samples"]


SMALL = Circuit.of([(random.integers(0, 16, n), Wires.random(m, n, seed=n)) for m, n in ((9, 40), (40, 30), (30, 21))])


def by_tables(circuit, classes):
    """Return the Verilog module `wanted`: each gate is a row of its truth table, and votes are sums."""
    lines, before = [], "x"
    for i, (gates, wires) in enumerate(circuit.layers):
        lines.append(f"wire [{wires.gates - 1}:0] layer{i};")
        for g, (gate, a, b) in enumerate(zip(gates, np.asarray(wires.a), np.asarray(wires.b), strict=True)):
            row = "".join(map(str, TRUTH_TABLES[gate][::-1]))  # Bit 2 a + b of a number is the value for a and b.
            lines.append(f"assign layer{i}[{g}] = 4'b{row} >> {{{before}[{a}], {before}[{b}]}};")
        before = f"layer{i}"
    group = circuit.outputs // classes
    votes = (" + ".join(f"{{7'b0, y[{c * group + i}]}}" for i in range(group)) for c in range(classes))
    lines += [f"wire [7:0] votes{c} = {vote};" for c, vote in enumerate(votes)]
    conditions = (
        " && ".join(f"votes{c} >= votes{other}" for other in range(c + 1, classes)) for c in range(classes - 1)
    )
    label = " : ".join([*(f"{condition} ? {c}" for c, condition in enumerate(conditions)), str(classes - 1)])
    lines += [f"assign y = {before};", f"assign label = {label};"]
    ports = f"input [{circuit.inputs - 1}:0] x, output [{circuit.outputs - 1}:0] y, output [1:0] label"
    return "\n".join([f"module wanted({ports});", *lines, "endmodule", ""])


@needs_yosys
@pytest.mark.parametrize(("table_inputs", "larger"), [(4, "= votes[5:3] >"), (6, "= x[5:3] >")])
def test_yosys_proves_that_the_simplified_circuit_and_its_votes_equal_the_truth_tables(tmp_path, table_inputs, larger):
    source = SMALL.netlist().simplify().to_verilog(classes=3, table_inputs=table_inputs)
    wanted = by_tables(SMALL, 3)
    (gate,) = re.findall(r"wire g9 = (.*);", source)
    sources = {"right": source, "wrong gate": source.replace(f"g9 = {gate}", f"g9 = ~({gate})")}
    sources["wrong vote"] = source.replace(larger, f"{larger}=")
    assert len({*sources.values()}) == 3
    proof = "proc; setattr -mod -unset keep_hierarchy; flatten; miter -equiv wanted circuit miter; flatten"
    proof += "; sat -verify -prove trigger 0 miter"
    for name, source in sources.items():
        (tmp_path / "proof.v").write_text(source + wanted)
        done = subprocess.run(
            ["yosys", "-p", f"read_verilog proof.v; {proof}"], cwd=tmp_path, capture_output=True, text=True
        )
        wanted_message = "SUCCESS!" if name == "right" else "proof did fail!"
        assert wanted_message in done.stdout + done.stderr, name
        assert (done.returncode == 0) == (name == "right")


@needs_icarus
def test_a_pipeline_gives_the_labels_of_ten_thousand_samples(tmp_path):
    sizes = [64, 100, 100, 50]
    layers = [(random.integers(0, 16, n), Wires.random(m, n, seed=n)) for m, n in itertools.pairwise(sizes)]
    circuit, bits = Circuit.of(layers), random.random((10_000, 64)) < 0.5
    source = circuit.netlist().simplify().to_verilog(classes=10, registers=2)
    labels = in_icarus(source, bits, 4, tmp_path, port="label") @ [1, 2, 4, 8]
    assert np.array_equal(labels, circuit(bits).reshape(-1, 10, 5).sum(axis=2).argmax(axis=1))


REFUSED = {
    "no layers": (lambda: Circuit.of([]), "Circuit: there are no layers; wants at least one layer"),
    "too few gates": (
        lambda: Circuit.of([(np.zeros(3, np.uint8), Wires.random(5, 4, seed=0))]),
        "Circuit: layer 0 has gates of shape (3,) with values from 0 to 0; wants shape (4,) and values from 0 to 15",
    ),
    "a gate that is none": (
        lambda: Circuit.of([(np.array([1, 16]), Wires.random(5, 2, seed=0))]),
        "Circuit: layer 0 has gates of shape (2,) with values from 1 to 16; wants shape (2,) and values from 0 to 15",
    ),
    "half as many gates": (
        lambda: Circuit.of([(np.array([1, 2]), Wires.random(5, 4, seed=0))]),
        "Circuit: layer 0 has 2 gates of dtype int64 and 4 pairs of wires; wants 4 gates, or dtype uint16 for gates of "
        "four inputs",
    ),
    "half as many gates of a layer": (
        lambda: jaxbp.bitwise_gate_layer(np.uint8([1, 2]), Wires.random(5, 4, seed=0), np.zeros((5, 1), np.uint32)),
        "bitwise_gate_layer: gates has shape (2,); wants (4,)",
    ),
    "layers that do not join": (
        lambda: Circuit.of([LAYERS[0], LAYERS[2]]),
        "Circuit: layer 1 reads 1030 inputs; wants 16, the number of gates of layer 0",
    ),
    "other inputs": (
        lambda: CIRCUIT(BITS[:, :4]),
        f"Circuit: bits has shape ({len(BITS)}, 4); wants (samples, 9)",
    ),
    "one sample": (lambda: CIRCUIT(BITS[0]), "Circuit: bits has shape (9,); wants (samples, 9)"),
    "words of other inputs": (
        lambda: CIRCUIT.evaluate(np.zeros((4, 3), np.uint32)),
        "Circuit: x has shape (4, 3); wants (9, words)",
    ),
    "a name with a space": (
        lambda: CIRCUIT.to_c("my net"),
        "Circuit: name is 'my net'; wants ASCII letters, digits, and underscores, not beginning with a digit",
    ),
    "a name beyond ASCII": (
        lambda: CIRCUIT.to_c("naïve"),
        "Circuit: name is 'naïve'; wants ASCII letters, digits, and underscores, not beginning with a digit",
    ),
    "a name that begins with a digit": (
        lambda: CIRCUIT.to_verilog("1net"),
        "Circuit: name is '1net'; wants ASCII letters, digits, and underscores, not beginning with a digit",
    ),
    "a keyword of C": (
        lambda: CIRCUIT.to_c("register"),
        "Circuit: name is 'register', which is reserved in C; wants another name",
    ),
    "classes of unequal size": (
        lambda: CIRCUIT.to_c(classes=3),
        "Circuit: classes is 3; wants None or a divisor of the 20 outputs",
    ),
    "a test bench without samples": (
        lambda: CIRCUIT.to_verilog_testbench(BITS[:0]),
        "Circuit.to_verilog_testbench: bits has no samples; wants at least one",
    ),
    "classes in Verilog of unequal size": (
        lambda: CIRCUIT.to_verilog(classes=3),
        "Circuit: classes is 3; wants None or a divisor of the 20 outputs",
    ),
    "no levels between registers": (
        lambda: CIRCUIT.to_verilog(registers=0),
        "Circuit: registers is 0; wants an int of at least 1",
    ),
    "tables of two inputs": (
        lambda: CIRCUIT.to_verilog(table_inputs=2),
        "Circuit: table_inputs is 2; wants an int of at least 3",
    ),
    "a keyword of Verilog": (
        lambda: CIRCUIT.to_verilog("reg"),
        "Circuit: name is 'reg', which is reserved in Verilog; wants another name",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_circuit_is_refused(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message


IMAGE = (1, 3, 3), [(np.zeros((9, 1), int), TreeWires.random(1, 9, 3, depth=1, seed=0))]
NOT_LAYERS = {
    "a number": (3, "Circuit: layers is 3; wants a list of pairs (gates, wires)"),
    "a text": ("ab", "Circuit: layer 0 is 'a'; wants (gates, wires), where wires is a jaxbp.Wires"),
    "gates only": ([(LAYERS[0][0],)], "Circuit: layer 0 is (ndarray); wants (gates, wires), where wires is a"),
    "a fraction of a gate": (
        [(np.full(LAYERS[0][1].gates, 1.5), LAYERS[0][1])],
        "Circuit: layer 0 has gates of dtype float64; wants integers",
    ),
}


@pytest.mark.parametrize("make", [Circuit, Circuit.of, lambda layers: ConvolutionalCircuit.of(*IMAGE, layers)])
@pytest.mark.parametrize(("layers", "message"), NOT_LAYERS.values(), ids=NOT_LAYERS)
def test_layers_of_another_kind_are_refused_by_each_constructor(make, layers, message):
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        make(layers)


def test_it_prints_its_sizes_and_not_its_arrays():
    assert repr(CIRCUIT) == "Circuit(9 inputs, layers of 16, 1030, 20 gates)"
