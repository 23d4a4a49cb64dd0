"""Trains a model from the command line.

    python -m experiments.train lenet --dataset mnist --data-dir data --implementation xla

The last line printed is the test accuracy. `--help` lists the settings, here and after an experiment's name.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import tyro
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import configs
from experiments.configs import EXPERIMENTS, TrainingConfig
from experiments.errors import UserError
from experiments.training import curves, run_directory
from experiments.training import loop as training
from experiments.training.loop import Metrics
from experiments.training.run_directory import RunDirectory


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 2, after one line on stderr, for what the user can mend."""
    try:
        config = parse(sys.argv[1:] if args is None else args)
        print(configs.to_json(config), end="", flush=True)
        metrics = train(config)
    except (UserError, OSError, NotImplementedError, FloatingPointError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"test accuracy {metrics.test_accuracy:.4f}")
    return 0


def parse(args: Sequence[str]) -> TrainingConfig:
    """The config that the command line asks for, with a run directory of its own if none is named.

    Raises:
      SystemExit: after `--help`, or a message about arguments that no run can have (2).
    """
    config = tyro.extras.subcommand_cli_from_dict(
        EXPERIMENTS, args=args, prog="python -m experiments.train", config=(tyro.conf.FlagCreatePairsOff,)
    )
    if config.run_dir is None:
        run_dir = Path("runs") / f"{config.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        config = dataclasses.replace(config, run_dir=run_dir)
    return config


def train(config: TrainingConfig) -> Metrics:
    """Trains in `config.run_dir`, from the start or from where the run there was left; returns the last metrics.

    Raises:
      UserError: (a ValueError) for data, settings or a run directory that do not fit.
      FloatingPointError: when a loss is no longer finite; the last checkpoint is that of the epoch before.
    """
    run_directory.check(config)
    if config.resume and (metrics := run_directory.final_metrics(config)):
        return metrics
    dataset = config.load()
    prepared = training.prepare(config, dataset)
    with (
        RunDirectory(config, prepared.constants_checksum) as directory,
        _progress(config, len(directory.metrics)) as show,
    ):
        start = directory.restore(prepared.state)
        for metrics, state, predictions in training.run(prepared, start, len(directory.metrics)):
            directory.append(metrics)
            last = config.is_last(metrics.epoch, metrics.test_accuracy)
            if last:
                title = f"{config.name} on {dataset.name}: test accuracy {metrics.test_accuracy:.4f}"
                directory.save_curves(curves.draw(title, directory.metrics, dataset, predictions))
            directory.save_checkpoint(state)
            show(metrics)
            if last:
                break
    print(_total(directory.metrics))
    nnx.update(prepared.model, state.params)
    if report := config.report(prepared.model, dataset):
        print(report)
    return directory.metrics[-1]


@contextlib.contextmanager
def _progress(config: TrainingConfig, epochs_done: int) -> Iterator[Callable[[Metrics], None]]:
    """Yields a function to show an epoch's metrics: in a bar on a terminal, otherwise as a line."""
    console = Console()
    if not console.is_terminal:
        yield lambda metrics: print(f"epoch {metrics.epoch}/{config.epochs}  {_summary(metrics)}", flush=True)
        return
    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[summary]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("epochs", total=config.epochs, completed=epochs_done, summary="")
        yield lambda metrics: progress.update(task, completed=metrics.epoch, summary=_summary(metrics))


def _summary(metrics: Metrics) -> str:
    return (
        f"train loss {metrics.train_loss:.4f} accuracy {metrics.train_accuracy:.4f}  "
        f"test loss {metrics.test_loss:.4f} accuracy {metrics.test_accuracy:.4f}  "
        f"{metrics.images_per_second:,.0f} images/s"
    )


def _total(metrics: Sequence[Metrics]) -> str:
    training, evaluation, compilation = (
        sum(getattr(epoch, name) for epoch in metrics) for name in ("seconds", "evaluation_seconds", "compile_seconds")
    )
    return (
        f"{len(metrics)} epochs in {training + evaluation:.2f} s: training {training:.2f} s, "
        f"evaluation {evaluation:.2f} s; compilation before that {compilation:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
