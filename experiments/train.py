"""Train a model from the command line, as docs/runs.md describes."""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from experiments import at_ctrl_c, configs
from experiments.configs import AUTOMATA, TrainingConfig
from experiments.data import datasets
from experiments.data.datasets import Dataset
from experiments.output.errors import (
    Stopped,
    UserError,
    exit_code,
    warn_of_failure,
    with_home,
)
from experiments.output.files import OptionalPath, refuse_unwritable, written
from experiments.output.results import keep, provenance
from experiments.training import devices, pictures, processes, run_directory
from experiments.training import loop as training
from experiments.training.loop import PreparedTraining
from experiments.training.reports import automaton, gpt, logic, logic_conv
from experiments.training.run_directory import RunDirectory
from jaxbp.training import loop
from jaxbp.training.loop import Metrics, TrainState

PROGRAM = "python -m experiments.train"


class Report(NamedTuple):
    """The report that a run writes after its last epoch.

    Attributes:
      files: the names of the files that `write` writes into `config.run_dir`. JSON files become a part of the result.
      write: a function `(config, model, dataset) -> text to print`.
    """

    files: Sequence[str]
    write: Callable[[TrainingConfig, nnx.Module, Dataset], str]


REPORTS = {
    "gpt": Report(gpt.FILES, gpt.report),
    "logic": Report(logic.FILES, logic.report),
    "logic-conv": Report(logic_conv.FILES, logic_conv.report),
    **dict.fromkeys(AUTOMATA, Report(automaton.FILES, automaton.report)),
}
CURVES = "curves.png"


def register(config: type[TrainingConfig], report: Report | None = None) -> type[TrainingConfig]:
    """Add an experiment of your own to the commands and to `run_directory.load`, as docs/own_experiments.md describes.

    Args:
      config: a frozen dataclass. Its class variable `name` is the name of the command.
      report: written after the learning curves.

    Raises:
      UserError: the class is no such dataclass, its name or a setting is taken, or a setting has an unsupported type.
    """
    configs.register(config, reserved=[field.name for field in dataclasses.fields(Options)])
    REPORTS.pop(config.name, None)
    if report is not None:
        REPORTS[config.name] = report
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line that are not settings of a run."""

    json: OptionalPath = None
    """JSON file for the result."""
    coordinator: str | None = None
    """In several processes: HOST:PORT at which process 0 listens. It also uses the next port."""
    process: int | None = None
    """In several processes: number of this process. Process 0 has the settings."""
    processes: int | None = None
    """In several processes: number of the processes."""


class Command(NamedTuple):
    experiment: TrainingConfig
    json: Path | None


def main(args: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the command line `args`, and return the exit code. `program` is what a user enters before `args`."""
    args = sys.argv[1:] if args is None else list(args)

    def lead(command):
        config, path = command
        reason = f", because {devices.default(config)[1]}" if config.devices is None else ""
        config = dataclasses.replace(config, devices=devices.number_of(config))
        print(configs.as_json(configs.to_dict(config)), end="", flush=True)
        if devices.available() > 1:
            print(f"training on {config.devices} of {devices.available()} devices{reason}", flush=True)
        metrics = train(config, program)
        print(_result(config, metrics), flush=True)
        if path is not None:
            said = shlex.join([*program.split(), *args])
            keep(result(said, config, run_directory.read_metrics(config.run_dir)), path)
        return 0

    def run():
        place = processes.Place.of(args)
        if place is not None and place.process:
            processes.run(place, _follow)
        command = parse(args, program)
        refuse_unwritable(command.json)
        if place is not None:
            processes.run(place, lambda _: lead(command), json.dumps(configs.to_dict(command.experiment)))
        return lead(command)

    return exit_code(run)


def _follow(settings: str) -> int:
    try:
        saved = json.loads(settings)
        config = configs.from_dict(configs.EXPERIMENTS[saved["experiment"]], saved)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"process 0 sent settings that this process cannot read ({reason}); wants the same version of jaxbp in all "
            "processes"
        ) from None
    dataset = config.load()
    prepared = training.prepare(config, dataset)
    state, epochs_done, is_done = _shared(prepared, dataset, prepared.state, 0, False)
    if is_done:
        np.asarray(prepared.evaluate(state.params)[0])
        return 0
    for metrics, *_ in loop.run(prepared, state, epochs_done):
        if config.is_last(metrics.epoch, metrics.test_accuracy):
            break
        processes.meet()
    return 0


def _shared(
    prepared: PreparedTraining, dataset: Dataset, state: TrainState, epochs_done: int, is_done: bool
) -> tuple[TrainState, int, bool]:
    """Return process 0's `state`, `epochs_done`, and `is_done`."""
    checksum = np.uint32(0)
    if jax.process_count() > 1:
        checksums = datasets.checksum(*dataset[:4]), prepared.constants_checksum
        checksum = np.uint32(zlib.crc32(repr(checksums).encode()))
    processes.meet()
    sent = state, np.int32(epochs_done), np.bool(is_done), checksum
    state, epochs_done, is_done, wanted = processes.of_process_0(sent)
    if checksum != wanted:
        raise UserError(
            f"process {jax.process_index()} has other data or another model than process 0; wants the same data files "
            "and the same version of jaxbp in all processes"
        )
    return devices.placed(state, prepared.shardings), int(epochs_done), bool(is_done)


