"""Train one model in several processes: see docs/many_devices.md. Process 0 runs JAX's coordinator.

Each other process connects to process 0 at the port after the port of the coordinator. In one line, it sends its
number, the number of processes, and the SHA-256 of a secret token. Process 0 answers with the settings of the run. The
connection stays open, and closes when a process ends.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import os
import queue
import secrets
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

TOKEN = "JAXBP_TOKEN"
"""The environment variable with the token."""
START_SECONDS = 300
"""How long a process waits for another."""
QUIET_SECONDS = 2
"""A process that waits longer says so."""
MOST_PROCESSES = 1024
INTRODUCTION_SECONDS, INTRODUCTION_BYTES = 5, 1000
"""Limits on the time and size of the first line from another process."""
SETTINGS_BYTES = 2**16
POLL_SECONDS = 0.1
PARTING_SECONDS = 2
"""Seconds within which a process notices that another process has ended."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
ENDS = "the run ends; if it has a checkpoint, --resume continues it"
DONE, HERE, STOP = b".", b"h", b"s"
"""Messages between processes: the run has ended, the process waits in `meet`, Ctrl-C was pressed."""


@dataclasses.dataclass(frozen=True)
class Place:
    host: str
    port: int
    process: int
    processes: int

    @classmethod
    def of(cls, args: Sequence[str]) -> "Place | None":
        """Parse --coordinator, --process, and --processes. Return None if all are omitted."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--coordinator")
        parser.add_argument("--process")
        parser.add_argument("--processes")
        found = vars(parser.parse_known_args(args)[0])
        if missing := [name for name, value in found.items() if value is None]:
            if len(missing) == len(found):
                return None
            raise UserError(
                f"--{missing[0]} is missing; wants all or none of --coordinator, --process, and --processes"
            )
        host, _, port = found["coordinator"].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16 - 1:
            raise UserError(f"--coordinator is {found['coordinator']}; wants HOST:PORT, with a port from 1 to 65534")
        try:
            host.encode("idna")
        except UnicodeError:
            raise UserError(f"--coordinator is {found['coordinator']}; wants HOST:PORT, with a valid host") from None
        processes = _number("processes", found["processes"], 1, MOST_PROCESSES)
        return cls(host.strip("[]"), int(port), _number("process", found["process"], 0, processes - 1), processes)


def _number(option, text, least, most):
    if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise UserError(f"--{option} is {text}; wants a number from {least} to {most}")
    return int(text)


_meet: Callable[[], None] | None = None
_release: Callable[[], None] | None = None


def meet() -> None:
    """Wait until every process calls this function. JAX's collectives wait only 30 s on a CPU.

    Raise TimeoutError if a process does not come within `START_SECONDS`.
    """
    if _meet is not None:
        _meet()


def release() -> None:
    """In process 0, end the other processes after Ctrl-C. Process 0 computes nothing with them any more."""
    if _release is not None:
        _release()


def run(place: Place, command: Callable[[str], int], settings: str | None = None) -> NoReturn:
    """Connect to the other processes, run `command(settings)`, and end this process.

    Only process 0 passes `settings`, one line of text, and sends them to the others. When the command of process 0
    returns 0, all processes exit with 0. If a process fails or disappears, all others exit with 1.
    """
    global _meet, _release
    if place.process:
        links, settings = _call(place)
    else:
        links = _listen(place)
        for link in links.values():
            link.sendall(settings.encode() + b"\n")
    ends, arrived, handed_on = threading.Event(), queue.SimpleQueue(), threading.Event()
    _meet = functools.partial(_meet_over, links, arrived, is_first=place.process == 0)

    def initialized():
        if place.process:
            _hand_on_ctrl_c(links[0], handed_on)
        # JAX's preemption service would catch SIGTERM and continue.
        jax.config.update("jax_enable_preemption_service", False)
        host = f"[{place.host}]" if ":" in place.host else place.host
        address = _relay(place) if place.process else f"{host}:{place.port}"
        jax.distributed.initialize(
            *(address, place.processes, place.process),
            cluster_detection_method="deactivate",
            coordinator_bind_address=None if place.process else address,  # JAX's default: all interfaces
        )
        return command(settings)

    def watch(process):
        said = HERE
        while said == HERE or (said == STOP and place.process == 0):
            try:
                said = links[process].recv(1)
            except OSError:
                said = b""
            if said == HERE:
                arrived.put(process)
            elif said == STOP and place.process == 0:
                os.kill(os.getpid(), signal.SIGINT)
        if said == DONE:
            end(0)
        if said == STOP:
            if not handed_on.is_set():
                print("process 0 was stopped with Ctrl-C, and prints how to resume", file=sys.stderr)
            end(1)
        if not ends.is_set():
            print(f"error: process {process} stopped answering: {ENDS}", file=sys.stderr)
            end(1)

    def stop_others():
        ends.set()
        for link in links.values():
            with contextlib.suppress(OSError):
                link.sendall(STOP)

    def end(code):
        ends.set()
        if place.process == 0:
            for link in links.values():
                with contextlib.suppress(OSError):
                    link.sendall(DONE * (code == 0))
                    link.shutdown(socket.SHUT_WR)
        for watching in watches:
            if watching is not threading.current_thread():
                watching.join(PARTING_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal exit would wait in JAX for processes that have ended

    _release = stop_others if place.process == 0 else None
    watches = [threading.Thread(target=watch, args=(process,), daemon=True) for process in links]
    for watching in watches:
        watching.start()
    try:
        code = exit_code(initialized)
    except BaseException:
        # Collectives fail if another process has ended. `watch` prints the reason.
        time.sleep(PARTING_SECONDS)
        traceback.print_exc()
        code = 1
    if place.process and code == 0:
        watches[0].join()
    end(code)


def _meet_over(links, arrived, is_first):
    """Wait until every process calls this function. The others send `HERE` to process 0, which answers when it has all
    messages."""
    if not is_first:
        links[0].sendall(HERE)
    missing, deadline, has_said = set(links), time.monotonic() + START_SECONDS, False
    while missing:
        seconds = deadline - time.monotonic()
        try:
            missing.remove(arrived.get(timeout=max(0, seconds if has_said else min(QUIET_SECONDS, seconds))))
        except queue.Empty:
            if has_said:
                raise TimeoutError(
                    f"process {min(missing)} did not come to the next epoch within {START_SECONDS} s; {ENDS}"
                ) from None
            has_said = _say_waiting(f"process {min(missing)} to come to the next epoch")
    if is_first:
        for link in links.values():
            link.sendall(HERE)


def _hand_on_ctrl_c(link, handed_on):
    """Let Ctrl-C in this process stop process 0, which draws the curves, says how to resume, and ends the others."""
    wakes, woken = socket.socketpair()
    woken.setblocking(False)

    def hand_on():
        wakes.recv(1)
        handed_on.set()
        print("process 0 stops the run after this epoch", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            link.sendall(STOP)

    signal.signal(signal.SIGINT, lambda *_: None)
    # Python calls the handler only after JAX's current computation, but writes into this socket at once.
    signal.set_wakeup_fd(woken.detach())
    threading.Thread(target=hand_on, daemon=True).start()


def _say_waiting(whom: str) -> bool:
    print(f"waiting for {whom}, for at most {START_SECONDS} s", file=sys.stderr, flush=True)
    return True


def of_process_0(tree: PyTree) -> PyTree:
    """Return process 0's arrays in every process. Every process must pass equal shapes and dtypes."""
    if jax.process_count() == 1:
        return tree
    arrays, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
    # JAX broadcasts by a sum over processes, which would lose the sign of zeros.
    as_bytes = multihost_utils.broadcast_one_to_all([np.frombuffer(a.tobytes(), np.uint8) for a in arrays])
    pairs = zip(as_bytes, arrays, strict=True)
    return structure.unflatten([np.frombuffer(np.asarray(b).tobytes(), a.dtype).reshape(a.shape) for b, a in pairs])


