import ast
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments import compare, configs, train
from experiments.configs import LeNetConfig
from experiments.data import datasets
from experiments.training import pictures, run_directory
from jaxbp.training import loop
from jaxbp.training.loop import Metrics

ROOT = Path(__file__).parents[2]


def test_the_default_run_prints_its_config_each_epoch_and_last_an_accuracy_above_97_percent(tmp_path):
    # The tests' XLA flags suit brief programs, and their cache causes warnings.
    of_tests = "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"
    environment = {name: value for name, value in os.environ.items() if name not in of_tests}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "experiments.train", "lenet"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr
    if jax.default_backend() == "cpu":
        assert finished.stderr == ""
    output, (run_dir,) = finished.stdout, (tmp_path / "runs").iterdir()
    config = (run_dir / "config.json").read_text()
    assert output.startswith(config)
    assert re.match("lenet-", run_dir.name)
    assert f"\ncurves in {Path('runs') / run_dir.name / 'curves.png'}\n" in output
    epochs, (*lines, last) = json.loads(config)["epochs"], output.splitlines()
    numbers = [line.split()[1] for line in lines if line.startswith("epoch")]
    assert numbers == [f"{epoch}/{epochs}" for epoch in range(1, epochs + 1)]
    assert float(re.fullmatch(r"test accuracy (\d\.\d{4})", last)[1]) >= 0.97