def parse(args: Sequence[str], program: str = PROGRAM) -> Command:
    """Parse the command line. Without `--run-dir`, the config gets a new run directory.

    With `--resume` and `--run-dir`, omitted settings come from the saved run.
    """
    saved, flags = _run_to_resume(args), (tyro.conf.FlagCreatePairsOff,)
    name = saved.name if saved else next(iter(args), "")
    if name in configs.EXPERIMENTS:
        config = _with_options(configs.EXPERIMENTS[name])
        options = dict(default=config(**vars(saved))) if saved else dict(config=flags)
        parsed = tyro.cli(config, args=args[args[:1] == [name] :], prog=f"{program} {name}", **options)
    else:
        experiments = {name: _with_options(config) for name, config in configs.EXPERIMENTS.items()}
        parsed = tyro.extras.subcommand_cli_from_dict(experiments, args=args, prog=program, config=flags)
    settings = dict(vars(with_home(parsed)))
    path, *_ = [settings.pop(field.name) for field in dataclasses.fields(Options)]
    if settings["run_dir"] is None:
        settings["run_dir"] = Path("runs") / f"{parsed.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    config = configs.EXPERIMENTS[parsed.name](**settings)
    return Command(configs.resumed(saved, config) if saved else config, path)


def _run_to_resume(args: Sequence[str]) -> TrainingConfig | None:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--resume", action="store_true")
    options.add_argument("--run-dir", "--run_dir", type=Path, nargs="?")
    options.add_argument("-h", "--help", action="store_true")
    found, _ = options.parse_known_args(args)
    if not found.resume or found.help:
        return None
    if found.run_dir is None:
        raise UserError("resume is True; wants run_dir as well, the directory of the run")
    run_dir = with_home(found.run_dir)
    saved, name = run_directory.saved_config(run_dir), args[0]
    if name in configs.EXPERIMENTS and name != saved.name:
        raise UserError(f"run_dir is {run_dir}, which holds a run of {saved.name}; wants a run of {name}")
    return dataclasses.replace(saved, resume=True)


def _with_options(config: type[TrainingConfig]) -> type[TrainingConfig]:
    """Return the dataclass that tyro fills from a command line.

    It does not check the settings, because tyro would print errors in a box. `parse` checks them afterwards.
    """
    namespace = {"__doc__": config.__doc__, "__post_init__": lambda parsed: None}
    options = dict(bases=(Options, config), frozen=True, kw_only=True, namespace=namespace)
    return dataclasses.make_dataclass(config.__name__, [], **options)


def train(config: TrainingConfig, program: str = PROGRAM) -> Metrics:
    """Train in `config.run_dir`, from the start or from the last checkpoint, and return the last epoch's metrics.

    Raises:
      UserError: for invalid data or settings, or a run directory with other settings.
      BrokenRun: if the run directory is in use, full, or too damaged to resume.
      FloatingPointError: if training diverges. The last checkpoint is from the epoch before.
      Stopped: after Ctrl-C, when the curves have been drawn.
    """
    with RunDirectory(config) as directory:
        config = directory.config
        report = REPORTS.get(config.name)
        files = (CURVES, *(report.files if report else ()))
        is_whole = directory.is_done and directory.has_whole(files)
        if is_whole and not directory.has_moved_data:
            return directory.metrics[-1]
        dataset, metrics, predictions = None, None, None
        try:
            dataset = config.load()
            directory.check_data(checksum := config.data_checksum(dataset))
            if is_whole:
                return directory.metrics[-1]
            prepared = training.prepare(config, dataset)
            at_ctrl_c(signal.default_int_handler)
            state = directory.begin(prepared.state, prepared.constants_checksum, checksum)
            state, _, _ = _shared(prepared, dataset, state, len(directory.metrics), directory.is_done)
            with _progress(config, len(directory.metrics)) as show:
                if not directory.is_done:
                    for epoch in loop.run(prepared, state, len(directory.metrics)):
                        metrics, state, predictions = epoch
                        directory.save(metrics, state)
                        show(metrics)
                        if directory.is_done:
                            break
                        processes.meet()
            if metrics is None:  # an earlier process completed all epochs
                _, _, predictions = jax.tree.map(np.asarray, prepared.evaluate(state.params))
            _draw(directory, dataset, predictions)
            print(_total(directory.metrics))
            print(f"curves in {config.run_dir / 'curves.png'}")
            nnx.update(prepared.model, jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), state.params))
            if report:
                _report(report, config, prepared.model, dataset)
            directory.seal(files)
        except KeyboardInterrupt:
            raise _stopped(directory, dataset, predictions, program) from None
    return directory.metrics[-1]


