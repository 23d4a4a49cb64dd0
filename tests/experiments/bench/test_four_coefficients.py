import jax
import numpy as np
import pytest

from experiments.bench.measure import relative_error
from experiments.bench.rows import with_speedups
from experiments.bench.training_workloads import logic_workload


def results_of(workload, name):
    results = workload.named(name, "float32")(*workload.draw(0, 4, "float32"))
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(results)]


@pytest.mark.parametrize("op", ["gate_layer", "gate_layer_backward", "logic"])
def test_a_baseline_computes_the_same_results_as_the_op(workload_at, op):
    workload = logic_workload("logic", 400, ()) if op == "logic" else workload_at(op, "4096->8192")
    (name,) = workload.baselines
    assert relative_error(results_of(workload, name), results_of(workload, "xla")) < 1e-5


def test_only_workloads_of_16_functions_have_a_baseline(workload_at):
    assert workload_at("relu", "relu1").baselines == {}
    assert logic_workload("logic", 400, (), "walsh").baselines == {}


def test_a_baseline_is_timed_with_autodiff(quickly, workload_at, monkeypatch):
    workload = logic_workload("logic", 400, (2,))
    monkeypatch.setattr("experiments.bench.__main__.selected", lambda *_: [workload])
    for implementations, names in (
        (("xla",), ["xla"]),
        (("xla", "autodiff"), ["xla", "autodiff", "autodiff, 4 coefficients"]),
    ):
        code, report = quickly(implementations=implementations)
        assert code == 0 and [row["implementation"] for row in report["rows"]] == names


def test_the_speedup_is_over_the_fastest_row_of_autodiff():
    times = {"pallas": 2.0, "autodiff": 12.0, "autodiff, 4 coefficients": 6.0}
    rows = [{"work": "w", "batch": 1, "implementation": name, "microseconds": t} for name, t in times.items()]
    failed = {"work": "w", "batch": 1, "implementation": "autodiff, other", "microseconds": None}
    assert [row["speedup_over_autodiff"] for row in with_speedups([*rows, failed])] == [3.0, 0.5, 1.0, None]
    assert [row["speedup_over_autodiff"] for row in with_speedups([failed, *rows[::-1]])] == [None, 1.0, 0.5, 3.0]
