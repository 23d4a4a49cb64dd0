"""Hardened networks: bit for bit the relaxed one, evaluated in words, as compiled C, and as simulated Verilog."""

import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from experiments.training.logic import compiled
from jaxbp import Circuit, Wires
from jaxbp.logic.circuit import EXPRESSIONS
from jaxbp.logic.gates import TRUTH_TABLES

pytestmark = pytest.mark.once

random = np.random.default_rng(0)
# Every gate, with both inputs from anywhere; layers of different widths.
LAYERS = [
    (np.arange(16, dtype=np.uint8), Wires.random(9, 16, seed=0)),
    (random.integers(0, 16, 1030), Wires.random(16, 1030, seed=1)),
    (random.integers(0, 16, 20), Wires.random(1030, 20, seed=2)),
]
CIRCUIT = Circuit.of(LAYERS)
BITS = random.random((75, 9)) < 0.5  # three words, the last one not full


@pytest.fixture(scope="module")
def expected():
    """Sample by sample, from the truth tables."""
    x = BITS
    for gates, wires in LAYERS:
        a, b = x[:, np.asarray(wires.a)], x[:, np.asarray(wires.b)]
        x = TRUTH_TABLES[np.asarray(gates), 2 * a + b].astype(bool)
    return x


def test_bits_are_packed_32_a_word_from_the_lowest():
    bits = np.zeros((33, 2), bool)
    bits[0, 0] = bits[31, 0] = bits[32, 1] = True
    assert jaxbp.pack_bits(bits).tolist() == [[1 + 2**31, 0], [0, 1]]


@pytest.mark.parametrize("samples", [0, 1, 32, 75])
def test_packed_bits_are_unpacked_again(samples):
    assert np.array_equal(jaxbp.unpack_bits(jaxbp.pack_bits(BITS[:samples]), samples), BITS[:samples])


def test_the_relaxed_network_of_hard_logits_is_the_circuit_exactly(expected):
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(BITS, dtype)
        for gates, wires in LAYERS:
            x = jaxbp.gate_layer(jaxbp.hard_logits(jnp.asarray(gates)), wires, x)
        assert np.array_equal(x, expected.astype(np.float32))


def test_words_are_evaluated_as_samples_are(expected):
    assert np.array_equal(CIRCUIT(BITS), expected)


def test_words_are_evaluated_within_jit_too():
    words = jaxbp.pack_bits(BITS)
    y = jax.jit(CIRCUIT.evaluate)(jnp.asarray(words))
    assert y.dtype == jnp.uint32
    assert np.array_equal(y, CIRCUIT.evaluate(words))


