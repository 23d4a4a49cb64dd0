import json

import jax
from helpers import cuda_program, on_the_cpu

from experiments.studies import frozen_parameters
from experiments.studies.frozen_parameters import draw, gradients


def test_each_program_is_timed_with_its_memory(tmp_path):
    path = tmp_path / "found.json"
    with on_the_cpu():
        sizes = ["--rows", "8", "--blocks", "1", "--implementations", "xla"]
        assert frozen_parameters.main(["--quick", *sizes, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["shape"] == [8, 128] and report["blocks"] == 1
    adapters, every = report["rows"]
    assert [adapters["wanted"], every["wanted"]] == ["adapters", "all"]
    assert all(row["microseconds"] > 0 and row["temporary_bytes"] > 0 for row in report["rows"])
    assert every["result_bytes"] > adapters["result_bytes"] >= 2 * 2 * 4 * (128 + 512)


def test_with_frozen_parameters_no_kernel_writes_their_gradients():
    shapes = jax.eval_shape(lambda: draw(16384, 2048, 1, 16, "bfloat16"))
    alone, every = (cuda_program(gradients("pallas", wanted), *shapes) for wanted in ("adapters", "all"))
    for kernel in ("layer_norm_backward", "linear_backward_weights"):
        assert kernel in every and kernel not in alone