def _report(report: Any, config: TrainingConfig, model: nnx.Module, dataset: Dataset) -> None:
    try:
        print(report.write(config, model, dataset))
    except OSError:  # a full disk
        raise
    except Exception as error:
        warn_of_failure("the report", error)


def _draw(directory: RunDirectory, dataset: Dataset, predictions: np.ndarray | None) -> None:
    config, last = directory.config, directory.metrics[-1]
    title = f"{config.name} on {dataset.name}: {_result(config, last)}"
    names = config.curves, config.loss_name
    written(config.run_dir / CURVES, lambda: pictures.curves(title, directory.metrics, dataset, predictions, *names))


def _stopped(directory: RunDirectory, dataset: Dataset | None, predictions: np.ndarray | None, program: str) -> Stopped:
    at_ctrl_c(signal.SIG_IGN)
    processes.release()
    if not directory.has_begun:
        return Stopped("stopped before anything was written")
    if directory.metrics and dataset:
        _draw(directory, dataset, predictions)
    command = f"{program} --resume --run-dir={_quoted(str(directory.config.run_dir))}"  # the name may begin with -
    return Stopped(f"stopped after epoch {len(directory.metrics)}; resume with: {command}")


def _quoted(word: str) -> str:
    """Quote a word for a shell, in one line of printable characters."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(plain)}'"


def result(command: str, config: TrainingConfig, metrics: Sequence[Metrics]) -> dict[str, Any]:
    """Return a result file's contents. Times are sums over the epochs."""
    seconds = _seconds(metrics)
    images = metrics[-1].step * config.batch_size
    return {
        **provenance(command),
        "dataset": config.data_name,
        "settings": configs.effective(config),
        "devices": config.devices,
        "epochs": len(metrics),
        "steps": metrics[-1].step,
        **seconds,
        **_figures(config),
        "test_loss": metrics[-1].test_loss,
        "test_accuracy": metrics[-1].test_accuracy,
        "images_per_second": images / seconds["train_seconds"],
    }


def _figures(config: TrainingConfig) -> dict[str, Any]:
    """Return the content of the JSON files of the run's report, by name."""
    report = REPORTS.get(config.name)
    files = [config.run_dir / name for name in (report.files if report else ()) if name.endswith(".json")]
    return {file.stem: json.loads(file.read_text()) for file in files if file.is_file()}


@contextlib.contextmanager
def _progress(config: TrainingConfig, epochs_done: int) -> Iterator[Callable[[Metrics], None]]:
    console = Console()
    if not console.is_terminal:
        yield lambda metrics: print(f"epoch {metrics.epoch}/{config.epochs}  {_summary(config, metrics)}", flush=True)
        return
    # A narrow terminal cuts off the last column.
    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[summary]}", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("epochs", total=config.epochs, completed=epochs_done, summary="")
        yield lambda metrics: progress.update(task, completed=metrics.epoch, summary=_tested(config, metrics))


def _summary(config: TrainingConfig, metrics: Metrics) -> str:
    line = (
        f"{_values(config, 0, metrics.train_loss, metrics.train_accuracy)}  {_tested(config, metrics)}  "
        f"{metrics.images_per_second:,.0f} {config.examples}/s"
    )
    if metrics.loss_scale is None:
        return line
    return f"{line}  loss scale {metrics.loss_scale:g}, {metrics.skipped_steps} skipped"


def _tested(config: TrainingConfig, metrics: Metrics) -> str:
    return _values(config, 1, metrics.test_loss, metrics.test_accuracy)


def _values(config: TrainingConfig, part: int, loss: float, accuracy: float | None) -> str:
    values = f"{config.curves[part]} {config.loss_name} {loss:.4f}"
    return values if accuracy is None else f"{values} accuracy {accuracy:.4f}"


def _result(config: TrainingConfig, metrics: Metrics) -> str:
    if metrics.test_accuracy is None:
        return _tested(config, metrics)
    return f"test accuracy {metrics.test_accuracy:.4f}"


def _total(metrics: Sequence[Metrics]) -> str:
    training, evaluation, compilation = _seconds(metrics).values()
    epochs = "1 epoch" if len(metrics) == 1 else f"{len(metrics)} epochs"
    return (
        f"{epochs} in {training + evaluation:.2f} s: training {training:.2f} s, "
        f"evaluation {evaluation:.2f} s; compilation before that {compilation:.1f} s"
    )


def _seconds(metrics: Sequence[Metrics]) -> dict[str, float]:
    fields = {"train_seconds": "seconds"} | {name: name for name in ("evaluation_seconds", "compile_seconds")}
    return {name: sum(getattr(epoch, field) for epoch in metrics) for name, field in fields.items()}


if __name__ == "__main__":
    sys.exit(main())
