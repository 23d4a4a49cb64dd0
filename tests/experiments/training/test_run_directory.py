import dataclasses
import itertools
import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import configs, train
from experiments.output.errors import BrokenRun, UserError
from experiments.training import checkpoints, run_directory
from experiments.training.run_directory import RunDirectory
from jaxbp.training import loop
from jaxbp.training.loop import TIMINGS

pytestmark = pytest.mark.usefixtures("prepared_once")


def epochs_of(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def last_checkpoint(run_dir):
    checkpoint = run_directory.newest(run_dir)
    return checkpoint.epoch, {name: array.tobytes() for name, array in checkpoint.arrays.items()}


def assert_same_run(one, other):
    assert epochs_of(one) == epochs_of(other)
    assert last_checkpoint(one) == last_checkpoint(other)


@pytest.fixture(scope="module")
def whole_run(toy_config, prepared_once, tmp_path_factory):
    """Tests only read this run's directory."""
    config = toy_config(run_dir=tmp_path_factory.mktemp("runs") / "whole")
    # The function-scoped fixture does not cover module fixtures.
    with jax.default_matmul_precision("highest"):
        train.train(config)
    return config.run_dir


WRITES = {
    "checkpoint": (checkpoints, "write"),
    "file": (run_directory, "write_atomically"),
    "picture": (train, "written"),
}


def interrupted_run(config, monkeypatch, write="checkpoint", number=3):
    module, name = WRITES[write]
    original, done = getattr(module, name), []

    def dying(*args):
        if len(done) == number:
            raise SystemExit("killed")
        done.append(args)
        original(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        patch.setattr(module, name, dying)
        train.train(config)
    return config.run_dir


def copied(run_dir, folder):
    shutil.copytree(run_dir, folder)
    return folder


def test_a_run_leaves_its_config_metrics_curves_and_two_checkpoints(toy_config, whole_run):
    assert json.loads((whole_run / "config.json").read_text()) == {
        "experiment": "toy",
        "seed": 0,
        "batch_size": 16,
        "epochs": 4,
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "precision": "float32",
        "target_accuracy": None,
        "devices": 1,
        "run_dir": str(whole_run),
        "resume": False,
    }
    assert [line["epoch"] for line in epochs_of(whole_run)] == [1, 2, 3, 4]
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir()) == ["3", "4"]
    assert sorted(path.name for path in whole_run.iterdir()) == FILES


FILES = [".lock", "checkpoints", "config.json", "curves.png", "files.sha256", "metrics.jsonl"]
# Order of files: the settings, the metrics after each epoch, the curves (a picture), the checksums.
INTERRUPTIONS = [("file", number) for number in (0, 1, 4, 5)] + [("checkpoint", number) for number in (1, 3)]
INTERRUPTIONS += [("picture", 0)]


@pytest.mark.parametrize(("write", "number"), INTERRUPTIONS)
def test_a_run_interrupted_between_two_writes_resumes_to_the_same_bits(
    toy_config, whole_run, tmp_path, monkeypatch, write, number
):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch, write, number)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)
    assert sorted(path.name for path in run_dir.iterdir()) == FILES


def tear_metrics(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "step": 2')


def leave_unfinished_checkpoint(run_dir):
    folder = run_dir / "checkpoints" / ".3.1234.jaxbp-tmp"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "manifest.ocdbt").write_bytes(b"half a man")


def leave_temporary_file(run_dir):
    (run_dir / ".curves.png.1234.jaxbp-tmp").write_bytes(b"half a pic")


def test_a_checkpoint_must_have_the_metrics_of_each_epoch_once(whole_run):
    checkpoint = run_directory.newest(whole_run)
    first, *rest = checkpoint.metrics
    for metrics in (rest, [first, first, *rest]):
        with pytest.raises(BrokenRun, match="lacks or repeats the metrics"):
            run_directory._metrics(dataclasses.replace(checkpoint, metrics=metrics))


