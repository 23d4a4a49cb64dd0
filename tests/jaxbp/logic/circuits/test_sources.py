import pytest

from jaxbp.logic.circuits.sources import C_WORDS, EXPRESSIONS, VERILOG_WORDS, check_name
from jaxbp.logic.gates import TRUTH_TABLES


@pytest.mark.parametrize("gate", range(16))
def test_each_expression_is_its_gate(gate):
    for row, (a, b) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert (
            eval(EXPRESSIONS[gate].format(a="a", b="b", zero="0", one="1"), {}, {"a": a, "b": b}) & 1
            == (TRUTH_TABLES[gate, row])
        )


@pytest.mark.parametrize(("words", "language"), [(C_WORDS, "C"), (VERILOG_WORDS, "Verilog")])
def test_every_keyword_is_refused_as_a_name(words, language):
    for word in words:
        with pytest.raises(
            ValueError, match=f"op: name is '{word}', which is reserved in {language}; wants another name"
        ):
            check_name("op", word, words)
    check_name("op", "cells_2", words)


@pytest.mark.parametrize(
    "name",
    [
        "int32_t",
        "NULL",
        "abs",
        "printf",
        "sqrtf",
        "roundeven",
        "fabsd64",
        "_exit",
        "UINT8_MAX",
        "INT64_C",
        "_Bool",
        "__x",
    ],
)
def test_names_that_c_has_taken_are_refused(name):
    with pytest.raises(ValueError, match=f"op: name is '{name}', which is reserved in C; wants another name"):
        check_name("op", name, C_WORDS)
