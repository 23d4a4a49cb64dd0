"""Compare ops with float64 in random cases.

A program is an op with random shapes, dtype, options, and JAX transformation. It has 8 cases, one per kind of data.

    python -m experiments.fuzz --seed 0 --only 1234              # repeats one case

A failing case is simplified, and printed as Python code. A case whose child process dies or hangs counts as a crash,
and runs again with autodiff. The exit code is 1 after a failure, or a crash that does not occur with autodiff.

`--json FILE` writes the fields of every result file (`experiments/output/results.py`), and:

    seed, cases    the cases 0 to cases - 1 of this seed were run
    refused        the number of cases that a kernel does not support
    lost           the number of cases that did not run, because an earlier case of the same program crashed
    crashes        one object per crash. `autodiff` says how autodiff crashed, or is null
"""

import collections
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.children import Done, in_children, share_gpus
from experiments.fuzz.program import DATA
from experiments.fuzz.work import REFUSED, Task, reproducer, work
from experiments.output import results
from experiments.output.errors import UserError, kept_in, refuse_missing_folders, refuse_unknown, run_command
from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.device import kernels_run

KEPT_EVERY = 20


@dataclasses.dataclass(frozen=True)
class FuzzConfig:
    """Run ops with random shapes, options, and data, and compare the results with float64."""

    seconds: float | None = None
    """Stop after this number of seconds. Default: 60, or with --cases or --only, no limit."""
    cases: int | None = None
    """Stop after this number of cases."""
    seed: int | None = None
    """Seed of the cases. Default: random, and printed."""
    ops: tuple[str, ...] = ()
    """Names of the ops to run. By default, all ops."""
    only: int | None = None
    """Run only the case with this number."""
    processes: int = 1
    """Number of child processes. With 0, a crash ends this process."""
    case_seconds: float = 120.0
    """Kill a child process after this number of seconds for one case."""
    json: Path | None = None
    """JSON file for the counts, failures, and crashes."""
    resume: bool = False
    """Continue after the last case in the JSON file, and add the new results."""


@dataclasses.dataclass
class Found:
    cases: int = 0
    seconds: float = 0.0
    refused: int = 0
    lost: int = 0
    counts: dict[str, collections.Counter] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    crashes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, done: Done) -> Iterator[str]:
        task, program = done.task, done.task.program
        outcomes = {outcome.draw: outcome for outcome in done.results}  # a draw's reduced case comes last
        for draw, outcome in outcomes.items():
            for field in ("dtype", "implementation", "transformation"):
                self.counts[field][str(getattr(program, field))] += 1
            self.counts["op"][program.entry.name] += 1
            self.counts["data"][DATA[draw]] += 1
            if outcome.message == REFUSED:
                self.refused += 1
            elif outcome.message is not None:
                failure = _case(task, draw) | dict(message=outcome.message, lines=outcome.lines)
                self.failures.append(failure)
                yield "failed: case {number}, {op}: {message}\n{lines}".format(**failure)
        missing = [draw for draw in task.draws if draw not in outcomes]
        if done.death is not None and missing:
            self.lost += len(missing) - 1
            crash = _case(task, missing[0]) | dict(death=done.death, said=done.said, autodiff=None)
            self.crashes.append(crash | dict(lines=reproducer(task, missing[0])))
            yield "crashed: case {number}, {op}: {death}\n{said}".format(**crash)


def _case(task: Task, draw: int) -> dict[str, Any]:
    return dict(number=task.number * len(DATA) + draw, op=task.program.entry.name)


def main(args: Sequence[str] | None = None) -> int:
    return run_command(run, FuzzConfig, "experiments.fuzz", args)


