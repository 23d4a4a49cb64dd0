"""Work in child processes: one that dies or hangs takes its own task with it, and nothing else."""

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

_SPAWN = multiprocessing.get_context("spawn")  # JAX's threads do not live through a fork
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
    """Do the tasks in so many processes, each one after the other; yield what came of each task, in their order.

    `work`, a function of a module, gives the results of a task one by one. A process that gives none for `limit`
    seconds, and does not end the task, is killed. A task is taken when a process is free. The text that a process
    writes to stderr is kept if it dies. Processes share GPUs.

    Raises:
      RuntimeError: a process dies before it begins its first task.
    """
    share_gpus()
    children, order = [], collections.deque()
    with ThreadPoolExecutor(processes) as pool:  # each thread waits for one process
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
    """Leaves memory of GPUs to other processes, unless the environment says otherwise; before JAX looks for them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class _Child:
    """A process that does one task after the other."""

    def __init__(self, work: Callable):
        self.stderr = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed when the process dies)
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(work, theirs, self.stderr.name), daemon=True)
        self.process.start()
        theirs.close()
        self.is_free, self.has_started = True, False

    def do(self, task: Any, limit: float) -> Done:
        """Do a task. If the process dies of it, it is never free again."""
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
                raise RuntimeError(f"a child process did not start: exit code {code}") from None
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
    """Do the tasks that come through the connection: what a child process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its children
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    connection.send(True)  # it has started
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the parent is gone
            return
        os.ftruncate(2, 0)
        for result in work(task):
            connection.send((False, result))
        connection.send((True, None))
