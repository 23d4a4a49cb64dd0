import functools
import importlib.util
import itertools

import jax
import numpy as np
import pytest

import jaxbp
from experiments.bench.peers import Task
from experiments.bench.workloads import document_ids, document_offsets

IS_INSTALLED = importlib.util.find_spec("torch") is not None
pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs PyTorch and torchlogix: from Python 3.12 on")
LENGTH = 3000


@pytest.fixture
def peer():
    from experiments.bench.peers import torch

    return torch


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", ["window", "documents", "packed"])
def test_masks_are_those_of_ours(peer, monkeypatch, function, is_causal):
    arrays = [jax.random.normal(jax.random.key(i), (2, LENGTH, 2, 8)) for i in range(3)]
    ids = document_ids(2, LENGTH).astype(np.int32)
    q, k, v, tensor_of_ids = map(peer.tensor, (*arrays, jax.numpy.asarray(ids)))
    monkeypatch.setattr(peer.aten, "_cudnn_attention_forward", functools.partial(_sequences, peer), raising=False)
    found = {
        "window": lambda: peer.FORWARDS["dot_product_attention"](q, k, v, local_window_size=99, is_causal=is_causal),
        "documents": lambda: peer.FORWARDS["document_attention"](q, k, v, tensor_of_ids, is_causal=is_causal),
        "packed": lambda: peer._packed_attention(q, k, v, tensor_of_ids, is_causal=is_causal),
    }[function]()
    mask = dict(local_window_size=99) if function == "window" else dict(segment_ids=ids)
    expected = jaxbp.dot_product_attention(*arrays, is_causal=is_causal, **mask, implementation="xla")
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def _sequences(peer, q, k, v, bias, starts, others, longest, longest_other, saves, dropout, is_causal):
    """Compute what cuDNN computes of sequences that are joined."""
    assert bias is None and starts is others and longest == longest_other == max(np.diff(starts)) and dropout == 0
    bounds = itertools.pairwise(starts.tolist())
    parts = [[a[start:end].transpose(0, 1) for a in (q, k, v)] for start, end in bounds]
    results = [peer.F.scaled_dot_product_attention(*part, is_causal=is_causal).transpose(0, 1) for part in parts]
    return peer.torch.cat(results), None


def test_of_lenet_the_modes_that_measured_fastest_are_timed(peer, monkeypatch):
    monkeypatch.setattr(peer.torch.cuda, "is_available", lambda: True)
    task = Task("lenet", {}, (), (), 0, "float32", "default", True, 1e-3, "best")
    names = [name for name, *_ in peer.variants(task)]
    assert names == ["compile, CUDA graph, TF32", "compile, channels last, CUDA graph, TF32"]


def test_offsets_are_the_bounds_of_the_documents():
    ids, offsets = document_ids(2, LENGTH), document_offsets(2, LENGTH)
    assert offsets[0] == 0 and LENGTH in offsets and offsets[-1] == 2 * LENGTH
    rows = np.concatenate([ids[0], ids[0].max() + 1 + ids[1]])
    assert (np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) == rows).all()
