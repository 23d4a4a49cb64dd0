import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from helpers import TOLERANCE

from experiments.bench import measure, rows
from experiments.bench.measure import Compiler
from experiments.bench.peers import table
from experiments.bench.rows import Case, Settings, measured_rows

ROOFLINE = ("floor_microseconds", "floor_fraction")
FIELDS = {
    *ROOFLINE,
    "work",
    "op",
    "place",
    "batch",
    "dtype",
    "implementation",
    "peer",
    "precision",
    "calls",
    "argument_bytes",
    "result_bytes",
    "operations",
    "read_bytes",
    "written_bytes",
    "arithmetic",
    "speedup_over_autodiff",
    "error_batch",
    *measure.MEASURED,
}


def test_every_place_of_a_case_has_a_row_an_implementation(finished):
    report = finished.report
    assert finished.code == 0
    workloads = dict.fromkeys(row["work"] for row in report["rows"])
    assert list(workloads) == [
        "lenet training step",
        "max_pool2d_with_indices fwd+bwd pool1",
        "max_pool2d_with_indices fwd+bwd pool2",
    ]
    for workload in workloads:
        names = [row["implementation"] for row in report["rows"] if row["work"] == workload]
        assert names == ["autodiff", "None"]


def test_every_row_has_every_field(finished):
    for row in finished.report["rows"]:
        assert set(row) == FIELDS
        assert row["failed"] is None and row["peer"] is None
        none = {"failed", "peer", "error_reason", *ROOFLINE * (finished.report["platform"] == "cpu")}
        none |= {"burst_microseconds"} | ({"peak_bytes"} if row["op"] != "lenet" else set())
        assert {name for name in FIELDS if row[name] is None} - {"error_reason"} == none - {"error_reason"}
        assert row["microseconds"] > 0 and row["compile_seconds"] > 0
        assert len(row["round_microseconds"]) == 1


def test_errors_are_those_of_the_dtype(finished):
    assert all(row["error"] < TOLERANCE["float32"] for row in finished.report["rows"])


def test_ratios_follow_from_the_times(finished):
    for row in finished.report["rows"]:
        (autodiff,) = (
            other["microseconds"]
            for other in finished.report["rows"]
            if other["work"] == row["work"] and other["implementation"] == "autodiff"
        )
        assert math.isclose(row["speedup_over_autodiff"], autodiff / row["microseconds"])
        if row["floor_fraction"] is not None:
            assert math.isclose(row["floor_fraction"], row["floor_microseconds"] / row["microseconds"])


def test_a_pallas_without_a_kernel_of_ours_is_no_row(workload_at, monkeypatch, capsys):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    settings = Settings(["pallas", "xla"], {}, "best", "float32", "default", 1e-3, False, {})
    monkeypatch.setattr(rows, "has_launch", lambda jaxpr: False)
    case = Case(workload_at("relu_backward", "relu4"), 2, settings)
    assert [row["implementation"] for row in measured_rows([case], lambda: True)] == case.row_names() == ["xla"]
    message = "relu_backward relu4, batch 2, pallas: left out, because no jaxbp kernel runs\n"
    assert message in capsys.readouterr().err


