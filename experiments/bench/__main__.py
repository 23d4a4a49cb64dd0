"""Time the ops of jaxbp and training steps.

docs/benchmarks.md has commands, and defines the figures.

`--json FILE` writes the fields of every result file (`experiments/output/results.py`), and:

    *_per_second    how fast this GPU moves bytes, and multiplies matrices of the first `--dtype`
    rows            one object per measurement, with the fields of `measure.MEASURED`
    missing         the names of measurements that were not made
    left_out        the errors of peers that cannot be imported, by name
"""

import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import jax
import tyro

from experiments.bench import compare, reproduce
from experiments.bench.measure import settling_seconds
from experiments.bench.peers import VariantChoice
from experiments.bench.peers.table import PEERS, installed
from experiments.bench.report import print_table
from experiments.bench.roofline import measured_rates
from experiments.bench.rows import Case, Settings, measured_rows, with_speedups
from experiments.bench.selection import quick, selected
from experiments.bench.workloads import Workload
from experiments.output.errors import UserError, kept_in, refuse_unknown, run_command
from experiments.output.files import OptionalPath, refuse_unwritable
from experiments.output.results import keep, provenance

IMPLEMENTATIONS = ("pallas", "xla", "autodiff", "None")


QUICK_SECONDS = 75.0
"""The default time limit of a quick run."""
GRACE_SECONDS = 5.0
"""Seconds after a time limit in which rows are still timed whose programs are compiled."""


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Time ops and training steps of jaxbp, of JAX's autodiff, and of other libraries."""

    cases: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",)
    """`all`, `ops`, an op, lenet, logic, logic-large, logic-learned, logic-conv, gpt, automaton, or NAME:SIZE."""
    quick: bool = False
    """Measure only times of "pallas" and "None", at one batch size, of one workload per op module and training kind."""
    batch: tuple[int, ...] = ()
    """Batch sizes. Default: as in docs/benchmarks; without a GPU, 256 for ops and 128 for most training steps."""
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32",)
    """Dtypes of the arrays. Training steps keep their parameters in float32, and scale their loss in float16."""
    precision: tuple[Literal["default", "highest"], ...] = ("default",)
    """Precisions of float32 products: default, which allows TF32 on a GPU, or highest, which uses exact float32."""
    implementations: tuple[Literal["pallas", "xla", "autodiff", "None"], ...] = ()
    """Implementations to time. By default, all four; with `quick`, "pallas" and "None"."""
    batch_last: bool = False
    """Time ops on arrays whose last axis is the batch, as kernels pass them to each other."""
    forward: bool = False
    """Time ops without their gradients."""
    peers: tuple[str, ...] | None = None
    """Also time peers, which are other libraries such as PyTorch and cuDNN. Without names, all installed peers."""
    peer_variants: VariantChoice = "best"
    """Variants of each peer to time: `best`, the fastest, or `all`, also eager and in both precisions."""
    bursts: bool = False
    """Also time bursts of a few calls after a rest, when the GPU is cool."""
    one_graph: bool = False
    """Let XLA put all steps of a timed training program in one CUDA graph, whose launches may overlap."""
    compile_seconds: bool = False
    """Also time compilation. Programs are then compiled one after the other."""
    time_limit: float | None = None
    """Seconds after which no further program is compiled. With `quick`, the default is 75."""
    seconds: float = 0.03
    """Least seconds per timing round. With 1, a round averages the clock's oscillation at a GPU's power limit."""
    json: OptionalPath = None
    """JSON file, written again after each row."""


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    if args[:1] == ["compare"]:
        return compare.main(args[1:])
    if "--reproduce" in args:
        return reproduce.main([arg for arg in args if arg != "--reproduce"], _repeated)
    return run_command(_main, BenchConfig, "experiments.bench", args)


def _main(config: BenchConfig, command: str) -> int:
    report = _report(config, command)
    print_table(report)
    errors = [row["failed"] for row in report["rows"] if row["peer"] is None and row["failed"] is not None]
    return 0 if all(error.startswith("NotImplementedError") for error in errors) else 1


def _repeated(args: Sequence[str], time_limit: float) -> dict[str, Any]:
    config = tyro.cli(BenchConfig, args=args, config=(tyro.conf.FlagCreatePairsOff,))
    time_limit = min(time_limit, math.inf if config.time_limit is None else config.time_limit)
    return _report(dataclasses.replace(config, json=None, time_limit=time_limit), shlex.join(args))


