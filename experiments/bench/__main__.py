"""Times every op of the library, and training steps of LeNet and of logic networks, side by side in one run.

    python -m experiments.bench                                        # everything
    python -m experiments.bench conv2d max_pool2d --json results.json  # some ops, each with its backwards
    python -m experiments.bench lenet --batch 128 8192 --precision highest
    python -m experiments.bench logic-conv:mnist-m                     # at one place
    python -m experiments.bench all --peers --json results.json        # and PyTorch on the same arrays
    python -m experiments.bench --quick --json new.json                # a row of every family
    python -m experiments.bench compare old.json new.json              # what became slower: exit code 1

A backward is timed by itself, a forward together with its gradient (`fwd+bwd`), LeNet as forward, backward and SGD,
logic networks, on random bits, convolutional ones on random numbers, as forward, backward and Adam.

- Time is device time: calls follow each other inside one compiled program, each with its own arrays. Together these do
  not fit into the GPU's cache, except at small batches, as there are at most 32 calls. Further programs are queued
  behind it. The time is the median of several rounds, whose spread is the noise. Before them a program runs for a
  while on a GPU, so that its clock is that of one at work, which its power limit may have lowered.
- The floor is the least time in which this GPU could do the work: see `experiments/bench/floor.py`.
- Memory is XLA's account of the compiled program: arguments, results and temporaries of one call.
- The error is the largest relative norm of a result's difference from float64, at a smaller batch. A peer's is that of
  its eager functions.
- Compile seconds are those of one call, from Python to the executable, with nothing else running. They are
  measured with `--compile-seconds`.
- `"pallas"` has no row where no kernel of this library runs. Without a GPU it has none at all.

The JSON file is written after every row. Next to what all result files have (`experiments/output/results.py`):

    dtype, precision       of the arrays, and of products of float32
    settling_seconds       how long a program runs before its first round, at most: until it is steady
    copy_bytes_per_second, bytes_per_second, operations_per_second
                           the rates of this GPU, in the first of the dtypes: see `floor.measured_rates`
    rows                   an object a row: see `rows.Case`
    complete               whether every row was measured
    missing                the names of those that were not: "WORK, batch BATCH, IMPLEMENTATION"
"""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from experiments.bench import compare, peers
from experiments.bench.floor import measured_rates
from experiments.bench.measure import settling_seconds
from experiments.bench.peers import VariantChoice
from experiments.bench.report import print_table
from experiments.bench.rows import Case, Settings, measured_rows, with_speedups
from experiments.bench.works import Work, quick, selected
from experiments.output.errors import UserError, kept_in, refuse_missing_folders, run_command
from experiments.output.results import keep, provenance

IMPLEMENTATIONS = ("pallas", "xla", "autodiff", "None")


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Time ops and training steps, beside JAX's own gradients and other libraries."""

    cases: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",)
    """`all`, `ops`, a training step (lenet, logic, logic-large, logic-conv, mixer, automaton), an op, or `op:place`."""
    quick: bool = False
    """Time one case of each family, at one batch size, under "pallas" and "None": for comparing runs."""
    batch: tuple[int, ...] = ()
    """Batch sizes. By default those of the published tables; without a GPU 256 for ops and 128 for training steps."""
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32",)
    """Dtypes of the arrays. Training steps keep their parameters in float32, and scale their loss in float16."""
    precision: Literal["default", "highest"] = "default"
    """Of products of float32: the library's default (TF32 on a GPU), or true float32."""
    implementations: tuple[Literal["pallas", "xla", "autodiff", "None"], ...] = ()
    """Implementations to time. By default all four; with `quick` "pallas" and "None"."""
    batch_last: bool = False
    """Time ops on arrays whose batch is the last axis, as kernels pass them to each other, without transposes."""
    peers: bool = False
    """Time other libraries too, where installed: PyTorch, Liger-Kernel, QuACK, tokamax, torchlogix."""
    peer_variants: VariantChoice = "best"
    """best: the fastest variant of each library; all: eager ones, both precisions and every formulation as well."""
    compile_seconds: bool = False
    """Time the compilation of every row. Programs then compile one after the other, and not concurrently."""
    time_limit: float | None = None
    """Seconds after which no further row is started."""
    seconds: float = 0.03
    """Least time of a round. A GPU at its power limit swings, about once a second: 1 averages over that."""
    json: Path | None = None
    """File to write the rows to, after each of them."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 1 if an implementation failed, else that of `errors.py`."""
    args = sys.argv[1:] if args is None else list(args)
    if args[:1] == ["compare"]:
        return compare.main(args[1:])
    return run_command(_main, BenchConfig, "experiments.bench", args)