def test_the_histogram_counts_each_layers_gates():
    assert CIRCUIT.histogram().tolist() == [np.bincount(gates, minlength=16).tolist() for gates, _ in LAYERS]


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
def test_compiled_c_says_so_where_there_is_no_memory(tmp_path):
    source, program = tmp_path / "main.c", tmp_path / "main"
    malloc = "#include <stdlib.h>\n#define malloc(bytes) ((void)(bytes), (void *)0)\n"
    source.write_text(malloc + CIRCUIT.to_c() + "int main(void) { return circuit(1, 0, 0); }\n")
    subprocess.run(["cc", "-std=c99", source, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 1


# -------------------------------------------------------------------------------------------------------------- Verilog


def simulate(source, x):
    """The outputs of a module of one-bit assignments, of samples `(inputs, samples)` of 0 and 1.

    Reads what `to_verilog` may write and nothing else: declared vectors, an assignment to each bit or to a whole
    vector, and the operators ~ & ^ |, which bind in Verilog as they do in Python, on values of one bit.
    """
    lines = [line.strip() for line in source.splitlines()]
    assert re.fullmatch(r"module \w+ \(", lines[0]) and lines[-1] == "endmodule"
    values = {}
    for kind, high, name in re.findall(r"^\s*(input wire|output wire|wire) \[(\d+):0\] (\w+)", source, re.MULTILINE):
        values[name] = x if kind == "input wire" else np.full((int(high) + 1, x.shape[1]), 2)
        assert len(values[name]) == int(high) + 1
    for line in (line for line in lines if line.startswith("assign")):
        target, expression = re.fullmatch(r"assign (\S+) = (.+);", line).groups()
        if expression in values:
            values[target][...] = values[expression]
            continue
        name, index = re.fullmatch(r"(\w+)\[(\d+)\]", target).groups()
        terms = re.sub(r"1'b([01])", r"one * \1", expression)
        assert re.fullmatch(r"(\w+\[\d+\]|one \* [01]|[~&^|() ])+", terms)
        values[name][int(index)] = eval(terms, {"one": np.ones(x.shape[1], int)}, values) & 1
    assert all((value < 2).all() for value in values.values()), "a bit that nothing drives"
    return values["y"]


def test_simulated_verilog_gives_the_same_bits(expected):
    assert np.array_equal(simulate(CIRCUIT.to_verilog(), BITS.T.astype(int)).T, expected)


def test_the_simulation_sees_a_wrong_gate_and_a_bit_that_nothing_drives(expected):
    source = CIRCUIT.to_verilog()
    wrong = re.sub(r"(assign layer2\[0\] = )(.*);", r"\1~(\2);", source)
    assert not np.array_equal(simulate(wrong, BITS.T.astype(int)).T, expected)
    with pytest.raises(AssertionError, match="nothing drives"):
        simulate(re.sub(r".*assign layer0\[3\].*\n", "", source), BITS.T.astype(int))


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="needs Icarus Verilog")
def test_verilog_in_icarus_gives_the_same_bits(tmp_path, expected):
    rows = "\n".join("".join("01"[bit] for bit in sample[::-1]) for sample in BITS)
    (tmp_path / "samples.txt").write_text(rows)
    bench = f"""
        module test;
          reg [{CIRCUIT.inputs - 1}:0] samples [0:{len(BITS) - 1}];
          reg [{CIRCUIT.inputs - 1}:0] x;
          wire [{CIRCUIT.outputs - 1}:0] y;
          integer i;
          circuit gates(.x(x), .y(y));
          initial begin
            $readmemb("samples.txt", samples);
            for (i = 0; i < {len(BITS)}; i = i + 1) begin x = samples[i]; #1 $display("%b", y); end
          end
        endmodule
    """
    (tmp_path / "test.v").write_text(CIRCUIT.to_verilog() + bench)
    subprocess.run(["iverilog", "-Wall", "-o", "test", "test.v"], cwd=tmp_path, check=True)
    output = subprocess.run(["./test"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert [[bit == "1" for bit in line[::-1]] for line in output.split()] == expected.tolist()


@pytest.mark.parametrize("gate", range(16))
def test_each_expression_is_its_gate(gate):
    for row, (a, b) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert (
            eval(EXPRESSIONS[gate].format(a="a", b="b", zero="0", one="1"), {}, {"a": a, "b": b}) & 1
            == (TRUTH_TABLES[gate, row])
        )


# ------------------------------------------------------------------------------------------------------------ bad input

REFUSED = {
    "no layers": (lambda: Circuit.of([]), "Circuit: there are no layers; wants at least one"),
    "too few gates": (
        lambda: Circuit.of([(np.zeros(3, np.uint8), Wires.random(5, 4, seed=0))]),
        "Circuit: layer 0 has gates of shape (3,) from 0 to 0; wants 4 from 0 to 15",
    ),
    "a gate that is none": (
        lambda: Circuit.of([(np.array([1, 16]), Wires.random(5, 2, seed=0))]),
        "Circuit: layer 0 has gates of shape (2,) from 1 to 16; wants 2 from 0 to 15",
    ),
    "layers that do not join": (
        lambda: Circuit.of([LAYERS[0], LAYERS[2]]),
        "Circuit: layer 1 reads 1030 inputs; wants 16, the gates before",
    ),
    "other inputs": (
        lambda: CIRCUIT(BITS[:, :4]),
        "Circuit: x has shape (4, 3); wants (9, words)",
    ),
    "a name with a space": (lambda: CIRCUIT.to_c("my net"), "Circuit: name is 'my net'; wants an identifier"),
    "a name beyond ASCII": (lambda: CIRCUIT.to_c("naïve"), "Circuit: name is 'naïve'; wants an identifier"),
    "a name that begins with a digit": (
        lambda: CIRCUIT.to_verilog("1net"),
        "Circuit: name is '1net'; wants an identifier",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_circuit_is_refused(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message
