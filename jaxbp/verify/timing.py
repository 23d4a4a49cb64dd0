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
      settling: seconds, at most, of calls before the first round, in which a GPU at its power limit lowers its clock.
    """
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        once = time.perf_counter() - start
    calls = max(2, min(2000, int(seconds / once)))
    _run(program, arguments, int(settling / once))
    times, shares = [], []
    for _ in range(rounds):
        elapsed, waited = _run(program, arguments, calls)
        times.append(elapsed / calls)
        shares.append(waited / elapsed)
    return Timed(statistics.median(times), statistics.median(shares), tuple(times))


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
