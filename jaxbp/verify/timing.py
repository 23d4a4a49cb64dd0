"""Compile and time a program."""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 5
IN_FLIGHT = 8
"""The largest number of queued calls. They keep the device busy, and their results fit into memory."""
_BLOCK_SECONDS, _AGREEMENT = 0.3, 0.01
"""The seconds of a block of calls in `settle`, and the fraction by which the times of two blocks may differ. For the
measured changes of a GPU's clock, see docs/lab/2026-11-24-dense.md."""


def compile_program(function: Callable, arguments: tuple) -> tuple[Any, float]:
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled, time.perf_counter() - start


class Timed(NamedTuple):
    """The time per call while further calls are queued. `seconds` is the median over rounds.

    `rounds` has the time per call in each round. For `host_waited`, see `jaxbp.verify.measurement.Program`.
    """

    seconds: float
    host_waited: float
    rounds: tuple[float, ...]


def device_seconds(
    program: Callable, arguments: tuple, seconds: float, rounds: int = ROUNDS, settling: float = 0.0
) -> Timed:
    """Time `program(*arguments)` in rounds of about `seconds`, after `settle` has run at most `settling` seconds."""
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        once = time.perf_counter() - start
    calls = max(2, min(2000, int(seconds / once)))
    settle(lambda calls: _run(program, arguments, calls)[0], once, settling)
    times, shares = [], []
    for _ in range(rounds):
        elapsed, waited = _run(program, arguments, calls)
        times.append(elapsed / calls)
        shares.append(waited / elapsed)
    return Timed(statistics.median(times), statistics.median(shares), tuple(times))


def settle(run: Callable[[int], float], once: float, most: float) -> None:
    """Call a program until two successive blocks of calls take equally long, so that the GPU's clock is steady.

    `run(calls)` calls the program this number of times, and returns the seconds. One call takes about `once` seconds.
    All calls together take at most about `most` seconds. If this limit is shorter than one block, the program is not
    called.
    """
    calls, spent, last = max(1, int(_BLOCK_SECONDS / once)), 0.0, 0.0
    while spent + _BLOCK_SECONDS <= most:
        seconds = run(calls)
        if abs(seconds - last) <= _AGREEMENT * last:
            return
        spent, last = spent + seconds, seconds


def _run(program, arguments, calls):
    in_flight, waited, start = collections.deque(), 0.0, time.perf_counter()
    for i in range(calls + IN_FLIGHT):
        if i < calls:
            in_flight.append(program(*arguments))
        if i >= IN_FLIGHT and in_flight:
            before = time.perf_counter()
            jax.block_until_ready(in_flight.popleft())
            waited += time.perf_counter() - before
    return time.perf_counter() - start, waited
