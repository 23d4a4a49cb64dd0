import dataclasses

import jax
import numpy as np
import pytest

from experiments.bench import training_workloads
from experiments.bench.measure import relative_error
from experiments.bench.peers import Task, published_automaton
from jaxbp.catalogue import AutomatonArgument

SMALL = AutomatonArgument(1, 1, (8, 4, 2), (2, 1), periodic=False)


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(training_workloads, "CHECKERBOARD", SMALL)
    monkeypatch.setattr(training_workloads, "TICKS", 1)
    monkeypatch.setitem(training_workloads.AUTOMATON_BATCHES, 4, ((), ()))
    arguments = training_workloads.automaton_workload(4).draw(0, 1, "float32")
    return Task("automaton", {"size": 4}, (arguments,), arguments, 2, "float32", "default", False, 1e-4, "best")


def test_the_published_automaton_is_timed_and_has_the_gradients_of_ours(task):
    ours = jax.jit(training_workloads.automaton_workload(4).function("xla", "float32"))(*task.small)
    names, precisions, runs = zip(*published_automaton.variants(task), strict=True)
    assert names == ("16 gates", "16 gates, deterministic") and set(precisions) == {None}
    measured = runs[1]()
    assert measured["microseconds"] > 0 and measured["temporary_bytes"] > 0
    assert relative_error(measured["results"], [np.asarray(a, np.float64) for a in jax.tree.leaves(ours)]) < 1e-5


def test_there_is_none_for_other_workloads(task):
    assert list(published_automaton.variants(dataclasses.replace(task, op="lenet"))) == []