def run(config: FuzzConfig, command: str) -> int:
    found, seed = _start(config, np.random.SeedSequence().entropy % 2**32 if config.seed is None else config.seed)
    share_gpus()
    ops = refuse_unknown("op", config.ops, (entry.name for entry in CATALOGUE))
    whole = Task(seed, 0, ops, kernels_run())
    head = results.provenance(command)
    print(f"seed {seed}, from case {found.cases}", flush=True)
    start, kept, before = time.perf_counter(), 0.0, found.seconds
    limit = 60.0 if (config.seconds, config.cases, config.only) == (None, None, None) else config.seconds

    def tasks() -> Iterator[Task]:
        if config.only is not None:
            number, draw = divmod(config.only, len(DATA))
            yield dataclasses.replace(whole, number=number, draws=(draw,))
            return
        end = sys.maxsize if config.cases is None else -(-config.cases // len(DATA))
        for number in range(found.cases // len(DATA), end):
            if limit is not None and time.perf_counter() - start > limit:
                return
            yield dataclasses.replace(whole, number=number)

    def keep() -> None:
        found.seconds = round(before + time.perf_counter() - start, 1)
        counts = {field: dict(sorted(each.items())) for field, each in sorted(found.counts.items())}
        results.keep({**head, "seed": seed, **vars(found), "counts": counts}, config.json)

    with kept_in(config.json):
        for done in _done(tasks(), config):
            for text in found.add(done):
                print(f"\n{text}", flush=True)
            found.cases += len(done.task.draws)
            if time.perf_counter() - start > kept + KEPT_EVERY:
                kept = time.perf_counter() - start
                keep()
        _by_autodiff(found.crashes, whole, config)
        keep()
    ours = [crash for crash in found.crashes if crash["autodiff"] is None]
    print(
        f"{found.cases} cases in {found.seconds:.0f} s: {len(found.failures)} failed, {found.refused} refused by a "
        f"kernel, {len(found.crashes)} crashed, of which {len(found.crashes) - len(ours)} also crashed with autodiff"
    )
    return 1 if found.failures or ours else 0


def _done(tasks: Iterable[Task], config: FuzzConfig) -> Iterator[Done]:
    if config.processes == 0:
        return (Done(task, list(work(task))) for task in tasks)
    return in_children(work, tasks, config.processes, config.case_seconds)


def _by_autodiff(crashes: Sequence[dict[str, Any]], whole: Task, config: FuzzConfig) -> None:
    tasks = [
        dataclasses.replace(whole, number=number, draws=(draw,), implementation="autodiff")
        for number, draw in (divmod(crash["number"], len(DATA)) for crash in crashes)
    ]
    for crash, done in zip(crashes, _done(tasks, config), strict=True):
        crash["autodiff"] = done.death
        ends = "no crash: the crash is jaxbp's" if done.death is None else f"{done.death}: the crash is JAX's"
        print(f"case {crash['number']}, {crash['op']}, {crash['death']}; with autodiff {ends}", flush=True)


def _start(config: FuzzConfig, seed: int) -> tuple[Found, int]:
    refuse_missing_folders(config.json)
    if config.processes < 0:
        raise UserError(f"--processes is {config.processes}; wants at least 0")
    if not config.case_seconds > 0:
        raise UserError(f"--case-seconds is {config.case_seconds}; wants more than 0")
    if not config.resume:
        return Found(), seed
    if config.json is None or not config.json.exists():
        raise UserError(
            f"--json is {config.json}, which is not a file; wants a file of results, from which --resume continues"
        )
    try:
        kept = json.loads(config.json.read_text())
        counts = collections.defaultdict(
            collections.Counter, {field: collections.Counter(each) for field, each in kept["counts"].items()}
        )
        found = Found(**{name: kept[name] for name in Found.__dataclass_fields__} | {"counts": counts})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--json is {config.json}, which cannot be resumed ({error}); wants a file that experiments.fuzz wrote"
        ) from None
    if config.seed not in (None, kept["seed"]):
        raise UserError(f"--seed is {config.seed}; wants {kept['seed']}, the seed of the run in {config.json}")
    return found, kept["seed"]


if __name__ == "__main__":
    sys.exit(main())
