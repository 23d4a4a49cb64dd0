"""Draws ops with shapes, dtypes, options, numbers and transformations, and holds them against float64.

    python -m experiments.fuzz --seconds 60                      # other cases at each run
    python -m experiments.fuzz --seed 0 --cases 10000 --json fuzz.json
    python -m experiments.fuzz --seed 0 --cases 20000 --json fuzz.json --resume
    python -m experiments.fuzz --seed 0 --only 1234              # one case again

A case is an op of the catalogue with shapes and options of its own, in one implementation and dtype, plain or through
a transformation of JAX (vmap, scan, remat, donation, a gradient of the gradient), at the numbers of a kind of
`cases.DATA`. It depends only on its seed and number. The reference is autodiff in float64, of the plain formula or,
for maxima, of `references.py`: see `jaxbp/verify/judge.py`.

Cases run in child processes, `--processes` of them, which a GPU may be shared by: one that dies, as when a compiler
aborts, or that gives no answer for `--case-seconds`, is a finding, and another goes on. The same case is then run
with JAX's own differentiation alone: if that ends the same way, it is the library's fault and not ours.

A failure prints lines of Python that show it by themselves, from a case made as small as it still fails. Exits with 1
for a failure, and for a crash that is not the library's. The JSON file, beside what all result files have
(`experiments/output/results.py`):

    seed, cases            numbers 0 to cases - 1 were drawn
    seconds                that took
    refused                cases that a kernel does not take (NotImplementedError)
    lost                   cases that did not run, for the process died in one of the same program
    counts                 field (op, implementation, transformation, dtype, data) -> value -> how many cases ran
    failures               an object each: number, op, what is wrong, and the lines that show it
    crashes                an object each: number, op, how the process ended and what it said, how it ended with
                           JAX's own differentiation (null: well), and the lines that show it
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
from experiments.fuzz.cases import DATA
from experiments.fuzz.work import REFUSED, Task, reproducer, work
from experiments.output import results
from experiments.output.errors import UserError, kept_in, refuse_missing_folders, refuse_unknown, run_command
from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.device import kernels_run

KEPT_EVERY = 20
"""Seconds between writes of the JSON file."""


@dataclasses.dataclass(frozen=True)
class FuzzConfig:
    """Draw ops, shapes, dtypes, options and numbers at random, and hold results against float64."""

    seconds: float | None = None
    """Stop after this time. By default, and without `--cases`, a minute."""
    cases: int | None = None
    """Stop after the case of this number."""
    seed: int | None = None
    """Of the cases; by default another one at each run, which is printed."""
    ops: tuple[str, ...] = ()
    """Names of ops, each by itself; by default all."""
    only: int | None = None
    """Run the case of this number alone."""
    processes: int = 1
    """Child processes that cases run in; 0 for this process, with which a crash makes an end."""
    case_seconds: float = 120.0
    """A process that takes longer for a case, or to make a failure smaller by a step, is ended."""
    json: Path | None = None
    """File to keep the counts and failures in."""
    resume: bool = False
    """Go on behind the last case of the JSON file, and add to its counts."""


@dataclasses.dataclass
class Found:
    """The outcome of cases, as they come."""

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
        """Counts what came of a task, and gives a text for what was found."""
        task, program = done.task, done.task.program
        outcomes = {outcome.draw: outcome for outcome in done.results}  # of two, the smaller case comes later
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
    """Run the command line. Return the exit code: 1 if a case failed, else that of `errors.py`."""
    return run_command(run, FuzzConfig, "experiments.fuzz", args)


def run(config: FuzzConfig, command: str) -> int:
    """Draw and try cases until the limit, and print and keep what is found."""
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
        f"kernel, {len(found.crashes)} crashed, of which {len(found.crashes) - len(ours)} by JAX alone as well"
    )
    return 1 if found.failures or ours else 0


def _done(tasks: Iterable[Task], config: FuzzConfig) -> Iterator[Done]:
    if config.processes == 0:
        return (Done(task, list(work(task))) for task in tasks)
    return in_children(work, tasks, config.processes, config.case_seconds)


def _by_autodiff(crashes: Sequence[dict[str, Any]], whole: Task, config: FuzzConfig) -> None:
    """Says of each crash how the case ends with JAX's own differentiation."""
    tasks = [
        dataclasses.replace(whole, number=number, draws=(draw,), implementation="autodiff")
        for number, draw in (divmod(crash["number"], len(DATA)) for crash in crashes)
    ]
    for crash, done in zip(crashes, _done(tasks, config), strict=True):
        crash["autodiff"] = done.death
        ends = "ends well: the crash is ours" if done.death is None else f"{done.death}: the crash is the library's"
        print(f"case {crash['number']}, {crash['op']}, {crash['death']}; by JAX alone {ends}", flush=True)


def _start(config: FuzzConfig, seed: int) -> tuple[Found, int]:
    refuse_missing_folders(config.json)
    if config.processes < 0 or not config.case_seconds > 0:
        raise UserError(
            f"--processes is {config.processes}, --case-seconds {config.case_seconds}: wanted at least 0, more than 0"
        )
    if not config.resume:
        return Found(), seed
    if config.json is None or not config.json.exists():
        raise UserError(f"--resume has no file to go on from: --json is {config.json}")
    try:
        kept = json.loads(config.json.read_text())
        counts = collections.defaultdict(
            collections.Counter, {field: collections.Counter(each) for field, each in kept["counts"].items()}
        )
        found = Found(**{name: kept[name] for name in Found.__dataclass_fields__} | {"counts": counts})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{config.json} is no file of this command: {error}") from None
    if config.seed not in (None, kept["seed"]):
        raise UserError(f"--seed is {config.seed}, but {config.json} has seed {kept['seed']}")
    return found, kept["seed"]


if __name__ == "__main__":
    sys.exit(main())
