import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 5
IN_FLIGHT = 8
"""Queued calls: enough to keep the device busy, few enough for memory."""
_BLOCK_SECONDS, _AGREEMENT = 0.3, 0.01
"""Seconds per block in `settle`, and the relative difference at which it ends (docs/lab/2026-11-24-dense.md)."""
_BURSTS, _BURST_SECONDS, _REST_SECONDS = 3, 0.02, 0.3


def compile_program(function: Callable, arguments: tuple) -> tuple[Any, float]:
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled, time.perf_counter() - start


class Timed(NamedTuple):
    """Seconds per call while further calls are queued: the median, and one number per round of timing.

    `host_waited` is the fraction of time in which the host waits for the device.
    """

    seconds: float
    host_waited: float
    rounds: tuple[float, ...]


def device_seconds(
    program: Callable, arguments: tuple, seconds: float, rounds: int = ROUNDS, settling: float = 0.0
) -> Timed:
    """Time `program(*arguments)` in rounds of about `seconds`, after at most `settling` seconds of warm-up calls."""
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        once = time.perf_counter() - start
    calls = max(2, min(2000, int(seconds / once)))
    settle(lambda calls: run(program, arguments, calls)[0], once, settling)
    times, shares = [], []
    for _ in range(rounds):
        elapsed, waited = run(program, arguments, calls)
        times.append(elapsed / calls)
        shares.append(waited / elapsed)
    return Timed(statistics.median(times), statistics.median(shares), tuple(times))


def settle(run: Callable[[int], float], once: float, most: float) -> None:
    """Call a program until two successive blocks of calls take equally long, so that the GPU's clock is steady.

    `run(calls)` makes this number of calls, of about `once` seconds each, and returns the seconds. All blocks take at
    most about `most` seconds.
    """
    calls, spent, last = max(1, int(_BLOCK_SECONDS / once)), 0.0, 0.0
    while spent + _BLOCK_SECONDS <= most:
        seconds = run(calls)
        if abs(seconds - last) <= _AGREEMENT * last:
            return
        spent, last = spent + seconds, seconds


def burst_seconds(run: Callable[[int], float]) -> float:
    """Return the median seconds per call of short bursts after rests, when the GPU is cool and its clock is high.

    `run(calls)` makes this number of calls and returns the seconds. A burst has at least three calls.
    """
    once = [run(1) for _ in range(3)][-1]
    calls, seconds = max(3, round(_BURST_SECONDS / once)), []
    for _ in range(_BURSTS):
        time.sleep(_REST_SECONDS)
        seconds.append(run(calls) / calls)
    return statistics.median(seconds)


def run(program: Callable, arguments: tuple, calls: int) -> tuple[float, float]:
    """Return the seconds of `calls` calls, and those in which the host waits for a result that is not ready."""
    in_flight, waited, start = collections.deque(), 0.0, time.perf_counter()
    for i in range(calls + IN_FLIGHT):
        if i < calls:
            in_flight.append(program(*arguments))
        if i >= IN_FLIGHT and in_flight:
            result = in_flight.popleft()
            was_ready, before = _is_ready(result), time.perf_counter()
            jax.block_until_ready(result)
            waited += 0.0 if was_ready else time.perf_counter() - before
    return time.perf_counter() - start, waited


def _is_ready(result):
    # The results of a program are ready together. A CPU runs small programs within the call.
    return any(a.is_ready() and next(iter(a.devices())).platform != "cpu" for a in jax.tree.leaves(result)[:1])
