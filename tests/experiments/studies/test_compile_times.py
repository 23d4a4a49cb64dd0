import json
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_compiler import missing

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_a_row_has_the_seconds_of_each_phase(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "experiments.studies.compile_times", "relu:relu4", "transpose:images"]
    done = subprocess.run([*command, "--json", path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    (row,) = report["rows"]  # transpose has no kernel
    assert row["work"] == "relu fwd+bwd relu4" and row["kernels"] == 1
    assert all(row[phase] > 0 for phase in ("tracing", "lowering", "mosaic", "xla"))
    assert report["compiled_for"] == "NVIDIA H200"
