import json
import math
import re
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TOLERANCE, assert_close
from matplotlib import image
from rich.console import Console

from experiments.bench import cli as bench
from experiments.bench import report as bench_report

pytestmark = pytest.mark.once

CASES = ["lenet", "conv2d_backward_weights", "max_pool2d_with_indices"]
QUICK = ["--batch", "2", "--seconds", "0.001", "--implementations"]
FIELDS = {
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
    "floor_microseconds",
    "floor_fraction",
    "speedup_over_autodiff",
    "error_batch",
    *bench.MEASURED,
}


def work_at(op, place=""):
    return next(work for work in bench.selected(["all"]) if (work.op, work.place) == (op, place))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the command line: its exit code, report and picture."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROUNDS", 1)
        code = bench.main([*CASES, *QUICK, "autodiff", "None", "--json", str(path)])
    return code, json.loads(path.read_text()), path.with_suffix(".png")


@pytest.fixture
def quickly(monkeypatch):
    """Runs one small op at one place from the command line, without measuring the device."""
    work = work_at("softmax_cross_entropy_backward", "classes")
    monkeypatch.setattr(bench, "selected", lambda *_: [work])
    monkeypatch.setattr(bench, "ROUNDS", 1)
    rates = {"copy_bytes_per_second": 1e12, "operations_per_second": {"default": 1e12, "highest": 1e12}}
    monkeypatch.setattr(bench, "ceilings", lambda *_: rates)
    reports = []
    monkeypatch.setattr(bench, "print_table", reports.append)

    def run(*args, implementations=("xla", "autodiff")):
        code = bench.main([work.op, *QUICK, *implementations, *args])
        return code, reports[-1]["rows"] if reports else None

    return run


# ---------------------------------------------------------------------------------------------------------------- rows


def test_every_place_of_a_case_has_a_row_an_implementation(finished):
    code, report, _ = finished
    assert code == 0
    works = dict.fromkeys(row["work"] for row in report["rows"])
    assert list(works) == [
        "lenet training step",
        "conv2d_backward_weights conv1",
        "conv2d_backward_weights conv2",
        "max_pool2d_with_indices fwd+bwd pool1",
        "max_pool2d_with_indices fwd+bwd pool2",
    ]
    for work in works:
        names = [row["implementation"] for row in report["rows"] if row["work"] == work]
        assert names == ["autodiff", "None"]


def test_every_row_has_every_field(finished):
    for row in finished[1]["rows"]:
        assert set(row) == FIELDS
        assert row["failed"] is None and row["peer"] is None
        assert all(row[name] is not None for name in FIELDS - {"failed", "peer"})
        assert row["microseconds"] > 0 and row["compile_seconds"] > 0


def test_errors_are_those_of_the_dtype(finished):
    assert all(row["error"] < TOLERANCE["float32"] for row in finished[1]["rows"])


def test_ratios_follow_from_the_times(finished):
    for row in finished[1]["rows"]:
        (autodiff,) = (
            other["microseconds"]
            for other in finished[1]["rows"]
            if other["work"] == row["work"] and other["implementation"] == "autodiff"
        )
        assert math.isclose(row["speedup_over_autodiff"], autodiff / row["microseconds"])
        assert math.isclose(row["floor_fraction"], row["floor_microseconds"] / row["microseconds"])


def test_the_report_says_where_and_how_it_was_measured(finished):
    report = finished[1]
    assert report["command"].startswith("python -m experiments.bench lenet conv2d_backward_weights")
    assert report["device"] == jax.devices()[0].device_kind
    assert report["versions"]["jax"] == jax.__version__
    assert report["copy_bytes_per_second"] > 0
    assert set(report["operations_per_second"]) == {"default", "highest"}


def test_json_round_trips(finished):
    assert json.loads(bench.to_json(finished[1])) == finished[1]


def test_the_picture_lies_beside_the_json_and_is_not_empty(finished):
    pixels = image.imread(finished[2])
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10


def test_the_table_has_a_line_a_row_and_says_what_failed(finished, capsys):
    report = finished[1] | {"rows": [*finished[1]["rows"], finished[1]["rows"][-1] | {"failed": "OSError: no luck"}]}
    bench_report.print_table(report, Console(width=140, color_system=None))
    output = capsys.readouterr().out
    assert len(re.findall(r"│   (autodiff|None) ", output)) == len(report["rows"])
    assert "pool2, batch 2, None: OSError: no luck" in output
    assert bench_report.picture(report).startswith(b"\x89PNG")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what is missing without a GPU")