REMAINS = [tear_metrics, leave_unfinished_checkpoint, leave_temporary_file]


@pytest.mark.parametrize("remain", REMAINS)
def test_what_a_killed_process_leaves_half_written_does_not_matter(
    toy_config, whole_run, tmp_path, monkeypatch, remain
):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    remain(run_dir)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)
    assert sorted(path.name for path in run_dir.iterdir()) == FILES
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["3", "4"]


def test_a_run_killed_before_its_first_checkpoint_may_begin_anew(toy_config, whole_run, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch, number=0)
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "checkpoints"]
    train.train(toy_config(run_dir=run_dir))
    assert_same_run(run_dir, whole_run)


def test_files_that_no_run_wrote_stay_as_they_are(toy_config, whole_run, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    foreign = [run_dir / name for name in ("notes.txt", ".draft.tmp", ".lock.old", "checkpoints/best")]
    foreign += [run_dir / "checkpoints" / "01", run_dir / "checkpoints" / "1.bak"]
    for path in foreign:
        path.write_text(path.name)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert [path.read_text() for path in foreign] == [path.name for path in foreign]
    assert_same_run(run_dir, whole_run)


@pytest.mark.parametrize("prepare", [lambda path: None, Path.mkdir], ids=["missing", "empty"])
def test_there_is_nothing_to_resume_in_a_directory_without_a_run(toy_config, tmp_path, prepare):
    prepare(tmp_path / "typo")
    with pytest.raises(ValueError, match="holds no run; wants the directory of a run"):
        train.train(toy_config(run_dir=tmp_path / "typo", resume=True))
    assert not (tmp_path / "typo").exists() or list((tmp_path / "typo").iterdir()) == []


def test_a_run_is_refused_to_a_second_process(toy_config, whole_run, tmp_path):
    run_dir = copied(whole_run, tmp_path / "run")
    resumed = toy_config(run_dir=run_dir, resume=True)
    with RunDirectory(resumed) as directory:
        with pytest.raises(BrokenRun, match="which another process uses"):
            train.train(resumed)
        assert directory.is_done
    assert train.train(resumed).epoch == 4


def test_of_two_new_runs_in_one_directory_one_goes_on(toy_config, whole_run, tmp_path):
    config = toy_config(run_dir=tmp_path / "run")
    with RunDirectory(config) as late:
        train.train(config)
        with pytest.raises(UserError, match="is not empty"):
            late.begin(None, None)
    assert_same_run(config.run_dir, whole_run)


def test_resuming_a_finished_run_reports_its_last_metrics_without_training(toy_config, whole_run, monkeypatch):
    monkeypatch.delattr(toy_config, "load")
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if path.is_file()}
    metrics = train.train(toy_config(run_dir=whole_run, resume=True))
    assert metrics.epoch == 4
    assert metrics.test_accuracy == epochs_of(whole_run)[-1]["test_accuracy"]
    assert before == {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if path.is_file()}


def test_a_run_ends_at_its_target_and_resuming_it_changes_nothing(toy_config, whole_run, tmp_path, monkeypatch, capsys):
    accuracies = [line["test_accuracy"] for line in epochs_of(whole_run)]
    config = toy_config(run_dir=tmp_path / "run", target_accuracy=accuracies[1])
    reached = accuracies.index(next(a for a in accuracies if a >= accuracies[1])) + 1
    metrics = train.train(config)
    assert metrics.epoch == reached < 4
    assert epochs_of(config.run_dir) == epochs_of(whole_run)[:reached]
    assert (config.run_dir / "curves.png").exists()
    assert f"{reached} epochs in " in capsys.readouterr().out
    monkeypatch.delattr(toy_config, "load")
    assert train.train(dataclasses.replace(config, resume=True)) == metrics


def test_a_new_run_does_not_touch_an_old_ones_directory(toy_config, whole_run):
    with pytest.raises(ValueError, match="is not empty; wants a new directory, or --resume"):
        train.train(toy_config(run_dir=whole_run))


