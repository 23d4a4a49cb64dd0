import jax
import jax.numpy as jnp
import pytest
from helpers import cuda_program

from experiments.bench.training_workloads import logic_workload
from pallas_kernels.core.launch import CHANGES_IN_PLACE


@pytest.mark.parametrize(("parametrization", "parameters"), [("softmax", 16), ("input_wise", 4), ("walsh", 4)])
def test_a_logic_network_has_the_parameters_of_its_parametrization(parametrization, parameters):
    workload = logic_workload("logic", 1000, (), parametrization)
    logits, bits, _ = workload.draw(0, 2, "float32")
    assert {a.shape for a in jax.tree.leaves(logits)} == {(1000, parameters)}
    assert (bits == logic_workload("logic", 1000, ()).draw(0, 2, "float32")[1]).all()
    loss, gradients = workload.function("autodiff", "float32")(*workload.draw(0, 2, "float32"))
    assert jnp.isfinite(loss) and {a.shape for a in jax.tree.leaves(gradients)} == {(1000, parameters)}


def test_a_logic_network_with_candidates_learns_its_wires():
    workload = logic_workload("logic-learned", 400, (), candidates=4)
    assert (workload.options, workload.baselines) == ({"gates": 400, "candidates": 4}, {})
    loss, gradients = jax.eval_shape(workload.function("xla", "float32"), *workload.draw(0, 2, "float32"))
    assert {a.shape for a in jax.tree.leaves(gradients)} == {(400, 16), (800, 4)} and loss.shape == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_in_half_precision_train_parameters_of_float32(workload_at, dtype):
    workload = workload_at("gpt", "tiny")
    (state, *data), program = workload.draw(0, 4, dtype), workload.chain(workload.function("xla", dtype), 3)
    (trained, _), losses = jax.jit(program)(((state, *data),))
    parameters = state.parameters if dtype == "float16" else state
    assert {a.dtype.name for a in jax.tree.leaves(parameters)} == {"float32"}
    assert jnp.isfinite(losses).all() and losses[2] < losses[0]
    if dtype == "float16":
        assert trained.scale.finite_steps == 3 and trained.scale.value == 2**15


def test_a_scaled_step_that_is_not_finite_changes_the_scale_alone(workload_at):
    workload = workload_at("lenet")
    state, images, labels = workload.draw(0, 4, "float16")
    program = workload.chain(workload.function("xla", "float16"), 1)
    (trained, _), _ = jax.jit(program)(((state, images.at[0].set(jnp.inf), labels),))
    assert trained.scale.value == 2**14
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state.parameters, trained.parameters)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(("implementation", "kernels"), [("pallas", CHANGES_IN_PLACE), ("autodiff", 0), ("xla", 0)])
def test_a_step_of_ours_updates_its_parameters_in_one_launch(workload_at, implementation, kernels, on_hopper):
    workload = workload_at("logic", "6x8000")
    arguments = workload.draw(0, 4, "float32")
    program = workload.chain(workload.function("autodiff", "float32"), 1, implementation)
    assert cuda_program(program, (arguments,)).count("@mosaic_gpu") == kernels
