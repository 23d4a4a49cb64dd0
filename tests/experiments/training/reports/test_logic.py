import re

import pytest
from hardened_report import HardenedReport


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
    for text in code.values():
        assert "Input 2 * (28 * row + column) + level: whether a pixel is above (level + 1) / 3" in text
        assert "class c has outputs 100 c to 100 c + 99" in text


def test_the_gates_are_counted(finished):
    _, output, folder = finished
    assert f"3,000 gates; {folder / 'gates.png'} shows their functions" in output
