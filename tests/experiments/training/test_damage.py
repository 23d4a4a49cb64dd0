"""However a file of a run is damaged, the run resumes to the same bits, or prints a one-line error."""

import errno
import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import configs, train
from experiments.training import checkpoints, pictures, run_directory
from jaxbp.training.loop import TIMINGS

POSITIONS = 2


@pytest.fixture(autouse=True, scope="module")
def quick(toy_config, prepared_once, tmp_path_factory):
    """Compile once, write equal arrays once, draw no curves, and do not wait for the disk."""
    save, written = checkpoints.save_state, []

    def saved(folder, arrays):
        for others, copy in written:
            if others.keys() == arrays.keys() and all(np.array_equal(arrays[name], others[name]) for name in others):
                shutil.copytree(copy, folder / checkpoints.STATE)
                return
        save(folder, arrays)
        copy = tmp_path_factory.mktemp("state") / "state"
        written.append((arrays, shutil.copytree(folder / checkpoints.STATE, copy)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(configs.EXPERIMENTS, "toy", toy_config)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(checkpoints, "save_state", saved)
        patch.setattr(pictures, "curves", lambda title, *_: b"\x89PNG" + title.encode() * 50)
        yield


@pytest.fixture(scope="module")
def runs(toy_config, tmp_path_factory):
    """Return a finished run and a run that died in its last epoch. Tests only read them."""
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
    "longer": lambda data: data + b"\0",
} | {f"flipped {position}": functools.partial(flipped, position=position) for position in range(POSITIONS)}
PLACES = {
    "finished": ("config.json", "metrics.jsonl", "curves.png", "files.sha256", "checkpoints/3", "checkpoints/4"),
    "cut": ("config.json", "metrics.jsonl", "checkpoints/2", "checkpoints/3"),
}
NEWEST = {"finished": "checkpoints/4", "cut": "checkpoints/3"}
CASES = [(run, place) for run, places in PLACES.items() for place in places]


def files_at(run_dir, place):
    path = run_dir / place
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [str(file.relative_to(run_dir)) for file in files if file.stat().st_size]


def resume(run_dir, capsys):
    capsys.readouterr()
    code = train.main(["--resume", "--run-dir", str(run_dir)])
    said = capsys.readouterr().err
    return code, said


def test_there_are_more_than_300_cases(runs):
    files = [file for run, place in CASES for file in files_at(runs[run], place)]
    assert len(files) * (1 + len(DAMAGES)) > 300


@pytest.mark.parametrize(("run", "place"), CASES)
def test_a_run_with_a_damaged_file_goes_on_to_the_same_bits(run, place, runs, tmp_path, capsys):
    wanted = outcome(runs["finished"])
    for i, file in enumerate(files_at(runs[run], place)):
        data = (runs[run] / file).read_bytes()
        for name, damage in {"deleted": None, **DAMAGES}.items():
            run_dir = Path(shutil.copytree(runs[run], tmp_path / f"{i} {name}"))
            if damage is None:
                (run_dir / file).unlink()
            else:
                assert damage(data) != data, name
                (run_dir / file).write_bytes(damage(data))
            code, said = resume(run_dir, capsys)
            assert (code, said.count("\n") <= 1) == (0, True), (file, name, said)
            assert outcome(run_dir) == wanted, (file, name)
            if place == NEWEST[run]:
                assert said.startswith("warning: ") and "resumes from the older checkpoint of epoch" in said
                assert f"{file} is corrupt" in said or f"{file} cannot be read" in said


@pytest.mark.parametrize("run", PLACES)
def test_a_lock_file_is_no_lock(run, runs, tmp_path, capsys):
    wanted = outcome(runs["finished"])
    for i, damage in enumerate([Path.unlink, lambda path: path.write_bytes(b"12345")]):
        run_dir = Path(shutil.copytree(runs[run], tmp_path / str(i)))
        damage(run_dir / ".lock")
        assert resume(run_dir, capsys) == (0, "")
        assert outcome(run_dir) == wanted


def without_checkpoints(run_dir):
    for path in (run_dir / "checkpoints").iterdir():
        shutil.rmtree(path)


def with_damaged_checkpoints(run_dir):
    for path in (run_dir / "checkpoints").glob("*/run.json"):
        path.write_bytes(path.read_bytes()[:-1])


def with_files_for_checkpoints(run_dir):
    for path in (run_dir / "checkpoints").iterdir():
        shutil.rmtree(path)
        path.touch()


def with_checkpoints_of_an_older_version(run_dir):
    without_checkpoints(run_dir)
    (run_dir / "checkpoints" / "4" / "default").mkdir(parents=True)


HOPELESS = [
    *(without_checkpoints, with_damaged_checkpoints),
    *(with_files_for_checkpoints, with_checkpoints_of_an_older_version),
]


@pytest.mark.parametrize("damage", HOPELESS)
def test_a_run_that_cannot_go_on_says_so_in_one_line_and_loses_nothing(damage, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["cut"], tmp_path / "run"))
    damage(run_dir)
    before = contents(run_dir)
    code, said = resume(run_dir, capsys)
    assert code == 1 and said.count("\n") == 1
    assert said.startswith(f"error: run_dir is {run_dir}, which has no intact checkpoint (")
    assert contents(run_dir) == before