def test_resuming_with_other_settings_is_refused_with_both_values(toy_config, whole_run):
    settings = r"\(seed: saved 0, now 7; epochs: saved 4, now 3\)"
    with pytest.raises(ValueError, match=rf"{settings}; wants the saved settings \(only epochs may be larger\)"):
        train.train(toy_config(run_dir=whole_run, resume=True, seed=7, epochs=3))


def test_a_finished_run_goes_on_with_more_epochs_and_keeps_them_in_mind(toy_config, whole_run, tmp_path, monkeypatch):
    run_dir = copied(whole_run, tmp_path / "run")
    before = epochs_of(run_dir)
    interrupted_run(toy_config(run_dir=run_dir, resume=True, epochs=6), monkeypatch, number=1)
    assert json.loads((run_dir / "config.json").read_text())["epochs"] == 6
    with monkeypatch.context() as patch:
        patch.setitem(configs.EXPERIMENTS, "toy", toy_config)
        saved = run_directory.saved_config(run_dir)
    assert train.train(dataclasses.replace(saved, resume=True)).epoch == 6
    assert epochs_of(run_dir)[:4] == before and len(epochs_of(run_dir)) == 6


def test_a_setting_that_a_run_is_older_than_has_its_default(toy_config, whole_run, tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Newer(toy_config):
        sharpness: float = 1.0

    run_dir = copied(whole_run, tmp_path / "run")
    assert train.train(Newer(run_dir=run_dir, resume=True)).epoch == 4
    with pytest.raises(ValueError, match=r"sharpness: saved 1.0, now 2.0"):
        train.train(Newer(run_dir=run_dir, resume=True, sharpness=2.0))


def test_resuming_with_other_constants_is_refused_and_changes_nothing(toy_config, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    before = last_checkpoint(run_dir)
    build = toy_config.build

    def other(config, key):
        model, loss = build(config, key)
        model.mask[...] = 1 - model.mask[...]
        return model, loss

    with monkeypatch.context() as patch:
        patch.setattr(toy_config, "build", other)
        with pytest.raises(BrokenRun, match=r"fixed variables.*SHA-256 saved .{64}, now .{64}"):
            train.train(toy_config(run_dir=run_dir, resume=True))
    assert last_checkpoint(run_dir) == before


def test_the_arrays_of_another_model_are_not_read(toy_config, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    build = toy_config.build

    def wider(config, key):
        model, loss = build(config, key)
        model.linear = nnx.Linear(784, 11, rngs=nnx.Rngs(0))
        return model, loss

    monkeypatch.setitem(configs.EXPERIMENTS, "toy", toy_config)
    monkeypatch.setattr(toy_config, "build", wider)
    monkeypatch.setattr(checkpoints.Checkpoint, "arrays", property(lambda checkpoint: 1 / 0))
    for resume in (lambda: train.train(toy_config(run_dir=run_dir, resume=True)), lambda: run_directory.load(run_dir)):
        with pytest.raises(BrokenRun, match=r"another model .*linear/bias: saved \(10,\) float32, now \(11,\)"):
            resume()


def test_a_run_resumes_with_its_loss_scale_to_the_same_bits(toy_config, tmp_path, monkeypatch):
    whole, cut = (toy_config(run_dir=tmp_path / name, precision="mixed_float16") for name in ("whole", "cut"))
    train.train(whole)
    interrupted_run(cut, monkeypatch)
    train.train(dataclasses.replace(cut, resume=True))
    assert_same_run(cut.run_dir, whole.run_dir)
    assert "loss_scale/value" in last_checkpoint(cut.run_dir)[1]


def test_a_clock_that_goes_backwards_does_not_matter(toy_config, whole_run, tmp_path, monkeypatch):
    seconds = itertools.count(time.time(), -1000)
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)


def test_a_run_can_be_moved_and_then_resumed(toy_config, whole_run, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch).rename(tmp_path / "moved")
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)


NAMES = ["a[b]", "*?", "new\nline", "back\\slash", "|#%20&:{}", "→", os.fsdecode(b"not \xff UTF-8")]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_run_resumes_in_a_directory_of_any_name(toy_config, whole_run, tmp_path, monkeypatch, name):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / name), monkeypatch)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)


