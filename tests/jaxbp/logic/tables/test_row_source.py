import ctypes
import shutil

import numpy as np
import pytest
from compiled_rows import results_in_c

from jaxbp import Circuit, Wires
from jaxbp.logic.tables import columns
from jaxbp.logic.tables.quantizer import Quantizer
from jaxbp.logic.tables.row_source import c_float, c_source, circuit_comment

random = np.random.default_rng(0)
ROWS = random.choice([-2.5, 0, 1, 3e-30, np.nan, 1e30], (1100, 5)).astype(np.float32)
QUANTIZER = Quantizer.of_tables("op", ROWS, np.ones(len(ROWS)), 4, {2})
NAMES = ["a", "b */", "c", "d\n", "e"]
ROW = len(NAMES), columns.describe(NAMES, {})
CIRCUIT = Circuit.of([(random.integers(0, 16, 60), Wires.random(len(QUANTIZER), 60, seed=0))])
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
def test_c_quantizes_and_classifies_as_python_does(tmp_path):
    source = c_source("op", "predict", QUANTIZER, CIRCUIT, *ROW, classes=range(3))
    wanted = CIRCUIT(QUANTIZER(ROWS)).reshape(-1, 3, 20).sum(axis=-1).argmax(axis=-1)
    assert len(set(wanted)) == 3
    comment = circuit_comment(QUANTIZER, NAMES, {}, 60, 3)
    assert np.array_equal(results_in_c(comment + source, ROWS, tmp_path), wanted)


def test_comments_say_what_rows_bits_outputs_and_classes_are():
    source = c_source("op", "f", QUANTIZER, CIRCUIT, *ROW, classes=["no", "yes"], circuit_name="circuit")
    assert source.startswith("// row[0] is a.\n// row[1] is b */.\n")
    assert "// row[3] is d .\n" in source and "// The classes are 0 for 'no', 1 for 'yes'.\n" in source
    assert "int circuit_classify(" in source and "int f(const float *row)" in source and "f_circuit" not in source
    comment = circuit_comment(QUANTIZER, NAMES, {}, 60, 3).splitlines()
    assert len(comment) == len(QUANTIZER) + 1 and comment[0].startswith("// x[0]: a above ")
    assert comment[-1] == "// Group g of the outputs is y[20 g] to y[20 g + 19]."


@needs_compiler
def test_c_returns_the_value_of_the_number_of_outputs_that_are_on(tmp_path):
    values = random.normal(size=61).astype(np.float32)
    source = c_source("op", "predict", QUANTIZER, CIRCUIT, *ROW, classes=None, values=values)
    wanted = values[CIRCUIT(QUANTIZER(ROWS)).sum(axis=-1)]
    assert np.array_equal(results_in_c(source, ROWS, tmp_path, ctypes.c_float), wanted)


def test_names_that_c_reserves_are_refused():
    for name in ("for", "1st", "log"):
        with pytest.raises(ValueError, match=f"op: name is '{name}'"):
            c_source("op", name, QUANTIZER, CIRCUIT, *ROW, classes=range(3))


def test_literals_are_exact():
    numbers = random.integers(0, 2**31, 500).astype(np.uint32).view(np.float32)
    for number in numbers[np.isfinite(numbers)]:
        assert np.float32(c_float(float(number)).removesuffix("f")) == number
    assert c_float(3.0) == "3.0f"
