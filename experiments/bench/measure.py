"""Measuring one row: compiling, device time, memory, and the error against float64."""

import functools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.works import Work
from jaxbp.verify.arguments import is_float
from jaxbp.verify.derivatives import float64
from jaxbp.verify.timing import compile_program, device_seconds

ROUNDS = 5
SETTLING_SECONDS = 2.4
"""For which a program runs on a GPU before the first round, at most: until its time is steady."""
NOTHING = 1e-12
"""Of the largest array's norm, what is rounding in float64."""
MEASURED = (
    "microseconds",
    "round_microseconds",
    "host_waited",
    "temporary_bytes",
    "compile_seconds",
    "error",
    "error_reason",
    "failed",
)
"""The fields of a row that a measurement fills in. `microseconds` is the median of `round_microseconds`, whose spread
is the noise of the row."""
MOST_THREADS = 16


class Compiler:
    """Compiles programs on several threads, as XLA's compiler needs no Python. Use as a context manager."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        self._futures = []

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exception) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """The executable of a function for arguments, or their shapes, once it is compiled; or why there is none."""
        try:
            # Tracing and lowering are Python, which threads would not speed up, and read settings of this thread.
            future = self._pool.submit(jax.jit(function).lower(*arguments).compile)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Waits until everything is compiled."""
        wait(self._futures)
        self._futures.clear()


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The fields that `run` measured. If it fails, the reason: other rows are measured all the same."""
    try:
        return dict.fromkeys(MEASURED) | run()
    except Exception as error:
        return dict.fromkeys(MEASURED) | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def time_chain(program: Callable, arguments: tuple, calls: int, seconds: float) -> dict[str, Any]:
    """Compiles a program of so many calls, and returns the device time of one."""
    return time_compiled(compile_program(program, (arguments,))[0], arguments, calls, seconds)


def time_compiled(compiled: Callable, arguments: tuple, calls: int, seconds: float) -> dict[str, Any]:
    """The device time of a call in an executable of so many calls."""
    timed = device_seconds(compiled, (arguments,), seconds, ROUNDS, settling=settling_seconds())
    return microseconds(timed.rounds, calls) | {"host_waited": timed.host_waited}


def settling_seconds() -> float:
    """How long a program runs before its first round, at most, on the default device."""
    return SETTLING_SECONDS if jax.default_backend() == "gpu" else 0.0


def microseconds(round_seconds: Sequence[float], calls: int) -> dict[str, Any]:
    """The fields of a row that its rounds fill in, from the seconds of a program of so many calls in each."""
    rounds = [seconds / calls * 1e6 for seconds in round_seconds]
    return {"microseconds": statistics.median(rounds), "round_microseconds": rounds}


# ------------------------------------------------------------------------------------------------------------- errors


class Accuracy:
    """A piece of work at a small batch: its results in float64, and how far those of implementations are from them.

    Attributes:
      batch: the small batch.
    """

    def __init__(self, work: Work, batch: int, dtype: str, compiler: Compiler):
        self.batch, self._work, self._dtype, self._compiler = min(batch, work.error_batch), work, dtype, compiler
        draw = lambda: work.draw(0, self.batch, dtype)  # noqa: E731
        self._structs, self._programs, self._errors = jax.eval_shape(draw), {}, {}
        self._draw = compiler.submit(draw)
        with float64():
            wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, _wide(a)), self._structs)
            self._reference = compiler.submit(work.function("autodiff", "float64"), *wide)

    @functools.cached_property
    def arguments(self) -> tuple:
        """The arguments of the call."""
        return self._draw.result()()

    @functools.cached_property
    def reference(self) -> list[np.ndarray]:
        """The floating results in float64, by JAX's own differentiation, on the CPU."""
        with float64():
            wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, _wide(a))), self.arguments)
            return floats(self._reference.result()(*wide))

    def submit(self, name: str) -> None:
        """Compiles an implementation's function."""
        if name not in self._programs:
            function = self._work.function(implementation(name), self._dtype)
            self._programs[name] = self._compiler.submit(function, *self._structs)

    def error(self, name: str) -> float:
        """The relative error of an implementation submitted before."""
        if name not in self._errors:
            results = floats(self._programs[name].result()(*self.arguments))
            self._errors[name] = relative_error(results, self.reference)
        return self._errors[name]


def _wide(a: Any) -> Any:
    return np.float64 if is_float(a) else a.dtype


def relative_error(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """The largest ‖result - reference‖ / ‖reference‖.

    Some gradients are 0 but for rounding, as of a bias that a norm takes away: these are held against the largest.
    """
    norms = [np.linalg.norm(r) for r in reference]
    least = max(NOTHING * max(norms, default=0.0), 1e-300)
    errors = [
        float(np.linalg.norm(a - r) / (norm if norm > least else max(*norms, 1e-300)))
        for a, r, norm in zip(results, reference, norms, strict=True)
    ]
    if not all(map(math.isfinite, errors)):
        raise ArithmeticError("a result is not finite where float64 is")
    return max(errors)


def floats(tree: Any) -> list[np.ndarray]:
    """The floating arrays of a tree, in float64."""
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(tree) if is_float(a)]


def implementation(name: str) -> str | None:
    """The value of `implementation=` that the command line calls `name`."""
    return None if name == "None" else name
