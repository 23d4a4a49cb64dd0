"""Run tasks in child processes, so that a process that dies or hangs loses only one task."""

import collections
import dataclasses
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
KEPT_CHARACTERS = 2000
STACK = re.compile(r"^ *@ +0x.*\n?", re.MULTILINE)
"""A line of an abort's C++ stack trace."""


@dataclasses.dataclass
class Done:
    """The outcome of a task.

    Attributes:
      death: None, or how the task's process died, such as "SIGABRT" or "no answer in 9 s".
      said: the last text on stderr of a process that died.
    """

    task: Any
    results: list[Any] = dataclasses.field(default_factory=list)
    death: str | None = None
    said: str = ""


def in_children(
    work: Callable[[Any], Iterable[Any]], tasks: Iterable[Any], processes: int, limit: float
) -> Iterator[Done]:
    """Run the tasks in `processes` concurrent processes, and yield their outcomes in the order of the tasks.

    `work(task)` yields results. A process is killed if it yields nothing for `limit` seconds. Raise RuntimeError if a
    process dies before its first task starts.
    """
    share_gpus()
    children, order = [], collections.deque()
    with ThreadPoolExecutor(processes) as pool:
        try:
            for task in tasks:
                child = next((child for child in children if child.is_free), None)
                if child is None:
                    children.append(child := _Child(work))
                child.is_free = False
                order.append(pool.submit(child.do, task, limit))
                while order:
                    running = [future for future in order if not future.done()]
                    if order[0] not in running:
                        yield order.popleft().result()
                    elif len(running) == processes:
                        wait(running, return_when=FIRST_COMPLETED)
                    else:
                        break
            while order:
                yield order.popleft().result()
        finally:
            for child in children:
                child.kill()


def share_gpus() -> None:
    """Let JAX allocate GPU memory only as needed. Call it before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class _Child:
    def __init__(self, work: Callable):
        self.stderr = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed when the process dies)
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(work, theirs, self.stderr.name), daemon=True)
        self.process.start()
        theirs.close()
        self.is_free, self.has_started = True, False

    def do(self, task: Any, limit: float) -> Done:
        results = []
        try:
            self.has_started = self.has_started or self.connection.recv()
            self.connection.send(task)
            while self.connection.poll(limit):
                is_end, result = self.connection.recv()
                if is_end:
                    self.is_free = True
                    return Done(task, results)
                results.append(result)
            death = f"no answer in {limit:g} s"
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            if not self.has_started:
                raise RuntimeError(
                    f"a child process ended with exit code {code} before it was ready for its first task"
                ) from None
            death = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.kill()
        said = STACK.sub("", Path(self.stderr.name).read_text(errors="replace"))[-KEPT_CHARACTERS:]
        self.connection.close()
        self.stderr.close()
        return Done(task, results, death, said)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(work: Callable[[Any], Iterable[Any]], connection: Connection, stderr: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    connection.send(True)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        os.ftruncate(2, 0)
        for result in work(task):
            connection.send((False, result))
        connection.send((True, None))
