import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from experiments import train
from experiments.output.errors import UserError
from experiments.training import processes
from experiments.training.processes import TOKEN, Place, _relay
from tests.qa import kill

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from conftest import ToyConfig
from experiments import configs, train
configs.EXPERIMENTS["toy"] = ToyConfig
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture
def port():
    """Yield a free port, followed by another. Holding the port before keeps other tests from both."""
    for port in itertools.count(20001, 3):
        with socket.socket() as held, socket.socket() as free, socket.socket() as free_after:
            try:
                held.bind(("127.0.0.1", port - 1))
                free.bind(("127.0.0.1", port))
                free_after.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            free.close()
            free_after.close()
            yield port
            return


@pytest.fixture
def start(monkeypatch, port):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "experiments"))))
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count=1")
    monkeypatch.setenv(TOKEN, "the token")
    # A process may read a program that another is writing.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache")
    started = []

    def both(*settings, scripts=(SCRIPT, SCRIPT)):
        place = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
        for i, (script, arguments) in enumerate(zip(scripts, (settings, ()), strict=True)):
            command = [sys.executable, "-c", script, *map(str, arguments), *place, "--process", str(i)]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started.append(subprocess.Popen(command, **pipes))
        return started[-2:]

    yield both
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs two devices to shard over, of the CPU")
def test_two_processes_go_on_with_a_run_in_the_bits_of_one_with_two_devices(start, toy_config, tmp_path):
    alone, both = tmp_path / "alone", tmp_path / "both"
    train.train(toy_config(run_dir=alone, devices=2))
    shutil.copytree(alone, both)
    shutil.rmtree(both / "checkpoints" / "4")
    (both / "files.sha256").unlink()
    first, other = start("--resume", "--run-dir", both)
    said, errors = first.communicate(timeout=300)
    assert (first.returncode, other.wait(timeout=30)) == (0, 0), errors
    assert [line.split()[1] for line in said.splitlines() if line.startswith("epoch")] == ["4/4"]
    assert "epoch" not in other.stdout.read() and '"devices": 2' in said
    assert kill.outcome(both) == kill.outcome(alone)
    for path in (alone, both):
        train.train(toy_config(run_dir=path, devices=2, resume=True, epochs=5))
    assert kill.outcome(both) == kill.outcome(alone)


def test_a_process_with_other_data_ends_the_run(start, tmp_path):
    other_data = """
load = ToyConfig.load
ToyConfig.load = lambda config: load(config)._replace(test_labels=load(config).test_labels[::-1])
sys.exit"""
    scripts = SCRIPT, SCRIPT.replace("\nsys.exit", other_data)
    first, other = start("toy", "--devices", "2", "--run-dir", tmp_path / "run", scripts=scripts)
    assert other.wait(timeout=300) == 2 and first.wait(timeout=30) == 1
    assert "process 1 has other data or another model than process 0" in other.stderr.read()
    assert "process 1 stopped answering" in first.stderr.read()


def messages(process):
    """Return what an ended process wrote to stderr, without the lines of a process that waited for a slow one."""
    lines = process.stderr.read().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("waiting for "))


@pytest.mark.parametrize(("killed", "number"), [(1, signal.SIGTERM), (0, signal.SIGKILL)])
def test_a_killed_process_ends_the_other_with_a_line(start, port, tmp_path, killed, number):
    both = start("toy", "--devices", "2", "--epochs", "100000", "--run-dir", tmp_path / "run")
    while not (both[0].stdout.readline()).startswith("epoch 3/"):
        assert both[0].poll() is None, both[0].stderr.read()
    with pytest.raises(OSError):  # JAX's coordinator would listen on all addresses
        socket.create_connection(("127.0.0.2", port), timeout=10)
    both[killed].send_signal(number)
    assert both[1 - killed].wait(timeout=30) == 1
    errors = messages(both[1 - killed])
    ends = "the run ends; if it has a checkpoint, --resume continues it"
    assert errors == f"error: process {killed} stopped answering: {ends}\n"


