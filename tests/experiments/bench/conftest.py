import json
from types import SimpleNamespace

import pytest

from experiments.bench import __main__ as bench
from experiments.bench import measure
from experiments.bench.selection import selected

CASES = ["lenet", "max_pool2d_with_indices"]
QUICK = ["--batch", "2", "--seconds", "0.001", "--implementations"]


@pytest.fixture(scope="session")
def workload_at():
    def workload_at(op, place=""):
        return next(workload for workload in selected(["all"]) if (workload.op, workload.place) == (op, place))

    return workload_at


@pytest.fixture(scope="package")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUNDS", 1)
        code = bench.main([*CASES, *QUICK, "autodiff", "None", "--compile-seconds", "--json", str(path)])
    return SimpleNamespace(code=code, report=json.loads(path.read_text()))


@pytest.fixture
def quickly(monkeypatch, workload_at):
    workload = workload_at("softmax_cross_entropy_backward", "classes")
    monkeypatch.setattr(bench, "selected", lambda *_: [workload])
    monkeypatch.setattr(measure, "ROUNDS", 1)
    rates = {
        "copy_bytes_per_second": 1e12,
        "bytes_per_second": {"copy": [[1, 1e12]]},
        "operations_per_second": {"default": 1e12, "highest": 1e12},
    }
    monkeypatch.setattr(bench, "measured_rates", lambda *_: rates)
    reports = []
    monkeypatch.setattr(bench, "print_table", reports.append)

    def run(*args, implementations=("xla", "autodiff")):
        code = bench.main([workload.op, *QUICK, *implementations, *args])
        return code, reports[-1] if reports else None

    return run
