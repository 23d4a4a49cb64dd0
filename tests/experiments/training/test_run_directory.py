import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import train
from experiments.training import loop as training
from experiments.training.loop import TIMINGS
from experiments.training.run_directory import RunDirectory

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]


def epochs_of(run_dir):
    """The metrics of a run that do not depend on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def last_checkpoint(run_dir):
    """The number of the last checkpoint, and the bytes of all its arrays."""
    with ocp.CheckpointManager((run_dir / "checkpoints").resolve()) as manager:
        step = manager.latest_step()
        state = manager.restore(step, args=ocp.args.StandardRestore())
    return step, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def assert_same_run(one, other):
    assert epochs_of(one) == epochs_of(other)
    assert last_checkpoint(one) == last_checkpoint(other)


@pytest.fixture(scope="module")
def whole_run(toy_config, tmp_path_factory):
    """The directory of a run that nothing disturbed, to be read only."""
    config = toy_config(run_dir=tmp_path_factory.mktemp("runs") / "whole")
    # As around every test: a fixture of a module is made outside of that.
    with jax.default_matmul_precision("highest"):
        train.train(config)
    return config.run_dir


def interrupt_before(monkeypatch, method, epoch):
    """Stops a run in `epoch`, at its call of a method of RunDirectory."""
    original = getattr(RunDirectory, method)

    def interrupted(directory, *args):
        if len(directory.metrics) + (method == "append") == epoch:
            raise KeyboardInterrupt
        original(directory, *args)

    monkeypatch.setattr(RunDirectory, method, interrupted)


def interrupted_run(config, monkeypatch, method="save_checkpoint", epoch=3):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_before(patch, method, epoch)
        train.train(config)
    return config.run_dir


def test_a_run_leaves_its_config_metrics_curves_and_two_checkpoints(toy_config, whole_run):
    assert json.loads((whole_run / "config.json").read_text()) == {
        "experiment": "toy",
        "seed": 0,
        "batch_size": 16,
        "epochs": 4,
        "learning_rate": 0.01,
        "target_accuracy": None,
        "run_dir": str(whole_run),
        "resume": False,
    }
    assert [line["epoch"] for line in epochs_of(whole_run)] == [1, 2, 3, 4]
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir()) == ["3", "4"]
    assert sorted(path.name for path in whole_run.iterdir()) == [
        "checkpoints",
        "config.json",
        "constants.sha256",
        "curves.png",
        "metrics.jsonl",
    ]


INTERRUPTIONS = [("append", 1), ("save_checkpoint", 1), ("append", 3), ("save_checkpoint", 3), ("save_curves", 4)]


@pytest.mark.parametrize(("method", "epoch"), INTERRUPTIONS)
def test_a_run_interrupted_between_two_writes_resumes_to_the_same_bits(
    toy_config, whole_run, tmp_path, monkeypatch, method, epoch
):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch, method, epoch)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)
    assert (run_dir / "curves.png").exists()


def tear_metrics(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "step": 2')


def leave_unfinished_checkpoint(run_dir):
    (run_dir / "checkpoints" / "3.orbax-checkpoint-tmp" / "default").mkdir(parents=True)


def leave_half_deleted_checkpoint(run_dir):
    (run_dir / "checkpoints" / "1" / "_CHECKPOINT_METADATA").unlink()


def leave_temporary_file(run_dir):
    (run_dir / ".curves.png.1234.tmp").write_bytes(b"half a pic")


REMAINS = [tear_metrics, leave_unfinished_checkpoint, leave_half_deleted_checkpoint, leave_temporary_file]


@pytest.mark.parametrize("remain", REMAINS)
def test_what_a_killed_process_leaves_half_written_does_not_matter(
    toy_config, whole_run, tmp_path, monkeypatch, remain
):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    remain(run_dir)
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(path.name for path in whole_run.iterdir())


@pytest.mark.parametrize("prepare", [lambda path: None, Path.mkdir], ids=["missing", "empty"])
def test_resuming_a_run_killed_before_it_wrote_anything_starts_it(toy_config, whole_run, tmp_path, prepare):
    prepare(tmp_path / "run")
    train.train(toy_config(run_dir=tmp_path / "run", resume=True))
    assert_same_run(tmp_path / "run", whole_run)


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
    with pytest.raises(ValueError, match="is not empty: wanted a new directory, or --resume"):
        train.train(toy_config(run_dir=whole_run))


def test_resuming_with_other_settings_is_refused_with_both_values(toy_config, whole_run):
    with pytest.raises(ValueError, match=r"\(seed: saved 0, now 7; epochs: saved 4, now 9\)"):
        train.train(toy_config(run_dir=whole_run, resume=True, seed=7, epochs=9))


@pytest.mark.parametrize("lost", [False, True])
def test_resuming_with_other_constants_is_refused_and_changes_nothing(toy_config, tmp_path, monkeypatch, lost):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    saved = (run_dir / "constants.sha256").read_text()
    if lost:
        (run_dir / "constants.sha256").unlink()
    before = last_checkpoint(run_dir)
    build = toy_config.build

    def other(config, key):
        model, loss = build(config, key)
        model.mask[...] = 1 - model.mask[...]
        return model, loss

    with monkeypatch.context() as patch:
        patch.setattr(toy_config, "build", other)
        with pytest.raises(ValueError, match=f"fixed variables.*saved {None if lost else saved}, now"):
            train.train(toy_config(run_dir=run_dir, resume=True))
    assert last_checkpoint(run_dir) == before


def test_a_run_can_be_moved_and_then_resumed(toy_config, whole_run, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch).rename(tmp_path / "moved")
    train.train(toy_config(run_dir=run_dir, resume=True))
    assert_same_run(run_dir, whole_run)


def test_resuming_in_a_directory_that_holds_no_run_is_refused(toy_config, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"no config\.json"):
        train.train(toy_config(run_dir=tmp_path, resume=True))


def test_a_run_directory_that_is_a_file_is_refused(toy_config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="wanted a directory"):
        train.train(toy_config(run_dir=tmp_path / "file"))


def test_metrics_lost_to_something_else_are_not_passed_over(toy_config, tmp_path, monkeypatch):
    run_dir = interrupted_run(toy_config(run_dir=tmp_path / "run"), monkeypatch)
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl: epochs \[\]: wanted 1 to 2"):
        train.train(toy_config(run_dir=run_dir, resume=True))


def test_a_loss_that_is_not_finite_keeps_the_last_good_epoch(toy_config, whole_run, tmp_path, monkeypatch):
    original = training.run

    def breaking(prepared, start, epochs_done):
        for metrics, state, predictions in original(prepared, start, epochs_done):
            yield metrics, state, predictions
            if metrics.epoch == 2:
                state.params["linear"]["kernel"][...] *= np.nan

    monkeypatch.setattr(training, "run", breaking)
    config = toy_config(run_dir=tmp_path / "run")
    with pytest.raises(FloatingPointError, match=r"loss became nan in epoch 3.*last good state is that of epoch 2"):
        train.train(config)
    assert epochs_of(config.run_dir) == epochs_of(whole_run)[:2]
    assert last_checkpoint(config.run_dir)[0] == 2


def test_data_that_do_not_fit_leave_no_run_directory(toy_config, tmp_path):
    with pytest.raises(ValueError, match="batch_size"):
        train.train(toy_config(run_dir=tmp_path / "run", batch_size=101))
    assert not (tmp_path / "run").exists()


# The real thing: processes that are killed while they train.

SCRIPT = """
import sys
from pathlib import Path
from conftest import ToyConfig
from experiments import train
train.train(ToyConfig(run_dir=Path(sys.argv[1]), resume=True, epochs=int(sys.argv[2])))
"""


def start_process(config):
    """Another process that goes on with the run of a toy config."""
    paths = os.pathsep.join(map(str, (ROOT, Path(__file__).parents[1])))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config.run_dir, str(config.epochs)],
        env=os.environ | {"PYTHONPATH": paths, "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines_written(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def unfinished_checkpoints(run_dir):
    path = run_dir / "checkpoints"
    return {name for name in os.listdir(path) if "tmp" in name} if path.exists() else set()


def after_two_more_lines(run_dir):
    before = lines_written(run_dir)
    return lambda: lines_written(run_dir) >= before + 2


def while_writing_another_checkpoint(run_dir):
    before = unfinished_checkpoints(run_dir)
    return lambda: unfinished_checkpoints(run_dir) - before


def a_moment_after_two_more_lines(run_dir):
    has_come = after_two_more_lines(run_dir)
    return lambda: has_come() and not time.sleep(random.uniform(0, 0.3))


MOMENTS = [after_two_more_lines, while_writing_another_checkpoint, a_moment_after_two_more_lines]


def test_a_run_killed_again_and_again_ends_in_the_same_bits(toy_config, tmp_path):
    whole, killed = (toy_config(run_dir=tmp_path / name, resume=True, epochs=24) for name in ("whole", "killed"))
    train.train(whole)
    for moment in MOMENTS:
        has_come = moment(killed.run_dir)
        process = start_process(killed)
        while not has_come():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.0005)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    train.train(killed)
    assert_same_run(killed.run_dir, whole.run_dir)
