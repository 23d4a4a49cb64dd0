import ctypes
import itertools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verilog import in_icarus, needs_icarus

import jaxbp
from experiments.training.compiled import compiled, load
from jaxbp import ConvolutionalCircuit, TreeWires, Wires
from jaxbp.logic.circuits.sources import VERILOG_WORDS
from jaxbp.logic.gates import TRUTH_TABLES

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

random = np.random.default_rng(0)


SPARSE = [1, 2, 4, 6, 8]  # with these gates, most pools are not 1


def convolution(channels, kernels, window, depth=2, gates=SPARSE, **options):
    wires = TreeWires.random(channels, kernels, window, depth=depth, seed=kernels)
    return random.choice(gates, (kernels, wires.gates)), wires, options


def layers(*sizes):
    return [
        (random.integers(0, 16, gates), Wires.random(inputs, gates, seed=gates))
        for inputs, gates in itertools.pairwise(sizes)
    ]


PARTS = {
    "padding and pools that leave a row over": (
        (2, 7, 6),
        [convolution(2, 5, 3, depth=3, padding=1, pool=2), convolution(5, 4, (2, 1), pool=(1, 2), gates=range(16))],
        layers(8, 30, 20),
    ),
    "strides": (
        (3, 9, 10),
        [
            convolution(3, 6, (3, 2), depth=1, stride=(2, 3), padding=(0, 2)),
            convolution(6, 7, 2, padding="SAME", stride=2, gates=[6]),
        ],
        layers(42, 21),
    ),
    "no layers": ((1, 5, 5), [convolution(1, 6, 5, depth=4, padding=2, pool=(3, 2), gates=[9])], []),
    "pass-throughs and constants": (
        (2, 4, 4),
        [convolution(2, 3, 2, gates=[3], padding=1, pool=2), convolution(3, 3, 1, gates=[15])],
        layers(12, 4),
    ),
}
CIRCUITS = {name: ConvolutionalCircuit.of(*parts) for name, parts in PARTS.items()}
FIRST = next(iter(CIRCUITS.values()))
all_circuits = pytest.mark.parametrize("name", CIRCUITS)


def samples(circuit, count=75):
    return np.random.default_rng(1).random((count, *circuit.shape)) < 0.4


def gate(number, a, b):
    return TRUTH_TABLES[number, 2 * a + b].astype(bool)