def _main(config: BenchConfig, command: str) -> int:
    started = time.monotonic()
    check(config)
    works = selected(config.cases, config.batch_last)
    if config.peers:
        # JAX has not started yet: leave the peers room on the GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with kept_in(config.json):
        report = run(works, config, command, started)
    print_table(report)
    return 1 if any(map(is_failure_of_ours, report["rows"])) else 0


def is_failure_of_ours(row: Mapping[str, Any]) -> bool:
    """Whether an implementation failed, other than by saying that it does not take the case."""
    return row["peer"] is None and row["failed"] is not None and not row["failed"].startswith("NotImplementedError")


def check(config: BenchConfig) -> None:
    """Raises UserError for a config that no run can have."""
    if not config.dtype or len(set(config.dtype)) < len(config.dtype):
        raise UserError(f"dtype is {' '.join(config.dtype) or 'nothing'}: wanted one or more, each of them once")
    if min(config.batch, default=1) < 1:
        raise UserError(f"batch is {min(config.batch)}: wanted at least 1")
    if config.batch_last and config.peers:
        raise UserError("batch_last is not for peers: they take their arrays examples first")
    if config.time_limit is not None and not config.time_limit >= 0:
        raise UserError(f"time_limit is {config.time_limit}: wanted at least 0")
    refuse_missing_folders(config.json)


def run(works: Sequence[Work], config: BenchConfig, command: str, started: float) -> dict[str, Any]:
    """Times the work and returns the report. Writes it after every row.

    Args:
      started: the moment from which the time limit counts, of `time.monotonic`.
    """
    on_gpu = jax.default_backend() == "gpu"
    implementations = config.implementations or (("pallas", "None") if config.quick else IMPLEMENTATIONS)
    implementations = [name for name in implementations if on_gpu or name != "pallas"]
    if not on_gpu:
        print("no GPU: kernels would run in an interpreter, so pallas is left out; times are those of the CPU")
    modules = peers.installed() if config.peers else {}
    report = provenance(command)
    report["versions"] |= {name: module.VERSION for name, module in modules.items()}
    report |= {"dtype": ", ".join(config.dtype), "precision": config.precision}
    report["settling_seconds"] = settling_seconds()
    keep_going = lambda: config.time_limit is None or time.monotonic() - started < config.time_limit  # noqa: E731
    with jax.default_matmul_precision(config.precision):
        rates = {dtype: measured_rates(dtype, config.seconds) if on_gpu else {} for dtype in config.dtype}
        report |= rates[config.dtype[0]] | {"rows": []}
        settings = [
            Settings(
                implementations,
                modules,
                config.peer_variants,
                dtype,
                config.precision,
                config.seconds,
                config.compile_seconds,
                rates[dtype],
                several_dtypes=len(config.dtype) > 1,
            )
            for dtype in config.dtype
        ]
        batches = {work: config.batch or work.batches[0 if on_gpu else 1] for work in works}
        if config.quick:
            batches = {work: config.batch or (n,) for work, n in quick(works, on_gpu).items()}
        cases = [Case(work, n, each) for work, of_work in batches.items() for n in of_work for each in settings]
        note_progress(report, cases)
        try:
            for row in measured_rows(cases, keep_going):
                report["rows"] = with_speedups([*report["rows"], row])
                note_progress(report, cases)
                keep(report, config.json)
        finally:
            keep(report, config.json)
    return report


def note_progress(report: dict[str, Any], cases: Sequence[Case]) -> None:
    """Writes into the report which rows of the cases it lacks."""
    measured = {(row["work"], row["batch"], row["implementation"]) for row in report["rows"]}
    report["missing"] = [
        f"{case.title}, {name}"
        for case in cases
        for name in case.row_names()
        if (case.name, case.batch, name) not in measured
    ]
    report["complete"] = not report["missing"]


if __name__ == "__main__":
    sys.exit(main())