def forged(run_dir, **fields):
    file = run_dir / NEWEST["cut"] / "run.json"
    run = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
    run |= {name: value(run[name]) if callable(value) else value for name, value in fields.items()}
    run = {name: value for name, value in run.items() if value is not MISSING}
    file.write_text(json.dumps({**run, "sha256": checkpoints._checksum(json.dumps(run).encode())}))


MISSING = object()
FORGERIES = {
    "files outside": {"files": lambda files: {**files, "../../fifo": "0" * 64}},
    "an absolute file": {"files": lambda files: {**files, "/dev/zero": "0" * 64}},
    "files as a list": {"files": list},
    "a checksum of another type": {"files": lambda files: dict.fromkeys(files, 3)},
    "no files": {"files": MISSING},
    "an unknown field": {"author": "me"},
    "the epoch as text": {"epoch": "3"},
    "the epoch as a truth value": {"epoch": True},
    "no settings": {"config": None},
    "metrics as text": {"metrics": "none"},
    "metrics of another type": {"metrics": lambda lines: [{**line, "test_loss": "low"} for line in lines]},
    "metrics of other epochs": {"metrics": lambda lines: lines[1:]},
    "metrics with another field": {"metrics": lambda lines: [{**line, "mood": 1} for line in lines]},
    "metrics without a field": {"metrics": [{"epoch": 1}, {"epoch": 2}, {"epoch": 3}]},
    "constants of another type": {"constants": 3},
}


@pytest.mark.parametrize("fields", FORGERIES.values(), ids=FORGERIES)
def test_a_checkpoint_that_the_run_cannot_have_written_is_not_used(fields, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["cut"], tmp_path / "run"))
    os.mkfifo(run_dir / "fifo")
    forged(run_dir, **fields)
    code, said = resume(run_dir, capsys)
    assert (code, said.count("\n")) == (0, 1) and said.endswith("resumes from the older checkpoint of epoch 2\n")
    (run_dir / "fifo").unlink()
    assert outcome(run_dir) == outcome(runs["finished"])


SETTINGS = {
    "a name of another type": ({"experiment": ["toy"]}, "holds a run of an unknown experiment, ['toy']; wants"),
    "no name": ({"experiment": None}, "holds a run of an unknown experiment, None; wants"),
    "a number as text": ({"seed": "3"}, "seed is '3'; wants a whole number"),
    "a path of another type": ({"run_dir": 3}, "run_dir is 3; wants a value of type Path or None"),
    "a truth value of another type": ({"resume": "no"}, "resume is 'no'; wants a value of type bool"),
    "a large number": ({"devices": 10**400}, "wants a whole number of at least 1"),
    "an unknown setting": ({"mood": 1}, "this version of jaxbp has no setting 'mood'"),
}


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_the_run_cannot_have_written_are_named(settings, message, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["cut"], tmp_path / "run"))
    forged(run_dir, config=lambda config: config | settings)
    before = contents(run_dir)
    code, said = resume(run_dir, capsys)
    assert (code, said.count("\n")) == (2, 1) and message in said
    assert contents(run_dir) == before


@pytest.mark.parametrize(
    "place", ["config.json", "metrics.jsonl", "curves.png", "files.sha256", "checkpoints/4/run.json"]
)
def test_a_pipe_for_a_file_is_replaced_and_not_read(place, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["finished"], tmp_path / "run"))
    (run_dir / place).unlink()
    os.mkfifo(run_dir / place)
    code, said = resume(run_dir, capsys)
    assert (code, said.count("\n") <= 1) == (0, True)
    assert outcome(run_dir) == outcome(runs["finished"])


@pytest.mark.parametrize("name", ["9", "2"])
def test_a_renamed_checkpoint_is_not_taken_for_that_of_another_epoch(name, runs, tmp_path, capsys):
    run_dir = Path(shutil.copytree(runs["cut"], tmp_path / "run"))
    folder = run_dir / "checkpoints"
    if name == "2":
        shutil.rmtree(folder / "2")
    (folder / "3").rename(folder / name)
    code, said = resume(run_dir, capsys)
    assert said.count("\n") == 1 and f"{name} holds the checkpoint of epoch 3" in said
    assert code == (name == "2")
    if code == 0:
        assert outcome(run_dir)[:2] == outcome(runs["finished"])[:2]


def test_a_full_disk_is_said_in_one_line_and_what_is_there_goes_on(runs, tmp_path, capsys, monkeypatch):
    for at in range(7):  # checkpoint, metrics, curves, checksums: each file, then its folder
        run_dir, written = Path(shutil.copytree(runs["cut"], tmp_path / str(at))), []

        def full(descriptor, at=at, written=written):
            written.append(descriptor)
            if len(written) > at:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            code, said = resume(run_dir, capsys)
        full_disk = (
            f"error: run_dir is {run_dir}, where a file could not be read or written (No space left on device); "
        )
        kept = r"the checkpoint of epoch (\d) is intact, and --resume continues from it\n"
        epoch = re.fullmatch(re.escape(full_disk) + kept, said)[1]
        # An epoch is complete when its checkpoint's name is on the disk.
        assert code == 1 and checkpoints.epochs(run_dir / "checkpoints")[0] - int(epoch) in (0, 1)
        assert resume(run_dir, capsys) == (0, "")
        assert outcome(run_dir) == outcome(runs["finished"])
