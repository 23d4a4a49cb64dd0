"""Test that a training run resumes after kills at random moments."""

import contextlib
import dataclasses
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from experiments.configs import EXPERIMENTS
from experiments.output.errors import BrokenRun, UserError, refuse_unknown, run_command
from experiments.output.files import is_leftover
from experiments.training import checkpoints, run_directory
from jaxbp.training.loop import TIMINGS

POLL_SECONDS = 0.0005
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
SIGNAL_SECONDS = 10
Command = Callable[[Path], Sequence[str]]
"""`run_dir -> command`, a command line that starts or resumes the run."""


@dataclasses.dataclass(frozen=True)
class KillConfig:
    """Kill and resume a training run repeatedly, and compare its bits with an uninterrupted run."""

    experiment: Annotated[str, tyro.conf.Positional] = "lenet"
    """Experiment of experiments.train."""
    kills: int = 50
    """Number of kills."""
    epochs: int | None = None
    """Number of epochs of the run. None: four per kill."""
    seed: int = 0
    """Seed of the kills' moments."""

    def __post_init__(self):
        if self.kills < 1:
            raise UserError(f"--kills is {self.kills}; wants at least 1")


def main(args: Sequence[str] | None = None) -> int:
    return run_command(run, KillConfig, "tests.qa.kill", args)


def run(config: KillConfig, _: str) -> int:
    refuse_unknown("experiment", [config.experiment], EXPERIMENTS)

    def command(run_dir: Path) -> Sequence[str]:
        train = [sys.executable, "-m", "experiments.train"]
        if checkpoints.epochs(run_dir / run_directory.CHECKPOINTS):
            return [*train, "--resume", "--run-dir", str(run_dir)]
        epochs = str(config.epochs or 4 * config.kills)
        return [*train, config.experiment, "--epochs", epochs, "--run-dir", str(run_dir)]

    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        finish(command, whole)
        for number, moment in enumerate(kill_again_and_again(command, killed, config.kills, config.seed), start=1):
            epoch = run_directory.newest(killed).epoch if killed.exists() else 0
            print(f"kill {number} of {config.kills}, {moment}: the checkpoint of epoch {epoch} is intact", flush=True)
        finish(command, killed)
        same = outcome(whole) == outcome(killed)
    print(f"killed {config.kills} times; the final bits are {'the same' if same else 'DIFFERENT'}")
    return 0 if same else 1


def kill_again_and_again(command: Command, run_dir: Path, kills: int, seed: int = 0) -> Iterator[str]:
    """Start or resume the run and kill its process, `kills` times. Yield each kill's moment, a key of `MOMENTS`.

    Raise BrokenRun if a process ends before its kill, or if the kill leaves the newest checkpoint corrupt.
    """
    generator, kinds = random.Random(seed), list(MOMENTS.items())
    for number in range(kills):
        kind, moment = kinds[number % len(kinds)]
        has_come = moment(run_dir, generator)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command(run_dir), stdout=output, stderr=subprocess.STDOUT)
            try:
                while not has_come():
                    if process.poll() is not None:
                        output.seek(0)
                        raise BrokenRun(f"a process ended before it was killed: {output.read().decode()[-500:]}")
                    time.sleep(POLL_SECONDS)
                process.send_signal(SIGNALS[(number + number // len(kinds)) % len(SIGNALS)])
                with contextlib.suppress(subprocess.TimeoutExpired):  # the signal is ignored under nohup
                    process.wait(SIGNAL_SECONDS)
            finally:
                process.kill()
                process.wait()
        folder = run_dir / run_directory.CHECKPOINTS
        if epochs := checkpoints.epochs(folder):
            checkpoints.read(checkpoints.path_of(folder, epochs[0]))
        yield kind


def finish(command: Command, run_dir: Path) -> None:
    finished = subprocess.run(command(run_dir), capture_output=True, text=True, check=False)
    if finished.returncode:
        raise BrokenRun(f"a process ended with exit code {finished.returncode}: {finished.stderr[-500:]}")


def outcome(run_dir: Path) -> tuple:
    checkpoint = run_directory.newest(run_dir)
    metrics = [{name: line[name] for name in line if name not in TIMINGS} for line in checkpoint.metrics]
    return checkpoint.epoch, metrics, {name: array.tobytes() for name, array in checkpoint.arrays.items()}


def _at_any_time(run_dir: Path, generator: random.Random) -> Callable[[], bool]:
    end = time.monotonic() + generator.uniform(0, 5)
    return lambda: time.monotonic() >= end


def _after_a_checkpoint(run_dir: Path, generator: random.Random) -> Callable[[], bool]:
    folder, pause = run_dir / run_directory.CHECKPOINTS, generator.uniform(0, 0.3)
    before = checkpoints.epochs(folder)
    return lambda: checkpoints.epochs(folder)[:1] > before[:1] and not time.sleep(pause)


def _while_a_file_is_written(run_dir: Path, generator: random.Random) -> Callable[[], bool]:
    def written() -> set[Path]:
        folders = [folder for folder in (run_dir, run_dir / run_directory.CHECKPOINTS) if folder.is_dir()]
        return {path for folder in folders for path in folder.iterdir() if is_leftover(path)}

    before = written()
    return lambda: bool(written() - before)


MOMENTS = {
    "after a checkpoint": _after_a_checkpoint,
    "while a file was written": _while_a_file_is_written,
    "at any time": _at_any_time,
}

if __name__ == "__main__":
    sys.exit(main())
