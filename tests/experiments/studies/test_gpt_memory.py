import contextlib
import functools
import importlib.util
import json
import math
import os
import sys

import jax
import pytest

from experiments.bench.gpt_workload import gpt_workload
from experiments.output.errors import UserError
from experiments.studies import gpt_memory


def test_the_largest_batch_and_length_of_each_implementation_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_memory, "peak_bytes", lambda place, name, dtype, batch, length: 2**20 * batch * length)
    path = tmp_path / "found.json"
    assert gpt_memory.main(["--place", "tiny", "--gib", "0.25", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    found = [(row["implementation"], row["largest"], row["batch"], row["length"]) for row in report["rows"]]
    assert found == [(n, *sizes) for n in ("None", gpt_memory.FLAX) for sizes in (("batch", 8, 32), ("length", 1, 256))]
    assert {row["peak_bytes"] for row in report["rows"]} == {report["limit_bytes"]} == {2**28}


def test_the_peak_contains_the_state_of_the_optimizer_and_grows_with_both_sizes():
    peak = functools.partial(gpt_memory.peak_bytes, "tiny", "xla", "float32")
    state = jax.eval_shape(lambda: gpt_workload("tiny").draw(0, 1, "float32"))[0]
    parameters = sum(a.size * 4 for a in jax.tree.leaves(state))
    assert 3 * parameters < peak(1, 32) < peak(4, 32) < peak(4, 64)


def test_the_largest_size_is_found_also_if_memory_is_not_linear():
    tried = []

    def peak(size):
        tried.append(size)
        return max(size**2, 30)

    assert gpt_memory.largest(peak, 4, 2, 400) == (20, 400) and len(tried) < 8
    assert gpt_memory.largest(peak, 4, 2, 20) == (0, 0)
    assert gpt_memory.largest(lambda size: 7 * size, 4, 1, 1000) == (142, 994)
    assert gpt_memory.largest(lambda size: size if size < 20 else math.inf, 4, 1, 1000) == (19, 19)


def test_an_absent_h200_has_the_memory_that_jax_would_use(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_memory, "h200", contextlib.nullcontext)
    monkeypatch.setattr(gpt_memory, "peak_bytes", lambda place, name, dtype, batch, length: 2**30 * batch * length / 32)
    path = tmp_path / "found.json"
    assert gpt_memory.main(["--place", "tiny", "--ahead-of-time", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["compiled_for"] == "NVIDIA H200" and report["limit_bytes"] == gpt_memory.H200_BYTES
    assert [row["batch"] for row in report["rows"] if row["largest"] == "batch"] == [104, 104]


def test_for_an_absent_gpu_jax_does_not_ask_for_cudnn(monkeypatch):
    monkeypatch.setattr(gpt_memory, "gpus", lambda device: contextlib.nullcontext())
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with gpt_memory.h200():
        assert "cudnn" in jax.jit(attention).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()


def test_multiples_of_a_given_step_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_memory, "peak_bytes", lambda place, name, dtype, batch, length: 2**20 * batch * length)
    path = tmp_path / "found.json"
    args = ["--place", "tiny", "--gib", "0.25", "--step", "3", "--implementations", "None", "--json", str(path)]
    assert gpt_memory.main(args) == 0
    assert [(row["batch"], row["length"]) for row in json.loads(path.read_text())["rows"]] == [(6, 32), (1, 192)]


IS_INSTALLED = all(map(importlib.util.find_spec, ["torch", "torchlogix"])) and sys.version_info >= (3, 12)


@pytest.mark.skipif(not IS_INSTALLED, reason="needs PyTorch and torchlogix: from Python 3.12 on")
def test_the_peak_of_pytorch_is_that_of_two_steps_or_infinite_if_they_do_not_fit(monkeypatch):
    import torch

    losses, memory = [], []
    monkeypatch.setattr(
        torch, "compile", lambda loss_of, **_: lambda model: losses.append(loss_of(model)) or losses[-1]
    )
    for name in ("init", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory.pop())
    memory.append(7)
    assert gpt_memory.peak_bytes("tiny", gpt_memory.TORCH, "float32", 2, 64) == 7
    first, second = (loss.item() for loss in losses)
    assert math.isfinite(first) and second < first  # the text is one token
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda _: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    assert gpt_memory.peak_bytes("tiny", gpt_memory.TORCH, "float32", 2, 64) == math.inf


def test_jax_leaves_memory_to_pytorch(monkeypatch):
    monkeypatch.setattr(gpt_memory, "peak_bytes", lambda *_, **__: math.inf)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    assert gpt_memory.main(["--place", "tiny", "--gib", "1", "--implementations", "PyTorch"]) == 0
    assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE") == "false"


def test_a_device_that_does_not_state_its_memory_is_refused():
    with pytest.raises(UserError, match="does not state its memory; wants --gib"):
        gpt_memory.main(["--place", "tiny"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gib", "0"], "--gib is 0; wants a finite number above 0"),
        (["--gib", "nan"], "--gib is nan; wants a finite number above 0"),
        (["--gib", "1", "--implementations", "cudnn"], "invalid choice: 'cudnn'"),
        (["--step", "0"], "--step is 0; wants at least 1"),
        (
            ["--ahead-of-time", "--implementations", "None", "PyTorch"],
            "--ahead-of-time does not compile PyTorch's step",
        ),
    ],
)
def test_invalid_arguments_are_refused(args, message, capsys):
    with pytest.raises(SystemExit):
        gpt_memory.main(["--place", "tiny", *args])
    assert message in capsys.readouterr().err
