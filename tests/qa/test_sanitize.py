import json
import sys
from types import SimpleNamespace

import pytest

from tests.qa import sanitize

FAKE = """#!{python}
import os, subprocess, sys, time
if sys.argv[1:] == ["--version"]:
    sys.exit(print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.4.0.0 (build 1) (public-release)"))
tool, op = sys.argv[2], sys.argv[sys.argv.index("tests.qa.sanitize") + 1]
assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform" and "--child" in sys.argv
if op == "tanh" or op == "log" and not os.path.exists(sys.argv[0] + ".ran"):
    open(sys.argv[0] + ".ran", "w")
    os.kill(os.getpid(), 11)
if op == "sin":
    time.sleep(60)
if op == "exp":
    print("========= Invalid __global__ write of size 4 bytes")
    print("=========     at exp_mosaic_gpu_kernel+0x10 in launch.py:1")
    print("=========     by thread (0,0,0) in block (0,0,0)")
print("all kernels ran")
print("========= ERROR SUMMARY: %d errors" % (op == "exp"), flush=True)
if op == "cos":
    os.kill(os.getpid(), 11)
sys.exit(99 if op == "exp" else 0)
"""
INITCHECK = """========= COMPUTE-SANITIZER
{op}, float32: ran
========= Uninitialized __global__ memory read of size 4 bytes
=========     at {kernel}+0x150
=========     by thread (0,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x1] in libcuda.so
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x160 in {kernel}(float *)
all kernels ran
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= Error: Race reported between Write access at {kernel}+0x3b0 in pairing.py:363
=========     and Write access at {kernel}+{other} in pairing.py:363 [62 hazards]
all kernels ran
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(path))


def test_findings_crashes_and_long_runs_are_told_apart(fake, tmp_path):
    path = tmp_path / "rows.json"
    options = ["--tools", "memcheck", "--attempts", "1", "--processes", "3", "--json", str(path)]
    assert sanitize.main(["relu", "exp", "tanh", "cos", *options]) == 1
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert report["versions"]["compute-sanitizer"] == "2026.4.0.0"
    assert [(row["op"], row["outcome"], row["code"]) for row in rows] == [
        ("relu", "clean", 0),
        ("exp", "found", 99),
        ("tanh", "failed", -11),
        ("cos", "crashed at exit", -11),
    ]
    assert sanitize.main(["sin", "--limit", "1", *options]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["outcome"], row["code"]) == ("timed out", None)
    message, kernel = "Invalid __global__ write of size 4 bytes", "exp_mosaic_gpu_kernel"
    assert rows[1]["findings"] == [dict(message=message, kernel=kernel, count=1, explained=None)]
    assert sanitize.main(["relu", "cos", "--tools", "memcheck"]) == 0


def test_what_fails_is_run_again(fake, tmp_path):
    path = tmp_path / "rows.json"
    assert sanitize.main(["log", "tanh", "--tools", "memcheck", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(row["outcome"], row["attempts"]) for row in rows] == [("clean", 2), ("failed", 2)]


def test_the_wheels_tool_goes_before_that_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: "/toolkit/compute-sanitizer")
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: None)
    assert sanitize.find_sanitizer() == "/toolkit/compute-sanitizer"
    (folder := tmp_path / "cu13" / "bin").mkdir(parents=True)
    (folder / "compute-sanitizer").touch()
    wheel = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: wheel)
    assert sanitize.find_sanitizer() == str(folder / "compute-sanitizer")


@pytest.mark.parametrize(
    ("printed", "tool", "op", "name", "explained"),
    [
        (INITCHECK, "initcheck", "linear", "nvjet_hsh_64x8", True),
        (INITCHECK, "initcheck", "matmul", "void cutlass::Kernel2<a, b>", True),
        (INITCHECK, "initcheck", "matmul", "loop_fusion", True),
        (INITCHECK, "initcheck", "matmul", "matmul_mosaic_gpu_kernel", False),
        (INITCHECK, "initcheck", "relu", "loop_fusion", False),
        (INITCHECK, "initcheck", "conv2d", "nvjet_hsh_64x8", False),
        (INITCHECK, "memcheck", "linear", "nvjet_hsh_64x8", False),
        (RACE, "racecheck", "layer_norm", "layer_norm_mosaic_gpu_kernel", True),
        (RACE.replace("{other}", "0x3c0"), "racecheck", "layer_norm", "layer_norm_mosaic_gpu_kernel", False),
        (RACE.replace("and Write", "and Read"), "racecheck", "layer_norm", "layer_norm_mosaic_gpu_kernel", False),
        (RACE, "racecheck", "relu", "relu_mosaic_gpu_kernel", False),
    ],
)
def test_a_finding_is_explained_by_its_tool_op_kernel_and_text(printed, tool, op, name, explained):
    text = printed.format(op=op, kernel=name, other="0x3b0")
    (finding,) = findings = sanitize.findings_in(text, tool, op)
    assert finding["kernel"] == name and (finding["explained"] is not None) == explained
    assert finding["count"] == (2 if printed is INITCHECK else 1)
    assert sanitize.outcome_of(text, sanitize.FOUND, findings) == ("explained" if explained else "found")
    assert sanitize.outcome_of(text, None, findings) == ("timed out" if explained else "found")
    assert sanitize.outcome_of(text, -11, findings) == ("crashed at exit" if explained else "found")


def test_what_the_tool_counts_and_does_not_print_is_not_explained():
    text = (
        INITCHECK.format(op="linear", kernel="nvjet") + "========= ERROR SUMMARY: 50 errors were not printed. Use x\n"
    )
    assert {f["message"]: f["count"] for f in sanitize.findings_in(text, "initcheck", "linear")}["not printed"] == 50
    assert sanitize.outcome_of("all kernels ran\n========= ERROR SUMMARY: 3 errors\n", 99, []) == "found"


def test_one_process_runs_the_kernels_of_one_op(capsys):
    assert sanitize.main(["relu_backward", "--child"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == sanitize.DONE


def test_without_the_tool_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: None)
    assert sanitize.main(["relu"]) == 2
    assert "pip install nvidia-cuda-sanitizer-api" in capsys.readouterr().err
