import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cuda_compiler import missing
from jax.sharding import NamedSharding, PartitionSpec

from experiments.studies import many_devices

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_devices_share_the_kernels_and_sum_the_gradients_once(tmp_path):
    workloads, found = ["lenet", "logic", "logic-large"], tmp_path / "found.json"
    command = [sys.executable, "-m", "experiments.studies.many_devices", "compile"]
    command += ["--workloads", *workloads, "--json", found]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["overlapping"] for row in rows] == [False, True] * 3
    for row in rows:
        assert row["collectives"].keys() == {"all-reduce"} and row["kernels"] >= 6
        sums = row["collectives"]["all-reduce"]
        assert sums > 1 and row["kernels_meanwhile"] > 0 if row["overlapping"] else sums == 1
    # LeNet has 44,426 parameters. XLA sums some gradients in padded rows.
    assert 44_426 < rows[0]["bytes"] // 4 < 1.2 * 44_426
    # A logic network sums its loss, and four gradients per gate in 6 layers.
    assert [row["bytes"] for row in rows[2::2]] == [4 * (4 * 6 * gates + 1) for gates in (8000, 64000)]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
def test_a_collective_in_a_loop_counts_once_per_iteration():
    mesh = many_devices.mesh_of(jax.devices()[:8])
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec("examples")))

    def sums(count):
        # Each iteration needs the sum of the examples.
        step = lambda _, x: x + jnp.sum(x, axis=0)  # noqa: E731
        return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jax.lax.fori_loop(0, count(x), step, x), x)

    found, unknown = (
        jax.jit(sums(count)).lower(x).compile().as_text()
        for count in (lambda x: 3, lambda x: 3 + (x[0, 0] > 0).astype(jnp.int32))
    )
    counted = {"collectives": {"all-reduce": 6}, "bytes": 6 * 4 * 4, "kernels": 0, "kernels_meanwhile": 0}
    assert many_devices.communicated(found) == counted
    with pytest.raises(ValueError, match=r"^%?all-reduce.* runs an unknown number of times; wants loops of known"):
        many_devices.communicated(unknown)


def test_a_step_is_timed_in_each_place_while_nothing_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(many_devices, "EXAMPLES", {"lenet": (4,)})
    monkeypatch.setattr(many_devices, "OVERLAPPING", {})
    monkeypatch.setattr(many_devices, "SECONDS", 1e-3)
    running, time_compiled, compile_ = [], many_devices.time_compiled, jax.stages.Lowered.compile

    def compiled(lowered):
        running.append(lowered)
        program = compile_(lowered)
        running.remove(lowered)
        return program

    def timed(*args):
        assert not running
        return time_compiled(*args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    monkeypatch.setattr(many_devices, "time_compiled", timed)
    path = tmp_path / "found.json"
    assert many_devices.main(["measure", "--workloads", "lenet", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert report["devices"] == len(jax.devices()) and row["examples"] == 4
    assert all(row[place] > 0 for place in ("alone", "mesh_of_one", "mesh", "mesh_overlapping"))
