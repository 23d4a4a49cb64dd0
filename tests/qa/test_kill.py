import functools
import os
import sys
from pathlib import Path

import pytest

from experiments import train
from experiments.output.errors import BrokenRun
from experiments.training import checkpoints, pictures
from tests.qa import kill

ROOT = Path(__file__).parents[2]
EPOCHS = 60
PAUSE = 0.05
"""Seconds after each checkpoint, so that no process ends before it is killed."""
SCRIPT = """
import sys
import time
from pathlib import Path
from conftest import ToyConfig
from experiments import train
from experiments.training import checkpoints
write = checkpoints.write

def write_and_pause(*args):
    written = write(*args)
    time.sleep(float(sys.argv[3]))
    return written

checkpoints.write = write_and_pause
path = Path(sys.argv[1])
has_begun = bool(checkpoints.epochs(path / "checkpoints"))
train.train(ToyConfig(run_dir=path, resume=has_begun, epochs=int(sys.argv[2])))
"""


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "experiments"))))
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # JAX would warn other tests of half a compiled program.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    return lambda run_dir, pause=PAUSE: [sys.executable, "-c", SCRIPT, str(run_dir), str(EPOCHS), str(pause)]


def test_an_unknown_experiment_ends_in_one_line(capsys):
    assert kill.main(["lnet"]) == 2
    assert capsys.readouterr().err == "error: unknown experiment lnet; did you mean lenet?\n"


def test_a_run_killed_at_each_kind_of_moment_ends_in_the_same_bits(command, toy_config, tmp_path):
    whole = toy_config(run_dir=tmp_path / "whole", epochs=EPOCHS)
    train.train(whole)
    assert list(kill.kill_again_and_again(command, tmp_path / "killed", 3)) == list(kill.MOMENTS)
    kill.finish(functools.partial(command, pause=0), tmp_path / "killed")
    assert kill.outcome(tmp_path / "killed") == kill.outcome(whole.run_dir)


def test_signals_take_turns_and_a_process_that_ignores_one_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(kill, "SIGNAL_SECONDS", 2)  # a busy machine may run the process late
    monkeypatch.setattr(kill, "MOMENTS", {"after the start": lambda run_dir, _: started.exists})
    started, received = tmp_path / "started", tmp_path / "received"
    script = f"""
import pathlib, signal, time
received = pathlib.Path({str(received)!r}).open("a", buffering=1)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: received.write(f"{{signal.Signals(number).name}}\\n"))
pathlib.Path({str(started)!r}).touch()
time.sleep(60)
"""
    for _ in kill.kill_again_and_again(lambda run_dir: [sys.executable, "-c", script], tmp_path, 3):
        started.unlink()
    assert received.read_text().split() == ["SIGHUP", "SIGTERM"]


def test_a_run_that_ends_otherwise_is_seen(toy_config, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    train.train(toy_config(run_dir=tmp_path / "one", epochs=2))
    train.train(toy_config(run_dir=tmp_path / "other", epochs=2, seed=1))
    assert kill.outcome(tmp_path / "one") != kill.outcome(tmp_path / "other")
    with pytest.raises(BrokenRun, match="ended before it was killed: a word"):
        list(kill.kill_again_and_again(lambda run_dir: [sys.executable, "-c", "print('a word')"], tmp_path, 1))


def test_a_kill_that_damages_the_newest_checkpoint_is_seen(tmp_path):
    script = "import os, sys, time; os.makedirs(os.path.dirname(sys.argv[1]));"
    script += "open(sys.argv[1], 'w').write('half'); time.sleep(60)"
    path = checkpoints.path_of(tmp_path / "checkpoints", 1)
    path.parent.mkdir()
    run = str(path / "run.json")
    with pytest.raises(BrokenRun, match=r"1/run.json (is corrupt|cannot be read)"):
        list(kill.kill_again_and_again(lambda run_dir: [sys.executable, "-c", script, run], tmp_path, 1))
