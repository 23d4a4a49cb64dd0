"""Compare the implementations of jaxbp's ops in an experiment: see docs/tutorial.md."""

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import PyTree
from rich.console import Console

from experiments import configs
from experiments.configs import EXPERIMENTS, TrainingConfig
from experiments.data.datasets import Dataset
from experiments.output import results
from experiments.output.errors import UserError, kept_in, run_command
from experiments.output.files import OptionalPath, refuse_unwritable, write
from experiments.output.pages import curves_table, page
from experiments.output.results import finite, provenance
from experiments.training.loop import prepare
from jaxbp.training import loop
from jaxbp.verify import Comparison, compare

REFERENCE = "autodiff"
Config = TypeVar("Config", bound=TrainingConfig)


@dataclasses.dataclass(frozen=True)
class CompareConfig(Generic[Config]):
    """Compare the implementations on one experiment: gradients, cost, and training curves."""

    experiment: tyro.conf.OmitArgPrefixes[Config]
    steps: int = 50
    """Number of training steps per implementation."""
    implementations: tuple[Literal["pallas", "xla", "autodiff"], ...] = ()
    """Implementations to compare with autodiff. Default: xla, and on a GPU also pallas."""
    matmul_precision: Literal["default", "highest"] = "default"
    """Precision of float32 products: default, which is TF32 on a GPU, or highest, which is float32."""
    second_order: bool = True
    """Also compare Hessian-vector products of the loss for a random vector. --no-second-order leaves them out."""
    seconds: float = 0.05
    """Shortest duration of a timing round, in seconds."""
    json: OptionalPath = None
    """JSON file for all compared numbers and the training losses."""
    html: OptionalPath = None
    """HTML file for a page with the tables and pictures."""

    def __post_init__(self):
        if self.steps < 0:
            raise UserError(f"--steps is {self.steps}; wants at least 0")


def main(args: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if args is None else args) or [""]
    if name in EXPERIMENTS:
        config = EXPERIMENTS[name]
        command = f"experiments.compare {name}"
        return run_command(_main, CompareConfig[config], command, rest, description=inspect.getdoc(config))
    commands = [
        Annotated[CompareConfig[config], tyro.conf.subcommand(name, description=inspect.getdoc(config))]
        for name, config in EXPERIMENTS.items()
    ]
    union = functools.reduce(operator.or_, commands)
    return run_command(_main, union, "experiments.compare", args, description=CompareConfig.__doc__)


def _main(config: CompareConfig, command: str) -> int:
    refuse_unwritable(config.json, config.html)
    with jax.default_matmul_precision(config.matmul_precision), kept_in(config.json):
        report, comparison = run(config, command)
    if config.html is not None:
        write(config.html, page(report, comparison).encode())
    return 1 if any(one["failed"] and not one["missing"] for one in report["measured"]) else 0


def run(config: CompareConfig, command: str) -> tuple[dict[str, Any], Comparison]:
    experiment = config.experiment
    if not any(field.name == "implementation" for field in dataclasses.fields(experiment)):
        raise UserError(
            f"{experiment.name} has no setting `implementation`; wants an experiment with several implementations"
        )
    names = dict.fromkeys((REFERENCE, *(config.implementations or _default_implementations())))
    dataset = experiment.load()
    if experiment.batch_size > len(dataset.train_images):
        most = f"{len(dataset.train_images)}, the size of the training set"
        raise UserError(f"batch_size is {experiment.batch_size}; wants at most {most}")
    key = jax.random.key(experiment.seed)
    built = {name: loop.split(*dataclasses.replace(experiment, implementation=name).build(key)) for name in names}
    params, losses = built[REFERENCE][0], {name: loss for name, (_, loss) in built.items()}
    console = Console() if sys.stdout.isatty() else Console(width=140)

    comparison = _compare_on_a_batch(config, params, losses, dataset)
    comparison.show(console)
    curves: dict[str, list[float]] = {}

    def keep(complete: bool) -> dict[str, Any]:
        report = finite(
            {
                **provenance(command),
                "complete": complete,
                "config": configs.to_dict(experiment),
                "precision": config.matmul_precision,
                "reference": REFERENCE,
                **dataclasses.asdict(comparison),
                "verdict": comparison.verdict,
                "curves": curves,
            }
        )
        results.keep(report, config.json)
        return report

    keep(complete=False)
    failed = {measured.implementation: measured.failed for measured in comparison.measured}
    for name in names:
        if config.steps and not failed[name]:
            print(f"{config.steps} steps, {name}", file=sys.stderr, flush=True)
            curves[name] = train(dataclasses.replace(experiment, implementation=name), config.steps, dataset)
            keep(complete=False)
    if curves:
        console.print(curves_table(curves, REFERENCE))
    return keep(complete=True), comparison


def _default_implementations() -> tuple[str, ...]:
    if jax.default_backend() == "gpu":
        return ("pallas", "xla")
    print("no GPU: pallas is left out, because its kernels would run in an interpreter; times are CPU times")
    return ("xla",)


def _compare_on_a_batch(
    config: CompareConfig, params: PyTree, losses: Mapping[str, loop.PureLoss], dataset: Dataset
) -> Comparison:

    def loss(params, inputs, targets, *, implementation):
        return jnp.mean(losses[implementation](params, inputs, targets)[0])

    size = config.experiment.batch_size
    batch = np.asarray(dataset.train_images[:size]), np.asarray(dataset.train_labels[:size])
    options = dict(second_order=config.second_order, seconds=config.seconds, argnums=(0,), reference=REFERENCE)
    comparison = compare(loss, params, *batch, implementations=tuple(losses), **options)
    return dataclasses.replace(comparison, function=f"{config.experiment.name}, batch {size}")


def train(config: TrainingConfig, steps: int, dataset: Dataset) -> list[float]:
    in_an_epoch = min(steps, len(dataset.train_images) // config.batch_size)
    size = in_an_epoch * config.batch_size
    subset = dataset._replace(
        train_images=dataset.train_images[:size],
        train_labels=dataset.train_labels[:size],
        test_images=dataset.test_images[:1],
        test_labels=dataset.test_labels[:1],
    )
    epochs = -(-steps // in_an_epoch)
    prepared = prepare(dataclasses.replace(config, epochs=epochs), subset)
    state, curve = prepared.state, []
    for epoch in range(epochs):
        state, losses, *_ = prepared.train_epoch(state, epoch + 1)
        curve += np.asarray(losses, np.float64).tolist()
    return curve[:steps]


if __name__ == "__main__":
    sys.exit(main())