def test_resuming_in_a_directory_that_holds_no_run_is_refused(toy_config, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds no run"):
        train.train(toy_config(run_dir=tmp_path, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_directory_that_is_a_file_is_refused(toy_config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="wants a directory"):
        train.train(toy_config(run_dir=tmp_path / "file"))


def test_a_loss_that_is_not_finite_keeps_the_last_good_epoch(toy_config, whole_run, tmp_path, monkeypatch):
    original = loop.run

    def breaking(prepared, start, epochs_done):
        for metrics, state, predictions in original(prepared, start, epochs_done):
            yield metrics, state, predictions
            if metrics.epoch == 2:
                state.params["linear"]["kernel"][...] *= np.nan

    monkeypatch.setattr(loop, "run", breaking)
    config = toy_config(run_dir=tmp_path / "run")
    with pytest.raises(FloatingPointError, match=r"loss became nan at .* in epoch 3.*finite state is of epoch 2"):
        train.train(config)
    assert epochs_of(config.run_dir) == epochs_of(whole_run)[:2]
    assert last_checkpoint(config.run_dir)[0] == 2


def test_data_that_do_not_fit_leave_no_run_directory(toy_config, tmp_path):
    with pytest.raises(ValueError, match="batch_size"):
        train.train(toy_config(run_dir=tmp_path / "run", batch_size=101))
    assert not (tmp_path / "run").exists()


def test_a_process_with_the_number_of_a_killed_one_begins_its_run(toy_config, tmp_path):
    leftover = tmp_path / "run" / "checkpoints" / f".0.{os.getpid()}.jaxbp-tmp"
    (leftover / "state").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    with pytest.raises(UserError, match="or the command without --resume, which begins this one again"):
        train.train(toy_config(run_dir=tmp_path / "run", resume=True))
    train.train(toy_config(run_dir=tmp_path / "run", epochs=1))
    assert not leftover.exists()


HOSTILE = {
    "more than 64 bits": ("learning_rate", 10**400, "learning_rate is 1000.*000; wants a finite number above 0"),
    "a control sequence": ("experiment", "\x1b[31mred", r"an unknown experiment, '\\x1b\[31mred'; wants"),
    "a long text": ("precision", "x" * 10**5, r"precision is 'x{12}\.\.\.x{13}'; wants one of"),
    "a long path": ("run_dir", "x" * 10**5, r"run_dir is PosixPath.*\.\.\..*; wants at most 4096 characters"),
    "a long name": ("y" * 10**5, 1, r"no setting 'y{12}\.\.\.y{13}'; wants the version"),
}


@pytest.mark.parametrize(("field", "value", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_settings_of_a_checkpoint_are_refused_in_few_characters(
    toy_config, whole_run, tmp_path, monkeypatch, field, value, message
):
    monkeypatch.setattr(configs, "EXPERIMENTS", {"toy": toy_config})
    checkpoint = run_directory.newest(copied(whole_run, tmp_path / "run"))
    checkpoints.write_run(dataclasses.replace(checkpoint, config=checkpoint.config | {field: value}), checkpoint.path)
    with pytest.raises(UserError, match=message):
        run_directory.saved_config(tmp_path / "run")


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan")])
def test_hostile_metrics_make_a_checkpoint_corrupt(whole_run, tmp_path, value):
    checkpoint = run_directory.newest(copied(whole_run, tmp_path / "run"))
    lines = [line | {"seconds": value} for line in checkpoint.metrics]
    checkpoints.write_run(dataclasses.replace(checkpoint, metrics=lines), checkpoint.path)
    assert run_directory.newest(tmp_path / "run").epoch == checkpoint.epoch - 1
