"""Read and write the directory of a run, which resumes from its newest intact checkpoint: see docs/runs.md."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

from experiments import configs
from experiments.configs import TrainingConfig
from experiments.configs.base import FILES_OF_DATA, build
from experiments.output.errors import BrokenRun, UserError, warn
from experiments.output.files import is_leftover, read, remove, write_atomically
from experiments.training import checkpoints
from experiments.training.checkpoints import Checkpoint
from jaxbp.training.loop import Metrics

KEPT_CHECKPOINTS = 2
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
LOCK, CHECKPOINTS, CONFIG, METRICS, CHECKSUMS = ".lock", "checkpoints", "config.json", "metrics.jsonl", "files.sha256"


def saved_config(path: Path) -> TrainingConfig:
    """Return the settings of the run in a directory.

    Raise UserError if there is no run, or its experiment is unknown. Raise BrokenRun if every checkpoint is corrupt.
    """
    saved = newest(path).config
    if (experiment := saved.get("experiment")) not in list(configs.EXPERIMENTS):
        wanted = f"a run of {', '.join(configs.EXPERIMENTS)}, or the program that registered the experiment"
        raise UserError(
            f"run_dir is {path}, which holds a run of an unknown experiment, {reprlib.repr(experiment)}; wants {wanted}"
        )
    config = configs.from_dict(configs.EXPERIMENTS[experiment], saved)
    return dataclasses.replace(config, run_dir=path)


def read_metrics(path: Path) -> list[Metrics]:
    return _metrics(newest(path))


def load(path: Path) -> tuple[TrainingConfig, nnx.Module]:
    """Return the settings of a run, and its model with the parameters of the newest checkpoint.

    Raise the errors of `saved_config`, and BrokenRun if the parameters do not fit this version's model.
    """
    config, checkpoint = saved_config(path), newest(path)
    model, _ = config.build(jax.random.split(jax.random.key(config.seed))[0])
    like = {"params": nnx.state(model, nnx.Param)}
    checkpoints.check_like(_params(checkpoint.shapes), like)
    nnx.update(model, checkpoints.from_arrays(_params(checkpoint.arrays), like)["params"])
    return config, model


def _params(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name.startswith("params/")}


def newest(path: Path, loud: bool = False) -> Checkpoint:
    """Return the newest intact checkpoint of a run. If `loud`, warn of newer corrupt checkpoints."""
    _check_is_run(path)
    folder, damaged = path / CHECKPOINTS, []
    for epoch in checkpoints.epochs(folder):
        try:
            checkpoint = checkpoints.read(checkpoints.path_of(folder, epoch))
            _metrics(checkpoint)
        except BrokenRun as error:
            damaged.append(str(error))
            continue
        if damaged and loud:
            warn(f"{'; '.join(damaged)}; the run resumes from the older checkpoint of epoch {checkpoint.epoch}")
        return checkpoint
    reason = "; ".join(damaged) or "none is left"
    raise BrokenRun(f"run_dir is {path}, which has no intact checkpoint ({reason}); wants the directory of another run")


class RunDirectory:
    """A context manager that writes a run's files, and keeps other processes out."""

    def __init__(self, config: TrainingConfig):
        self.config, self.metrics = config, []
        self._path, self._checkpoint, self._open = config.run_dir, None, contextlib.ExitStack()

    def __enter__(self) -> "RunDirectory":
        """If the config sets `resume`, lock the directory and load its run. Otherwise, `begin` creates a run.

        Raises:
          UserError: if no run with these settings can be resumed, or if a new run's directory is not empty.
          BrokenRun: if another process uses the directory, or all checkpoints to resume from are corrupt.
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
            self.metrics = _metrics(self._checkpoint)
            self._write_anew(loud=True)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Unlock the directory. If the run has a checkpoint, replace disk errors, such as a full disk, by BrokenRun."""
        self._open.close()
        if isinstance(error, OSError) and error.errno in DISK_ERRORS and self.has_begun:
            raise BrokenRun(
                f"run_dir is {self._path}, where a file could not be read or written ({error.strerror}); the "
                f"checkpoint of epoch {len(self.metrics)} is intact, and --resume continues from it"
            ) from error

    @property
    def has_begun(self) -> bool:
        return self._checkpoint is not None

    @property
    def is_done(self) -> bool:
        return bool(self.metrics) and self.config.is_last(len(self.metrics), self.metrics[-1].test_accuracy)

    @property
    def has_moved_data(self) -> bool:
        """Whether the settings name other files of data than the checkpoint, perhaps with equal data."""
        saved, config = self._checkpoint.config, configs.to_dict(self.config)
        return any(config[name] != saved.get(name) for name in FILES_OF_DATA & config.keys())

    def has_whole(self, names: Sequence[str]) -> bool:
        try:
            return read(self._path / CHECKSUMS) == self._checksums(names).encode()
        except OSError:
            return False

    def check_data(self, checksum: str | None) -> None:
        """Raise UserError if the run resumes, and had data with another checksum."""
        saved = self._checkpoint.data if self._checkpoint else None
        if saved is not None and saved != checksum:
            raise UserError(
                f"cannot resume {self._path}: the data differ from the data of the run (SHA-256 saved {saved}, now "
                f"{checksum}); wants the same data"
            )

    def begin(self, initial: PyTree, constants: str | None, data: str | None = None) -> PyTree:
        """Return the checkpoint's state if the run resumes. Otherwise, create the directory and return `initial`.

        `constants` is the checksum of the model's fixed variables, `data` the checksum of the data. Raise BrokenRun if
        the checkpoint does not fit `initial` or `constants`, or if another process uses the directory.
        """
        if self._checkpoint is None:
            self._path.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(_locked(self._path))
            _check_is_free(self._path)  # again under the lock: another process may have begun a run
            (self._path / CHECKPOINTS).mkdir(exist_ok=True)
            self._remove_leftovers()
            first = Checkpoint(0, configs.to_dict(self.config), constants, [], {}, self._path / CHECKPOINTS, data)
            checkpoints.write(first, checkpoints.to_arrays(initial))
            self._checkpoint = first
            self._write_anew()
            return initial
        saved = self._checkpoint.constants
        if saved != constants:
            raise BrokenRun(
                f"cannot resume {self._path}: the model's fixed variables, such as wires, differ from the saved "
                f"variables (SHA-256 saved {saved}, now {constants}); wants the version of jaxbp that began the run"
            )
        checkpoints.check_like(self._checkpoint.shapes, initial)
        state = checkpoints.from_arrays(self._checkpoint.arrays, initial)
        config = configs.to_dict(self.config) | {"run_dir": self._checkpoint.config["run_dir"], "resume": False}
        if (config, data) != (self._checkpoint.config, self._checkpoint.data):
            self._checkpoint = dataclasses.replace(self._checkpoint, config=config, data=data)
            checkpoints.write_run(self._checkpoint, self._checkpoint.path)
            self._write_anew()
        return state

    def save(self, metrics: Metrics, state: PyTree) -> None:
        lines = [line._asdict() for line in (*self.metrics, metrics)]
        checkpoint = dataclasses.replace(self._checkpoint, epoch=metrics.epoch, metrics=lines)
        checkpoints.write(checkpoint, checkpoints.to_arrays(state))
        self.metrics = [*self.metrics, metrics]
        write_atomically(self._path / METRICS, _lines(self.metrics))
        for epoch in checkpoints.epochs(self._path / CHECKPOINTS):
            if epoch <= metrics.epoch - KEPT_CHECKPOINTS:
                remove(checkpoints.path_of(self._path / CHECKPOINTS, epoch))

    def seal(self, names: Sequence[str]) -> None:
        """Write the checksums of the files `names`, which marks the run as finished, if all of them exist."""
        if all((self._path / name).is_file() for name in names):
            write_atomically(self._path / CHECKSUMS, self._checksums(names).encode())

    def _remove_leftovers(self) -> None:
        for folder in (self._path, self._path / CHECKPOINTS):
            for leftover in filter(is_leftover, folder.iterdir()):
                remove(leftover)

    def _write_anew(self, loud: bool = False) -> None:
        self._remove_leftovers()
        wanted = {CONFIG: configs.as_json(self._checkpoint.config).encode(), METRICS: _lines(self.metrics)}
        for name, data in wanted.items():
            file = self._path / name
            found = file.read_bytes() if file.is_file() else b""
            if found == data:
                continue
            # A file that only ends earlier or later is from a killed process or another checkpoint.
            if loud and not (data.startswith(found) or found.startswith(data)):
                warn(f"{file} has changed since the run wrote it, and was rewritten from the checkpoint")
            write_atomically(file, data)

    def _checksums(self, names: Iterable[str]) -> str:
        return "".join(f"{hashlib.sha256(read(self._path / name)).hexdigest()}  {name}\n" for name in names)