def _listen(place):
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(16)
    links, introduced, deadline = {}, queue.SimpleQueue(), time.monotonic() + START_SECONDS
    has_said = False
    # JAX's coordinator crashes if its port is in use. Reserve the port until the coordinator starts.
    with _bound(place, place.port), _bound(place, place.port + 1) as server:
        if not os.environ.get(TOKEN):
            print(f"the other processes need the environment variable {TOKEN}={token}", file=sys.stderr, flush=True)
        server.settimeout(POLL_SECONDS)
        while missing := [process for process in range(1, place.processes) if process not in links]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {missing[0]} of {place.processes} did not connect to process 0 within {START_SECONDS} s"
                )
            if not has_said and time.monotonic() > deadline - START_SECONDS + QUIET_SECONDS:
                has_said = _say_waiting(f"process {missing[0]} of {place.processes} to connect to process 0")
            with contextlib.suppress(OSError):  # no connection yet, or too many
                link, _ = server.accept()
                threading.Thread(target=_introduce, args=(link, token, introduced), daemon=True).start()
            while missing and not introduced.empty():
                link, process, processes = introduced.get()
                if processes != str(place.processes) or process not in map(str, missing):
                    wanted = f"wants --process {' or '.join(map(str, missing))} and --processes {place.processes}"
                    came = f"--process {process} and --processes {processes}"
                    raise UserError(f"a process with {came} connected to {place.host}:{place.port}; {wanted}")
                missing.remove(int(process))
                links[int(process)] = _lasting(link)
    return links