def test_the_programs_that_are_timed_are_submitted_first(workload_at, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(rows, "COMPILING_SECONDS", 1e6)
    submitted, submit = [], Compiler.submit

    def recorded(*args, timed=False, **options):
        submitted.append("timed" if timed else "other")
        return submit(*args, timed=timed, **options)

    monkeypatch.setattr(Compiler, "submit", recorded)
    settings = Settings(["xla", "autodiff", "None"], {}, "best", "float32", "default", 1e-3, False, {})
    list(measured_rows([Case(workload_at("relu_backward", "relu4"), 2, settings)], lambda: True))
    groups = [(name, len(list(programs))) for name, programs in itertools.groupby(submitted)]
    assert [name for name, _ in groups] == ["timed", "other"] * 2
    assert [count for name, count in groups if name == "timed"] == [1, 2]


def test_a_group_of_rows_ends_when_lowering_took_as_long_as_compiling_may(workload_at, monkeypatch):
    durations, now = iter([1.0, *itertools.repeat(3.0, 4)]), [0.0]

    def submit(*_):
        now[0] += next(durations)
        return True

    monkeypatch.setattr(rows.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rows, "COMPILING_SECONDS", 5.0)
    monkeypatch.setattr(Case, "submit", submit)
    monkeypatch.setattr(Case, "submit_others", lambda *_: None)
    monkeypatch.setattr(Case, "rows", lambda self, names: [names])
    settings = Settings(list("abcde"), {}, "best", "float32", "default", 1e-3, True, {})
    groups = list(measured_rows([Case(workload_at("relu_backward", "relu4"), 2, settings)], lambda: True))
    assert groups == [["a"], ["b", "c"], ["d", "e"]]


def test_a_peer_has_rows_and_its_failure_does_not_end_the_run(quickly, monkeypatch, capsys):
    def right(task):
        dy, logits, labels = task.small
        return dy[:, None] * (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 10))

    def variants(task):
        assert task.op == "softmax_cross_entropy_backward" and not task.products
        yield "right", "highest", lambda: {"microseconds": 2.0, "results": [np.asarray(right(task), np.float64)]}
        yield "rounded", None, lambda: {"microseconds": 1.0, "results": [0.75 * np.asarray(right(task), np.float64)]}
        yield "wrong", None, lambda: {"microseconds": 1.0, "results": [np.zeros(task.small[1].shape)]}
        yield "broken", None, lambda: 1 / 0
        yield "other", None, lambda: {"microseconds": 1.0, "results": None, "error_reason": "another function"}
        yield "referred", None, lambda: {"microseconds": 1.0, "results": [np.ones(2)], "reference": [np.ones(2)]}

    monkeypatch.setattr(table, "PEERS", {"Peer": lambda: table.Peer("1.0", variants)})
    code, report = quickly("--peers")
    assert code == 0
    of_peer = {row["implementation"]: row for row in report["rows"] if row["peer"] == "Peer"}
    assert of_peer["Peer right"]["error"] < 1e-6 and of_peer["Peer right"]["precision"] == "highest"
    rounded, wrong = of_peer["Peer rounded"], of_peer["Peer wrong"]
    assert rounded["error"] == pytest.approx(0.25, abs=1e-6) and rounded["precision"] == "default"
    assert wrong["microseconds"] is None and "the results are wrong" in wrong["failed"]
    assert of_peer["Peer broken"]["failed"] == "ZeroDivisionError: division by zero"
    assert of_peer["Peer other"]["error"] is None and of_peer["Peer other"]["error_reason"] == "another function"
    assert of_peer["Peer referred"]["error"] == 0.0
    assert all(set(row) == FIELDS for row in of_peer.values())
    said = capsys.readouterr().err
    assert all(said.count(f", {name}: compiling\n") == 1 for name in of_peer)


def test_a_language_model_has_rates_of_tokens_and_its_peers_run_first(workload_at, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(rows, "nominal_operations", lambda dtype: 1e9)
    workload = dataclasses.replace(
        workload_at("lenet"), tokens=7, error_batch=None, baselines={"autodiff, other": None}
    )
    variants = lambda task: [("timed", None, lambda: {"microseconds": 100.0, "results": None})]  # noqa: E731
    peers = {"Peer": table.Peer("1.0", variants)}
    settings = Settings(["xla"], peers, "best", "float32", "default", 1e-3, False, {})
    assert Case(workload, 2, settings._replace(peers={})).row_names() == ["xla"]
    case = Case(workload, 2, settings)
    assert case.row_names() == ["xla", "autodiff, other", "Peer timed"]
    peer, ours, _ = measured_rows([case], lambda: True)
    assert (peer["peer"], ours["peer"], ours["error"], ours["failed"]) == ("Peer", None, None, None)
    assert peer["tokens_per_second"] == pytest.approx(2 * 7 / 100e-6)
    assert peer["model_flop_utilization"] == pytest.approx(peer["operations"] / 100e-6 / 1e9)
    parameters = ours["argument_bytes"] - 2 * 28 * 28 * 4 - 2 * 4
    assert ours["peak_bytes"] > parameters


@pytest.mark.parametrize(
    ("op", "place", "batch", "title"),
    [
        ("layer_norm", "65536x1024", 256, "layer_norm fwd+bwd 256x1024, batch 256"),
        ("layer_norm", "65536x1024", 65536, "layer_norm fwd+bwd 65536x1024, batch 65536"),
        ("dot_product_attention", "384x4x32 bias", 8, "dot_product_attention fwd+bwd 384x4x32 bias, batch 8"),
        ("automaton", "16x16", 4, "automaton training step 16x16, batch 4"),
    ],
)
def test_a_title_has_the_size_that_is_timed(workload_at, op, place, batch, title):
    settings = Settings([], {}, "best", "float32", "default", 1e-3, False, {})
    assert Case(workload_at(op, place), batch, settings).title == title


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_programs_are_traced_at_the_precision_of_the_row(workload_at, precision):
    workload, seen = workload_at("linear_backward", "fc3"), set()

    def function(implementation, dtype):
        def call(*arrays):
            if implementation == "xla":
                seen.add(jax.config.jax_default_matmul_precision)
            return workload.function(implementation, dtype)(*arrays)

        return call

    settings = Settings(["xla"], {}, "best", "float32", precision, 1e-3, False, {})
    case = Case(dataclasses.replace(workload, function=function), 2, settings)
    list(measured_rows([case], lambda: True))
    assert seen == {precision}
