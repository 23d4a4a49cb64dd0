"""Work in child processes: one that dies or hangs takes its own task with it, and nothing else."""

import collections
import dataclasses
import math
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")  # JAX's threads do not live through a fork
_READY, _END = "ready", "end"
KEPT_CHARACTERS = 2000
STACK = re.compile(r"^ *@ +0x.*\n?", re.MULTILINE)
"""The calls of C++ that led to an abort. They come after what is wrong, and are many."""


@dataclasses.dataclass
class Done:
    """What came of a task.

    Attributes:
      task: it.
      results: what the work gave, as far as it came.
      death: how the process ended before the task did, if it did: "SIGABRT", "exit code 1" or "no answer in 9 s".
      said: the last that the process wrote to stderr in the task, if it died.
    """

    task: Any
    results: list[Any] = dataclasses.field(default_factory=list)
    death: str | None = None
    said: str = ""


def in_children(
    work: Callable[[Any], Iterable[Any]], tasks: Iterable[Any], processes: int, limit: float
) -> Iterator[Done]:
    """Does the tasks in so many processes, which do one after the other; gives what came of each, in their order.

    `work`, a function of a module, gives the results of a task one by one; a process that gives none for `limit`
    seconds, and does not end the task, is killed. Tasks are taken as processes are free. What processes write to
    stderr is kept for those that die. Processes share GPUs.

    Raises:
      RuntimeError: a process dies before it begins its first task.
    """
    share_gpus()
    tasks, children, order = iter(tasks), [], collections.deque()
    try:
        while True:
            free = [child for child in children if child.doing is None]
            while (free or len(children) < processes) and (task := next(tasks, None)) is not None:
                order.append(Done(task))
                if free:
                    free.pop().begin(order[-1])
                else:
                    children.append(_Child(work, order[-1], limit))
            while order and all(child.doing is not order[0] for child in children):
                yield order.popleft()
            busy = {child.connection: child for child in children if child.doing is not None}
            if not busy:
                return
            soonest = min(child.deadline for child in busy.values())
            ready = wait(busy, None if soonest == math.inf else max(soonest - time.monotonic(), 0))
            for connection, child in busy.items():
                if connection in ready:
                    child.listen()
                elif time.monotonic() > child.deadline:
                    child.kill(f"no answer in {limit:g} s")
            children = [child for child in children if not child.connection.closed]
    finally:
        for child in children:
            child.kill()


def share_gpus() -> None:
    """Leaves memory of GPUs to other processes, unless the environment says otherwise; before JAX looks for them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class _Child:
    """A process, and the task that it does."""

    def __init__(self, work: Callable, first: Done, limit: float):
        self.doing: Done | None = first
        self.limit, self.deadline = limit, math.inf  # until it is ready for its first task
        self.stderr = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with the process)
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(work, theirs, self.stderr.name), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, done: Done) -> None:
        self.doing, self.deadline = done, time.monotonic() + self.limit
        self.connection.send(done.task)

    def listen(self) -> None:
        try:
            message, result = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            if self.deadline == math.inf:
                raise RuntimeError(f"a child process did not start: exit code {code}") from None
            return self.kill(signal.Signals(-code).name if code < 0 else f"exit code {code}")
        self.deadline = time.monotonic() + self.limit
        if message == _READY:
            self.begin(self.doing)
        elif message == _END:
            self.doing = None
        else:
            self.doing.results.append(result)

    def kill(self, death: str | None = None) -> None:
        """Ends the process, and with it its task, if it has one."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        if self.doing is not None:
            said = STACK.sub("", Path(self.stderr.name).read_text(errors="replace"))[-KEPT_CHARACTERS:]
            self.doing.death, self.doing.said, self.doing = death, said, None
        self.stderr.close()


def _serve(work: Callable[[Any], Iterable[Any]], connection: Connection, stderr: str) -> None:
    """A child's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its children
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    connection.send((_READY, None))
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the parent is gone
            return
        os.ftruncate(2, 0)
        for result in work(task):
            connection.send((None, result))
        connection.send((_END, None))
