"""A run's directory: its config, metrics, curves and checkpoints, and how a run resumes after an interruption.

    config.json         the settings, written once
    constants.sha256    the checksum of the model's variables that are no parameters, if it has any; written once
    metrics.jsonl       a line an epoch
    curves.png          drawn after the last epoch, before its checkpoint
    checkpoints/        the state after each of the last epochs

The last checkpoint is the truth. An epoch's metrics are written before its checkpoint, so lines 1 to e are valid if the
checkpoint of epoch e exists. Later lines belong to an epoch without a checkpoint, and are cut when the run resumes.
"""

import json
import os
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from experiments import configs
from experiments.configs import TrainingConfig
from experiments.output.errors import UserError
from experiments.output.files import is_leftover, write_atomically
from experiments.training.loop import Metrics, TrainState

KEPT_CHECKPOINTS = 2


def check(config: TrainingConfig) -> None:
    """Raises UserError unless a run of `config` may start, or with `resume` go on, in `config.run_dir`.

    A directory with anything in it takes no new run, and goes on only with the settings it was started with. One that
    is missing or empty has nothing to go on with; the run then starts there from the beginning, as a run must that was
    killed before it had written anything.
    """
    path = config.run_dir
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir = {path}: wanted a directory")
    if not path.exists() or all(map(is_leftover, path.iterdir())):
        return
    if not config.resume:
        raise UserError(f"run_dir = {path} is not empty: wanted a new directory, or --resume to continue its run")
    try:
        saved = json.loads(_config_path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"run_dir = {path} holds no {_config_path(path).name}: wanted the directory of a run") from None
    except ValueError as error:
        raise UserError(f"{_config_path(path)}: {error}: wanted the JSON that the run wrote") from error
    differing = configs.differences(saved, config)
    if differing:
        fields = "; ".join(f"{field}: saved {old!r}, now {new!r}" for field, (old, new) in differing.items())
        raise UserError(f"cannot resume {path} with other settings ({fields})")


def final_metrics(config: TrainingConfig) -> Metrics | None:
    """The last epoch's metrics if the run in `config.run_dir`, which `check` let pass, is finished."""
    with _checkpoints(config.run_dir, read_only=True) as checkpoints:
        epochs_done = checkpoints.latest_step() or 0
    metrics = read_metrics(config.run_dir, epochs_done)
    return metrics[-1] if metrics and config.is_last(epochs_done, metrics[-1].test_accuracy) else None


def read_metrics(path: Path, epochs: int) -> list[Metrics]:
    """The metrics of the first `epochs` epochs of the run in `path`.

    Raises:
      UserError: if one of them is missing.
    """
    file = _metrics_path(path)
    lines = file.read_text().splitlines()[:epochs] if file.exists() else []
    try:
        metrics = [Metrics(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: {error}: wanted a line of metrics for each of {epochs} epochs") from error
    if [line.epoch for line in metrics] != list(range(1, epochs + 1)):
        raise UserError(f"{file}: epochs {[line.epoch for line in metrics]}: wanted 1 to {epochs}, all checkpointed")
    return metrics


class RunDirectory:
    """Writes a run's files. Use as a context manager.

    Attributes:
      metrics: those of every epoch done.
    """

    def __init__(self, config: TrainingConfig, constants_checksum: str | None):
        """Creates the directory, or with `config.resume` takes up the one there is: see `check`, which comes first.

        Raises:
          UserError: also if the last checkpoint's parameters belong to a model with other constants, or unknown ones.
        """
        check(config)
        self._path = config.run_dir
        self._path.mkdir(parents=True, exist_ok=True)
        for leftover in filter(is_leftover, self._path.iterdir()):
            leftover.unlink()
        if not _config_path(self._path).exists():
            write_atomically(_config_path(self._path), configs.to_json(config).encode())
        self._checkpoints = _checkpoints(self._path)
        self.metrics = read_metrics(self._path, self._checkpoints.latest_step() or 0)
        self._check_constants(constants_checksum)
        write_atomically(_metrics_path(self._path), "".join(map(_line, self.metrics)).encode())

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception) -> None:
        self._checkpoints.close()

    def restore(self, initial: TrainState) -> TrainState:
        """The state of the last checkpoint, or `initial` where there is none; shapes and dtypes are the same."""
        if not self.metrics:
            return initial
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, initial)
        return self._checkpoints.restore(len(self.metrics), args=ocp.args.StandardRestore(like))

    def _check_constants(self, checksum: str | None) -> None:
        """Writes the checksum before the first epoch, and compares it afterwards."""
        file = self._path / "constants.sha256"
        if not self.metrics and checksum:
            write_atomically(file, checksum.encode())
        saved = file.read_text() if file.exists() else None
        if saved != checksum:
            raise UserError(
                f"cannot resume {self._path}: the model's fixed variables, as a network's wires, are not those of its "
                f"training (SHA-256 saved {saved}, now {checksum}): wanted the version of jaxbp that began it"
            )

    def append(self, metrics: Metrics) -> None:
        """Adds an epoch's line."""
        self.metrics.append(metrics)
        with _metrics_path(self._path).open("a") as file:
            file.write(_line(metrics))
            file.flush()
            os.fsync(file.fileno())  # On disk before the checkpoint, even if the machine fails.

    def save_curves(self, png: bytes) -> None:
        """Writes `curves.png`."""
        write_atomically(self._path / "curves.png", png)

    def save_checkpoint(self, state: TrainState) -> None:
        """Keeps the state after the last epoch appended; the epoch is done once this returns."""
        self._checkpoints.save(len(self.metrics), args=ocp.args.StandardSave(state))


def _checkpoints(path: Path, read_only: bool = False) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if read_only else KEPT_CHECKPOINTS,
        read_only=read_only,
        # The next epoch reuses the state's buffers, so it has to wait for the copy anyway.
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager((path / "checkpoints").resolve(), options=options)


def _config_path(path: Path) -> Path:
    return path / "config.json"


def _metrics_path(path: Path) -> Path:
    return path / "metrics.jsonl"


def _line(metrics: Metrics) -> str:
    return json.dumps(metrics._asdict()) + "\n"
