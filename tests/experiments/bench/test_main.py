import json
import re
import time
from types import SimpleNamespace

import jax
import pytest

from experiments.bench import __main__ as bench
from experiments.bench import rows
from experiments.bench.measure import Accuracy, Compiler
from experiments.bench.peers import table
from experiments.bench.rows import Case
from experiments.output.results import to_json


def test_the_report_says_where_and_how_it_was_measured(finished):
    report = finished.report
    assert report["command"].startswith("python -m experiments.bench lenet max_pool2d_with_indices")
    assert report["device"] == jax.devices()[0].device_kind
    assert report["versions"]["jax"] == jax.__version__
    assert report["schema"] == 1 and re.fullmatch(r"[0-9a-f]{7,}\+?", report["commit"] or "0000000")
    assert report["complete"] and report["missing"] == []
    rates = {"default", "highest"} if report["platform"] == "gpu" else set()
    assert set(report.get("operations_per_second", ())) == rates


def test_the_file_is_the_json_of_its_report(finished):
    assert json.loads(to_json(finished.report)) == finished.report


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="tests the message without a GPU")
def test_without_a_gpu_pallas_is_left_out_and_said_so(quickly, capsys):
    code, report = quickly(implementations=("pallas", "xla"))
    assert code == 0
    assert {row["implementation"] for row in report["rows"]} == {"xla"}
    assert "no GPU" in capsys.readouterr().out


def test_an_implementation_that_fails_leaves_its_reason_and_exit_code_1(quickly, monkeypatch):
    error = Accuracy.error
    monkeypatch.setattr(Accuracy, "error", lambda self, name: error(self, name) if name == "autodiff" else 1 / 0)
    code, report = quickly()
    assert code == 1
    failed = {row["implementation"]: row["failed"] for row in report["rows"]}
    assert failed == {"xla": "ZeroDivisionError: division by zero", "autodiff": None}


def test_after_the_time_limit_no_row_is_started_and_the_report_names_what_is_missing(quickly, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    code, _ = quickly("--time-limit", "0", "--json", str(path))
    report = json.loads(path.read_text())
    title = "softmax_cross_entropy_backward classes, batch 2"
    assert code == 0 and report["rows"] == []
    assert not report["complete"] and report["missing"] == [f"{title}, xla", f"{title}, autodiff"]

    moments = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(moments, 9.0)))
    quickly("--time-limit", "5", "--json", str(path))
    report = json.loads(path.read_text())
    assert [row["implementation"] for row in report["rows"]] == ["xla"]
    assert not report["complete"] and report["missing"] == [f"{title}, autodiff"]


