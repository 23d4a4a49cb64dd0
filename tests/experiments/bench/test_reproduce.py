import json
import re

import jax
import pytest

from experiments.bench import __main__ as bench
from experiments.bench import reproduce


def row(name, microseconds, peer=None, speedup=None):
    fields = {"implementation": name, "microseconds": microseconds, "peer": peer, "speedup_over_autodiff": speedup}
    return {"work": "relu images", "batch": 2, **fields}


ROWS = [row("pallas", 10.0, speedup=3.0), row("autodiff", 30.0), row("A eager", 50.0, "A"), row("B fast", 20.0, "B")]


@pytest.fixture
def published(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    page = "<!-- table: summary -->\n[a](results/relu.json), [b](results/relu.json)\n<!-- end -->\n(results/no.json)"
    (tmp_path / "benchmarks.md").write_text(page)
    report = {"platform": "cpu", "device": "an old CPU", "rows": ROWS}

    def written(
        command="python -m experiments.bench relu:images --time-limit 9 --json docs/results/relu.json", **fields
    ):
        (tmp_path / "results" / "relu.json").write_text(json.dumps(report | {"command": command} | fields))

    written()
    return written


def test_a_ratio_is_over_the_fastest_autodiff_and_the_fastest_peer():
    assert reproduce.ratios({"rows": ROWS}) == {"relu images, batch 2": (3.0, 2.0)}
    # Without "pallas", the ratios are of None. Rows that failed have no time.
    rows = [row("pallas", None), row("None", 15.0, speedup=2.0), row("A", None, "A")]
    assert reproduce.ratios({"rows": rows}) == {"relu images, batch 2": (2.0, None)}
    assert reproduce.ratios({"rows": [row("autodiff", 1.0)]}) == {}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the published run is of a CPU")
def test_the_commands_of_the_summary_run_and_their_ratios_stand_beside_the_published(
    published, tmp_path, monkeypatch, capsys
):
    runs = []

    def run(workloads, config, command, started):
        runs.append(([workload.title for workload in workloads], config.time_limit, config.json))
        return {"rows": [row("None", 8.0, speedup=2.5)]}

    monkeypatch.setattr(bench, "run", run)
    published("python -m experiments.bench relu_backward:relu4 --time-limit 9 --json docs/results/relu.json")
    path = tmp_path / "found.json"
    assert bench.main(["--reproduce", "--json", str(path)]) == 0
    assert runs == [(["relu_backward relu4"], 9, None)]
    assert re.search(r"relu images, batch 2 +│ +2.50x +│ +3.00x +│ +│ +2.00x", capsys.readouterr().out)
    (found,) = json.loads(path.read_text())["rows"]
    assert (found["over_autodiff"], found["published_over_autodiff"]) == (2.5, 3.0)
    assert bench.main(["--reproduce", "relu", "--time-limit", "0"]) == 0
    assert runs[1] == (["relu_backward relu4"], 0.0, None)


def test_a_run_of_another_platform_or_command_is_refused(published, capsys):
    published(platform="tpu")
    assert bench.main(["--reproduce"]) == 2
    assert f"the platform is {jax.default_backend()}; wants tpu" in capsys.readouterr().err
    published("python -m experiments.train lenet")
    assert bench.main(["--reproduce"]) == 2
    assert "wants a command of experiments.bench" in capsys.readouterr().err
    assert bench.main(["--reproduce", "no_such_file"]) == 2
