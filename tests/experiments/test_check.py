import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from experiments import check
from jaxbp.catalogue import Argument, Case, Entry

PAIR = jaxbp.Pair(jnp.sin, {"xla": lambda dy, x: dy * jnp.cos(x).at[2].add(jnp.nan)}, name="wrong")


def wrong(x, *, implementation=None):
    return PAIR(x, implementation=implementation)


QUICK = ["--implementations", "xla", "autodiff", "--order", "1"]


def test_an_op_and_its_backward_are_checked_in_each_dtype(tmp_path, capsys):
    path = tmp_path / "relu.json"
    assert check.main(["relu", *QUICK, "--dtype", "float32", "float64", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["passed"] and report["command"].startswith("python -m experiments.check relu")
    assert {(row["op"], row["implementation"]) for row in report["rows"]} == {
        (op, implementation) for op in ("relu", "relu_backward") for implementation in ("xla", "autodiff")
    }
    assert {row["dtype"] for row in report["rows"]} == {"float32", "float64"}
    printed = capsys.readouterr().out
    assert "ok      relu_backward, xla" in printed and "0 failed" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_verbose_prints_a_row_for_every_result(capsys):
    assert check.main(["relu", *QUICK, "--verbose"]) == 0
    assert "max abs" in capsys.readouterr().out


def test_a_failure_names_the_worst_element_and_exits_with_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "CATALOGUE", (Entry(wrong, Case((Argument((4,)),)), {}),))
    path = tmp_path / "wrong.json"
    assert check.main(["wrong", *QUICK, "--json", str(path)]) == 1
    assert "failed: wrong, xla, float32, order 1: x[2] is nan; wants " in capsys.readouterr().out
    row = next(row for row in json.loads(path.read_text())["rows"] if row["verdict"] == "failed")
    assert (row["index"], row["analytic"], row["absolute"]) == ([2], "nan", "inf") and row["data"] == "own data"


def test_what_was_found_before_an_interruption_is_kept_and_has_not_passed(tmp_path, press_ctrl_c, capsys, monkeypatch):
    original, path = check.check_entry, tmp_path / "relu.json"

    def interrupted(entry, *args):
        if entry.name == "relu_backward":
            press_ctrl_c()
        return original(entry, *args)

    monkeypatch.setattr(check, "check_entry", interrupted)
    assert check.main(["relu", *QUICK, "--json", str(path)]) == 130
    assert capsys.readouterr().err.endswith(f"\nstopped; {path} has the results so far\n")
    report = json.loads(path.read_text())
    assert (report["complete"], report["passed"]) == (False, False)
    assert {row["op"] for row in report["rows"]} == {"relu"}


def test_repeated_runs_have_the_same_bits(capsys):
    assert check.main(["relu", "--repeat", "3", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "ok      relu_backward, pallas: 1 results, errors up to bf16 0e+00" in printed and "tried: 3 runs" in printed
    assert "6 ok, 0 failed, 0 skipped" in printed


def test_a_run_with_other_bits_fails(capsys, monkeypatch):
    noise = np.random.default_rng(0)

    def noisy(x, *, implementation=None):
        drawn = jax.pure_callback(lambda: noise.random(dtype="float32"), jax.ShapeDtypeStruct((), "float32"))
        return x * drawn

    monkeypatch.setattr(check, "CATALOGUE", (Entry(noisy, Case((Argument((4,)),)), {}),))
    assert check.main(["noisy", "--repeat", "3", "--implementations", "xla"]) == 1
    assert "failed: noisy, xla, float32, order 1: all: 2 of 3 runs differ in bits" in capsys.readouterr().out


def test_all_is_the_whole_catalogue():
    assert check.selected(["all"]) == list(check.CATALOGUE)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["relu", "layer_nrom"], "unknown op layer_nrom; did you mean layer_norm or"),
        (["xyz"], "unknown op xyz; wants all, or names among"),
        (["relu", "--json", "no/such/file"], "no folder"),
        (["relu", "--repeat", "1"], "--repeat is 1; wants at least 2 runs"),
    ],
)
def test_what_the_user_can_mend_is_one_line(args, message, capsys):
    assert check.main(args) == 2
    assert message in capsys.readouterr().err
