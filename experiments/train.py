"""Trains a model from the command line.

    python -m experiments.train lenet --dataset mnist --data-dir data --implementation xla
    python -m experiments.train logic --json logic.json          # and the result as a file
    python -m experiments.train ca-checkerboard

The last line printed is the test accuracy. `--help` lists the experiments, and after an experiment's name its settings.
"""

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import configs
from experiments.configs import AUTOMATA, EXPERIMENTS, TrainingConfig
from experiments.configs.base import FIELDS_WITHOUT_EFFECT
from experiments.data.datasets import Dataset
from experiments.output.errors import UserError
from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json
from experiments.training import automaton, curves, logic, run_directory
from experiments.training import loop as training
from experiments.training.loop import Metrics
from experiments.training.run_directory import RunDirectory

REPORTS: Mapping[str, Callable[[Any, nnx.Module, Dataset], str]] = {
    "logic": logic.report,
    **dict.fromkeys(AUTOMATA, automaton.report),
}
"""Experiment -> `(config, trained model, dataset) -> lines` to print after training. It may add files to run_dir."""


class Command(NamedTuple):
    """What to train, and where to put the result."""

    experiment: TrainingConfig
    json: Path | None


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 2, after one line on stderr, for a mistake of the user."""
    args = sys.argv[1:] if args is None else list(args)
    try:
        config, path = parse(args)
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}")
        print(configs.to_json(config), end="", flush=True)
        metrics = train(config)
        if path is not None:
            history = run_directory.read_metrics(config.run_dir, metrics.epoch)
            report = result(shlex.join(["python", "-m", "experiments.train", *args]), config, history)
            write_atomically(path, to_json(report))
    except (UserError, OSError, NotImplementedError, FloatingPointError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"test accuracy {metrics.test_accuracy:.4f}")
    return 0


def parse(args: Sequence[str]) -> Command:
    """The config that the command line asks for, with a new run directory if none is named.

    Raises:
      SystemExit: after `--help`, or a message about arguments that no run can have (2).
    """
    parsed = tyro.extras.subcommand_cli_from_dict(
        {name: _with_json(config) for name, config in EXPERIMENTS.items()},
        args=args,
        prog="python -m experiments.train",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    settings = dict(vars(parsed))
    path = settings.pop("json")
    if settings["run_dir"] is None:
        settings["run_dir"] = Path("runs") / f"{parsed.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    return Command(EXPERIMENTS[parsed.name](**settings), path)


def _with_json(config: type[TrainingConfig]) -> type[TrainingConfig]:
    """The config with the option `--json`, which is no setting of a run."""
    help = "File to write the result to: accuracy, times, settings, device and versions."
    field = ("json", Annotated[Path | None, tyro.conf.arg(help=help)], None)
    options = dict(bases=(config,), frozen=True, kw_only=True, namespace={"__doc__": config.__doc__})
    return dataclasses.make_dataclass(config.__name__, [field], **options)


def train(config: TrainingConfig) -> Metrics:
    """Trains in `config.run_dir`, from the start or from its last checkpoint; returns the last metrics.

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
                directory.save_curves(curves.draw(title, directory.metrics, dataset, predictions, config.curves))
            directory.save_checkpoint(state)
            show(metrics)
            if last:
                break
    print(_total(directory.metrics))
    nnx.update(prepared.model, state.params)
    if config.name in REPORTS:
        print(REPORTS[config.name](config, prepared.model, dataset))
    return directory.metrics[-1]


def result(command: str, config: TrainingConfig, metrics: Sequence[Metrics]) -> dict[str, Any]:
    """The result file of a run, of the metrics of all its epochs.

    Next to what all result files have (`experiments/output/results.py`): `dataset`, `settings`, `epochs` (run),
    `train_seconds`, `evaluation_seconds` and `compile_seconds` (sums over the epochs), `test_accuracy` (of the last
    epoch), `images_per_second` (of training, over all epochs).
    """
    seconds = _seconds(metrics)
    images = metrics[-1].step * config.batch_size
    return {
        **provenance(command),
        "dataset": getattr(config, "dataset", config.name),
        "settings": {k: v for k, v in configs.to_dict(config).items() if k not in FIELDS_WITHOUT_EFFECT},
        "epochs": len(metrics),
        **seconds,
        "test_accuracy": metrics[-1].test_accuracy,
        "images_per_second": images / seconds["train_seconds"],
    }


@contextlib.contextmanager
def _progress(config: TrainingConfig, epochs_done: int) -> Iterator[Callable[[Metrics], None]]:
    """Yields a function to show an epoch's metrics: in a bar on a terminal, otherwise as a line."""
    console = Console()
    if not console.is_terminal:
        yield lambda metrics: print(f"epoch {metrics.epoch}/{config.epochs}  {_summary(config, metrics)}", flush=True)
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
        yield lambda metrics: progress.update(task, completed=metrics.epoch, summary=_summary(config, metrics))


def _summary(config: TrainingConfig, metrics: Metrics) -> str:
    train, test = config.curves
    return (
        f"{train} loss {metrics.train_loss:.4f} accuracy {metrics.train_accuracy:.4f}  "
        f"{test} loss {metrics.test_loss:.4f} accuracy {metrics.test_accuracy:.4f}  "
        f"{metrics.images_per_second:,.0f} {config.examples}/s"
    )


def _total(metrics: Sequence[Metrics]) -> str:
    training, evaluation, compilation = _seconds(metrics).values()
    return (
        f"{len(metrics)} epochs in {training + evaluation:.2f} s: training {training:.2f} s, "
        f"evaluation {evaluation:.2f} s; compilation before that {compilation:.1f} s"
    )


def _seconds(metrics: Sequence[Metrics]) -> dict[str, float]:
    fields = {
        "train_seconds": "seconds",
        "evaluation_seconds": "evaluation_seconds",
        "compile_seconds": "compile_seconds",
    }
    return {name: sum(getattr(epoch, field) for epoch in metrics) for name, field in fields.items()}


if __name__ == "__main__":
    sys.exit(main())
