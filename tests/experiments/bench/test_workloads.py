import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import cuda_program

import jaxbp
from experiments.bench.measure import floats, relative_error
from experiments.bench.rows import with_speedups
from experiments.bench.training_workloads import logic_workload
from experiments.bench.workloads import document_ids, frozen_parameters_workload, mixture_of_experts_workload


def test_every_call_of_a_chain_is_computed(workload_at):
    workload = workload_at("conv2d_backward_weights", "conv2")
    function = workload.function("autodiff", "float32")
    sets = tuple(workload.draw(seed, 2, "float32") for seed in range(3))
    count = lambda calls: len(_convolutions(workload.chain(function, calls), sets))  # noqa: E731
    assert count(3) == 3 * count(1) > 0


def _convolutions(program, sets):
    return re.findall(r"convolution\(|__cudnn\$conv", jax.jit(program).lower(sets).compile().as_text())


@pytest.mark.parametrize("name", ["pallas", "xla", "autodiff", "None"])
def test_a_backward_begins_after_the_results_of_its_forward(workload_at, name):
    workload = workload_at("relu", "relu4")
    arguments = jax.eval_shape(lambda: workload.draw(0, 2, "float32"))
    program = jax.make_jaxpr(workload.named(name, "float32"))(*arguments).jaxpr
    (barrier,) = (equation for equation in program.eqns if equation.primitive.name == "optimization_barrier")
    (_, cotangent), (result, *_) = program.invars, program.outvars
    assert [equation for equation in program.eqns if cotangent in equation.invars] == [barrier]
    assert result in barrier.outvars


def results_of(workload, name):
    results = jax.jit(lambda: workload.named(name, "float32")(*workload.draw(0, 4, "float32")))()
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(results)]


@pytest.mark.parametrize("op", ["gate_layer", "gate_layer_backward", "logic"])
def test_a_baseline_computes_the_same_results_as_the_op(workload_at, op):
    workload = logic_workload("logic", 400, ()) if op == "logic" else workload_at(op, "4096->8192")
    (name,) = workload.baselines
    assert relative_error(results_of(workload, name), results_of(workload, "xla")) < 1e-5


def test_only_workloads_of_16_functions_have_a_baseline(workload_at):
    assert workload_at("relu", "relu1").baselines == {}
    assert logic_workload("logic", 400, (), "walsh").baselines == {}


def test_a_baseline_is_timed_with_autodiff(quickly, workload_at, monkeypatch):
    workload = logic_workload("logic", 400, (2,))
    monkeypatch.setattr("experiments.bench.__main__.selected", lambda *_: [workload])
    _, report = quickly("--time-limit", "0", implementations=["xla"])
    assert len(report["missing"]) == 1
    code, report = quickly(implementations=["xla", "autodiff"])
    names = [row["implementation"] for row in report["rows"]]
    assert code == 0 and names == ["xla", "autodiff", "autodiff, 4 coefficients"]


def test_the_speedup_is_over_the_fastest_row_of_autodiff():
    times = {"pallas": 2.0, "autodiff": 12.0, "autodiff, 4 coefficients": 6.0}
    rows = [{"work": "w", "batch": 1, "implementation": name, "microseconds": t} for name, t in times.items()]
    failed = {"work": "w", "batch": 1, "implementation": "autodiff, other", "microseconds": None}
    assert [row["speedup_over_autodiff"] for row in with_speedups([*rows, failed])] == [3.0, 0.5, 1.0, None]
    assert [row["speedup_over_autodiff"] for row in with_speedups([failed, *rows[::-1]])] == [None, 1.0, 0.5, 3.0]


def test_with_frozen_parameters_no_kernel_writes_their_gradients():
    workloads = [frozen_parameters_workload(wanted, blocks=1) for wanted in ("adapters", "all")]
    shapes = jax.eval_shape(lambda: workloads[0].draw(0, 16384, "bfloat16"))
    alone, every = (cuda_program(workload.function("pallas", "bfloat16"), *shapes) for workload in workloads)
    for kernel in ("layer_norm_backward", "linear_backward_weights"):
        assert kernel in every and kernel not in alone