@pytest.fixture
def waiting(port, monkeypatch):
    monkeypatch.setenv(TOKEN, "the token")
    monkeypatch.setattr(processes, "INTRODUCTION_SECONDS", 1)
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as links:
        result = pool.submit(processes._listen, Place("127.0.0.1", port, 0, 2))

        def connect(said):
            link = links.enter_context(processes._connected("127.0.0.1", port + 1))
            link.settimeout(30)
            link.sendall(said)
            return link

        yield connect, result
        if not result.done():
            connect(introduction("1 2"))


def introduction(numbers, token="the token"):
    return f"{numbers} {processes._digest(token)}\n".encode()


STRANGERS = {
    "silent": b"",
    "slow": introduction("1 2")[:-9],
    "long": b"x" * 10_000,
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "another token": introduction("1 2", "the tokem"),
    "not UTF-8": b"\xff\xff\n",
}


def test_process_0_closes_the_connections_of_strangers_and_goes_on_waiting(waiting):
    connect, result = waiting
    strangers = [connect(said) for said in STRANGERS.values()]
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert not result.done()
    connect(introduction("1 2")).close()
    assert result.result(timeout=30).keys() == {1}


def test_a_line_that_comes_byte_by_byte_must_end_in_time():
    near, far = socket.socketpair()
    with near, far, pytest.raises(ConnectionError, match="too slowly"):
        far.sendall(b"x" * 100)
        processes._line(near, 200, -1)


@pytest.mark.parametrize("numbers", ["2 3", "1 3", "0 2", "x y"])
def test_a_process_of_another_run_ends_the_start(waiting, numbers):
    connect, result = waiting
    connect(introduction(numbers))
    with pytest.raises(UserError, match=r"connected to 127.0.0.1:\d+; wants --process 1 and --processes 2"):
        result.result(timeout=30)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_said_before_jax_uses_it(port, offset):
    message = rf"port {port + offset} cannot be used \(Address already in use\); wants an address"
    with socket.create_server(("127.0.0.1", port + offset)), pytest.raises(UserError, match=message):
        processes._listen(Place("127.0.0.1", port, 0, 2))


def test_a_process_without_the_token_gets_no_settings(waiting, port, monkeypatch):
    monkeypatch.setenv(TOKEN, "another token")
    with pytest.raises(ConnectionError, match="process 0 to run with the same value of JAXBP_TOKEN as this process"):
        processes._call(Place("127.0.0.1", port, 1, 2))
    monkeypatch.delenv(TOKEN)
    with pytest.raises(UserError, match="JAXBP_TOKEN is not set; wants the token that process 0"):
        processes._call(Place("127.0.0.1", port, 1, 2))


@pytest.mark.parametrize("token", ["two\nlines", "x" * 10_000, "\udcff not UTF-8"])
def test_any_token_may_be_used(token, port, monkeypatch):
    monkeypatch.setenv(TOKEN, token)
    with ThreadPoolExecutor() as pool:
        listening = pool.submit(processes._listen, Place("127.0.0.1", port, 0, 2))
        calling = pool.submit(processes._call, Place("127.0.0.1", port, 1, 2))
        listening.result(timeout=30)[1].sendall(b"settings\n")
        assert calling.result(timeout=30)[1] == "settings"


@pytest.mark.parametrize(
    "settings",
    ["GET / HTTP/1.1", "[]", '{"experiment": "unknown"}', '{"experiment": "lenet", "x": 1}', "[" * 60_000],
    ids=["no JSON", "a list", "unknown", "unknown setting", "deep"],
)
def test_settings_of_another_program_are_refused(settings):
    with pytest.raises(UserError, match=r"settings that this process cannot read .*; wants the same version"):
        train._follow(settings)


