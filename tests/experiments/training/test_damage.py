"""Every file of a run damaged in every way: the run goes on to the same bits, or says in one line why it cannot.

All of it goes through the command line's `main`. What takes long is done once: the toy model is compiled for the first
case, the picture of the curves is a stand-in, and nothing waits for the disk.
"""

import dataclasses
import errno
import functools
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import configs, train
from experiments.training import curves, run_directory
from experiments.training import loop as training
from experiments.training.loop import TIMINGS

pytestmark = pytest.mark.once

POSITIONS = 32
"""Where a bit is flipped, evenly over a file."""


@pytest.fixture(autouse=True, scope="module")
def quick(toy_config):
    """The toy experiment on the command line, compiled once."""
    prepare = training.prepare

    @functools.cache
    def prepared(epochs):
        made = prepare(toy_config(epochs=epochs), toy_config().load())
        # Training works in the buffers of the state that it begins with.
        return dataclasses.replace(made, state=jax.tree.map(np.array, made.state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(configs.EXPERIMENTS, "toy", toy_config)
        patch.setattr(training, "prepare", lambda config, dataset: prepared(config.epochs))
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(curves, "draw", lambda title, *_: b"\x89PNG" + title.encode() * 50)
        yield


@pytest.fixture(scope="module")
def runs(toy_config, tmp_path_factory):
    """A finished run, and one that died in its last epoch; both to be read only."""
    folder = tmp_path_factory.mktemp("runs")
    train.train(toy_config(run_dir=folder / "finished"))
    write = run_directory.RunDirectory.save
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):

        def dying(directory, metrics, state):
            if metrics.epoch == 4:
                raise SystemExit
            write(directory, metrics, state)

        patch.setattr(run_directory.RunDirectory, "save", dying)
        train.train(toy_config(run_dir=folder / "cut"))
    return {name: folder / name for name in ("finished", "cut")}


def contents(run_dir):
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def outcome(run_dir):
    """What a run came to: its metrics but for the clock's, its parameters and state, and its other files."""
    checkpoint = run_directory.newest(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines == checkpoint.metrics
    metrics = [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]
    settings = json.loads((run_dir / "config.json").read_text())
    assert settings == checkpoint.config
    sums = (run_dir / "files.sha256").read_text()
    names = sorted(path.name for path in run_dir.iterdir())
    return metrics, {name: array.tobytes() for name, array in checkpoint.arrays.items()}, settings["seed"], sums, names


def flipped(data, position):
    at = position * len(data) // POSITIONS
    return data[:at] + bytes([data[at] ^ 1 << position % 8]) + data[at + 1 :]


DAMAGES = {
    "emptied": lambda data: b"",
    "halved": lambda data: data[: len(data) // 2],
    "garbage": lambda data: np.random.default_rng(0).bytes(len(data) or 100),
    "text": lambda data: b"<html>no such file</html>\n",
    "longer": lambda data: data + b"\0",
} | {f"flipped {position}": functools.partial(flipped, position=position) for position in range(POSITIONS)}
CHECKPOINTS = ("checkpoints/3.npz", "checkpoints/4.npz")
FILES = {
    "finished": (
        *("config.json", "metrics.jsonl", "curves.png", "files.sha256"),
        "checkpoints/3.npz",
        "checkpoints/4.npz",
    ),
    "cut": ("config.json", "metrics.jsonl", "checkpoints/2.npz", "checkpoints/3.npz"),
}
CASES = [(run, file) for run, files in FILES.items() for file in files]


def resume(run_dir, capsys):
    capsys.readouterr()
    code = train.main(["--resume", "--run-dir", str(run_dir)])
    said = capsys.readouterr().err
    return code, said


def test_there_are_more_than_300_cases():
    assert len(CASES) * (1 + len(DAMAGES)) > 300


@pytest.mark.parametrize(("run", "file"), CASES)
def test_a_run_with_a_damaged_file_goes_on_to_the_same_bits(run, file, runs, tmp_path, capsys):
    wanted, data = outcome(runs["finished"]), (runs[run] / file).read_bytes()
    for name, damage in {"deleted": None, **DAMAGES}.items():
        run_dir = Path(shutil.copytree(runs[run], tmp_path / name))
        if damage is None:
            (run_dir / file).unlink()
        else:
            assert damage(data) != data, name
            (run_dir / file).write_bytes(damage(data))
        code, said = resume(run_dir, capsys)
        assert (code, said.count("\n") <= 1) == (0, True), (name, said)
        assert outcome(run_dir) == wanted, name
        if damage and file == f"checkpoints/{4 if run == 'finished' else 3}.npz":
            assert said.startswith("warning: ") and f"{file} is damaged" in said and "going on from epoch" in said


@pytest.mark.parametrize("run", FILES)
def test_a_lock_file_is_no_lock(run, runs, tmp_path, capsys):
    wanted = outcome(runs["finished"])
    for i, damage in enumerate([Path.unlink, lambda path: path.write_bytes(b"12345")]):
        run_dir = Path(shutil.copytree(runs[run], tmp_path / str(i)))
        damage(run_dir / ".lock")
        assert resume(run_dir, capsys) == (0, "")
        assert outcome(run_dir) == wanted


def without_checkpoints(run_dir):
    for path in (run_dir / "checkpoints").iterdir():
        path.unlink()


def with_damaged_checkpoints(run_dir):
    for path in (run_dir / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])


def with_folders_for_checkpoints(run_dir):
    for path in (run_dir / "checkpoints").iterdir():
        path.unlink()
        path.mkdir()


def with_checkpoints_of_an_older_version(run_dir):
    without_checkpoints(run_dir)
    (run_dir / "checkpoints" / "4" / "default").mkdir(parents=True)


HOPELESS = [
    *(without_checkpoints, with_damaged_checkpoints),
    *(with_folders_for_checkpoints, with_checkpoints_of_an_older_version),
]


@pytest.mark.parametrize("damage", HOPELESS)
def test_a_run_that_cannot_go_on_says_so_in_one_line_and_loses_nothing(damage, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["cut"], tmp_path / "run"))
    damage(run_dir)
    before = contents(run_dir)
    code, said = resume(run_dir, capsys)
    assert code == 1 and said.count("\n") == 1
    assert said.startswith(f"error: run_dir = {run_dir} has no checkpoint to go on from: ")
    assert contents(run_dir) == before


@pytest.mark.parametrize("name", ["9.npz", "2.npz"])
def test_a_renamed_checkpoint_is_not_taken_for_that_of_another_epoch(name, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["cut"], tmp_path / "run"))
    folder = run_dir / "checkpoints"
    (folder / "3.npz").rename(folder / name)
    code, said = resume(run_dir, capsys)
    assert said.count("\n") == 1 and f"{name} is a checkpoint of epoch 3, under another name" in said
    assert code == (name == "2.npz")
    if code == 0:
        assert outcome(run_dir)[:2] == outcome(runs["finished"])[:2]


def test_a_full_disk_is_said_in_one_line_and_what_is_there_goes_on(runs, tmp_path, capsys, monkeypatch):
    for at in range(7):  # at the checkpoint, the metrics, the curves, the checksums; each file, then its folder
        run_dir, written = Path(shutil.copytree(runs["cut"], tmp_path / str(at))), []

        def full(descriptor, at=at, written=written):
            written.append(descriptor)
            if len(written) > at:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert resume(run_dir, capsys) == (1, "error: [Errno 28] No space left on device\n")
        assert resume(run_dir, capsys) == (0, "")
        assert outcome(run_dir) == outcome(runs["finished"])
