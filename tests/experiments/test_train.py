import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import configs, train
from experiments.configs import LeNetConfig
from experiments.data import datasets

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.once) for name in ("lenet", "mixer")])
def default_run(request, tmp_path_factory):
    """`python -m experiments.train lenet`, or mixer, with nothing else said: its output, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("default")
    # Without the XLA flags of the tests, which are for fast compilation of what runs briefly.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "experiments.train", request.param]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, folder


def test_the_default_run_reaches_97_percent_and_says_so_last(default_run):
    output, _ = default_run
    accuracy = re.fullmatch(r"test accuracy (\d\.\d{4})", output.splitlines()[-1])
    assert float(accuracy[1]) >= 0.97


def test_the_config_is_printed_as_it_is_saved(default_run):
    output, folder = default_run
    (run_dir,) = (folder / "runs").iterdir()
    assert output.startswith((run_dir / "config.json").read_text())
    assert re.match("(lenet|mixer)-", run_dir.name)


def test_away_from_a_terminal_every_epoch_is_a_line(default_run):
    output, _ = default_run
    epochs = json.loads(output[: output.index("}") + 1])["epochs"]
    lines = [line for line in output.splitlines() if line.startswith("epoch")]
    assert [line.split()[1] for line in lines] == [f"{epoch}/{epochs}" for epoch in range(1, epochs + 1)]


def test_on_a_terminal_a_bar_shows_the_last_epoch(toy_config, tmp_path, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(train, "Console", lambda: Console(file=terminal, force_terminal=True, width=200))
    metrics = train.train(toy_config(run_dir=tmp_path / "run"))
    assert "4/4" in terminal.getvalue()
    assert f"test loss {metrics.test_loss:.4f} accuracy {metrics.test_accuracy:.4f}" in terminal.getvalue()


MISTAKES = {
    "batch of more than the training set": (["--batch-size", "1438"], "batch_size = 1438: wanted at most 1437"),
    "missing data": (["--dataset", "mnist", "--data-dir", "nowhere"], "train-images-idx3-ubyte is neither in nowhere"),
    "occupied run directory": (["--run-dir", "."], "run_dir = . is not empty"),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_users_mistake_ends_in_one_line_and_exit_code_2(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "MIRRORS", {"mnist": ()})
    assert train.main(["lenet", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


REFUSED = {
    "no experiment": ([], "lenet"),
    "unknown experiment": (["alexnet"], "alexnet"),
    "unknown choice": (["lenet", "--dataset", "cifar"], "fashion_mnist"),
    "not a number": (["lenet", "--seed", "x"], "--seed"),
    "value out of range": (["lenet", "--batch-size", "0"], "batch_size = 0: wanted a whole number of at least 1"),
    "nothing to resume": (["lenet", "--resume"], "resume = True: wanted run_dir as well"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_no_run_can_have_end_in_exit_code_2(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(args)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_experiments(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output for name in configs.EXPERIMENTS)


def test_an_error_inside_a_model_keeps_its_traceback(monkeypatch, tmp_path):
    def build(config, key):
        raise ValueError("a kernel under development")

    monkeypatch.setattr(LeNetConfig, "build", build)
    with pytest.raises(ValueError, match="a kernel under development"):
        train.main(["lenet", "--run-dir", str(tmp_path / "run")])


def test_every_option_reaches_the_config(tmp_path):
    options = {
        "seed": 5,
        "batch_size": 8,
        "epochs": 3,
        "learning_rate": 0.5,
        "target_accuracy": 0.99,
        "run_dir": str(tmp_path),
        "dataset": "mnist",
        "data_dir": "data",
        "implementation": "xla",
        "dtype": "bfloat16",
        "shift": 2,
    }
    args = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = train.parse(["lenet", *args, "--resume", "--no-fused"]).experiment
    assert json.loads(configs.to_json(config)) == {"experiment": "lenet", "resume": True, "fused": False, **options}


def test_the_result_is_a_file_with_what_was_measured_where(toy_config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "EXPERIMENTS", {"toy": toy_config})
    path, run_dir = tmp_path / "toy.json", tmp_path / "run"
    args = ["toy", "--epochs", "3", "--run-dir", str(run_dir), "--json", str(path)]
    for options in ([], ["--resume"]):  # finished runs are not trained once more
        path.unlink(missing_ok=True)
        assert train.main([*args, *options]) == 0
        result = json.loads(path.read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert result["schema"] == 1 and result["command"].startswith("python -m experiments.train toy --epochs 3")
        assert {"date", "commit", "device", "platform", "versions"} < set(result)
        assert (result["dataset"], result["epochs"], len(lines)) == ("toy", 3, 3)
        assert result["settings"]["experiment"] == "toy" and result["settings"]["batch_size"] == 16
        assert not set(result["settings"]) & {"run_dir", "resume", "data_dir"}
        assert result["test_accuracy"] == lines[-1]["test_accuracy"]
        assert result["train_seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
        assert result["evaluation_seconds"] == pytest.approx(sum(line["evaluation_seconds"] for line in lines))
        assert result["compile_seconds"] == pytest.approx(sum(line["compile_seconds"] for line in lines))
        assert result["images_per_second"] == pytest.approx(3 * 96 / result["train_seconds"])


def test_a_result_needs_a_folder(capsys):
    assert train.main(["lenet", "--json", "nowhere/result.json"]) == 2
    assert capsys.readouterr().err == "error: nowhere/result.json cannot be written: there is no folder nowhere\n"