def test_gradients_of_all_parameters_have_more_results_and_equal_gradients_of_the_adapters():
    workloads = [frozen_parameters_workload(wanted, features=128, blocks=2, rank=4) for wanted in ("adapters", "all")]
    functions = [workload.function("xla", "float32") for workload in workloads]
    run = jax.jit(lambda: [function(*workloads[0].draw(0, 8, "float32")) for function in functions])
    alone, (adapters, frozen) = run()
    assert relative_error(floats(alone), floats(adapters)) < 1e-5
    assert len(floats(alone)) == 8 and sum(a.size for a in floats(frozen)) > sum(a.size for a in floats(adapters))


def test_the_mixture_of_experts_is_the_layer_with_its_losses():
    workload = mixture_of_experts_workload(experts=4, features=8, hidden=6, experts_per_token=2)
    (parameters, x), cotangents = jax.jit(lambda: workload.draw(0, 16, "float32"))()
    layer = jaxbp.nnx.MixtureOfExperts(8, 6, 4, 2, rngs=nnx.Rngs(0))
    nnx.update(layer, {name: nnx.Param(a) for name, a in parameters.items()})
    y, routing = nnx.jit(layer)(x)
    results, integers, gradients = jax.jit(workload.named("xla", "float32"))((parameters, x), cotangents)
    for found, wanted in zip(results, (y, routing.load_balancing_loss, routing.z_loss), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert not integers and [a.shape for a in gradients] == [a.shape for a in jax.tree.leaves((parameters, x))]


@pytest.mark.parametrize(
    ("op", "masks"),
    [
        ("dot_product_attention", " window"),
        ("dot_product_attention", " two-sided window"),
        ("document_attention", ""),
        ("document_attention", " causal"),
    ],
)
def test_the_shares_of_attention_are_those_of_its_valid_pairs_and_tiles(workload_at, op, masks):
    workload, length = workload_at(op, f"8192x16x128{masks}"), 8192
    query, key = np.ogrid[:length, :length]
    valid = np.abs(query - key) <= 1023 if "window" in masks else np.ones((length, length), bool)
    valid &= query >= key if masks in (" window", " causal") else True
    ids = document_ids(4, length) if op == "document_attention" else np.zeros((1, length))
    pairs = [valid & (row[:, None] == row) for row in ids]
    tiles = [of.reshape(64, 128, 64, 128).any((1, 3)) for of in pairs]
    assert (workload.share, workload.share_of_tiles) == pytest.approx((np.mean(pairs), np.mean(tiles)), rel=1e-12)


def test_documents_have_random_lengths_that_divide_no_tile():
    ids = document_ids(64, 8192)
    lengths = np.concatenate([np.unique(row, return_counts=True)[1][:-1] for row in ids])
    assert 900 < lengths.mean() < 1100 and lengths.min() < 100 and lengths.max() < 2048
    assert np.mean(lengths % 128 == 0) < 0.05 and (ids[:, 0] == 0).all() and (np.diff(ids) >= 0).all()
    assert (document_ids(1, 8192) == ids[:1]).all()


def test_documents_attend_to_themselves(workload_at):
    workload = workload_at("document_attention", "8192x16x128 causal")
    (q, k, v, ids), [dy] = jax.eval_shape(lambda: workload.draw(0, 2, "bfloat16"))
    assert (ids.shape, ids.dtype, q.shape, dy.shape) == ((2, 8192), jnp.int32, (2, 8192, 16, 128), q.shape)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 6, 1, 4)) for i in range(3))
    ids = jnp.asarray([[0, 0, 0, 2, 2, 3]])
    y = workload.function("xla", "float32")((q, k, v, ids), [q])[0][0]
    expected = [
        jaxbp.dot_product_attention(q[:, a:b], k[:, a:b], v[:, a:b], is_causal=True)
        for a, b in ((0, 3), (3, 5), (5, 6))
    ]
    np.testing.assert_allclose(y, np.concatenate(expected, 1), rtol=1e-5)