def _metrics(checkpoint: Checkpoint) -> list[Metrics]:
    try:
        metrics = [build(Metrics, line) for line in checkpoint.metrics]
    except TypeError as error:
        raise BrokenRun(
            f"the metrics of {checkpoint.path} have other fields than this version of jaxbp writes ({error}); "
            "wants the version that wrote them"
        ) from None
    if [line.epoch for line in metrics] != list(range(1, checkpoint.epoch + 1)):
        raise BrokenRun(
            f"{checkpoint.path} lacks or repeats the metrics of an epoch; wants each from 1 to {checkpoint.epoch} once"
        )
    return metrics


@contextlib.contextmanager
def _locked(path: Path):
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BrokenRun(f"run_dir is {path}, which another process uses; wants an unused directory") from None
        yield
    finally:
        os.close(descriptor)


def _check_is_free(path: Path) -> None:
    folder = path / CHECKPOINTS
    files = [*_files(path), *(folder.iterdir() if folder.is_dir() else ())]
    if not all(is_leftover(file) or file.name == LOCK or (file == folder and file.is_dir()) for file in files):
        raise UserError(
            f"run_dir is {path}, which is not empty; wants a new directory, or --resume to continue its run"
        )


def _check_is_run(path: Path) -> None:
    names = {file.name for file in _files(path)}
    if not (checkpoints.epochs(path / CHECKPOINTS) or {CONFIG, METRICS} <= names):
        wanted = "the directory of a run"
        if LOCK in names:  # a process ended in checkpoint 0
            wanted += ", or the command without --resume, which begins this one again"
        raise UserError(f"run_dir is {path}, which holds no run; wants {wanted}")


def _files(path: Path) -> list[Path]:
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir is {path}, which is not a directory; wants a directory")
    return list(path.iterdir()) if path.exists() else []


def _lines(metrics: Iterable[Metrics]) -> bytes:
    return "".join(json.dumps(line._asdict()) + "\n" for line in metrics).encode()
