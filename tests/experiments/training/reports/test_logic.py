"""The experiment `logic`: it reaches its accuracy when hardened, and reports what it learned."""

import json
import re
import shutil

import numpy as np
import pytest
from matplotlib import image

from experiments.training import run_directory
from experiments.training.compiled import load


@pytest.fixture(scope="module")
def finished(gates_run):
    """Run the command line with a smaller network and fewer epochs. Return its output and its folder."""
    return gates_run("logic", "--levels", "2", "--gates", "1000", "--layers", "3", "--epochs", "25")


def test_it_reaches_93_percent_hardened_and_says_so_last(finished):
    code, output, _ = finished
    assert code == 0
    assert float(re.fullmatch(r"test accuracy (\d\.\d{4})", output.splitlines()[-1])[1]) >= 0.93


def test_the_test_accuracy_is_that_of_the_circuit_evaluated_in_words(finished):
    relaxed, hardened = re.search(r"relaxed test accuracy (\S+), hardened (\S+)", finished[1]).groups()
    last = json.loads((finished[2] / "metrics.jsonl").read_text().splitlines()[-1])
    assert hardened == f"{last['test_accuracy']:.4f}"
    assert float(relaxed) >= 0.93


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_c_that_it_leaves_classifies_as_the_loaded_model_does(finished, tmp_path):
    _, output, folder = finished
    config, model = run_directory.load(folder)
    dataset, circuit = config.load(), model.harden()
    bits = np.asarray(config.bits(dataset.test_images)) > 0
    scores = circuit(bits).reshape(len(bits), model.classes, -1).sum(axis=-1)
    library = load((folder / "circuit.c").read_text(), shutil.which("cc"), tmp_path)
    classes = [library.circuit_classify(sample.tobytes()) for sample in bits.astype(np.uint8)]
    assert classes == np.argmax(scores, axis=-1).tolist()
    assert f"test accuracy {np.mean(classes == dataset.test_labels):.4f}" == output.splitlines()[-1]


def test_the_code_is_of_the_simplified_gates_and_says_what_its_bits_are(finished):
    _, output, folder = finished
    (gates,) = re.findall(r"^([\d,]+) gates when simplified", output, re.MULTILINE)
    code = {suffix: (folder / f"circuit.{suffix}").read_text() for suffix in "cv"}
    assert 0 < code["v"].count("wire gate") == int(gates.replace(",", "")) < 3000
    for text in code.values():
        assert "Input 2 * (28 * row + column) + level: whether a pixel is above (level + 1) / 3" in text
        assert "class c has outputs 100 c to 100 c + 99" in text


def test_the_gates_are_counted_drawn_and_timed(finished):
    _, output, folder = finished
    assert f"3,000 gates; {folder / 'gates.png'} shows their functions" in output
    assert min(image.imread(folder / "gates.png").shape[:2]) > 100
    assert re.search(r"on one CPU core: [\d,]+ samples/s in NumPy", output)
