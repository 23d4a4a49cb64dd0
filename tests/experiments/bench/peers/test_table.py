import functools
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxbp
from experiments.bench import __main__ as bench
from experiments.bench import peers
from experiments.bench.peers import published_automaton, table
from experiments.bench.rows import Case, Settings
from experiments.bench.workloads import document_ids, forward_and_backward


def test_without_their_libraries_there_are_no_peers_but_the_reasons(monkeypatch):
    libraries = {"PyTorch": "torch", "causal-conv1d": "causal_conv1d", "Liger-Kernel": "liger_kernel"}
    libraries |= {"Liger-Kernel (CuTe)": "liger_kernel", "QuACK": "quack", "cuDNN": "torch"}
    libraries |= {
        "tokamax": "tokamax",
        "fa4-jax": "fa4_jax",
        "torchlogix": "torch",
    }  # cuDNN's and torchlogix's modules import torch first
    for library in libraries.values():
        monkeypatch.setitem(sys.modules, library, None)
    for module in ("torch", "torchlogix"):
        monkeypatch.delitem(sys.modules, f"experiments.bench.peers.{module}", raising=False)
    of_jax = ["JAX's cuDNN", "JAX's cuDNN, deterministic"]
    found, errors = table.installed()
    assert list(found) == [*of_jax, "published automaton"] and errors.keys() == libraries.keys()
    assert all(library in errors[peer] for peer, library in libraries.items())


def test_a_run_without_the_peers_asked_for_goes_on(quickly, monkeypatch):
    monkeypatch.setattr(table, "PEERS", {"Peer": functools.partial(table.module, "no_such_module")})
    code, report = quickly("--peers")
    assert code == 0 and all(row["peer"] is None for row in report["rows"])
    assert report["left_out"] == {"Peer": "No module named 'experiments.bench.peers.no_such_module'"}


def test_only_named_peers_are_loaded(quickly, monkeypatch, capsys):
    names = ["published automaton", "JAX's cuDNN"]
    monkeypatch.setattr(table, "PEERS", {name: functools.partial(table.module, name) for name in names})
    monkeypatch.setattr(bench, "PEERS", table.PEERS)
    _, report = quickly("--peers", "JAX's cuDNN")
    assert list(report["left_out"]) == ["JAX's cuDNN"]
    assert quickly("--peers", "no peer")[0] == 2 and "unknown peer no peer" in capsys.readouterr().err


def test_of_a_peer_with_several_formulations_the_one_that_measured_fastest_is_timed():
    results = Path(__file__).parents[4] / "docs" / "results"
    times = {}
    for path in results.glob("*.json"):
        for row in json.loads(path.read_text()).get("rows", []):
            if row.get("peer") in peers.FASTEST and not row["failed"]:
                variant = row["implementation"].removeprefix(f"{row['peer']} ")
                key = row["peer"], path.stem, row["work"], row["batch"]
                times.setdefault(key, {})[variant] = row["microseconds"]
    several = {key: of for key, of in times.items() if len({variant.partition(",")[0] for variant in of}) > 1}
    assert several and {peer for peer, *_ in several} <= peers.FASTEST.keys()
    for (peer, *_), of in several.items():
        kept = [variant for variant in of if peers.is_asked_for(peer, variant, "best")]
        assert min(of, key=of.get) in kept
        assert len({variant.partition(",")[0] for variant in kept}) == 1
        assert all(peers.is_asked_for(peer, variant, "all") for variant in of)


@pytest.mark.parametrize(("choice", "rows"), [("best", 1), ("all", 2)])
def test_only_the_variants_asked_for_are_rows(workload_at, choice, rows):
    settings = Settings(
        [], {"published automaton": published_automaton}, choice, "float32", "default", 1e-3, False, {"platform": "cpu"}
    )
    assert len(Case(workload_at("automaton", "8x8"), 1, settings).row_names()) == rows


def _flash_attn(q, k, v, *, causal, window_size):
    """Return what fa4-jax says that it returns. The window is the numbers of keys before and after the query."""
    options = dict(is_causal=causal, local_window_size=window_size, implementation="xla")
    return jaxbp.dot_product_attention(q, k, v, **options)


def _flash_attn_varlen(q, k, v, starts, starts_of_keys, *, causal):
    assert starts is starts_of_keys
    ids = jax.numpy.searchsorted(starts, jax.numpy.arange(len(q)), side="right")[None]
    options = dict(is_causal=causal, segment_ids=ids, implementation="xla")
    return jaxbp.dot_product_attention(*(a[None] for a in (q, k, v)), **options)[0]


@pytest.mark.parametrize(("masks", "is_causal"), [("none", True), ("window", False), ("documents", True)])
def test_fa4_gets_the_masks_of_ours(monkeypatch, masks, is_causal):
    library = types.SimpleNamespace(flash_attn=_flash_attn, flash_attn_varlen=_flash_attn_varlen)
    monkeypatch.setitem(sys.modules, "fa4_jax", library)
    monkeypatch.setattr(table.metadata, "version", lambda package: "0")
    monkeypatch.setattr(table, "time_compiled", lambda *_, **__: {})
    length = 1800
    q, *kv = (jax.random.normal(jax.random.key(i), (2, length, heads, 8)) for i, heads in enumerate((2, 1, 1)))
    ids = jax.numpy.asarray(document_ids(2, length), "int32")
    options = {"is_causal": is_causal} | ({"local_window_size": 99} if masks == "window" else {})
    op, arrays = ("document_attention", (q, *kv, ids)) if masks == "documents" else ("dot_product_attention", (q, *kv))
    arguments = arrays, [jax.numpy.cos(q)]
    task = peers.Task(op, options, [arguments], arguments, 1, "float32", "highest", True, 1e-3, "best")
    ((_, _, run),) = table.PEERS["fa4-jax"]().variants(task)
    segments = {"segment_ids": ids} if masks == "documents" else {}
    ours = functools.partial(jaxbp.dot_product_attention, **options, **segments, implementation="xla")
    expected = forward_and_backward(ours)(arrays[:3], arguments[1])
    for found, wanted in zip(run()["results"], jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
