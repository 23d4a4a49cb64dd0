import ctypes
import shutil

import numpy as np
import pytest
from compiled_rows import results_in_c

from jaxbp import Circuit, Wires
from jaxbp.estimators.quantizer import Quantizer
from jaxbp.estimators.source import c_float, c_source

random = np.random.default_rng(0)
ROWS = random.choice([-2.5, 0, 1, 3e-30, np.nan, 1e30], (1100, 5)).astype(np.float32)
QUANTIZER = Quantizer.of_tables("op", ROWS, np.ones(len(ROWS)), 4, {2})
CIRCUIT = Circuit.of([(random.integers(0, 16, 60), Wires.random(len(QUANTIZER), 60, seed=0))])
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
def test_c_quantizes_and_classifies_as_python_does(tmp_path):
    source = c_source("op", "predict", QUANTIZER, CIRCUIT, features=5, classes=3)
    wanted = CIRCUIT(QUANTIZER(ROWS)).reshape(-1, 3, 20).sum(axis=-1).argmax(axis=-1)
    assert len(set(wanted)) == 3
    assert np.array_equal(results_in_c(source, ROWS, tmp_path), wanted)


@needs_compiler
def test_c_returns_the_value_of_the_number_of_outputs_that_are_on(tmp_path):
    values = random.normal(size=61).astype(np.float32)
    source = c_source("op", "predict", QUANTIZER, CIRCUIT, features=5, classes=None, values=values)
    wanted = values[CIRCUIT(QUANTIZER(ROWS)).sum(axis=-1)]
    assert np.array_equal(results_in_c(source, ROWS, tmp_path, ctypes.c_float), wanted)


def test_names_that_c_reserves_are_refused():
    for name in ("for", "1st", "log"):
        with pytest.raises(ValueError, match=f"op: name is '{name}'"):
            c_source("op", name, QUANTIZER, CIRCUIT, features=5, classes=3)


def test_literals_are_exact():
    numbers = random.integers(0, 2**31, 500).astype(np.uint32).view(np.float32)
    for number in numbers[np.isfinite(numbers)]:
        assert np.float32(c_float(float(number)).removesuffix("f")) == number
    assert c_float(3.0) == "3.0f"
