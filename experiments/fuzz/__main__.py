"""Draws ops with shapes, dtypes, options, numbers and transformations, and holds them against float64.

    python -m experiments.fuzz --seconds 60                      # other cases at each run
    python -m experiments.fuzz --seed 0 --cases 10000 --json fuzz.json
    python -m experiments.fuzz --seed 0 --cases 20000 --json fuzz.json --resume
    python -m experiments.fuzz --seed 0 --only 1234              # one case again

A case is an op of the catalogue with shapes and options of its own, in one implementation and dtype, plain or through
a transformation of JAX (vmap, scan, remat, donation, a gradient of the gradient), at some numbers: normal, far from
zero, of few values (zeros and ties), or with infinities, NaN, the largest and the least. It depends on its seed and
number alone. The reference is JAX's own differentiation of the plain formula in float64: see `judge.py`.

A failure prints lines of Python that show it by themselves, from a case made as small as it still fails. Exits
with 1 then.
The JSON file, beside what all result files have (`experiments/output/results.py`):

    seed, cases            numbers 0 to cases - 1 were drawn
    seconds                that took
    refused                cases that a kernel does not take (NotImplementedError)
    counts                 field -> value -> how many cases
    failures               an object each: number, op, what is wrong, and the lines that show it
"""

import collections
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.fuzz.cases import DATA, Program, draw_program, smaller
from experiments.fuzz.judge import Trial, cotangents_of
from experiments.fuzz.reproducer import lines_of
from experiments.output.errors import UserError, exit_code
from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json
from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.device import kernels_run

MOST_TRIALS = 15
"""To make a failing case smaller."""
KEPT_EVERY = 20
"""Seconds between writes of the JSON file."""
CLEARED_EVERY = 200
"""Programs after which JAX forgets what it compiled."""


