"""Several processes that train one model, each with the devices that it sees.

Process 0 has the settings, writes the run's directory and prints. JAX joins the devices. Beside that each of the others
keeps a connection to process 0, on the port after the coordinator's: it brings the settings, and the kernel closes it
when a process ends, however it does. So that the end of one is the end of all, whether they compile, draw or wait.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from experiments.output.errors import UserError, exit_code

START_SECONDS = 300
"""For all processes to come."""
PARTING_SECONDS = 2
"""For the others to hear that a process ends."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""In seconds, and probes: a machine that is gone is noticed after half a minute."""
DONE = b"."
"""What process 0 says before it ends well."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process this is of how many, and where process 0 is."""

    host: str
    port: int
    process: int
    processes: int

    @classmethod
    def of(cls, args: Sequence[str]) -> "Place | None":
        """What a command line says, among other things; None if nothing.

        Raises:
          UserError: (a ValueError) for some of the three options without the others, or for values that do not fit.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--coordinator")
        parser.add_argument("--process", type=int)
        parser.add_argument("--processes", type=int)
        found = vars(parser.parse_known_args(args)[0])
        if missing := [name for name, value in found.items() if value is None]:
            if len(missing) == len(found):
                return None
            raise UserError(f"{missing[0]} = None: wanted coordinator, process and processes, or none of them")
        host, _, port = found["coordinator"].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16 - 1:
            raise UserError(f"coordinator = {found['coordinator']}: wanted HOST:PORT")
        if not 0 <= found["process"] < found["processes"]:
            raise UserError(f"process = {found['process']}: wanted one from 0 to processes - 1")
        return cls(host.strip("[]"), int(port), found["process"], found["processes"])


def run(place: Place, command: Callable[[str], int], settings: str | None = None) -> NoReturn:
    """Runs `command(settings)` in all processes, and ends this one.

    Process 0's exit code is that of its command. Where that is 0, the others' is, too. A process that finds another one
    gone says so in one line and ends with 1.

    Args:
      settings: a line, which process 0 has.
    """
    links, settings = _listen(place, settings) if place.process == 0 else _call(place)
    Joined(place, links).run(lambda: command(settings))


def of_process_0(tree: PyTree) -> PyTree:
    """The arrays that process 0 has, in all processes. Each has some of these shapes and dtypes."""
    if jax.process_count() == 1:
        return tree
    arrays, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
    # As bytes: a sum over processes, which this is, would lose the sign of zeros.
    as_bytes = multihost_utils.broadcast_one_to_all([np.frombuffer(a.tobytes(), np.uint8) for a in arrays])
    pairs = zip(as_bytes, arrays, strict=True)
    return structure.unflatten([np.frombuffer(np.asarray(b).tobytes(), a.dtype).reshape(a.shape) for b, a in pairs])


class Joined:
    """This process, connected to process 0, or as process 0 to all others."""

    def __init__(self, place: Place, links: dict[int, socket.socket]):
        self._place, self._links, self._ends = place, links, threading.Event()
        self._watches = [threading.Thread(target=self._watch, args=(i,), daemon=True) for i in links]

    def run(self, command: Callable[[], int]) -> NoReturn:
        """Runs the command, and ends this process."""
        for watch in self._watches:
            watch.start()
        try:
            code = exit_code(lambda: self._initialized(command))
        except BaseException:
            # With a process gone, collectives fail: it is for `_watch` to say why.
            time.sleep(PARTING_SECONDS)
            traceback.print_exc()
            code = 1
        if self._place.process and code == 0:
            self._watches[0].join()
        self._end(code)

    def _initialized(self, command):
        place = self._place
        if place.process:
            # Ctrl-C in a terminal goes to all. Process 0 answers it, and the others end with process 0.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # It would take SIGTERM for news of a preemption, and go on.
        jax.config.update("jax_enable_preemption_service", False)
        address = _relay(place) if place.process else f"{place.host}:{place.port}"
        jax.distributed.initialize(address, place.processes, place.process, cluster_detection_method="deactivate")
        return command()

    def _watch(self, process):
        """Waits for the end of another process, and ends this one."""
        try:
            said = self._links[process].recv(1)
        except OSError:
            said = b""
        if said == DONE:
            self._end(0)
        if not self._ends.is_set():
            print(f"error: process {process} stopped answering: the run ends, and --resume goes on", file=sys.stderr)
            self._end(1)

    def _end(self, code) -> NoReturn:
        self._ends.set()
        if self._place.process == 0:
            for link in self._links.values():
                with contextlib.suppress(OSError):  # it is gone
                    link.sendall(DONE * (code == 0))
                    link.shutdown(socket.SHUT_WR)
        for watch in self._watches:
            if watch is not threading.current_thread():
                watch.join(PARTING_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # JAX would wait for processes that are gone


def _listen(place, settings):
    """Waits for the others, and tells them the settings."""
    links, deadline = {}, time.monotonic() + START_SECONDS
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.create_server((place.host, place.port + 1), family=family) as server:
        while missing := [i for i in range(1, place.processes) if i not in links]:
            server.settimeout(max(deadline - time.monotonic(), 0.1))
            try:
                link, _ = server.accept()
            except TimeoutError:
                raise TimeoutError(f"process {missing[0]} of {place.processes} did not come in time") from None
            links[_introduced(link, place, missing)] = link
    for link in links.values():
        link.sendall(settings.encode() + b"\n")
    return links, settings


def _call(place):
    """Comes to process 0, and hears the settings."""
    link = _connected(place.host, place.port + 1)
    link.sendall(f"{place.process} {place.processes}\n".encode())
    if not (settings := _line(link)):
        raise ConnectionError("process 0 ended before all processes came")
    return {0: _lasting(link)}, settings


def _connected(host, port):
    """A connection to process 0, which may not listen yet."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=START_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process 0 does not answer at {host}:{port} ({error})") from None
            time.sleep(0.1)


def _relay(place):
    """Relays connections to the coordinator, and returns the address at which this process reaches the relay.

    JAX aborts a process whose connection to the coordinator closes, often before `_watch` can say why. The relay's
    connections to JAX stay open when process 0 is gone.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            near, _ = server.accept()
            far = _lasting(_connected(place.host, place.port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_forward, args=(source, sink), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _forward(source, sink):
    """Sends on to `sink` all that `source` receives, but not its end."""
    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        while said := source.recv(2**16):
            sink.sendall(said)


def _introduced(link, place, missing):
    """Which process has come."""
    link.settimeout(PARTING_SECONDS)
    try:
        said = _line(link)
    except OSError:
        said = ""
    process, _, processes = said.partition(" ")
    if processes != str(place.processes) or process not in map(str, missing):
        wanted = f"wanted process {' or '.join(map(str, missing))} of {place.processes}"
        raise UserError(f"process {process or '?'} of {processes or '?'} came to {place.host}:{place.port}: {wanted}")
    _lasting(link)
    return int(process)


def _lasting(link):
    """A connection that waits for as long as the other machine is there."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _line(link):
    """The next line that is said, and no byte more."""
    said = b""
    while not said.endswith(b"\n") and (byte := link.recv(1)):
        said += byte
    return said.decode(errors="replace").strip()
