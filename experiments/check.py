"""Check the ops of jaxbp against finite differences, in every implementation."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.text import Text

from experiments.accuracy import measure
from experiments.output.errors import UserError, kept_in, refuse_unknown, run_command
from experiments.output.files import OptionalPath, refuse_unwritable
from experiments.output.results import finite, keep
from jaxbp.catalogue import CATALOGUE, Case, Entry, FixedArgument
from jaxbp.verify import EXTRA_DATA, CheckResult, CheckRow, check
from jaxbp.verify.arguments import bind, take_apart
from jaxbp.verify.derivatives import value_and_gradients
from jaxbp.verify.report import WIDTH


@dataclasses.dataclass(frozen=True)
class CheckConfig:
    """Check the gradients of ops in every implementation."""

    ops: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",)
    """Names of ops, or `all`. A forward's name also selects its backwards."""
    dtype: tuple[Literal["float16", "bfloat16", "float32", "float64"], ...] = ("float32",)
    """Dtypes of the arguments. GPU kernels do not support float64."""
    implementations: tuple[Literal["pallas", "xla", "autodiff"], ...] = ("pallas", "xla", "autodiff")
    """Implementations to check."""
    order: Literal[1, 2, 3] = 2
    """Highest order of derivatives to check; 1 checks values and gradients."""
    accuracy: bool = False
    """Instead, measure errors against float64, also for large, small, or shifted values."""
    repeat: int | None = None
    """Instead, compute each op and its gradients this many times, and compare their bits."""
    seed: int = 0
    """Seed of the random arguments."""
    scale: float = 1.0
    """Factor for all arguments except probabilities, weights, and fixed arguments."""
    verbose: bool = False
    """Print one row per comparison, not one row per op."""
    json: OptionalPath = None
    """JSON file for one row per comparison."""


def main(args: Sequence[str] | None = None) -> int:
    return run_command(run, CheckConfig, "experiments.check", args)


def run(config: CheckConfig, command: str) -> int:
    entries = selected(config.ops)
    refuse_unwritable(config.json)
    if config.repeat is not None and config.repeat < 2:
        raise UserError(f"--repeat is {config.repeat}; wants at least 2 runs, which are compared")
    console, rows = Console(), []
    if not console.is_terminal:
        console = Console(width=150 if config.verbose or config.accuracy else WIDTH)
    if config.accuracy:
        ours = [name for name in config.implementations if name != "autodiff"]
        return 0 if measure(entries, ours, config.dtype, command, console, config.json) else 1
    with kept_in(config.json):
        for i, (entry, dtype) in enumerate(cases := list(itertools.product(entries, config.dtype)), start=1):
            print(f"{entry.name}, {dtype}", file=sys.stderr, flush=True)
            result = (check_entry if config.repeat is None else repeat_entry)(entry, dtype, config)
            console.print(result.table() if config.verbose else result.summary())
            rows += result.rows
            complete, found = i == len(cases), CheckResult(tuple(rows))
            report = {"command": command, "complete": complete, "passed": complete and bool(found)}
            report["rows"] = [dataclasses.asdict(row) for row in rows]
            keep(finite(report, str), config.json)
    result = CheckResult(tuple(rows))
    for failure in result.failures:
        console.print(Text(f"failed: {failure}", style="bold red"), soft_wrap=True)
    counts = {verdict: sum(row.verdict == verdict for row in result.rows) for verdict in ("ok", "failed", "skipped")}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if result else 1


def selected(names: Sequence[str]) -> list[Entry]:
    known = [entry.name for entry in CATALOGUE]
    refuse_unknown("op", [name for name in names if name != "all"], known, "all, or names among ")
    return [
        entry
        for entry in CATALOGUE
        if any(name in ("all", entry.name) or entry.name.startswith(f"{name}_backward") for name in names)
    ]


def check_entry(entry: Entry, dtype: str, config: CheckConfig) -> CheckResult:
    with jax.enable_x64(dtype == "float64"):
        args = entry.small.draw(config.seed, dtype=jnp.dtype(dtype))
        args = jax.tree.map(
            lambda kind, a: (
                a if isinstance(kind, FixedArgument) or kind.below is not None or kind.weights else config.scale * a
            ),
            entry.small.arguments,
            args,
        )
    return check(
        entry.function,
        *args,
        implementations=config.implementations,
        order=config.order,
        # A convention defines the derivative of a forward at kinks, but not of a backward.
        kink_convention=entry.kink_convention and "_backward" not in entry.name,
        added=[name for name in EXTRA_DATA if name != "dtypes"],  # `--dtype` selects the dtypes
        seed=config.seed,
        **entry.small.options,
    )


def repeat_entry(entry: Entry, dtype: str, config: CheckConfig) -> CheckResult:
    cases, rows = entry.real.values() if jax.default_backend() == "gpu" else [entry.small], []
    for case, implementation in itertools.product(cases, config.implementations):
        data = f"{config.repeat} runs"
        row = functools.partial(CheckRow, entry.name, implementation, dtype, "all", 1, "the first run", data=data)
        try:
            others = _runs_with_other_bits(entry.function, case, implementation, dtype, config)
        except NotImplementedError as error:
            rows.append(row("skipped", reason=str(error)))
            continue
        reason = f"{others} of {data} differ in bits from the first run"
        rows.append(row("failed", reason=reason) if others else row("ok", relative=0.0))
    return CheckResult(tuple(rows))


def _runs_with_other_bits(function, case: Case, implementation: str, dtype: str, config: CheckConfig) -> int:
    with jax.enable_x64(dtype == "float64"):
        args = case.draw(config.seed, batch=case.batch or 128, dtype=jnp.dtype(dtype))
        arguments = take_apart(function, args)
        op = arguments.of_floats(bind(function, implementation, case.options))
        run, values, random = (
            jax.jit(value_and_gradients(op)),
            list(arguments.floats),
            np.random.default_rng(config.seed),
        )
        cotangents = [random.standard_normal(y.shape).astype(y.dtype) for y in jax.eval_shape(op, *values)]
        bits = lambda: [np.asarray(a).tobytes() for a in jax.tree.leaves(run(values, cotangents))]  # noqa: E731
        first = bits()
        return sum(bits() != first for _ in range(config.repeat - 1))


if __name__ == "__main__":
    sys.exit(main())
