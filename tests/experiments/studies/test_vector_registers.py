import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import pytest

from experiments.configs import LogicConfig
from experiments.studies import vector_registers

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


def test_the_result_file_has_the_speed_and_the_flags(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(LogicConfig(), layers=1, gates=1200, initialization="normal")
    monkeypatch.setattr(vector_registers, "load", lambda path: (config, config.build(jax.random.key(0))[0]))
    metrics = SimpleNamespace(test_accuracy=0.75)
    monkeypatch.setattr(vector_registers, "read_metrics", lambda path: [metrics])
    # A processor may lack the larger registers.
    monkeypatch.setattr(vector_registers, "MACHINES", {128: "x86-64"})
    monkeypatch.setattr(vector_registers, "WORDS", 64)
    file = tmp_path / "speeds.json"
    assert vector_registers.main(["run", "run", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["compiler"].endswith("-O3")
    row, other = report["rows"]
    assert other["gate_count"] == row["gate_count"] > 0
    assert row["settings"]["gates"] == 1200 and row["test_accuracy"] == 0.75
    assert row["vector_bits"] == 128 and row["flags"] == "-march=x86-64 -mprefer-vector-width=128"
    assert f"128 bits: {other['samples_per_second']:,.0f} samples/s" in capsys.readouterr().out
    assert row["samples_per_second"] > 1000


def test_the_speed_is_the_median_of_processor_time_after_a_warm_up(monkeypatch):
    now, seconds = [0.0], iter([9, 1, 2, 4, 8, 2])
    monkeypatch.setattr(vector_registers.time, "process_time", lambda: now[0])
    monkeypatch.setattr(vector_registers, "ROUNDS", 5)

    def classify(x):
        now[0] += next(seconds)

    assert vector_registers.speed(classify, vector_registers.np.zeros((3, 10))) == 320 / 2


def test_a_run_of_another_experiment_is_refused(toy_config, monkeypatch, capsys):
    monkeypatch.setattr(vector_registers, "load", lambda path: (toy_config(), None))
    assert vector_registers.main(["run"]) == 2
    assert "is a run of toy; wants a run of logic or logic-conv" in capsys.readouterr().err


def test_no_run_is_refused(capsys):
    assert vector_registers.main([]) == 2
    assert "run_dirs is empty; wants the directory of a run" in capsys.readouterr().err
