import json
import sys

import pytest

from experiments.output.errors import UserError
from experiments.studies import seeds


def test_each_setting_and_seed_has_a_row_and_a_run_that_fails_says_why(tmp_path):
    path = tmp_path / "seeds.json"
    settings = ["lenet --epochs 1 --implementation xla", "lenet --batch-size 10000"]
    assert seeds.main([*settings, "--seeds", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    trained, failed = report["rows"]
    assert report["command"].startswith("python -m experiments.studies.seeds 'lenet --epochs 1")
    assert (trained["settings"], trained["seed"], trained["epochs"], trained["skipped_steps"]) == (settings[0], 0, 1, 0)
    assert 0.5 < trained["test_accuracy"] <= 1 and trained["updates"] > 40
    assert failed["settings"] == settings[1] and "batch_size is 10000" in failed["failed"]


RUN = """#!{python}
import os, sys, time
assert sys.argv[1:3] == ["-m", "experiments.studies.seeds"] and sys.argv[4] == "--only"
print("noise")
match sys.argv[3]:
    case "abort":
        os.write(2, b"why it died\\n    @     0x7fb8 xla::Run()\\n")
        os.abort()
    case "hang":
        time.sleep(60)
    case "raise":
        raise ValueError("a mistake in the work")
print('{{"updates": %s}}' % sys.argv[5])
"""


def test_a_run_that_dies_or_hangs_loses_only_its_row(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(RUN.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(seeds.sys, "executable", str(script))
    settings = ["abort", "a", "hang", "raise"]
    abort, ended, hang, error = (seeds.trained_in_a_process((name, 7), limit=5) for name in settings)
    assert ended == {"settings": "a", "seed": 7, "updates": 7}
    assert abort == {"settings": "abort", "seed": 7, "failed": "SIGABRT: why it died\n"}
    assert hang["failed"] == "no answer in 5 s"
    assert error["failed"].startswith("exit code 1: Traceback") and "a mistake in the work" in error["failed"]


def test_a_mistake_is_reported_before_anything_is_trained(tmp_path):
    with pytest.raises(SystemExit):
        seeds.main(["lenet", "lenet --nothing 1", "--json", str(tmp_path / "seeds.json")])
    for option in ("--seeds", "--processes"):
        with pytest.raises(SystemExit):
            seeds.main(["lenet", option, "0", "--json", str(tmp_path / "seeds.json")])
    with pytest.raises(UserError, match=r"^settings is .*No closing quotation.; wants arguments of experiments.train"):
        seeds.main(["lenet --data 'a", "--json", str(tmp_path / "seeds.json")])
    assert list(tmp_path.iterdir()) == []


def test_automata_say_how_often_they_are_right(tiny_automaton, monkeypatch):
    monkeypatch.setattr(seeds, "config_of", lambda task: tiny_automaton(seed=task[1]))
    row = seeds.trained(("ca-tiny", 0))
    assert (row["right"], row["stands"], row["heals"]) == (1, 1, 1)
    assert row["updates"] == 80 and row["gates"] > 0


def test_a_run_ends_its_training_after_a_number_of_seconds(tiny_automaton, monkeypatch):
    monkeypatch.setattr(seeds, "config_of", lambda task: tiny_automaton(seed=task[1]))
    row = seeds.trained(("ca-tiny", 0), seconds=0)
    assert row["epochs"] == 1 and row["updates"] < 80 and row["gates"] > 0


def test_logic_networks_say_how_many_gates_remain_when_simplified():
    settings = "logic --wiring learned --candidates 4 --layers 1 --gates 50 --levels 1 --epochs 1"
    settings += " --initialization normal --implementation xla"
    row = seeds.trained((settings, 0))
    assert row["gates"] == 50 >= row["simplified_gates"] > 0 and 0 < row["relaxed"] <= 1


def test_convolutional_logic_networks_say_what_their_circuit_is(tmp_path):
    row = seeds.trained(("logic-conv --kernels 1 --epochs 1", 0))
    assert row["placed_gates"] > row["simplified_gates"] > 0 and 0 < row["relaxed"] <= 1
    if "c_accuracy" in row:
        assert row["c_accuracy"] == pytest.approx(row["test_accuracy"]) and row["c_samples_per_second"] > 0
        assert "-O3" in seeds.c_compiler()["compiler"]
