import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from experiments.children import Done
from experiments.fuzz import __main__ as fuzz
from experiments.fuzz import work
from experiments.fuzz.program import DATA, Program, draw_program
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


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1.2e-38), ("float64", 1.5e-154)])
def test_the_least_number_can_be_held_against_float64(dtype, least):
    entry = ENTRIES["kl_divergence"]
    program = Program(entry, entry.small, dtype, "xla", "plain")
    with jax.enable_x64(dtype == "float64"):
        drawn = [program.arguments(np.random.default_rng(seed), "with special values").floats[1] for seed in range(20)]
    assert np.min([p[p > 0].min() for p in drawn]) == pytest.approx(least, rel=0.1)


def drawn(name, kind, invalid_labels=False):
    program = Program(ENTRIES[name], ENTRIES[name].small, "float32", "xla", "plain", invalid_labels=invalid_labels)
    random = np.random.default_rng(0)
    arguments = program.arguments(random, kind)
    return arguments, program.masked(np.ones(ENTRIES[name].small.arguments[0].shape[:-1]), random, kind)


def test_numbers_at_the_edges_are_drawn():
    tiny = np.finfo(np.float32).tiny
    (x,) = drawn("logsumexp", "with subnormal numbers")[0].floats
    assert ((np.abs(x) > 0) & (np.abs(x) < tiny)).any()
    (x,) = drawn("logsumexp", "far from zero")[0].floats
    assert np.abs(x).min() > 900
    rows = [drawn("softmax", "with ruled-out entries")[0].floats[0].reshape(-1, 4)]
    assert (rows[0] == -np.inf).any() and np.isfinite(rows[0]).any()
    _, cotangent = drawn("softmax", "under a mask")
    assert 0 < cotangent.mean() < 1


def test_an_invalid_label_is_under_a_mask():
    arguments, cotangent = drawn("mlp_softmax_cross_entropy", "normal", invalid_labels=True)
    _, labels, *_ = arguments.leaves
    is_valid = (labels >= 0) & (labels < 4)
    assert not is_valid.all() and is_valid.any()
    np.testing.assert_array_equal(cotangent, is_valid)


@pytest.fixture(autouse=True)
def settings():
    before = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def wrong(monkeypatch):
    pair = Pair(jnp.tanh, {"xla": lambda dy, x: dy}, name="tanh")

    def tanh(x, *, implementation=None):
        return pair(x, implementation="autodiff" if implementation == "autodiff" else "xla")

    entry = dataclasses.replace(ENTRIES["tanh"], function=tanh)
    for module in (fuzz, work):
        monkeypatch.setattr(module, "CATALOGUE", (entry,))
    monkeypatch.setattr(jaxbp, "tanh", tanh)


def test_a_mistake_is_found_and_its_lines_show_it(wrong, tmp_path, capsys):
    path = tmp_path / "fuzz.json"
    assert fuzz.main(["--seed", "2", "--cases", "8", "--processes", "0", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["cases"] == 8 and sum(report["counts"]["dtype"].values()) == 8
    failure = report["failures"][0]
    assert failure["op"] == "tanh" and "(float64)" in failure["message"]
    capsys.readouterr()
    exec(failure["lines"], {})
    assert capsys.readouterr().out.count("Array") >= 3
    assert fuzz.main(["--resume", "--cases", "16", "--processes", "0", "--json", str(path)]) == 1
    again = json.loads(path.read_text())
    assert (again["cases"], again["seed"]) == (16, 2) and again["failures"][: len(report["failures"])] == report[
        "failures"
    ]
    assert sum(again["counts"]["data"].values()) == 2 * len(DATA)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ops", "gelu_"], "unknown op gelu_"),
        (["--resume"], "which is not a file"),
        (["--json", "no/x"], "no folder"),
        (["--processes", "-1"], "--processes is -1"),
    ],
)
def test_what_the_user_can_mend_is_one_line(args, message, capsys):
    assert fuzz.main(args) == 2
    assert message in capsys.readouterr().err


def test_a_crash_is_a_finding_and_said_to_be_the_librarys_where_jax_alone_crashes_too(tmp_path, monkeypatch, capsys):
    path = tmp_path / "fuzz.json"

    def in_children(_, tasks, processes, limit):
        """Program 1 kills its process at the third draw. Program 2 kills it at once, except under autodiff."""
        assert (processes, limit) == (3, 9.0)
        for task in tasks:
            passed = [work.Outcome(draw, None) for draw in task.draws]
            ours = task.implementation == "drawn"
            if task.number == 1:
                yield Done(task, passed[: 2 * ours], "SIGABRT", "why")
            else:
                yield Done(task, *([], "no answer in 9 s") if task.number == 2 and ours else (passed,))

    monkeypatch.setattr(fuzz, "in_children", in_children)
    args = ["--ops", "tanh", "--seed", "0", "--cases", "32", "--processes", "3", "--case-seconds", "9"]
    assert fuzz.main([*args, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert (report["cases"], report["lost"], report["failures"]) == (32, 5 + 7, [])
    assert report["counts"]["op"] == {"tanh": 32 - 5 - 7 - 2}
    theirs, ours = report["crashes"]
    assert (theirs["number"], theirs["death"], theirs["said"], theirs["autodiff"]) == (10, "SIGABRT", "why", "SIGABRT")
    assert (ours["number"], ours["death"], ours["autodiff"]) == (16, "no answer in 9 s", None)
    exec(theirs["lines"], {})
    printed = capsys.readouterr().out
    assert "2 crashed, of which 1 also crashed with autodiff" in printed and printed.count("Array") >= 3


def dying(task):
    if task.implementation == "drawn":
        os.abort()
    return work.work(task)


def test_a_process_that_dies_does_not_end_the_run(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "work", dying)
    assert fuzz.main(["--ops", "relu", "--seed", "0", "--cases", "16", "--processes", "2"]) == 1
    assert "16 cases" in (printed := capsys.readouterr().out) and printed.count("the crash is jaxbp's") == 2


def test_random_cases_are_right():
    assert fuzz.main(["--seed", "1", "--cases", "64"]) == 0
