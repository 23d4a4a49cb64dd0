import json
import re

import numpy as np
import pytest
from hardened_report import HardenedReport
from verilog import needs_yosys

from experiments import train
from experiments.training.reports import logic
from experiments.training.reports.logic import hints
from jaxbp import Netlist


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
    assert "output wire [3:0] label" in code["v"]
    assert "// row[28 * i + j] is the pixel in row i and column j, from 0 to 1" in code["c"]
    for text in code.values():
        assert "Input 2 * (28 * row + column) + level: whether a pixel is above (level + 1) / 3" in text
        assert "class c has outputs 100 c to 100 c + 99" in text


def test_the_gates_are_counted(finished):
    _, output, folder = finished
    assert f"3,000 gates; {folder / 'gates.png'} shows their functions" in output


@pytest.fixture(scope="module")
def finished_table(gates_run, tmp_path_factory):
    """The color or else the number tells the classes apart. A name could end a comment of C."""
    path, random = tmp_path_factory.mktemp("table") / "own.csv", np.random.default_rng(0)
    labels = np.arange(120) % 3
    rows = [
        (x, "" if label < 2 else number, "red" if label else random.choice(["blue", "NA"]), "abc"[label])
        for x, number, label in zip(random.normal(0, 1, 120), random.random(120), labels, strict=True)
    ]
    path.write_text("\n".join(["x,b */,color,class", *(",".join(map(str, row)) for row in rows)]))
    settings = ["--layers", "2", "--gates", "60", "--tau", "2", "--levels", "5", "--epochs", "20", "--batch-size", "8"]
    return *gates_run("logic", "--data", str(path), "--target", "class", *settings), path


class TestReportOfATable(HardenedReport):
    least_accuracy = 0.8

    @pytest.fixture
    def finished(self, finished_table):
        return finished_table[:3]


def test_the_c_of_a_table_says_what_its_bits_and_rows_are(finished_table):
    code = (finished_table[2] / "circuit.c").read_text()
    assert re.match(r"// x\[0\]: x above -\d\.\d+\n", code) and "]: b */ missing\n" in code
    for line in ("row[2] is color (0 for 'blue', 1 for 'red').", "The classes are 0 for 'a', 1 for 'b', 2 for 'c'."):
        assert f"// {line}\n" in code


@needs_yosys
def test_the_lookup_tables_of_a_small_circuit_are_counted(finished, finished_table):
    assert re.search(
        r"^lookup tables of 4 inputs: \d+ for the gates and \d+ for the votes", finished_table[1], re.MULTILINE
    )
    assert "lookup tables" not in finished[1]


@needs_yosys
def test_a_failure_of_yosys_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(logic, "MAPPING_SECONDS", 0.001)
    assert logic.lookup_tables(Netlist.from_gates(2, [1], [0], [1], [2]), 1) == []
    assert "warning: the number of lookup tables failed, and is left out (TimeoutExpired" in capsys.readouterr().err


def test_a_table_with_other_categories_does_not_resume(finished_table, tmp_path, capsys):
    _, _, folder, path = finished_table
    saved = json.loads((folder / "config.json").read_text())
    assert saved["categories"] == [["color", ["blue", "red"]], ["class", ["a", "b", "c"]]]
    (other := tmp_path / "own.csv").write_text(path.read_text().replace("red", "green"))
    assert train.main(["--resume", "--run-dir", str(folder), "--epochs", "21", "--data", str(other)]) == 2
    assert "has the categories (('color', ('blue', 'green'))" in capsys.readouterr().err


def test_a_circuit_without_gates_gets_a_hint():
    (line,) = hints(0)
    assert line.startswith("no gate is left") and hints(1) == []