def test_a_row_that_is_running_ends_soon_after_the_time_limit(quickly, monkeypatch):
    monkeypatch.setattr(bench, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(Accuracy, "error", lambda *_: time.sleep(60))
    started = time.monotonic()
    code, report = quickly("--time-limit", "0.1")
    assert time.monotonic() - started < 30
    assert code == 0 and report["rows"] == [] and len(report["missing"]) == 2


@pytest.mark.parametrize("seconds", [1e6, 0])
def test_the_first_row_is_timed_before_the_second_is_compiled_and_peers_come_last(seconds, quickly, monkeypatch):
    events, submit, keep = [], Case.submit, bench.keep
    monkeypatch.setattr(rows, "COMPILING_SECONDS", seconds)

    def submitted(case, name, *args):
        events.append(f"compile {name} {case.batch}")
        return submit(case, name, *args)

    def kept(report, path):
        events.append(f"row {len(report['rows'])}")
        keep(report, path)

    monkeypatch.setattr(Case, "submit", submitted)
    monkeypatch.setattr(bench, "keep", kept)
    variants = lambda task: [("timed", None, lambda: {"microseconds": 1.0})]  # noqa: E731
    monkeypatch.setattr(table, "PEERS", {"Peer": lambda: table.Peer("1.0", variants)})
    _, report = quickly("--batch", "2", "3", "--peers")
    compiled = [f"compile {name} {batch}" for batch in (2, 3) for name in ("xla", "autodiff")]
    timed = [f"row {n}" for n in (1, 2, 3, 4, 5, 6, 6)]
    one_by_one = [event for pair in zip(compiled, timed[:4], strict=True) for event in pair] + timed[4:]
    assert events == (one_by_one if seconds == 0 else [compiled[0], timed[0], *compiled[1:], *timed[1:]])
    names = ["xla", "autodiff", "Peer timed"]
    assert [(row["batch"], row["implementation"]) for row in report["rows"]] == [
        (n, name) for n in (2, 3) for name in names
    ]


def test_ctrl_c_keeps_the_rows_that_are_measured(quickly, tmp_path, press_ctrl_c, capsys, monkeypatch):
    path, original = tmp_path / "results.json", bench.measured_rows

    def interrupted(*args):
        yield next(original(*args))
        press_ctrl_c()

    monkeypatch.setattr(bench, "measured_rows", interrupted)
    code, _ = quickly("--batch", "2", "3", "--json", str(path))
    report = json.loads(path.read_text())
    assert code == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped; {path} has the results so far"
    assert [(row["batch"], row["implementation"]) for row in report["rows"]] == [(2, "xla")] and not report["complete"]


def test_a_quick_run_has_the_rows_of_ours_that_users_get(quickly, monkeypatch):
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", ())
    code, report = quickly("--quick", implementations=())
    assert code == 0 and report["complete"]
    assert [row["implementation"] for row in report["rows"]] == [*["pallas"] * (report["platform"] == "gpu"), "None"]


def test_a_quick_run_compiles_only_what_it_times(quickly, monkeypatch):
    submitted, submit = [], Compiler.submit
    monkeypatch.setattr(Compiler, "submit", lambda *args, **options: submitted.append(args) or submit(*args, **options))
    (row,) = quickly("--quick", implementations=("xla",))[1]["rows"]
    assert len(submitted) == 2 and row["microseconds"] > 0  # the row's program, and one that draws its arguments
    assert [row[name] for name in ("temporary_bytes", "error", "error_batch", "compile_seconds")] == [None] * 4
    (row,) = quickly("--quick", "--compile-seconds", implementations=("xla",))[1]["rows"]
    assert row["compile_seconds"] > 0


def test_compilation_is_timed_where_it_is_asked_for(quickly):
    seconds = [[row["compile_seconds"] for row in quickly(*args)[1]["rows"]] for args in ((), ("--compile-seconds",))]
    assert seconds[0] == [None, None]
    assert all(s > 0 for s in seconds[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["xyz"], "unknown case xyz; wants all, ops, or names among lenet, conv2d,"),
        (["rleu"], "unknown case rleu; did you mean relu"),
        (["relu", "--batch", "0"], "--batch is 0; wants at least 1"),
        (["lenet", "relu", "--one-graph"], "--one-graph is given with relu fwd+bwd relu1; wants only training steps"),
        (["relu", "--batch-last", "--peers"], "--batch-last is given with --peers; wants only one"),
        (
            ["lenet", "logic", "--batch-last"],
            "--batch-last is given for lenet, logic, which have only training steps; wants",
        ),
        (
            ["lenet", "relu_backward", "--forward"],
            "--forward is given for lenet, relu_backward, which have only training steps or backwards; wants",
        ),
        (["relu", "--time-limit", "-1"], "--time-limit is -1.0; wants at least 0"),
        (
            ["relu", "--dtype", "float16", "float16"],
            "--dtype is float16 float16; wants at least one value, and no value twice",
        ),
        (
            ["relu", "--precision", "highest", "highest"],
            "--precision is highest highest; wants at least one value",
        ),
        (["relu", "--json", "nowhere/results.json"], "there is no folder nowhere"),
    ],
)
def test_a_users_mistake_ends_in_one_line_and_exit_code_2(args, message, capsys):
    assert bench.main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_several_dtypes_are_rows_of_one_run(quickly):
    code, report = quickly("--dtype", "float32", "bfloat16")
    assert code == 0 and report["complete"] and report["dtype"] == "float32, bfloat16"
    named = [(row["work"].rpartition(" in ")[2], row["dtype"]) for row in report["rows"]]
    assert named == [("float32", "float32")] * 2 + [("bfloat16", "bfloat16")] * 2
    assert all(row["speedup_over_autodiff"] for row in report["rows"])


def test_several_precisions_are_rows_of_products_of_float32(quickly, workload_at, monkeypatch):
    workloads = [workload_at("conv2d_backward_weights", "conv2"), workload_at("relu_backward", "relu4")]
    monkeypatch.setattr(bench, "selected", lambda *_: workloads)
    code, report = quickly("--precision", "default", "highest", implementations=("xla", "autodiff"))
    assert code == 0 and report["complete"] and report["precision"] == "default, highest"
    named = list(dict.fromkeys((row["work"], row["precision"]) for row in report["rows"]))
    assert named == [
        ("conv2d_backward_weights conv2 at default precision", "default"),
        ("conv2d_backward_weights conv2 at highest precision", "highest"),
        ("relu_backward relu4 at default precision", "default"),
    ]
