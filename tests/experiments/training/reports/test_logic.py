import ctypes
import re
import shutil

import numpy as np
import pytest
from hardened_report import HardenedReport

from experiments.data import user_data
from experiments.training.compiled import load
from experiments.training.reports.logic import hints


@pytest.fixture(scope="module")
def finished(gates_run):
    return gates_run("logic", "--levels", "2", "--gates", "1000", "--layers", "3", "--epochs", "25")


class TestReport(HardenedReport):
    least_accuracy = 0.93


def test_the_code_is_of_the_simplified_gates_and_says_what_its_bits_are(finished):
    _, output, folder = finished
    (gates,) = re.findall(r"^([\d,]+) gates when simplified", output, re.MULTILINE)
    code = {suffix: (folder / f"circuit.{suffix}").read_text() for suffix in "cv"}
    assert 0 < code["v"].count("wire g") == int(gates.replace(",", "")) < 3000
    assert "output reg [3:0] label" in code["v"]
    for text in code.values():
        assert "Input 2 * (28 * row + column) + level: whether a pixel is above (level + 1) / 3" in text
        assert "class c has outputs 100 c to 100 c + 99" in text


def test_the_gates_are_counted(finished):
    _, output, folder = finished
    assert f"3,000 gates; {folder / 'gates.png'} shows their functions" in output


@pytest.fixture(scope="module")
def finished_table(gates_run, tmp_path_factory):
    """The second feature tells the classes apart, and the others are noise. A name would end a comment of C."""
    path, random = tmp_path_factory.mktemp("table") / "own.csv", np.random.default_rng(0)
    labels = np.arange(120) % 3
    rows = zip(
        random.normal(0, 1, 120), labels + random.uniform(-0.4, 0.4, 120), random.random(120), labels, strict=True
    )
    path.write_text("\n".join(["x,b */,c,class", *(",".join(map(str, row)) for row in rows)]))
    settings = ["--layers", "2", "--gates", "60", "--tau", "2", "--levels", "5", "--epochs", "20", "--batch-size", "8"]
    return *gates_run("logic", "--data", str(path), "--target", "class", *settings), path


class TestReportOfATable(HardenedReport):
    least_accuracy = 0.8

    @pytest.fixture
    def finished(self, finished_table):
        return finished_table[:3]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_c_of_a_table_classifies_its_rows(finished_table, tmp_path):
    _, output, folder, path = finished_table
    code = (folder / "circuit.c").read_text()
    assert re.match(r"/\* Each input is a bit:\n   0: x > -0\.\d+\n", code) and "\n   5: b __ > " in code
    library = load(code, shutil.which("cc"), tmp_path)
    dataset = user_data.read(path, "class")
    rows = [np.ascontiguousarray(row) for row in dataset.test_images]
    classes = [library.circuit_classify_row(row.ctypes.data_as(ctypes.c_void_p)) for row in rows]
    assert f"test accuracy {np.mean(classes == dataset.test_labels):.4f}" == output.splitlines()[-1]


def test_a_circuit_without_gates_gets_a_hint():
    (line,) = hints(0)
    assert line.startswith("no gate is left") and hints(1) == []