def test_on_a_terminal_a_bar_shows_the_last_epoch(toy_config, tmp_path, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(train, "Console", lambda: Console(file=terminal, force_terminal=True, width=80))
    metrics = train.train(toy_config(run_dir=tmp_path / "run"))
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    shown = rf"epoch 4/4 ━{{8,}} \d\d:\d\d test loss {metrics.test_loss:.4f} accuracy {metrics.test_accuracy:.4f} *"
    assert re.fullmatch(shown, [line for line in lines if line][-1])


def test_80_columns_have_room_for_the_longest_line(toy_config, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(train, "Console", lambda: Console(file=terminal, force_terminal=True, width=80))
    config = configs.LogicConfig(epochs=150)
    metrics = Metrics(**dict.fromkeys(Metrics._fields, 0.0) | {"epoch": 100, "test_loss": 12.3456})
    with train._progress(config, 0) as show:
        show(metrics)
    assert "hardened test loss 12.3456 accuracy 0.0000" in terminal.getvalue()
    assert "100/150" in terminal.getvalue() and "━━━" in terminal.getvalue()


MISTAKES = {
    "value out of range": (["--batch-size", "0"], "batch_size is 0; wants a whole number of at least 1"),
    "batch of more than the training set": (["--batch-size", "1438"], "batch_size is 1438; wants at most 1437"),
    "missing data": (["--dataset", "mnist", "--data-dir", "nowhere"], "train-images-idx3-ubyte is not in nowhere"),
    "occupied run directory": (["--run-dir", "."], "run_dir is ., which is not empty"),
    "no home folder": (["--run-dir", "~no_such_user/a"], "wants a path without ~"),
    "no run to resume": (["--resume"], "resume is True; wants run_dir as well"),
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
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_no_run_can_have_end_in_exit_code_2(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(args)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [train, compare])
def test_a_hint_for_an_unknown_option_is_a_command_that_can_be_run(command, capsys):
    with pytest.raises(SystemExit):
        command.main(["lenet", "--epoch", "3"])
    said = capsys.readouterr().err
    assert "--epochs" in said
    assert re.findall(r"python .*--help", said) == [f"python -m {command.__spec__.name} lenet --help"]


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path):
    (tmp_path / "jax.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    (tmp_path / "sitecustomize.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    command = [sys.executable, "-m", "experiments.train", "lenet"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_ctrl_c_during_start_up_cannot_be_swallowed(tmp_path):
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import json
def swallow(*_, **__):
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass
json.dumps = swallow
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    command = [sys.executable, "-m", "experiments.train", "lenet", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_help_ends_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "4")
    with pytest.raises(SystemExit):
        train.main(["lenet", "--help"])
    assert "--epochs" in capsys.readouterr().out


def test_a_run_to_resume_is_asked_for_without_an_experiment_too(capsys):
    assert train.main(["--resume"]) == 2
    assert capsys.readouterr().err == "error: resume is True; wants run_dir as well, the directory of the run\n"


def test_help_lists_the_experiments(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output for name in configs.EXPERIMENTS)


def test_help_breaks_no_sentence():
    # Tyro breaks a help text wherever the docstring breaks.
    modules = [ast.parse(file.read_text()) for file in (ROOT / "experiments").rglob("*.py")]
    nodes = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    configs = [node for node in nodes if node.name.endswith("Config")]
    pairs = [pair for config in configs for pair in itertools.pairwise(config.body)]
    docs = [doc.value.value for field, doc in pairs if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)]
    assert len(docs) > 50 and [doc for doc in docs if "\n" in doc] == []


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
        "weight_decay": 0.25,
        "target_accuracy": 0.99,
        "run_dir": str(tmp_path),
        "dataset": "mnist",
        "data_dir": "data",
        "implementation": "xla",
        "precision": "mixed_bfloat16",
        "shift": 2,
        "distortion": 0.5,
        "devices": 4,
    }
    args = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = train.parse(["lenet", *args, "--no-fused", "--flip"]).experiment
    assert json.loads(configs.as_json(configs.to_dict(config))) == {
        "experiment": "lenet",
        "resume": False,
        "fused": False,
        "flip": True,
        "data": None,
        "shape": [1, 28, 28],
        "classes": 10,
        **options,
    }


def test_the_result_is_a_file_with_what_was_measured_where(toy_config, tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "EXPERIMENTS", {"toy": toy_config})
    path, run_dir = tmp_path / "toy.json", tmp_path / "run"
    args = ["toy", "--epochs", "3", "--run-dir", str(run_dir), "--json", str(path)]
    for options in ([], ["--resume"]):
        path.unlink(missing_ok=True)
        assert train.main([*args, *options]) == 0
        result = json.loads(path.read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert result["schema"] == 1 and result["command"].startswith("python -m experiments.train toy --epochs 3")
        assert {"date", "commit", "device", "platform", "versions"} < set(result)
        assert (result["dataset"], result["epochs"], len(lines)) == ("toy", 3, 3)
        assert result["settings"]["experiment"] == "toy" and result["settings"]["batch_size"] == 16
        assert not set(result["settings"]) & {"run_dir", "resume", "data_dir", "devices"}
        assert result["devices"] == 1
        assert result["test_accuracy"] == lines[-1]["test_accuracy"]
        assert result["train_seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
        assert result["evaluation_seconds"] == pytest.approx(sum(line["evaluation_seconds"] for line in lines))
        assert result["compile_seconds"] == pytest.approx(sum(line["compile_seconds"] for line in lines))
        assert result["images_per_second"] == pytest.approx(3 * 96 / result["train_seconds"])


@pytest.fixture
def run(toy_config, tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "EXPERIMENTS", {"toy": toy_config, "lenet": LeNetConfig})
    return lambda *args, **options: train.main([*args, "--run-dir", str(tmp_path / "run")], **options)


def test_a_run_resumes_by_its_directory_alone_and_with_more_epochs(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    assert run("toy", "--seed", "3", "--epochs", "2", "--learning-rate", "0.02") == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert run("--resume") == 0
    for args in (["--resume", "--epochs", "3"], ["toy", "--resume", "--epochs", "4", "--seed", "3"]):
        capsys.readouterr()
        assert run(*args) == 0
        output = capsys.readouterr().out
        settings |= {"epochs": settings["epochs"] + 1}
        assert json.loads(output[: output.index("}") + 1]) == settings | {"resume": True}
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == settings
        assert [line.split()[1] for line in output.splitlines() if line.startswith("epoch")] == [
            f"{settings['epochs']}/{settings['epochs']}"
        ]


RESUMED_WRONGLY = {
    "another setting": (["--resume", "--seed", "7"], "(seed: saved 0, now 7); wants the saved settings"),
    "fewer epochs": (["--resume", "--epochs", "1"], "(epochs: saved 2, now 1)"),
    "another experiment": (["lenet", "--resume"], "holds a run of toy; wants a run of lenet"),
}


@pytest.mark.parametrize(("args", "message"), RESUMED_WRONGLY.values(), ids=RESUMED_WRONGLY)
def test_a_run_resumes_with_its_own_settings_alone(args, message, run, capsys, monkeypatch):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    assert run("toy", "--epochs", "2") == 0
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_a_directory_mistyped_is_not_trained_in(run, tmp_path, capsys):
    assert run("toy", "--resume") == run("--resume") == 2
    assert capsys.readouterr().err == 2 * (
        f"error: run_dir is {tmp_path / 'run'}, which holds no run; wants the directory of a run\n"
    )
    assert not (tmp_path / "run").exists()


def test_ctrl_c_says_how_to_go_on_and_draws_the_curves(run, tmp_path, press_ctrl_c, capsys, monkeypatch):
    original = loop.run

    def interrupted(*args):
        for epoch in original(*args):
            yield epoch
            if epoch[0].epoch == 2:
                press_ctrl_c()

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", interrupted)
        assert run("toy") == 130
    run_dir = tmp_path / "run"
    said = f"stopped after epoch 2; resume with: python -m experiments.train --resume --run-dir={run_dir}\n"
    assert capsys.readouterr().err == said
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert train.main(said.split("experiments.train ")[1].split()) == 0
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4


def test_the_command_to_resume_finds_a_folder_with_any_name():
    for name in ("two  spaces", "a\ttab", "a\nline", "\udcff", "it's \\", "$HOME"):
        quoted = train._quoted(name)
        assert quoted.isprintable()
        found = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True).stdout
        assert os.fsdecode(found) == name


def test_a_folder_may_be_called_none(toy_config, tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "EXPERIMENTS", {"toy": toy_config})
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--resume"]):
        command = train.parse(["toy", "--run-dir", "None", "--json", "None", *options])
        assert (command.experiment.run_dir, command.json) == (Path("None"), Path("None"))
        if not options:
            train.train(command.experiment)


def test_ctrl_c_before_the_first_write_leaves_nothing(run, toy_config, tmp_path, press_ctrl_c, capsys, monkeypatch):
    monkeypatch.setattr(toy_config, "load", lambda config: press_ctrl_c())
    assert run("toy") == 130
    assert capsys.readouterr().err == "stopped before anything was written\n"
    assert not (tmp_path / "run").exists()


OFFERED = {"lenet": "{None,digits,mnist,fashion_mnist}", "logic-conv": "{None,digits,mnist,fashion_mnist,cifar10}"}


@pytest.mark.parametrize(("experiment", "datasets"), OFFERED.items())
def test_a_command_offers_the_datasets_that_it_can_take(experiment, datasets, capsys):
    with pytest.raises(SystemExit):
        train.main([experiment, "--help"])
    offered = re.search(
        r"--dataset\s+(\{.*?\})", re.sub(r"[│\s]+", "", capsys.readouterr().out).replace("--dataset", "--dataset ")
    )
    assert offered[1] == datasets


WRONG_DATA = {
    "no file": ("lenet", "--data", "nowhere.npz"),
    "bytes": ("logic-conv", "--data", "bytes.npz"),
    "table without a target": ("logic", "--data", "table.csv"),
    "table for images": ("lenet", "--data", "table.csv"),
    "rows for images": ("logic-conv", "--data", "rows.npz"),
    "no picture": ("ca", "--target", "table.csv"),
}


@pytest.mark.parametrize("args", WRONG_DATA.values(), ids=WRONG_DATA)
def test_data_that_a_command_cannot_take_end_in_one_line_that_names_the_file(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bytes.npz").write_bytes(b"PK")
    Path("table.csv").write_text("a,b\n1,0\n2,1\n")
    np.savez("rows.npz", x_train=np.eye(8), y_train=np.arange(8) % 2)
    assert train.main([*args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert args[2] in error and "; wants " in error
    assert not Path("runs").exists()


def test_a_run_resumes_with_moved_data_but_not_with_other_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    images, labels = np.random.default_rng(0).random((40, 28, 28), np.float32), np.arange(40) % 3
    np.savez("a.npz", x_train=images, y_train=labels)
    assert train.main(["lenet", "--data", "a.npz", "--epochs", "1", "--run-dir", "run"]) == 0
    Path("a.npz").rename("b.npz")
    resume = ["--resume", "--run-dir", "run", "--epochs", "2"]
    assert train.main(resume) == 2
    assert capsys.readouterr().err == "error: a.npz is not a file; wants an existing file\n"
    assert train.main([*resume, "--data", "b.npz"]) == 0
    assert json.loads(Path("run", "config.json").read_text())["data"] == "b.npz"
    before = sorted(path.read_bytes() for path in Path("run").rglob("*") if path.is_file())
    np.savez("b.npz", x_train=images[::-1], y_train=labels[::-1])
    resume[-1] = "3"
    capsys.readouterr()
    assert train.main(resume) == 2
    said = r"error: cannot resume run: the data differ .* \(SHA-256 saved \w{64}, now \w{64}\); wants the same data\n"
    assert re.fullmatch(said, capsys.readouterr().err)
    assert train.main(["--resume", "--run-dir", "run"]) == 0
    np.savez("a.npz", x_train=images[::-1], y_train=labels[::-1])
    assert train.main(["--resume", "--run-dir", "run", "--data", "a.npz"]) == 2  # without more epochs
    assert re.fullmatch(said, capsys.readouterr().err)
    assert sorted(path.read_bytes() for path in Path("run").rglob("*") if path.is_file()) == before


def test_an_experiment_outside_the_repository_has_the_commands_and_the_report(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "own_experiments.md").read_text()
    (tmp_path / "spirals.py").write_text(re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
    np.save(tmp_path / "noise.npy", np.zeros((500, 2), np.float32))
    command = [sys.executable, "-m", "spirals", "spirals", "--noise", "noise.npy", "--epochs", "1", "--run-dir", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "points/s" in done.stdout and f"are in {Path('run', 'classes.txt')}\n" in done.stdout
    assert {"classes.txt", "curves.png", "files.sha256"} <= {path.name for path in (tmp_path / "run").iterdir()}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configs, "EXPERIMENTS", {**configs.EXPERIMENTS})
    monkeypatch.setattr(train, "REPORTS", {**train.REPORTS})
    configs.EXPERIMENTS.pop("spirals", None)
    assert train.main(["--resume", "--run-dir", "run"]) == 2
    assert "an unknown experiment, 'spirals'; wants" in capsys.readouterr().err
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("spirals")
    assert train.main(["--resume", "--run-dir", "run", "--epochs", "12"], "python -m spirals") == 0
    config, model = run_directory.load(Path("run"))
    assert (config.noise, config.epochs, config.hidden) == (Path("noise.npy"), 12, 64)
    dataset, classes = config.load(), np.loadtxt("run/classes.txt", int)
    assert np.array_equal(classes, np.argmax(model(dataset.test_images), axis=-1))
    assert np.mean(classes == dataset.test_labels) > 0.7


def test_ctrl_c_names_the_program_of_an_experiment_of_ones_own(run, press_ctrl_c, toy_config, capsys, monkeypatch):
    monkeypatch.setattr(train, "_progress", lambda *_: press_ctrl_c())
    monkeypatch.setattr(configs, "EXPERIMENTS", {"toy": toy_config})
    assert run("toy", program="python -m spirals") == 130
    assert "; resume with: python -m spirals --resume --run-dir=" in capsys.readouterr().err


def test_a_report_that_fails_loses_nothing_else(tmp_path, monkeypatch, capsys):
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(pictures, "gates", lambda *_: 1 // 0)
    run_dir, result = tmp_path / "run", tmp_path / "result.json"
    settings = ["--layers", "1", "--gates", "400", "--levels", "1", "--epochs", "1"]
    assert train.main(["logic", *settings, "--run-dir", str(run_dir), "--json", str(result)]) == 0
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("warning")]
    warnings = [line.partition(" failed, and is left out (")[0] for line in lines]
    assert warnings == [f"warning: {run_dir / 'gates.png'}", "warning: the speed of the compiled C code"]
    assert "samples/s in NumPy\ntest accuracy" in output.out
    assert result.is_file() and (run_dir / "circuit.c").is_file() and not (run_dir / "files.sha256").exists()


def test_a_result_that_cannot_be_written_is_printed(run, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    assert run("toy", "--epochs", "1", "--json", "/dev/full") == 1
    output = capsys.readouterr()
    assert "\ntest accuracy" in output.out
    assert output.err == "error: /dev/full: No space left on device\n"


def test_a_clock_that_stands_still_ends_no_run(run, monkeypatch):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    monkeypatch.setattr(loop.time, "perf_counter", lambda: 1.0)
    assert run("toy", "--epochs", "1") == 0


def test_a_result_needs_a_folder(capsys):
    assert train.main(["lenet", "--json", "nowhere/result.json"]) == 2
    wanted = "because there is no folder nowhere; wants an existing folder"
    assert capsys.readouterr().err == f"error: nowhere/result.json cannot be written, {wanted}\n"