def test_processes_meet_or_name_the_missing_one(monkeypatch, capsys):
    monkeypatch.setattr(processes, "QUIET_SECONDS", 0)
    near, far = socket.socketpair()
    arrived, answered = queue.SimpleQueue(), queue.SimpleQueue()
    with near, far, ThreadPoolExecutor() as pool:
        first = pool.submit(processes._meet_over, {1: near}, arrived, is_first=True)
        other = pool.submit(processes._meet_over, {0: far}, answered, is_first=False)
        assert near.recv(1) == processes.HERE and not first.done() and not other.done()
        arrived.put(1)
        assert far.recv(1) == processes.HERE
        answered.put(0)
        first.result(timeout=30), other.result(timeout=30)
        assert "waiting for process 1 to come to the next epoch, for at most 300 s\n" in capsys.readouterr().err
        monkeypatch.setattr(processes, "START_SECONDS", 0)
        with pytest.raises(TimeoutError, match="process 1 did not come to the next epoch within 0 s"):
            processes._meet_over({1: near, 2: near}, arrived, is_first=True)


def test_ctrl_c_in_another_process_stops_the_run_as_in_process_0(start, tmp_path):
    both = start("toy", "--devices", "2", "--epochs", "100000", "--run-dir", tmp_path / "run")
    while not (both[0].stdout.readline()).startswith("epoch 3/"):
        assert both[0].poll() is None, both[0].stderr.read()
    both[1].send_signal(signal.SIGINT)
    assert [process.wait(timeout=30) for process in both] == [130, 1]
    assert re.fullmatch(r"stopped after epoch \d+; resume with: .*\n", messages(both[0]))
    assert messages(both[1]) == "process 0 stops the run after this epoch\n"


def test_without_a_token_process_0_prints_one(port, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(processes, "START_SECONDS", 0)
    with pytest.raises(TimeoutError, match="process 1 of 2 did not connect to process 0 within 0 s"):
        processes._listen(Place("127.0.0.1", port, 0, 2))
    assert re.fullmatch(r"the other processes need .* JAXBP_TOKEN=[\w-]{20,}\n", capsys.readouterr().err)


def test_a_relay_hands_on_all_but_the_end():
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        host, _, port = _relay(Place("127.0.0.1", coordinator.getsockname()[1], 1, 2)).rpartition(":")
        near = socket.create_connection((host, int(port)))
        far, _ = coordinator.accept()
    with near, far:
        near.sendall(b"question")
        assert far.recv(8, socket.MSG_WAITALL) == b"question"
        far.sendall(b"answer")
        assert near.recv(6, socket.MSG_WAITALL) == b"answer"
        far.close()
        near.settimeout(1)
        with pytest.raises(TimeoutError):
            near.recv(1)


MISTAKES = {
    "one option": ("--process 1", "--coordinator is missing; wants all or none of"),
    "no port": ("--coordinator host --process 0 --processes 2", "--coordinator is host; wants HOST:PORT"),
    "too large": ("--coordinator host:1 --process 2 --processes 2", "--process is 2; wants a number from 0 to 1"),
    "not a host": ("--coordinator a..b:1 --process 1 --processes 2", "a..b:1; wants HOST:PORT, with a valid host"),
    "no number": ("--coordinator host:1 --process x --processes 2", "--process is x; wants a number from 0 to 1"),
    "none": ("--coordinator host:1 --process 0 --processes 0", "--processes is 0; wants a number from 1 to 1024"),
    "too many": (
        "--coordinator host:1 --process 0 --processes 99999999999",
        "99999999999; wants a number from 1 to 1024",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Place.of(["lenet", *arguments.split()])


def test_options_are_found_among_others():
    words = ["lenet", "--epochs", "3", "--process=1", "--coordinator", "[::1]:9000", "--processes", "2"]
    assert Place.of(words) == Place("::1", 9000, 1, 2)
    assert Place.of(words[:3]) is None
