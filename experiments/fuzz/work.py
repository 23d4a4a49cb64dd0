"""Run random programs on each kind of data in `program.DATA`, and simplify programs that fail."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from experiments.fuzz.program import DATA, Program, draw_program, smaller
from experiments.fuzz.reproducer import lines_of
from experiments.fuzz.trial import Trial
from jaxbp.catalogue import CATALOGUE
from jaxbp.verify.arguments import Arguments

MOST_TRIALS = 15
CLEARED_EVERY = 200
REFUSED = "refused"
_tasks = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Task:
    seed: int
    number: int
    ops: tuple[str, ...]
    on_gpu: bool
    draws: tuple[int, ...] = tuple(range(len(DATA)))
    implementation: str | None = "drawn"
    """"drawn" keeps the program's random implementation. "autodiff" replaces it."""

    @functools.cached_property
    def program(self) -> Program:
        entries = {entry.name: entry for entry in CATALOGUE}
        program = draw_program(self.seed, self.number, [entries[name] for name in self.ops], self.on_gpu)
        return program if self.implementation == "drawn" else dataclasses.replace(program, implementation="autodiff")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a random program on one kind of data.

    Attributes:
      draw: the index of the kind of data in `program.DATA`.
      message: what is wrong, `REFUSED` if a kernel does not support the op's arguments, or None.
      lines: Python code that reproduces a failure.
    """

    draw: int
    message: str | None
    lines: str | None = None


def work(task: Task) -> Iterator[Outcome]:
    """Run a task's program, and yield one outcome per kind of data.

    If the program fails, and a simpler program fails too, also yield an outcome with the simpler program's code.
    """
    if next(_tasks) % CLEARED_EVERY == 0:
        jax.clear_caches()
    for draw, message in _outcomes(task.program, task, task.draws):
        failed = message not in (None, REFUSED)
        yield Outcome(draw, message, reproducer(task, draw) if failed else None)
        if failed and (small := _smallest(task.program, task, draw)) is not task.program:
            yield Outcome(draw, message, reproducer(task, draw, small))


def reproducer(task: Task, draw: int, program: Program | None = None) -> str:
    program = program or task.program
    return lines_of(program, *_numbers(program, task, draw))


def _outcomes(program: Program, task: Task, draws: Iterable[int]) -> Iterator[tuple[int, str | None]]:
    trial = None
    precision = "highest" if program.exact else "default"
    with jax.enable_x64(program.dtype == "float64"), jax.default_matmul_precision(precision):
        for draw in draws:
            try:
                arguments, cotangents = _numbers(program, task, draw, trial and trial.results)
                trial = trial or Trial(program, arguments)
                yield draw, trial.run(arguments.floats, cotangents)
            except NotImplementedError as refused:
                message = str(refused)
                yield draw, REFUSED if program.implementation == "pallas" else f"raises NotImplementedError: {message}"
            except Exception as error:
                yield draw, f"raises {type(error).__name__}: {error}"[:1000]


def _numbers(
    program: Program, task: Task, draw: int, results: Sequence[jax.ShapeDtypeStruct] | None = None
) -> tuple[Arguments, list[np.ndarray]]:
    random = np.random.default_rng([task.seed, task.number, draw])
    with jax.enable_x64(program.dtype == "float64"):
        arguments = program.arguments(random, DATA[draw])
        results = results or jax.eval_shape(program.function(arguments, "autodiff"), *arguments.floats)
    cotangents = (random.standard_normal(y.shape).astype(y.dtype) for y in results)
    if "_backward" not in program.entry.name:
        cotangents = (program.masked(c, random, DATA[draw]) for c in cotangents)
    return arguments, list(cotangents)


def _smallest(program: Program, task: Task, draw: int) -> Program:
    candidates, tried = iter(smaller(program)), 0
    while tried < MOST_TRIALS and (simpler := next(candidates, None)) is not None:
        tried += 1
        ((_, message),) = _outcomes(simpler, task, (draw,))
        if message not in (None, REFUSED):
            program, candidates = simpler, iter(smaller(simpler))
    return program
