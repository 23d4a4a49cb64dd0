import re

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, cuda_program

from experiments.bench.works import logic_work, quick, selected
from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.launch import CHANGES_IN_PLACE


def test_a_forward_stands_for_its_backwards_and_for_no_other_op():
    ops = {work.op for work in selected(["conv2d", "relu_backward"])}
    backwards = {f"conv2d_backward_{of}" for of in ("input", "weights", "bias")}
    assert ops == {"conv2d", "relu_backward"} | backwards


def test_a_place_may_be_named_and_ops_are_all_but_the_training_steps():
    assert [(work.op, work.place) for work in selected(["automaton:32x32", "relu:relu1"])] == [
        ("relu", "relu1"),
        ("automaton", "32x32"),
    ]
    everything, ops = selected(["all"]), selected(["ops"])
    assert {work.op for work in everything} - {work.op for work in ops} == {
        "lenet",
        "mixer",
        "logic",
        "logic-large",
        "logic-conv",
        "automaton",
    }
    with pytest.raises(ValueError, match="unknown place 32x32 of relu: wanted one of "):
        selected(["relu:32x32"])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_quick_run_has_one_work_of_every_family(on_gpu):
    chosen = quick(selected(["all"]), on_gpu)
    module = {entry.name: entry.function.__module__ for entry in CATALOGUE}
    families = [module.get(work.op, work.op) for work in chosen]
    assert len(families) == len(set(families)) and set(families) >= {*module.values(), "lenet", "mixer", "logic"}
    assert families[-1] == "automaton" and "logic-large" not in families
    assert all(batch in work.batches[0 if on_gpu else 1] for work, batch in chosen.items())
    assert [work.op for work in quick(selected(["conv2d_backward_bias"]), on_gpu)] == ["conv2d_backward_bias"]


def test_with_the_batch_last_it_is_the_same_work():
    for op in ("conv2d_backward_weights", "relu"):
        first, last = (selected([op], batch_last)[0] for batch_last in (False, True))
        assert [a.shape[-1] for a in jax.tree.leaves(last.draw(0, 3, "float32"))] == [3, 3]
        results, turned = (
            jax.tree.leaves(work.function("xla", "float32")(*work.draw(0, 3, "float32"))) for work in (first, last)
        )
        back = [a if a.shape == b.shape else jnp.moveaxis(b, -1, 0) for a, b in zip(results, turned, strict=True)]
        assert_close(back, results, "float32")
    assert [a.shape for a in turned] != [a.shape for a in results]
    assert {work.op for work in selected(["lenet", "relu_backward"], batch_last=True)} == {"relu_backward"}


def test_every_call_of_a_chain_is_computed(work_at):
    work = work_at("conv2d_backward_weights", "conv2")
    function = work.function("autodiff", "float32")
    sets = tuple(work.draw(seed, 2, "float32") for seed in range(3))
    count = lambda calls: len(_convolutions(work.chain(function, calls), sets))  # noqa: E731
    assert count(3) == 3 * count(1) > 0


def _convolutions(program, sets):
    return re.findall(r"convolution\(|__cudnn\$conv", jax.jit(program).lower(sets).compile().as_text())


@pytest.mark.parametrize(("parametrization", "parameters"), [("softmax", 16), ("input_wise", 4), ("walsh", 4)])
def test_a_logic_network_has_the_parameters_of_its_parametrization(parametrization, parameters):
    work = logic_work("logic", 1000, (), parametrization)
    logits, bits, _ = work.draw(0, 2, "float32")
    assert {a.shape for a in jax.tree.leaves(logits)} == {(1000, parameters)}
    assert (bits == logic_work("logic", 1000, ()).draw(0, 2, "float32")[1]).all()
    loss, gradients = work.function("autodiff", "float32")(*work.draw(0, 2, "float32"))
    assert jnp.isfinite(loss) and {a.shape for a in jax.tree.leaves(gradients)} == {(1000, parameters)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_in_half_precision_train_parameters_of_float32(work_at, dtype):
    work = work_at("mixer")
    (state, *data), program = work.draw(0, 4, dtype), work.chain(work.function("xla", dtype), 3)
    (trained, _), losses = jax.jit(program)(((state, *data),))
    parameters = state.parameters if dtype == "float16" else state
    assert {a.dtype.name for a in jax.tree.leaves(parameters)} == {"float32"}
    assert jnp.isfinite(losses).all() and losses[2] < losses[0]
    if dtype == "float16":
        assert trained.scale.finite_steps == 3 and trained.scale.value == 2**15


def test_a_scaled_step_that_is_not_finite_changes_the_scale_alone(work_at):
    work = work_at("mixer")
    state, images, labels = work.draw(0, 4, "float16")
    program = work.chain(work.function("xla", "float16"), 1)
    (trained, _), _ = jax.jit(program)(((state, images.at[0].set(jnp.inf), labels),))
    assert trained.scale.value == 2**14
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state.parameters, trained.parameters)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(("implementation", "kernels"), [("pallas", CHANGES_IN_PLACE), ("autodiff", 0), ("xla", 0)])
def test_a_step_of_ours_updates_its_parameters_in_one_launch(work_at, implementation, kernels, on_hopper):
    work = work_at("logic", "6x8000")
    arguments = work.draw(0, 4, "float32")
    program = work.chain(work.function("autodiff", "float32"), 1, implementation)
    assert cuda_program(program, (arguments,)).count("@mosaic_gpu") == kernels
