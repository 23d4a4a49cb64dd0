import json
import os
import re
import sys
from pathlib import Path

import pytest

from experiments.output.errors import UserError
from experiments.studies import profiles

RESULTS = Path(__file__).parents[3] / "docs" / "results"
FAKE = """#!{python}
import sys
assert sys.argv[-3:] == ["experiments.studies.profiles", "--run", "{workload}"]
columns = ["ID", "Kernel Name", "gpu__time_duration.sum", "launch__registers_per_thread"]
stalls = ["barrier", "long_scoreboard"]
columns += ["smsp__average_warps_issue_stalled_" + name + "_per_issue_active.ratio" for name in stalls]
lines = [columns, ["", "", "ns", "", "", ""], ["0", "relu_kernel(float)", "1,500.0", "32", "0.5", "2.5"]]
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as log:
    print("==PROF== Connected", *(",".join('"' + cell + '"' for cell in line) for line in lines), sep="\\n", file=log)
"""


def test_each_kernel_has_a_row(tmp_path, monkeypatch):
    workload, path = "relu_backward:relu1@2/float32/xla", tmp_path / "profiles.json"
    script = tmp_path / "ncu"
    script.write_text(FAKE.format(python=sys.executable, workload=workload))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert profiles.main([workload, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["work"], row["dtype"], row["implementation"]) == ("relu_backward relu1, batch 2", "float32", "xla")
    assert (row["kernel"], row["microseconds"], row["registers"], row["dram"]) == ("relu_kernel", 1.5, 32, None)
    assert (row["waits_for"], row["waited_cycles"]) == ("long_scoreboard", 2.5)


def test_ncu_sees_the_kernels_of_each_recorded_profile():
    recorded = [json.loads(path.read_text())["rows"] for path in RESULTS.glob("profiles*.json")]
    kernels = {row["kernel"] for rows in recorded for row in rows if "fusion" not in row["kernel"]}
    assert len(kernels) > 30 and {kernel for kernel in kernels if not re.search(profiles.KERNELS, kernel)} == set()


@pytest.mark.parametrize("text", profiles.DEFAULT)
def test_the_default_workloads_are_in_the_bench(text):
    asked = profiles.asked_for(text)
    assert asked.batch in [batch for batches in asked.workload.batches for batch in batches]


def test_a_workload_has_one_place_and_defaults():
    asked = profiles.asked_for("lenet@8192/bfloat16")
    assert (asked.batch, *asked[2:]) == (8192, "bfloat16", "pallas", "default")
    with pytest.raises(UserError, match="wants the name of one, such as"):
        profiles.asked_for("relu_backward")
