import json

import pytest
from helpers import on_the_cpu

from experiments.output.errors import UserError
from experiments.studies import tutorial_steps
from pallas_kernels.core.simulator import simulated

RATES = {
    "copy_bytes_per_second": 2e9,
    "bytes_per_second": {kind: [[0, 2e9]] for kind in ("copy", "read", "write")},
    "operations_per_second": {"default": 1e12, "highest": 1e12},
}


@pytest.fixture
def simulator(monkeypatch):
    monkeypatch.setattr(tutorial_steps, "measured_rates", lambda dtype, seconds: RATES)
    with on_the_cpu():
        yield


def test_each_kernel_of_the_page_is_timed_and_compared_with_the_roofline(tmp_path, simulator, monkeypatch):
    kernels = tutorial_steps.steps()
    assert len(kernels) == 6 and [name[0] for name in kernels] == [*"n12345"]
    monkeypatch.setattr(tutorial_steps, "steps", lambda: kernels)
    path, sizes = tmp_path / "found.json", ["--rows", "8", "--features", "128", "--dtype", "float32"]
    with simulated():
        assert tutorial_steps.main([*sizes, "--seconds", "1e-9", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["shape"] == [8, 128] and [row["step"] for row in report["rows"]] == list(kernels)
    # dy, x, dx, scale, dscale, and inv take these bytes, at 2 bytes per ns.
    for row in report["rows"]:
        assert row["roofline_microseconds"] == pytest.approx((3 * 4096 + 2 * 512 + 32) / 2e3)
        assert row["roofline_share"] == pytest.approx(row["roofline_microseconds"] / row["microseconds"])


def test_the_roofline_does_not_count_what_a_kernel_writes_in_between(simulator):
    arrays = tutorial_steps.draw(8, 128, "bfloat16")
    assert [a.dtype.name for a in arrays] == ["bfloat16"] * 3 + ["float32"]
    (row,) = tutorial_steps.measured({"a": lambda dy, x, scale, inv: (dy * 2, scale)}, arrays, 1e-9)
    assert row["roofline_microseconds"] == pytest.approx((3 * 2048 + 2 * 256 + 32) / 2e3)


def test_it_refuses_to_time_the_interpreter(monkeypatch):
    monkeypatch.setattr(tutorial_steps.jax, "default_backend", lambda: "cpu")
    with pytest.raises(UserError, match="the device is a CPU; wants a GPU"):
        tutorial_steps.main([])
