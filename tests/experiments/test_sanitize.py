"""Processes under compute-sanitizer, of which a script with its messages takes the place."""

import json
import sys

import pytest

from experiments import sanitize

FAKE = """#!{python}
import os, subprocess, sys, time
tool, op = sys.argv[2], sys.argv[sys.argv.index("experiments.sanitize") + 1]
assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform" and "--child" in sys.argv
if op == "tanh":
    os.kill(os.getpid(), 11)
if op == "sin":
    time.sleep(60)
print("all kernels ran")
print("========= ERROR SUMMARY: %d errors" % (3 if op == "exp" else 0))
sys.exit(99 if op == "exp" else 0)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(path))


def test_findings_crashes_and_long_runs_are_told_apart(fake, tmp_path):
    path = tmp_path / "rows.json"
    code = sanitize.main(["relu", "exp", "tanh", "sin", "--tools", "memcheck", "--limit", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    found = {row["op"]: (row["outcome"], row["findings"], row["code"]) for row in rows}
    assert found == {
        "relu": ("clean", 0, 0), "exp": ("found", 3, 99), "tanh": ("failed", 0, -11), "sin": ("timed out", 0, None)
    }  # fmt: skip
    assert code == 1


def test_one_process_runs_the_kernels_of_one_op(capsys):
    assert sanitize.main(["relu_backward", "--child"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == sanitize.DONE


def test_without_the_tool_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: None)
    assert sanitize.main(["relu"]) == 2
    assert "pip install nvidia-cuda-sanitizer-api" in capsys.readouterr().err