def convolved(x, gates, wires, stride=1, padding=0, pool=1):
    (s, t), (p, q) = np.broadcast_to(stride, 2), np.broadcast_to(pool, 2)
    _, _, height, width = x.shape
    if padding == "SAME":
        needed = [max(0, (-(-n // s) - 1) * s + f - n) for n, f in zip((height, width), wires.window, strict=True)]
        padding = [(n // 2, n - n // 2) for n in needed]
    else:
        padding = [(n, n) for n in np.broadcast_to(padding, 2)]
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    rows, columns = (x.shape[2] - wires.window[0]) // s + 1, (x.shape[3] - wires.window[1]) // t + 1
    y = np.empty((len(x), wires.kernels, rows, columns), bool)
    for k, i, j in np.ndindex(*y.shape[1:]):
        values = [x[:, c, s * i + u, t * j + v] for c, u, v in np.asarray(wires.leaves)[k]]
        numbers = iter(gates[k])
        while len(values) > 1:
            values = [gate(next(numbers), a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        y[:, k, i, j] = values[0]
    pooled = np.empty((len(x), wires.kernels, rows // p, columns // q), bool)
    for i, j in np.ndindex(*pooled.shape[2:]):
        pooled[:, :, i, j] = y[:, :, p * i : p * i + p, q * j : q * j + q].any(axis=(2, 3))
    return pooled


def expected(name, x):
    _, convolutions, layers = PARTS[name]
    for gates, wires, options in convolutions:
        x = convolved(x, gates, wires, **options)
    x = x.reshape(len(x), -1)
    for gates, wires in layers:
        x = gate(gates, x[:, np.asarray(wires.a)], x[:, np.asarray(wires.b)])
    return x


@all_circuits
def test_words_are_evaluated_as_every_place_is(name):
    circuit = CIRCUITS[name]
    bits = samples(circuit, 1030)
    y = circuit(bits)
    assert y.shape == (1030, circuit.outputs)
    assert len(np.unique(y, axis=0)) > 1 or name == "pass-throughs and constants"
    assert np.array_equal(y, expected(name, bits))


def test_words_are_evaluated_within_jit_too():
    words = jaxbp.pack_bits(samples(FIRST).reshape(75, -1))
    y = jax.jit(FIRST.evaluate)(jnp.asarray(words))
    assert y.dtype == jnp.uint32
    assert np.array_equal(y, FIRST.evaluate(words))


def test_the_relaxed_convolution_of_hard_logits_is_the_circuit_exactly():
    shape, (first, _), _ = PARTS["padding and pools that leave a row over"]
    gates, wires, options = first
    bits = samples(FIRST)
    logits = jaxbp.hard_logits(jnp.asarray(gates))
    y = jaxbp.logic_conv2d_or_pool2d(logits, wires, jnp.asarray(bits, jnp.float32), **options)
    assert np.array_equal(y.reshape(75, -1), ConvolutionalCircuit.of(shape, [first])(bits).astype(np.float32))


@all_circuits
def test_one_netlist_has_all_places(name):
    circuit, bits = CIRCUITS[name], samples(CIRCUITS[name])
    netlist = circuit.netlist()
    assert np.array_equal(netlist(bits.reshape(len(bits), -1)), expected(name, bits))
    assert np.array_equal(netlist.simplify()(bits.reshape(len(bits), -1)), expected(name, bits))


def test_gates_are_counted_once_a_kernel_and_once_a_place():
    assert FIRST.gates == 5 * 7 + 4 * 3 + 50
    assert FIRST.placed_gates == 5 * (36 * 7 + 9 * 3) + 4 * (4 * 3 + 2 * 1) + 50
    (first, second), layers = PARTS["padding and pools that leave a row over"][1:]
    counted = [np.bincount(np.ravel(part[0]), minlength=16).tolist() for part in (first, second, *layers)]
    assert FIRST.histogram().tolist() == counted


def test_kernels_that_cannot_be_simplified_are_all_placed():
    circuit = ConvolutionalCircuit.of((1, 4, 4), [convolution(1, 1, 2, gates=[6], pool=3)])
    assert len(circuit.netlist()) == circuit.placed_gates == 9 * 3 + 8


@needs_cc
@all_circuits
def test_compiled_c_gives_the_same_words(tmp_path, name):
    circuit = CIRCUITS[name]
    function = compiled(circuit, shutil.which("cc"), tmp_path)
    for words in (0, 1, 35):
        x = random.integers(0, 2**32, (circuit.inputs, words), np.uint32)
        assert np.array_equal(function(x), circuit.evaluate(x))


@needs_cc
def test_compiled_c_classifies_and_may_stand_beside_another(tmp_path):
    library = load(FIRST.to_c("net", classes=5) + FIRST.to_c("other"), shutil.which("cc"), tmp_path)
    bits = samples(FIRST)
    wanted = FIRST(bits).reshape(len(bits), 5, 4).sum(axis=-1).argmax(axis=-1)
    assert len(set(wanted.tolist())) > 1
    assert [library.net_classify(b.tobytes()) for b in bits.astype(np.uint8)[:20]] == wanted[:20].tolist()
    words, classes = jaxbp.pack_bits(bits.reshape(75, -1)), np.empty(96, np.intc)
    library.net_classify_words.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    library.net_classify_words(3, words.ctypes.data, classes.ctypes.data)
    assert classes[:75].tolist() == wanted.tolist()


@needs_icarus
@all_circuits
def test_verilog_in_icarus_gives_the_same_bits(tmp_path, name):
    circuit = CIRCUITS[name]
    bits = samples(circuit, 9)
    y = in_icarus(circuit.to_verilog(), bits.reshape(9, -1), circuit.outputs, tmp_path)
    assert np.array_equal(y, expected(name, bits))


@needs_icarus
def test_the_label_in_verilog_is_the_first_of_the_largest_groups(tmp_path):
    bits = samples(FIRST, 9)
    labels = in_icarus(FIRST.to_verilog(classes=5), bits.reshape(9, -1), 3, tmp_path, port="label") @ [1, 2, 4]
    assert np.array_equal(labels, FIRST(bits).reshape(9, 5, -1).sum(axis=2).argmax(axis=1))


@needs_icarus
def test_a_pipeline_takes_a_sample_at_each_edge_and_gives_it_as_many_edges_later_as_it_has_layers(tmp_path):
    bits, source = samples(FIRST, 9), FIRST.to_verilog(pipelined=True)
    assert "localparam LATENCY = 4;" in source
    assert np.array_equal(in_icarus(source, bits.reshape(9, -1), FIRST.outputs, tmp_path), FIRST(bits))
    for table_inputs in (4, 6):
        source = FIRST.to_verilog(pipelined=True, classes=5, table_inputs=table_inputs)
        labels = in_icarus(source, bits.reshape(9, -1), 3, tmp_path, port="label") @ [1, 2, 4]
        assert np.array_equal(labels, FIRST(bits).reshape(9, 5, -1).sum(axis=2).argmax(axis=1))


@pytest.mark.parametrize("pipelined", [False, True])
def test_verilog_declares_no_keyword(pipelined):
    source = re.sub(r"//.*", "", FIRST.to_verilog("net", pipelined))
    genvars = itertools.chain(*(found.split(", ") for found in re.findall(r"genvar ([^;]*)", source)))
    instances = re.findall(r"^ *net_\w+ (\w+) \(", source, re.MULTILINE)
    declared = {*genvars, *re.findall(r"(?:begin :|(?<!end)module|\breg|\bwire)(?: \[[^]]*\])? (\w+)", source)}
    assert {"net", "net_convolution1", "channel", "window", "pools", "y1"} <= declared and "part0" in instances
    declared |= {*instances}
    assert not VERILOG_WORDS & declared


GATES, TREES, _ = convolution(2, 3, 2, gates=[6])
REFUSED = {
    "a shape without channels": (
        lambda: ConvolutionalCircuit.of((4, 4), [(GATES, TREES)]),
        "ConvolutionalCircuit: shape is (4, 4); wants (channels, height, width), each at least 1",
    ),
    "no convolutions": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), []),
        "ConvolutionalCircuit: there are no convolutions; wants at least one convolution",
    ),
    "too few gates": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES[:2], TREES)]),
        "ConvolutionalCircuit: convolution 0 has gates of shape (2, 3) with values from 6 to 6; wants shape (3, 3) "
        "and values from 0 to 15",
    ),
    "a gate that is none": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES + 10, TREES)]),
        "ConvolutionalCircuit: convolution 0 has gates of shape (3, 3) with values from 16 to 16; wants shape (3, 3) "
        "and values from 0 to 15",
    ),
    "other channels": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES, TREES), (GATES, TREES)]),
        "ConvolutionalCircuit: convolution 1 reads 2 channels; wants 3, the number of channels of its input",
    ),
    "a pool that is none": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES, TREES, dict(pool=0))]),
        "ConvolutionalCircuit: convolution 0: pool is 0; wants an int of at least 1, or a pair of such ints",
    ),
    "a padding that is none": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES, TREES, dict(padding="FULL"))]),
        "ConvolutionalCircuit: convolution 0: padding is 'FULL'; wants 'VALID', 'SAME', or 'SAME_LOWER'; or an "
        "int; or a sequence with one entry per axis (2 in total), each an int or a pair (before, after). Each int "
        "is at least 0",
    ),
    "a pool larger than the image": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES, TREES, dict(pool=(1, 4)))]),
        "ConvolutionalCircuit: convolution 0 has an output of 3 x 3 positions; wants at least 1 x 4, the size of the "
        "pool's window",
    ),
    "layers that do not join": (
        lambda: ConvolutionalCircuit.of((2, 4, 4), [(GATES, TREES, dict(pool=3))], layers(27, 5)),
        "ConvolutionalCircuit: the first layer reads 27 inputs; wants 3, the number of outputs of the "
        "convolutions, 3 x 1 x 1",
    ),
    "images of another shape": (
        lambda: FIRST(np.zeros((3, 2, 6, 7), bool)),
        "ConvolutionalCircuit: bits has shape (3, 2, 6, 7); wants (samples, 2, 7, 6)",
    ),
    "other inputs": (
        lambda: FIRST.evaluate(np.zeros((3, 1), np.uint32)),
        "ConvolutionalCircuit: x has shape (3, 1); wants (84, words)",
    ),
    "a keyword of C": (
        lambda: FIRST.to_c("auto"),
        "ConvolutionalCircuit: name is 'auto', which is reserved in C; wants another name",
    ),
    "classes of unequal size": (
        lambda: FIRST.to_c(classes=3),
        "ConvolutionalCircuit: classes is 3; wants None or a divisor of the 20 outputs",
    ),
    "a keyword of Verilog": (
        lambda: FIRST.to_verilog("cell"),
        "ConvolutionalCircuit: name is 'cell', which is reserved in Verilog; wants another name",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_circuit_is_refused(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message


def test_a_convolution_of_another_kind_is_refused():
    with pytest.raises(
        TypeError, match=r"convolution 0 is 'x'; wants \(gates, wires\), where wires is a jaxbp.TreeWires"
    ):
        ConvolutionalCircuit.of((2, 4, 4), "x")


def test_an_unknown_option_is_refused():
    with pytest.raises(
        TypeError, match=r"convolution 0 has the options window; wants only the options stride, padding, and pool"
    ):
        ConvolutionalCircuit.of((2, 4, 4), [(GATES, TREES, dict(window=2))])


def test_it_prints_its_sizes_and_not_its_arrays():
    assert repr(FIRST) == "ConvolutionalCircuit(2 x 7 x 6 -> 5 x 3 x 3 -> 4 x 2 x 1, layers of 30, 20 gates)"
    assert repr(CIRCUITS["no layers"]) == "ConvolutionalCircuit(1 x 5 x 5 -> 6 x 1 x 2)"
