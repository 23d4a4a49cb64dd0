"""Compile programs, time them, and measure their errors against float64."""

import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.workloads import Workload
from jaxbp.verify import timing
from jaxbp.verify.arguments import is_float
from jaxbp.verify.derivatives import float64

ROUNDS = 5
SETTLING_SECONDS = 2.4
"""The longest time that a program runs on a GPU before it is timed, to become steady."""
QUICK_SETTLING_SECONDS = 0.6
"""`SETTLING_SECONDS` if only times are measured."""
NOTHING = 1e-12
"""A reference array counts as 0 if its norm is below this share of the largest norm."""
WRONG = 0.5
"""A row with a larger error fails, because it does not compute the workload."""
MEASURED = (
    "microseconds",
    "round_microseconds",
    "burst_microseconds",
    "host_waited",
    "temporary_bytes",
    "peak_bytes",
    "compile_seconds",
    "error",
    "error_reason",
    "failed",
)
MOST_THREADS = 16
ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""Options of XLA: one CUDA graph holds all steps of a scan, and launches overlap if none needs the results of the
other."""
MOST_REFERENCE_BYTES = 48 * 2**30
"""A float64 reference that needs more memory than this is not computed."""


class Compiler:
    """Compile programs in threads.

    On a GPU, XLA times algorithms to choose one, and programs that are compiled meanwhile would change the choice.
    Without `quick`, programs that will be timed are therefore compiled one at a time, and other programs after them.
    """

    def __init__(self, quick: bool = False):
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        self._quick, self._futures, self._timed = quick, {}, []

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exception) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def submit(
        self, function: Callable, *arguments: Any, timed: bool = False, options: Mapping[str, Any] | None = None
    ) -> Future:
        """Compile a program in a thread. Rows whose programs are equal share one executable, because XLA may choose
        other algorithms each time that it compiles a program. Submit programs that will be `timed` first. `options` are
        options of XLA."""
        try:
            # Tracing and lowering depend on this thread's settings of JAX.
            lowered = jax.jit(function).lower(*arguments)
        except Exception as error:
            future = Future()
            future.set_exception(error)
            return future
        text = lowered.as_text(), str(options)
        if text not in self._futures:
            self._futures[text] = self._pool.submit(_compile_after, tuple(self._timed), lowered, options)
            self._timed += [self._futures[text]] * (timed and not self._quick)
        return self._futures[text]

    def wait(self) -> None:
        wait(self._futures.values())
        self._futures.clear()
        self._timed.clear()


def _compile_after(programs, lowered, options):
    wait(programs)
    return lowered.compile(compiler_options=options)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return dict.fromkeys(MEASURED) | run()
    except Exception as error:
        return dict.fromkeys(MEASURED) | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def time_compiled(
    compiled: Callable, arguments: tuple, calls: int, seconds: float, quick: bool = False, bursts: bool = False
) -> dict[str, Any]:
    in_bursts = timing.burst_seconds(lambda count: timing.run(compiled, (arguments,), count)[0]) if bursts else None
    timed = timing.device_seconds(compiled, (arguments,), seconds, ROUNDS, settling=settling_seconds(quick))
    return microseconds(timed.rounds, calls, in_bursts) | {"host_waited": timed.host_waited}


def settling_seconds(quick: bool = False) -> float:
    if jax.default_backend() != "gpu":
        return 0.0
    return QUICK_SETTLING_SECONDS if quick else SETTLING_SECONDS


def microseconds(round_seconds: Sequence[float], calls: int, burst: float | None = None) -> dict[str, Any]:
    rounds = [seconds / calls * 1e6 for seconds in round_seconds]
    in_bursts = None if burst is None else burst / calls * 1e6
    return {
        "microseconds": statistics.median(rounds),
        "round_microseconds": rounds,
        "burst_microseconds": in_bursts,
    }


class Accuracy:
    def __init__(self, workload: Workload, batch: int, dtype: str, compiler: Compiler):
        self.batch, self._workload = min(batch, workload.error_batch), workload
        self._dtype, self._compiler = dtype, compiler
        draw = functools.partial(workload.draw, 0, self.batch, dtype)
        self._structs, self._programs, self._errors = jax.eval_shape(draw), {}, {}
        self._drawing = compiler.submit(draw)
        with float64():
            wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, _wide(a)), self._structs)
            self._reference = compiler.submit(workload.function("autodiff", "float64"), *wide)

    @functools.cached_property
    def arguments(self) -> tuple:
        return self._drawing.result()()

    @functools.cached_property
    def reference(self) -> list[np.ndarray] | None:
        """The results in float64, or None if they need more than `MOST_REFERENCE_BYTES`."""
        arguments = self.arguments
        if self._reference.result().memory_analysis().temp_size_in_bytes > MOST_REFERENCE_BYTES:
            return None
        with float64():
            wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, _wide(a))), arguments)
            return floats(self._reference.result()(*wide))

    def submit(self, name: str) -> None:
        if name not in self._programs:
            function = self._workload.named(name, self._dtype)
            self._programs[name] = self._compiler.submit(function, *self._structs)

    def error(self, name: str) -> dict[str, Any]:
        if name not in self._errors:
            results = floats(self._programs[name].result()(*self.arguments))
            self._errors[name] = error_of(results, self.reference)
        return self._errors[name]


def _wide(a: Any) -> Any:
    return np.float64 if is_float(a) else a.dtype


def error_of(results: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None) -> dict[str, Any]:
    if reference is None:
        return {"error_reason": f"the float64 reference needs more than {MOST_REFERENCE_BYTES >> 30} GiB"}
    error = relative_error(results, reference)
    if error > WRONG:
        raise ArithmeticError(f"the results are wrong: their error against float64 is {error:.1e}")
    return {"error": error}


def relative_error(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Return the largest `‖result - reference‖ / ‖reference‖` over the arrays.

    If a reference is 0 up to rounding, such as the gradient of a bias before a norm, the denominator is the largest
    norm of all references.
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
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(tree) if is_float(a)]
