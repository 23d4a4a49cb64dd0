import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close

from experiments.bench.selection import quick, selected
from jaxbp.catalogue import CATALOGUE


def test_a_forward_stands_for_its_backwards_and_for_no_other_op():
    ops = {workload.op for workload in selected(["conv2d", "relu_backward"])}
    backwards = {f"conv2d_backward_{of}" for of in ("input", "weights", "bias")}
    assert ops == {"conv2d", "relu_backward"} | backwards


def test_a_place_may_be_named_and_ops_are_all_but_the_training_steps():
    assert [(workload.op, workload.place) for workload in selected(["automaton:32x32", "relu:relu1"])] == [
        ("relu", "relu1"),
        ("automaton", "32x32"),
    ]
    everything, ops = selected(["all"]), selected(["ops"])
    assert {workload.op for workload in everything} - {workload.op for workload in ops} == {
        "lenet",
        "gpt",
        "logic",
        "logic-large",
        "logic-learned",
        "logic-conv",
        "automaton",
    }
    with pytest.raises(ValueError, match="unknown place 32x32 of relu; wants one of "):
        selected(["relu:32x32"])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_quick_run_has_one_workload_of_every_family(on_gpu):
    chosen = quick(selected(["all"]), on_gpu)
    module = {entry.name: entry.function.__module__ for entry in CATALOGUE}
    families = [module.get(workload.op, workload.op) for workload in chosen]
    assert len(families) == len(set(families)) and set(families) >= {*module.values(), "lenet", "gpt", "logic"}
    assert families[-1] == "logic" and "automaton" not in families
    assert all(batch in workload.batches[0 if on_gpu else 1] for workload, batch in chosen.items())
    assert [workload.op for workload in quick(selected(["conv2d_backward_bias"]), on_gpu)] == ["conv2d_backward_bias"]


def test_a_forward_alone_has_the_results_of_the_op_and_no_gradients():
    (alone,), (both,) = (selected(["layer_norm:65536x1024"], forward=forward) for forward in (True, False))
    assert (alone.title, alone.op) == ("layer_norm fwd 65536x1024", both.op)
    arrays, cotangents = both.draw(0, 3, "float32")
    results, *_ = both.function("xla", "float32")(arrays, cotangents)
    assert_close([alone.function("xla", "float32")(*alone.draw(0, 3, "float32"))], results, "float32")
    assert {workload.op for workload in selected(["lenet", "relu", "relu_backward"], forward=True)} == {"relu"}


def test_with_the_batch_last_it_is_the_same_workload():
    for op in ("conv2d_backward_weights", "relu"):
        first, last = (selected([op], batch_last)[0] for batch_last in (False, True))
        assert [a.shape[-1] for a in jax.tree.leaves(last.draw(0, 3, "float32"))] == [3, 3]
        results, turned = (
            jax.tree.leaves(workload.function("xla", "float32")(*workload.draw(0, 3, "float32")))
            for workload in (first, last)
        )
        back = [a if a.shape == b.shape else jnp.moveaxis(b, -1, 0) for a, b in zip(results, turned, strict=True)]
        assert_close(back, results, "float32")
    assert [a.shape for a in turned] != [a.shape for a in results]
    assert {workload.op for workload in selected(["lenet", "relu_backward"], batch_last=True)} == {"relu_backward"}
