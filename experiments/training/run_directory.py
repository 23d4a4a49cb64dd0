"""A run's directory: what it holds, and how a run goes on after an interruption or damage.

    .lock             locked while a process works in the directory, and by the kernel: a dead process leaves no lock
    config.json       the settings
    metrics.jsonl     a line an epoch
    checkpoints/      the state after each of the last epochs: see `experiments/training/checkpoints.py`
    curves.png        drawn after the last epoch, or where the run was stopped; and what the experiment's report adds
    files.sha256      the checksums of these, as `sha256sum --check` reads them; written last

The newest checkpoint that is whole is the truth: it holds the settings and the metrics as well. Whatever else is not as
it was written is made anew from it. Files that no run writes stay as they are.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
from flax import nnx
from jaxtyping import PyTree

from experiments import configs
from experiments.configs import TrainingConfig
from experiments.output.errors import BrokenRun, UserError, warn
from experiments.output.files import is_leftover, remove, write_atomically
from experiments.training import checkpoints
from experiments.training.checkpoints import Checkpoint
from experiments.training.loop import Metrics

KEPT_CHECKPOINTS = 2
LOCK, CHECKPOINTS, CONFIG, METRICS, CHECKSUMS = ".lock", "checkpoints", "config.json", "metrics.jsonl", "files.sha256"

Config = TypeVar("Config", bound=TrainingConfig)


def saved_config(path: Path) -> TrainingConfig:
    """The settings of the run in a directory.

    Raises:
      UserError: (a ValueError) if there is no run, or one of no experiment of ours.
      BrokenRun: if no checkpoint of it is whole.
    """
    saved = newest(path).config
    if saved["experiment"] not in configs.EXPERIMENTS:
        raise UserError(f"run_dir = {path} holds a run of {saved['experiment']}, which is no experiment")
    config = configs.from_dict(configs.EXPERIMENTS[saved["experiment"]], saved)
    return dataclasses.replace(config, run_dir=path)


def read_metrics(path: Path) -> list[Metrics]:
    """The metrics of every epoch of the run in a directory. Raises as `saved_config` does."""
    return [Metrics(**line) for line in newest(path).metrics]


def load(path: Path) -> tuple[TrainingConfig, nnx.Module]:
    """The settings of the run in a directory, and its model with the parameters of the newest checkpoint.

    Raises as `saved_config` does, and `BrokenRun` if this version of the library makes another model of the settings.
    """
    config, checkpoint = saved_config(path), newest(path)
    model, _ = config.build(jax.random.split(jax.random.key(config.seed))[0])
    params = {name: array for name, array in checkpoint.arrays.items() if name.startswith("params/")}
    nnx.update(model, checkpoints.from_arrays(params, {"params": nnx.state(model, nnx.Param)})["params"])
    return config, model


def newest(path: Path, loud: bool = False) -> Checkpoint:
    """The newest checkpoint that is whole; with `loud`, damaged ones are named on stderr."""
    _check_is_run(path)
    folder, damaged = path / CHECKPOINTS, []
    for epoch in checkpoints.epochs(folder):
        try:
            checkpoint = checkpoints.read(checkpoints.path_of(folder, epoch))
        except BrokenRun as error:
            damaged.append(str(error))
            continue
        if damaged and loud:
            warn(f"{'; '.join(damaged)}: going on from epoch {checkpoint.epoch}")
        return checkpoint
    raise BrokenRun(f"run_dir = {path} has no checkpoint to go on from: {'; '.join(damaged) or 'none is left'}")


class RunDirectory:
    """Writes a run's files. Use as a context manager, within which no other process works in the directory.

    Attributes:
      config: the settings; of a run that goes on, the saved ones, but for more epochs and where the data lie.
      metrics: those of every epoch done.
    """

    def __init__(self, config: Config):
        self.config, self.metrics = config, []
        self._path, self._checkpoint, self._open = config.run_dir, None, contextlib.ExitStack()

    def __enter__(self) -> "RunDirectory":
        """Takes up the run that is there if the config says `resume`; otherwise see `begin`.

        Raises:
          UserError: for a directory with no run to resume or one of other settings; for a new run, with anything.
          BrokenRun: if no checkpoint is whole, or another process works in the directory.
        """
        if not self.config.resume:
            _check_is_free(self._path)
            return self
        _check_is_run(self._path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked(self._path))
            self._checkpoint = newest(self._path, loud=True)
            saved = configs.from_dict(type(self.config), self._checkpoint.config)
            self.config = configs.resumed(saved, self.config)
            self.metrics = [Metrics(**line) for line in self._checkpoint.metrics]
            self._write_anew(loud=True)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._open.close()

    @property
    def has_begun(self) -> bool:
        """Whether there is something to go on from."""
        return self._checkpoint is not None

    @property
    def is_done(self) -> bool:
        """Whether the last epoch is done."""
        return bool(self.metrics) and self.config.is_last(len(self.metrics), self.metrics[-1].test_accuracy)

    def has_whole(self, names: Sequence[str]) -> bool:
        """Whether the files of these names are as `seal` found them."""
        try:
            return (self._path / CHECKSUMS).read_text() == self._checksums(names)
        except (OSError, UnicodeDecodeError):
            return False

    def begin(self, initial: PyTree, constants: str | None) -> PyTree:
        """The state to go on from: that of the checkpoint, or `initial`, which a new directory is made for.

        Args:
          constants: the checksum of the model's variables that are not trained.

        Raises:
          BrokenRun: if the checkpoint is of another model, or of one with other constants.
        """
        if self._checkpoint is None:
            self._path.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(_locked(self._path))
            _check_is_free(self._path)  # once more: it may be another process's by now
            (self._path / CHECKPOINTS).mkdir(exist_ok=True)
            self._checkpoint = Checkpoint(0, configs.to_dict(self.config), constants, [], {}, self._path / CHECKPOINTS)
            self._save(initial, [])
            self._write_anew()
            return initial
        saved = self._checkpoint.constants
        if saved != constants:
            raise BrokenRun(
                f"cannot resume {self._path}: the model's fixed variables, as a network's wires, are not those of its "
                f"training (SHA-256 saved {saved}, now {constants}): wanted the version of jaxbp that began it"
            )
        state = checkpoints.from_arrays(self._checkpoint.arrays, initial)
        saved = configs.from_dict(type(self.config), self._checkpoint.config)
        if configs.differences(saved, self.config) or saved.devices != self.config.devices:
            # More epochs, or other devices: so that a run stopped before the next checkpoint still knows of them.
            extended = {**configs.to_dict(self.config), "run_dir": self._checkpoint.config["run_dir"], "resume": False}
            self._checkpoint = dataclasses.replace(self._checkpoint, config=extended)
            checkpoints.write_run(self._checkpoint, self._checkpoint.path)
            self._write_anew()
        return state

    def save(self, metrics: Metrics, state: PyTree) -> None:
        """Keeps an epoch's metrics and the state after it; the epoch is done once this returns."""
        self._save(state, [*self.metrics, metrics])
        self.metrics = [*self.metrics, metrics]
        write_atomically(self._path / METRICS, _lines(self.metrics))
        for epoch in checkpoints.epochs(self._path / CHECKPOINTS):
            if epoch <= metrics.epoch - KEPT_CHECKPOINTS:
                remove(checkpoints.path_of(self._path / CHECKPOINTS, epoch))

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of the report."""
        write_atomically(self._path / name, data)

    def seal(self, names: Sequence[str]) -> None:
        """Writes the checksums of these files: the run is finished."""
        self.write(CHECKSUMS, self._checksums(names).encode())

    def _save(self, state: PyTree, metrics: Sequence[Metrics]) -> None:
        lines = [line._asdict() for line in metrics]
        checkpoint = dataclasses.replace(self._checkpoint, epoch=len(lines), metrics=lines)
        checkpoints.write(checkpoint, checkpoints.to_arrays(state))

    def _write_anew(self, loud: bool = False) -> None:
        """Makes of the checkpoint what is not as it says, and removes what killed processes left."""
        for folder in (self._path, self._path / CHECKPOINTS):
            for leftover in filter(is_leftover, folder.iterdir()):
                remove(leftover)
        wanted = {CONFIG: configs.as_json(self._checkpoint.config).encode(), METRICS: _lines(self.metrics)}
        for name, data in wanted.items():
            file = self._path / name
            found = file.read_bytes() if file.exists() else b""
            if found == data:
                continue
            # A process may have been killed before it wrote the file, or have gone on from there.
            if loud and not (data.startswith(found) or found.startswith(data)):
                warn(f"{file} is not what the run wrote: written anew")
            write_atomically(file, data)

    def _checksums(self, names: Iterable[str]) -> str:
        return "".join(f"{hashlib.sha256((self._path / name).read_bytes()).hexdigest()}  {name}\n" for name in names)


@contextlib.contextmanager
def _locked(path: Path):
    """Holds the lock of a run's directory."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BrokenRun(f"run_dir = {path} is in use by another process: wanted to be the only one") from None
        yield
    finally:
        os.close(descriptor)


def _check_is_free(path: Path) -> None:
    """Requires a directory for a new run: one that is missing, or holds at most what a run begins with."""
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir = {path}: wanted a directory")
    folder = path / CHECKPOINTS
    files = [*(path.iterdir() if path.exists() else ()), *(folder.iterdir() if folder.is_dir() else ())]
    if not all(is_leftover(file) or file.name == LOCK or (file == folder and file.is_dir()) for file in files):
        raise UserError(f"run_dir = {path} is not empty: wanted a new directory, or --resume to continue its run")


def _check_is_run(path: Path) -> None:
    """Requires a directory in which a run has begun."""
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir = {path}: wanted a directory")
    if not (checkpoints.epochs(path / CHECKPOINTS) or ((path / CONFIG).exists() and (path / METRICS).exists())):
        raise UserError(f"run_dir = {path} holds no run to resume: wanted the directory of one")


def _lines(metrics: Iterable[Metrics]) -> bytes:
    return "".join(json.dumps(line._asdict()) + "\n" for line in metrics).encode()
