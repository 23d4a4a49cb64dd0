"""The experiment `logic-conv`: the hardened network learns, and the run reports what it learned."""

import json
import re
import shutil

import numpy as np
import pytest
from matplotlib import image

from experiments.configs import LogicConvConfig
from experiments.training import run_directory
from experiments.training.compiled import load
from experiments.training.reports import logic, logic_conv


@pytest.fixture(scope="module")
def finished(gates_run):
    """Run the command line with a smaller network and fewer epochs. Return its output and its folder."""
    size = ["--kernels", "8", "--levels", "1", "--tau", "2"]
    training = ["--epochs", "2", "--learning-rate", "0.1", "--shift", "0", "--devices", "1"]
    return gates_run("logic-conv", *size, *training)


def test_it_learns_hardened_and_says_so_last(finished):
    code, output, _ = finished
    assert code == 0
    assert float(re.fullmatch(r"test accuracy (\d\.\d{4})", output.splitlines()[-1])[1]) >= 0.7


def test_the_test_accuracy_is_that_of_the_circuit_evaluated_in_words(finished):
    relaxed, hardened = re.search(r"relaxed test accuracy (\S+), hardened (\S+)", finished[1]).groups()
    last = json.loads((finished[2] / "metrics.jsonl").read_text().splitlines()[-1])
    assert hardened == f"{last['test_accuracy']:.4f}"
    assert float(relaxed) >= 0.7


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_c_that_it_leaves_classifies_as_the_loaded_model_does(finished, tmp_path):
    _, output, folder = finished
    config, model = run_directory.load(folder)
    dataset, circuit = config.load(), model.harden()
    bits = np.asarray(config.bits(dataset.test_images)) > 0
    library = load((folder / "circuit.c").read_text(), shutil.which("cc"), tmp_path)
    classes = [library.circuit_classify(sample.tobytes()) for sample in bits.astype(np.uint8)]
    assert classes == logic.hardened_predictions(circuit, bits, model.classes).tolist()
    assert f"test accuracy {np.mean(classes == dataset.test_labels):.4f}" == output.splitlines()[-1]


def test_the_gates_are_counted_drawn_and_timed(finished):
    _, output, folder = finished
    circuit = run_directory.load(folder)[1].harden()
    once, placed, simplified = re.findall(r"^([\d,]+) (?:gates, (?:each|with)|of these)", output, re.MULTILINE)
    assert once == f"{circuit.gates:,}" and placed == f"{circuit.placed_gates:,}"
    assert 0 < int(simplified.replace(",", "")) < circuit.placed_gates
    assert min(image.imread(folder / "gates.png").shape[:2]) > 100
    assert re.search(r"on one CPU core: [\d,]+ samples/s in NumPy", output)


def test_the_code_says_what_its_bits_are(finished):
    _, _, folder = finished
    for suffix in "cv":
        text = (folder / f"circuit.{suffix}").read_text()
        assert "Input 28 * (28 * level + row) + column: whether a pixel is above\n   (level + 1) / 2" in text


def test_inputs_of_colours_are_a_channel_after_the_other(finished):
    circuit = run_directory.load(finished[2])[1].harden()
    comment = logic_conv.comment(LogicConvConfig(dataset="cifar10", levels=2), circuit)
    assert "Input 32 * (32 * (2 * channel + level) + row) + column" in comment
    assert f"There are {circuit.outputs} outputs" in comment
