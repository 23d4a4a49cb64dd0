"""Steps of training compiled for eight GPUs that are not there: what they communicate, and what runs meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ahead_of_time import missing

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "docs" / "lab" / "many_devices.py"


@pytest.mark.once
@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_devices_share_the_kernels_and_sum_the_gradients_once(tmp_path):
    works, found = ["lenet", "logic", "logic-large"], tmp_path / "found.json"
    command = [sys.executable, STUDY, "compile", "--works", *works, "--json", found]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["overlapping"] for row in rows] == [False, True] * 3
    for row in rows:
        # No array of examples goes from device to device: that would be an all-gather.
        assert row["collectives"].keys() == {"all-reduce"} and row["kernels"] >= 6
        sums = row["collectives"]["all-reduce"]
        assert sums > 1 and row["kernels_meanwhile"] > 0 if row["overlapping"] else sums == 1
    # LeNet's parameters, some of them in rows that are filled up; four coefficients a gate; and the loss.
    assert 44_426 < rows[0]["bytes"] // 4 < 1.2 * 44_426
    assert [row["bytes"] for row in rows[2::2]] == [4 * (4 * 6 * gates + 1) for gates in (8000, 64000)]