def _report(config: BenchConfig, command: str) -> dict[str, Any]:
    started = time.monotonic()
    check(config)
    workloads = selected(config.cases, config.batch_last, config.forward)
    if config.one_graph and (ops := [workload.title for workload in workloads if workload.steps is None]):
        raise UserError(f"--one-graph is given with {ops[0]}; wants only training steps")
    if config.peers is not None:
        # Set before JAX starts, so that it leaves GPU memory for the peers.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with kept_in(config.json):
        return run(workloads, config, command, started)


def check(config: BenchConfig) -> None:
    for name, values in (("dtype", config.dtype), ("precision", config.precision)):
        if not values or len(set(values)) < len(values):
            raise UserError(f"--{name} is {' '.join(values) or 'empty'}; wants at least one value, and no value twice")
    if min(config.batch, default=1) < 1:
        raise UserError(f"--batch is {min(config.batch)}; wants at least 1")
    if config.batch_last and config.peers is not None:
        raise UserError("--batch-last is given with --peers; wants only one of them: peers need a leading batch axis")
    if config.time_limit is not None and not config.time_limit >= 0:
        raise UserError(f"--time-limit is {config.time_limit}; wants at least 0 seconds")
    refuse_unknown("peer", config.peers or (), PEERS)
    refuse_unwritable(config.json)


def run(workloads: Sequence[Workload], config: BenchConfig, command: str, started: float) -> dict[str, Any]:
    on_gpu = jax.default_backend() == "gpu"
    implementations = config.implementations or (("pallas", "None") if config.quick else IMPLEMENTATIONS)
    implementations = [name for name in implementations if on_gpu or name != "pallas"]
    if not on_gpu:
        print("no GPU: pallas is left out, because kernels would run in an interpreter; times are CPU times")
    peers, left_out = ({}, {}) if config.peers is None else installed(config.peers)
    report = provenance(command)
    report["versions"] |= {name: peer.version for name, peer in peers.items()}
    report |= {"dtype": ", ".join(config.dtype), "precision": ", ".join(config.precision), "left_out": left_out}
    times_only = config.quick and config.peers is None
    report["settling_seconds"] = settling_seconds(times_only)
    limit = QUICK_SECONDS if config.quick and config.time_limit is None else config.time_limit
    end = math.inf if limit is None else started + limit
    if on_gpu:
        print("measuring the rates of this GPU", file=sys.stderr, flush=True)
    rates = {dtype: measured_rates(dtype, config.seconds, config.quick) if on_gpu else {} for dtype in config.dtype}
    report |= rates[config.dtype[0]] | {"rows": []}

    def settings(dtype, precision):
        label = f" in {dtype}" if len(config.dtype) > 1 else ""
        label += f" at {precision} precision" if len(config.precision) > 1 else ""
        label += " in one graph" if config.one_graph else ""
        options = config.seconds, config.compile_seconds, rates[dtype], times_only, label
        last = config.bursts, config.one_graph
        return Settings(implementations, peers, config.peer_variants, dtype, precision, *options, *last)

    every = [settings(*each) for each in itertools.product(config.dtype, config.precision)]
    batches = {workload: workload.batches[0 if on_gpu else 1] for workload in workloads}
    if config.quick:
        batches = {workload: (n,) for workload, n in quick(workloads, on_gpu).items()}
    sizes = [(workload, n) for workload, default in batches.items() for n in config.batch or default]
    cases = [Case(workload, n, each) for workload, n in sizes for each in every]
    cases = [case for case in cases if case.settings.precision == config.precision[0] or case.has_float32_products]
    position = {(case.name, case.batch): i for i, case in enumerate(cases)}
    try:
        with stopped_at(end + GRACE_SECONDS):
            for row in measured_rows(cases, lambda: time.monotonic() < end):
                rows = sorted([*report["rows"], row], key=lambda row: position[row["work"], row["batch"]])
                report["rows"] = with_speedups(rows)
                note_progress(report, cases)
                keep(report, config.json)
    finally:
        note_progress(report, cases)
        keep(report, config.json)
    return report


class OutOfTime(BaseException):
    """The time limit has passed."""


@contextlib.contextmanager
def stopped_at(end: float) -> Iterator[None]:
    """Return a context that leaves its block at the time `end` of `time.monotonic()`, without an exception.

    A signal interrupts the block, even while a function that it called is running. If `end` is infinite, there is no
    limit.
    """

    def stop(*_):
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, 0 if end == math.inf else max(end - time.monotonic(), 1e-3))
    try:
        yield
    except OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def note_progress(report: dict[str, Any], cases: Sequence[Case]) -> None:
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
