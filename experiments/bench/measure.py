"""Measure one row: compilation, device time, memory, and the error against float64."""

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

from experiments.bench.workloads import Workload
from jaxbp.verify.arguments import is_float
from jaxbp.verify.derivatives import float64
from jaxbp.verify.timing import compile_program, device_seconds

ROUNDS = 5
SETTLING_SECONDS = 2.4
"""The longest time in seconds that a program runs on a GPU before its first round, so that its time becomes steady."""
QUICK_SETTLING_SECONDS = 0.6
"""`SETTLING_SECONDS` for rows that have only times. A GPU at its power limit may then have a higher clock."""
NOTHING = 1e-12
"""An array whose norm is below this share of the largest array's norm is 0 up to rounding errors in float64."""
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
"""The fields of a row that a measurement sets. `microseconds` is the median of `round_microseconds`."""
MOST_THREADS = 16


class Compiler:
    """A context manager that compiles programs on several threads."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        self._futures = []

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exception) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """Start to compile a function for arguments or their shapes. Return a future that gives the executable or
        raises the error."""
        try:
            # Tracing and lowering run Python code, and depend on JAX's settings of this thread.
            future = self._pool.submit(jax.jit(function).lower(*arguments).compile)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._futures.append(future)
        return future

    def wait(self) -> None:
        wait(self._futures)
        self._futures.clear()


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that `run` measures, or the reason why it fails."""
    try:
        return dict.fromkeys(MEASURED) | run()
    except Exception as error:
        return dict.fromkeys(MEASURED) | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def time_chain(program: Callable, arguments: tuple, calls: int, seconds: float) -> dict[str, Any]:
    """Compile a program of `calls` calls, and return the device time of one call."""
    return time_compiled(compile_program(program, (arguments,))[0], arguments, calls, seconds)


def time_compiled(
    compiled: Callable, arguments: tuple, calls: int, seconds: float, quick: bool = False
) -> dict[str, Any]:
    """Return the device time of one call in an executable of `calls` calls."""
    timed = device_seconds(compiled, (arguments,), seconds, ROUNDS, settling=settling_seconds(quick))
    return microseconds(timed.rounds, calls) | {"host_waited": timed.host_waited}


def settling_seconds(quick: bool = False) -> float:
    """Return the longest time that a program runs before its first round on the default device."""
    if jax.default_backend() != "gpu":
        return 0.0
    return QUICK_SETTLING_SECONDS if quick else SETTLING_SECONDS


def microseconds(round_seconds: Sequence[float], calls: int) -> dict[str, Any]:
    """Return the timing fields of a row, given the seconds of each round of a program of `calls` calls."""
    rounds = [seconds / calls * 1e6 for seconds in round_seconds]
    return {"microseconds": statistics.median(rounds), "round_microseconds": rounds}


# ------------------------------------------------------------------------------------------------------------- errors


class Accuracy:
    """Measures the errors of the implementations of a workload against float64, at the small batch size `batch`."""

    def __init__(self, workload: Workload, batch: int, dtype: str, compiler: Compiler):
        self.batch, self._workload = min(batch, workload.error_batch), workload
        self._dtype, self._compiler = dtype, compiler
        self._draw = functools.partial(workload.draw, 0, self.batch, dtype)
        self._structs, self._programs, self._errors = jax.eval_shape(self._draw), {}, {}
        with float64():
            wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, _wide(a)), self._structs)
            self._reference = compiler.submit(workload.function("autodiff", "float64"), *wide)

    @functools.cached_property
    def arguments(self) -> tuple:
        return self._draw()

    @functools.cached_property
    def reference(self) -> list[np.ndarray]:
        """The floating results of autodiff in float64, on the CPU."""
        arguments = self.arguments
        with float64():
            wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, _wide(a))), arguments)
            return floats(self._reference.result()(*wide))

    def submit(self, name: str) -> None:
        """Start to compile the function of an implementation."""
        if name not in self._programs:
            function = self._workload.named(name, self._dtype)
            self._programs[name] = self._compiler.submit(function, *self._structs)

    def error(self, name: str) -> float:
        """Return the relative error of a submitted implementation."""
        if name not in self._errors:
            results = floats(self._programs[name].result()(*self.arguments))
            self._errors[name] = relative_error(results, self.reference)
        return self._errors[name]


def _wide(a: Any) -> Any:
    return np.float64 if is_float(a) else a.dtype


def relative_error(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Return the largest ‖result - reference‖ / ‖reference‖.

    If a reference is 0 up to rounding, such as the gradient of a bias that a norm removes, its denominator is the
    largest norm of all references.
    """
    norms = [np.linalg.norm(r) for r in reference]
    least = max(NOTHING * max(norms, default=0.0), 1e-300)
    errors = [
        float(np.linalg.norm(a - r) / (norm if norm > least else max(*norms, 1e-300)))
        for a, r, norm in zip(results, reference, norms, strict=True)
    ]
    if not all(map(math.isfinite, errors)):
        raise ArithmeticError("the error cannot be computed: a result or its float64 reference is not finite")
    return max(errors)


def floats(tree: Any) -> list[np.ndarray]:
    """Return the floating arrays of a tree, in float64."""
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(tree) if is_float(a)]