def _bound(place, port):
    try:
        return socket.create_server((place.host, port), family=socket.AF_INET6 if ":" in place.host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror.partition(" (")[0]  # without the address
        raise UserError(
            f"--coordinator is {place.host}:{place.port}, but port {port} cannot be used ({reason}); wants an address "
            "of this machine, and a port that is unused, as is the next port"
        ) from None


def _introduce(link, token, introduced):
    try:
        process, processes, said = _line(link, INTRODUCTION_BYTES, INTRODUCTION_SECONDS).split(" ", 2)
        if hmac.compare_digest(said.encode(), _digest(token).encode()):
            introduced.put((link, process, processes))
            return
    except (OSError, ValueError):
        pass
    link.close()


def _call(place):
    if not (token := os.environ.get(TOKEN)):
        raise UserError(f"the environment variable {TOKEN} is not set; wants the token that process 0 printed")
    link = _connected(place.host, place.port + 1)
    link.sendall(f"{place.process} {place.processes} {_digest(token)}\n".encode())
    try:
        settings = _line(link, SETTINGS_BYTES, START_SECONDS)
    except OSError as error:
        raise ConnectionError(
            f"process 0 sent no settings ({error}); wants process 0 to run with the same value of {TOKEN} as this "
            "process"
        ) from None
    return {0: _lasting(link)}, settings


def _digest(token):
    return hashlib.sha256(os.fsencode(token)).hexdigest()  # one line, whatever the token is


def _connected(host, port):
    started, has_said = time.monotonic(), False
    while True:
        try:
            return socket.create_connection((host, port), timeout=START_SECONDS)
        except OSError as error:
            waited = time.monotonic() - started
            if waited > START_SECONDS:
                raise TimeoutError(
                    f"process 0 does not answer at {host}:{port} ({error}) within {START_SECONDS} s"
                ) from None
            has_said = has_said or (waited > QUIET_SECONDS and _say_waiting(f"process 0 at {host}:{port} ({error})"))
            time.sleep(POLL_SECONDS)


def _relay(place):
    """Start threads that forward bytes between JAX and the coordinator at `place`. Return the address for JAX.

    JAX aborts a process if its connection to the coordinator closes, often before `run` prints which process ended.
    The threads keep JAX's connection open.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def forward(source, sink):
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            while said := source.recv(2**16):
                sink.sendall(said)

    def serve():
        while True:
            near, _ = server.accept()
            far = _lasting(_connected(place.host, place.port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=forward, args=(source, sink), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _lasting(link):
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a lost machine
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _line(link, most_bytes, seconds):
    # Reads nothing after the line.
    said, deadline = b"", time.monotonic() + seconds
    while not said.endswith(b"\n"):
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        byte = link.recv(1)
        if not byte or len(said) == most_bytes or time.monotonic() > deadline:
            raise ConnectionError("the connection ended" if not byte else "the line is too long, or came too slowly")
        said += byte
    return said.decode(errors="replace").removesuffix("\n")
