"""Compiling and timing a program."""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 5
IN_FLIGHT = 8
"""Programs queued at most: enough to keep the device busy, and few enough for their results to fit into its memory."""
_BLOCK_SECONDS, _AGREEMENT = 0.3, 0.01
"""Of `settle`: the blocks, and the share by which two may differ. Under a large product a GPU starts at its highest
clock and meets its power limit within 0.2 s; some programs come down too far, and recover within 2 s
(docs/lab/2026-11-24-dense.md)."""


def compile_program(function: Callable, arguments: tuple) -> tuple[Any, float]:
    """The function as an executable, and the seconds from Python to there."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled, time.perf_counter() - start


class Timed(NamedTuple):
    """The time of a call with more of them queued.

    Attributes:
      seconds: the median over rounds.
      host_waited: the share of it that the host waited for the device. Nearly nothing says that the device waited for
        the host: then the time is the host's.
      rounds: the seconds of a call in each round.
    """

    seconds: float
    host_waited: float
    rounds: tuple[float, ...]


def device_seconds(
    program: Callable, arguments: tuple, seconds: float, rounds: int = ROUNDS, settling: float = 0.0
) -> Timed:
    """Times a program.

    Args:
      seconds: least time of a round.
      settling: seconds, at most, of calls before the first round: see `settle`.
    """
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
    """Calls a program until a GPU at its power limit has found its clock: until two blocks in a row take equally long.

    Args:
      run: `run(calls)`, the seconds that so many calls take.
      once: about the seconds of a call.
      most: seconds that are not exceeded, but for what a block takes longer than expected. Less than a block are none.
    """
    calls, spent, last = max(1, int(_BLOCK_SECONDS / once)), 0.0, 0.0
    while spent + _BLOCK_SECONDS <= most:
        seconds = run(calls)
        if abs(seconds - last) <= _AGREEMENT * last:
            return
        spent, last = spent + seconds, seconds


def _run(program, arguments, calls):
    """The seconds that so many calls take, and how many of them the host waited."""
    in_flight, waited, start = collections.deque(), 0.0, time.perf_counter()
    for i in range(calls + IN_FLIGHT):
        if i < calls:
            in_flight.append(program(*arguments))
        if i >= IN_FLIGHT and in_flight:
            before = time.perf_counter()
            jax.block_until_ready(in_flight.popleft())
            waited += time.perf_counter() - before
    return time.perf_counter() - start, waited
