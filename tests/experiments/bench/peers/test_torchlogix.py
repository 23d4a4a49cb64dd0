import dataclasses
import importlib.util
import sys

import jax
import pytest

from experiments.bench import training_workloads
from experiments.bench.measure import floats, relative_error
from experiments.bench.peers import Task
from jaxbp.nn import LogicConvolution

IS_INSTALLED = all(map(importlib.util.find_spec, ["torch", "torchlogix"])) and sys.version_info >= (3, 12)
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="needs PyTorch and torchlogix: from Python 3.12 on"),
]
CONVOLUTIONS = (LogicConvolution(6, 3, pool=2), LogicConvolution(8, 3, padding=1, pool=2, depth=2))


@pytest.fixture
def peer():
    from experiments.bench.peers import torchlogix

    return torchlogix


@pytest.fixture
def workload_of(monkeypatch):
    sizes = training_workloads.LogicConvSizes((2, 10, 10), CONVOLUTIONS, (80, 40), 2.0)
    monkeypatch.setitem(training_workloads.LOGIC_CONV, "small", sizes)
    return lambda parametrization: training_workloads.logic_conv_workload("small", parametrization)


def task_of(workload, batch=3):
    arguments = jax.jit(workload.draw, static_argnums=(1, 2))(0, batch, "float32")
    options = dict(sets=(arguments,), small=arguments, calls=2, dtype="float32", precision="default")
    return Task(workload.op, workload.options, **options, products=False, seconds=1e-4, choice="best")


def expected(workload, task):
    return floats(jax.jit(workload.function("xla", "float32"))(*task.small))


@pytest.mark.parametrize("name", ["raw", "light"])
def test_its_loss_and_gradients_are_ours(peer, workload_of, name):
    workload = workload_of(peer.PARAMETRIZATIONS[name])
    task = task_of(workload)
    runs = {variant: run for variant, _, run in peer.variants(task)}
    measured = runs[f"{name}, eager"]()
    assert measured["microseconds"] > 0
    assert relative_error(measured["results"], expected(workload, task)) < 1e-5


@pytest.mark.parametrize("name", ["raw", "light"])
def test_compiled_layer_by_layer_it_is_the_same_network(peer, workload_of, name, monkeypatch):
    import torch

    from experiments.bench.peers import torch as pytorch

    compile_layer, backends = torch.nn.Module.compile, []

    def traced(layer, **options):
        backends.append(options.pop("backend", "inductor"))
        compile_layer(layer, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    workload = workload_of(peer.PARAMETRIZATIONS[name])
    task = task_of(workload)
    model, parameters, loss_of = peer._network(name, task, task.small)
    fields = pytorch.compile_layers(model, loss_of)
    assert backends == ["inductor"] * 4 and fields.keys() == {"compile_seconds"}
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    results = peer._joined([a.detach().numpy() for a in (loss, *(p.grad for p in parameters))], "small")
    assert relative_error(results, expected(workload, task)) < 1e-5


def test_layers_are_compiled_until_it_has_taken_too_long(peer, workload_of, monkeypatch):
    import torch

    from experiments.bench.peers import torch as pytorch

    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: compiled.append(layer))
    monkeypatch.setattr(pytorch, "COMPILE_SECONDS", 0.0)
    task = task_of(workload_of("input_wise"))
    model, _, loss_of = peer._network("light", task, task.small)
    fields = pytorch.compile_layers(model, loss_of)
    assert compiled == [model[0]] and fields["note"].startswith("1 of 4 layers were compiled in ")


def test_only_a_convolutional_network_is_also_timed_without_a_compiler(peer, workload_of, monkeypatch):
    monkeypatch.setattr(peer.torch.cuda, "is_available", lambda: True)
    task = dataclasses.replace(task_of(workload_of("input_wise")), sets=(), small=())
    names = [name for name, *_ in peer.variants(task)]
    assert names[2:4] == ["light, CUDA graph", "light, compiled layers, CUDA graph"]
    names = [name for name, *_ in peer.variants(dataclasses.replace(task, op="logic", options={"gates": 40}))]
    assert names == [f"{name}, compile, CUDA graph" for name in peer.PARAMETRIZATIONS]


def test_its_learned_connections_have_our_candidates_and_loss(peer):
    workload = training_workloads.logic_workload("logic-learned", 400, (), candidates=4)
    task = task_of(workload)
    model, _, loss_of = peer._network("raw", task, task.small)
    loss, _ = jax.jit(workload.function("xla", "float32"))(*task.small)
    assert float(loss_of(model)) == pytest.approx(float(loss), rel=1e-5)
