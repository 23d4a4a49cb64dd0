import json

import pytest

from experiments.bench import __main__ as bench
from experiments.bench import compare


def row(workload="relu", microseconds=100.0, spread=0.01, implementation="None", **fields):
    rounds = [microseconds * (1 + by) for by in (-spread, 0.0, spread)]
    of = dict(work=workload, batch=8, dtype="float32", precision="default", implementation=implementation, peer=None)
    return of | dict(microseconds=microseconds, round_microseconds=rounds, failed=None) | fields


def failed(workload="relu", **fields):
    return row(workload, **fields) | dict(microseconds=None, round_microseconds=None, failed="ValueError: no")


@pytest.fixture
def compared(tmp_path, capsys):
    def run(old, new, *args, device="a device", **fields_of_new):
        for name, rows, fields in (
            ("old", old, {"device": "a device"}),
            ("new", new, dict(device=device) | fields_of_new),
        ):
            report = dict(platform="gpu", versions={"jax": "0.12.0"}, commit="01234567", date="2026-11-22") | fields
            (tmp_path / f"{name}.json").write_text(json.dumps(report | {"rows": rows}))
        code = bench.main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *args])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (row(), row(microseconds=110.0), "slower"),
        (row(), row(microseconds=104.0), "the same"),
        (row(spread=0.2), row(microseconds=110.0), "the same"),
        (row(), row(microseconds=110.0, spread=0.2), "the same"),
        (row(microseconds=110.0), row(), "faster"),
        (row(), failed(), "fails"),
        (failed(), row(), "works again"),
        (failed(), failed(), "the same"),
    ],
)
def test_a_row_is_slower_beyond_noise_and_threshold(old, new, verdict):
    assert compare.verdict(old, new, 0.05) == verdict


def test_what_is_slower_is_said_and_is_exit_code_1(compared):
    code, said = compared([row(), row("sum")], [row(microseconds=130.0), row("sum")])
    assert code == 1 and "1 of 2 rows slower, 1 unchanged" in said
    assert "relu, 8, float32, default, None │ 100.0 ± 1% │ 130.0 ± 1% │ 1.30 │ slower" in said and "sum, 8" not in said
    assert compared([row()], [failed()])[0] == 1


def test_runs_that_settled_differently_are_told_apart(compared):
    said = compared([row()], [row()], settling_seconds=0.3)[1]
    assert "before timing, programs ran for up to 0.0 s in the old run and 0.3 s in the new run" in said
    assert "before timing" not in compared([row()], [row()], settling_seconds=0.0)[1]


def test_a_higher_threshold_lets_it_pass(compared):
    assert compared([row()], [row(microseconds=130.0)], "--threshold", "0.5")[0] == 0
    assert compared([row(microseconds=130.0)], [row()])[0] == 0


def test_the_worst_comes_first():
    names = {"a": 110.0, "b": 300.0, "c": 100.0}
    old, new = (
        {"rows": [row(name, time or 100.0) for name, time in of.items()]} for of in (dict.fromkeys(names), names)
    )
    assert [change.new["work"] for change in compare.changes(old, new, 0.05)] == ["b", "a", "c"]


def test_rows_of_one_run_alone_are_named_and_peers_are_left_out(compared):
    theirs = row(implementation="PyTorch", peer="PyTorch")
    code, said = compared([row(), row("gone"), theirs], [row(), row("new"), theirs | {"microseconds": 900.0}])
    assert code == 0 and "0 of 1 rows slower" in said
    assert "only in the old run: gone, 8" in said and "only in the new run: new, 8" in said


@pytest.mark.parametrize(
    ("new", "args", "device", "message"),
    [
        ([row()], [], "another device", "; wants one device"),
        ([row("sum")], [], "a device", "have no row in common"),
        ([{"work": "relu"}], [], "a device", "is not a report of the bench"),
        ([row()], ["--threshold", "-1"], "a device", "--threshold is -1.0; wants at least 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(compared, new, args, device, message):
    code, said = compared([row()], new, *args, device=device)
    assert code == 2 and said.startswith("error: ") and message in said