def test_without_a_gpu_pallas_is_left_out_and_said_so(quickly, capsys):
    code, rows = quickly(implementations=("pallas", "xla"))
    assert code == 0
    assert {row["implementation"] for row in rows} == {"xla"}
    assert "no GPU" in capsys.readouterr().out


def test_an_implementation_that_fails_leaves_its_reason_and_exit_code_1(quickly, monkeypatch):
    results_of = bench.results_of

    def results_or_failure(work, name, *rest):
        return results_of(work, name, *rest) if name == "autodiff" else 1 / 0

    monkeypatch.setattr(bench, "results_of", results_or_failure)
    code, rows = quickly()
    assert code == 1
    failed = {row["implementation"]: row["failed"] for row in rows}
    assert failed == {"xla": "ZeroDivisionError: division by zero", "autodiff": None}


def test_a_result_that_is_not_finite_is_a_failure():
    row = bench.attempt(lambda: {"microseconds": 1.0, "results": [np.array([1.0, np.nan])]}, [np.ones(2)])
    assert row["microseconds"] is None and "not finite" in row["failed"]


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["alexnet"], "unknown case alexnet: wanted all or some of lenet, conv2d,"),
        (["relu", "--batch", "0"], "batch is 0: wanted at least 1"),
        (["relu", "--batch-last", "--peers"], "batch_last is not for peers"),
        (["lenet", "logic", "--batch-last"], "batch_last is for ops: wanted some beside lenet, logic"),
        (["relu", "--json", "nowhere/results.json"], "there is no folder nowhere"),
    ],
)
def test_a_users_mistake_ends_in_one_line_and_exit_code_2(args, message, capsys):
    assert bench.main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_a_forward_stands_for_its_backwards_and_for_no_other_op():
    ops = {work.op for work in bench.selected(["conv2d", "relu_backward"])}
    backwards = {f"conv2d_backward_{of}" for of in ("input", "weights", "bias")}
    assert ops == {"conv2d", "relu_backward"} | backwards


def test_with_the_batch_last_it_is_the_same_work():
    for op in ("conv2d_backward_weights", "relu"):
        first, last = (bench.selected([op], batch_last)[0] for batch_last in (False, True))
        assert [a.shape[-1] for a in jax.tree.leaves(last.draw(0, 3, "float32"))] == [3, 3]
        results, turned = (
            jax.tree.leaves(work.function("xla", "float32")(*work.draw(0, 3, "float32"))) for work in (first, last)
        )
        back = [a if a.shape == b.shape else jnp.moveaxis(b, -1, 0) for a, b in zip(results, turned, strict=True)]
        assert_close(back, results, "float32")
    assert [a.shape for a in turned] != [a.shape for a in results]
    assert {work.op for work in bench.selected(["lenet", "relu_backward"], batch_last=True)} == {"relu_backward"}


# ------------------------------------------------------------------------------------------------------------ the floor

BATCH = 3
DY1, X1, W1 = BATCH * 6 * 24 * 24, BATCH * 28 * 28, 6 * 5 * 5