@dataclasses.dataclass(frozen=True)
class FuzzConfig:
    """What to draw, and until when."""

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
    counts: dict[str, collections.Counter] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 1 if a case failed, 2 for a mistake of the user."""
    args = sys.argv[1:] if args is None else list(args)
    config = tyro.cli(FuzzConfig, args=args, prog="python -m experiments.fuzz", config=(tyro.conf.FlagCreatePairsOff,))
    try:
        seed = np.random.SeedSequence().entropy % 2**32 if config.seed is None else config.seed
        found, seed = _start(config, seed)
        entries = _entries(config.ops)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = provenance(shlex.join(["python", "-m", "experiments.fuzz", *args]))
    print(f"seed {seed}, from case {found.cases}", flush=True)
    start, kept, before = time.perf_counter(), 0.0, found.seconds
    limit = 60.0 if (config.seconds, config.cases, config.only) == (None, None, None) else config.seconds
    until = lambda: limit is not None and time.perf_counter() - start > limit  # noqa: E731

    def keep():
        found.seconds = round(before + time.perf_counter() - start, 1)
        if config.json is not None:
            counts = {field: dict(sorted(each.items())) for field, each in sorted(found.counts.items())}
            write_atomically(config.json, to_json({**head, "seed": seed, **vars(found), "counts": counts}))

    on_gpu = kernels_run()
    first = found.cases // len(DATA) if config.only is None else config.only // len(DATA)
    for number in range(first, sys.maxsize):
        draws = range(len(DATA)) if config.only is None else (config.only % len(DATA),)
        for failure in _run(found, seed, number, draw_program(seed, number, entries, on_gpu), draws):
            print(f"\nfailed: case {failure['number']}, {failure['op']}: {failure['message']}\n{failure['lines']}")
            sys.stdout.flush()
        found.cases = (number + 1) * len(DATA) if config.only is None else 1
        if number % CLEARED_EVERY == CLEARED_EVERY - 1:
            jax.clear_caches()
        if config.only is not None or until() or (config.cases is not None and found.cases >= config.cases):
            break
        if time.perf_counter() - start > kept + KEPT_EVERY:
            kept = time.perf_counter() - start
            keep()
    keep()
    failed = len(found.failures)
    print(f"{found.cases} cases in {found.seconds:.0f} s: {failed} failed, {found.refused} refused by a kernel")
    return 1 if failed else 0


def _start(config: FuzzConfig, seed: int) -> tuple[Found, int]:
    if config.json is not None and not config.json.parent.is_dir():
        raise UserError(f"{config.json} cannot be written: there is no folder {config.json.parent}")
    if not config.resume:
        return Found(), seed
    if config.json is None or not config.json.exists():
        raise UserError(f"--resume has no file to go on from: --json is {config.json}")
    try:
        kept = json.loads(config.json.read_text())
        counts = collections.defaultdict(
            collections.Counter, {field: collections.Counter(each) for field, each in kept["counts"].items()}
        )
        found = Found(kept["cases"], kept["seconds"], kept["refused"], counts, kept["failures"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{config.json} is no file of this command: {error}") from None
    if config.seed not in (None, kept["seed"]):
        raise UserError(f"--seed is {config.seed}, but {config.json} has seed {kept['seed']}")
    return found, kept["seed"]


def _entries(names):
    known = {entry.name: entry for entry in CATALOGUE}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"unknown op {', '.join(unknown)}: wanted some of {', '.join(known)}")
    return [known[name] for name in names] or list(CATALOGUE)


def _run(found: Found, seed: int, number: int, program: Program, draws: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Runs a program with numbers of some draws, counts, and gives the failures."""
    for draw, message in outcomes(program, seed, number, draws):
        for field in ("dtype", "implementation", "transformation"):
            found.counts[field][str(getattr(program, field))] += 1
        found.counts["op"][program.entry.name] += 1
        found.counts["data"][DATA[draw]] += 1
        if message is REFUSED:
            found.refused += 1
        elif message is not None:
            small = _smallest(program, seed, number, draw)
            failure = {
                "number": number * len(DATA) + draw,
                "op": program.entry.name,
                "message": message,
                "lines": lines_of(small, *_numbers(small, seed, number, draw)),
            }
            found.failures.append(failure)
            yield failure


REFUSED = "refused"


def outcomes(program: Program, seed: int, number: int, draws: Iterable[int]) -> Iterator[tuple[int, str | None]]:
    """(draw, what is wrong or `REFUSED` or None) for numbers of each draw."""
    trial = None
    precision = "highest" if program.exact else "default"
    with jax.enable_x64(program.dtype == "float64"), jax.default_matmul_precision(precision):
        for draw in draws:
            try:
                arguments, cotangents = _numbers(program, seed, number, draw)
                trial = trial or Trial(program, arguments)
                yield draw, trial.run(arguments.floats, cotangents)
            except NotImplementedError as refused:
                message = str(refused)
                yield draw, REFUSED if program.implementation == "pallas" else f"raises NotImplementedError: {message}"
            except Exception as error:
                yield draw, f"raises {type(error).__name__}: {error}"[:1000]


def _numbers(program, seed, number, draw):
    random = np.random.default_rng([seed, number, draw])
    with jax.enable_x64(program.dtype == "float64"):
        arguments = program.arguments(random, DATA[draw])
        results = jax.eval_shape(program.function(arguments, "autodiff"), *arguments.floats)
    return arguments, cotangents_of(random, results)


def _smallest(program: Program, seed: int, number: int, draw: int) -> Program:
    """The program, made simpler step by step as long as it fails."""
    tried = 0
    while tried < MOST_TRIALS:
        for simpler in smaller(program):
            tried += 1
            ((_, message),) = outcomes(simpler, seed, number, (draw,))
            if message not in (None, REFUSED):
                program = simpler
                break
            if tried >= MOST_TRIALS:
                return program
        else:
            return program
    return program


if __name__ == "__main__":
    sys.exit(exit_code(main))
