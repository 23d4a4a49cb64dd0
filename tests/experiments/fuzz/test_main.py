"""Random cases: the same for the same seed, right for right ops, and a mistake is found with lines that show it."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

import jaxbp
from experiments.fuzz import __main__ as fuzz
from experiments.fuzz.cases import DATA, draw_program
from jaxbp.catalogue import CATALOGUE
from jaxbp.pairing import Pair

ENTRIES = {entry.name: entry for entry in CATALOGUE}


def test_a_case_depends_on_its_seed_and_number_alone():
    for number in range(12):
        one, same, other = (draw_program(seed, number, CATALOGUE, False) for seed in (3, 3, 4))
        assert one == same != other


def test_shapes_options_dtypes_and_transformations_vary():
    drawn = [draw_program(0, number, [ENTRIES["sum"]], True) for number in range(60)]
    for field in ("case", "dtype", "implementation", "transformation", "exact"):
        assert len({str(getattr(program, field)) for program in drawn}) > 1
    assert len({program.case.options["axis"] for program in drawn}) > 5
    assert any(0 in argument.shape for program in drawn for argument in program.case.arguments)


@pytest.fixture
def wrong(monkeypatch):
    """`tanh` with a gradient that forgets its slope."""
    pair = Pair(jnp.tanh, {"xla": lambda dy, x: dy}, name="tanh")

    def tanh(x, *, implementation=None):
        return pair(x, implementation="autodiff" if implementation == "autodiff" else "xla")

    entry = dataclasses.replace(ENTRIES["tanh"], function=tanh)
    monkeypatch.setattr(fuzz, "CATALOGUE", (entry,))
    monkeypatch.setattr(jaxbp, "tanh", tanh)


def test_a_mistake_is_found_and_its_lines_show_it(wrong, tmp_path, capsys):
    path = tmp_path / "fuzz.json"
    assert fuzz.main(["--seed", "0", "--cases", "24", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["cases"] == 24 and sum(report["counts"]["dtype"].values()) == 24
    failure = report["failures"][0]
    assert failure["op"] == "tanh" and "from float64" in failure["message"]
    capsys.readouterr()
    exec(failure["lines"], {})
    assert capsys.readouterr().out.count("Array") >= 3
    # It goes on where it stopped.
    assert fuzz.main(["--resume", "--cases", "32", "--json", str(path)]) == 1
    again = json.loads(path.read_text())
    assert (again["cases"], again["seed"]) == (32, 0) and again["failures"][: len(report["failures"])] == report[
        "failures"
    ]
    assert sum(again["counts"]["data"].values()) == 4 * len(DATA)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ops", "gelu_"], "unknown op gelu_"),
        (["--resume"], "no file to go on from"),
        (["--json", "no/x"], "no folder"),
    ],
)
def test_what_the_user_can_mend_is_one_line(args, message, capsys):
    assert fuzz.main(args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.once
def test_half_a_minute_of_random_cases():
    assert fuzz.main(["--seed", "1", "--seconds", "30"]) == 0