@pytest.mark.parametrize(
    ("op", "place", "arguments", "results", "operations"),
    [
        ("conv2d_backward_weights", "conv1", 4 * (DY1 + X1), 4 * W1, 2 * 25 * DY1),
        ("conv2d_backward_input", "conv1", 4 * (DY1 + W1), 4 * X1, 2 * 25 * DY1),
        ("conv2d_backward_bias", "conv1", 4 * DY1, 4 * 6, 0),
        ("conv2d", "conv1", 4 * (X1 + W1 + 6 + DY1), 4 * (DY1 + X1 + W1 + 6), 3 * 2 * 25 * DY1),
        ("max_pool2d_backward", "pool1", 5 * DY1 // 4, 4 * DY1, 0),
        (
            "linear_backward",
            "fc1",
            4 * (BATCH * 120 + BATCH * 256 + 120 * 256),
            4 * (BATCH * 256 + 120 * 256 + 120),
            2 * 2 * BATCH * 120 * 256,
        ),
    ],
)
def test_bytes_and_operations_are_those_counted_by_hand(op, place, arguments, results, operations):
    assert bench.cost(work_at(op, place), BATCH, "float32") == (arguments, results, operations)


def test_lenets_operations_are_those_of_its_layers():
    layers = [24 * 24 * 6 * 25, 8 * 8 * 16 * 6 * 25, 256 * 120, 120 * 84, 84 * 10]
    # Forward, weights and input; but the images need no gradient.
    assert bench.cost(work_at("lenet"), BATCH, "float32")[2] == BATCH * 2 * (3 * sum(layers) - layers[0])


def test_the_floor_is_the_longer_of_moving_and_computing():
    rates = {"copy_bytes_per_second": 100.0, "operations_per_second": {"default": 1000.0, "highest": 10.0}}
    assert bench.floor_seconds(200, 500, "default", rates) == 2.0
    assert bench.floor_seconds(200, 500, "highest", rates) == 50.0


# -------------------------------------------------------------------------------------------------------------- timing


def test_time_includes_the_whole_program():
    def program():
        time.sleep(0.005)
        return jnp.zeros(())

    seconds, host_waited = bench.device_seconds(program, (), 0.02)
    assert 0.005 <= seconds < 0.05
    assert host_waited < 0.2  # all of it is the host's


def test_every_call_of_a_chain_is_computed():
    work = work_at("conv2d_backward_weights", "conv2")
    function = work.function("autodiff", "float32")
    sets = tuple(work.draw(seed, 2, "float32") for seed in range(3))
    count = lambda calls: len(_convolutions(work.chain(function, calls), sets))  # noqa: E731
    assert count(3) == 3 * count(1) > 0


def _convolutions(program, sets):
    return re.findall(r"convolution\(|__cudnn\$conv", jax.jit(program).lower(sets).compile().as_text())


def test_memory_is_that_of_one_call_and_not_of_the_chain():
    work = work_at("conv2d_backward_weights", "conv2")
    function = work.function("autodiff", "float32")
    arguments = work.draw(0, 2, "float32")
    one = jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert bench.compile_call(function, arguments)["temporary_bytes"] == one > 0


# --------------------------------------------------------------------------------------------------------------- peers


def test_without_their_libraries_there_are_no_peers_and_the_bench_says_so(monkeypatch, capsys):
    libraries = {"PyTorch": "torch", "Liger-Kernel": "liger_kernel", "QuACK": "quack", "tokamax": "tokamax"}
    libraries |= {"torchlogix": "torch"}  # which it imports first
    for library, module in zip(libraries.values(), bench.PEERS.values(), strict=True):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert bench.installed_peers() == {}
    lines = [rf"{peer} is left out: .*{library}.*\n" for peer, library in libraries.items()]
    assert re.fullmatch("".join(lines), capsys.readouterr().out)


def test_a_run_without_the_peers_asked_for_goes_on(quickly, monkeypatch):
    monkeypatch.setattr(bench, "PEERS", {"Peer": "no_such_module"})
    code, rows = quickly("--peers")
    assert code == 0 and all(row["peer"] is None for row in rows)


def test_a_peer_has_rows_and_its_failure_does_not_end_the_run(quickly, monkeypatch):
    def right(task):
        dy, logits, labels = task.small
        return dy[:, None] * (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 10))

    def variants(task):
        assert task.op == "softmax_cross_entropy_backward" and not task.products
        yield "right", "highest", lambda: {"microseconds": 2.0, "results": [np.asarray(right(task), np.float64)]}
        yield "wrong", None, lambda: {"microseconds": 1.0, "results": [np.zeros(task.small[1].shape)]}
        yield "broken", None, lambda: 1 / 0

    monkeypatch.setitem(sys.modules, "a_peer", SimpleNamespace(VERSION="1.0", variants=variants))
    monkeypatch.setattr(bench, "PEERS", {"Peer": "a_peer"})
    code, rows = quickly("--peers")
    assert code == 0
    peers = {row["implementation"]: row for row in rows if row["peer"] == "Peer"}
    assert peers["Peer right"]["error"] < 1e-6 and peers["Peer right"]["precision"] == "highest"
    assert peers["Peer wrong"]["error"] == 1.0 and peers["Peer wrong"]["precision"] == "default"
    assert peers["Peer broken"]["failed"] == "ZeroDivisionError: division by zero"
    assert all(set(row) == FIELDS for row in peers.values())
