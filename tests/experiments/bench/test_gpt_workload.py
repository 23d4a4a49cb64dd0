import jax
import pytest
from helpers import launching_program

from experiments.bench.gpt_workload import gpt_workload
from experiments.bench.roofline import cost


@pytest.mark.parametrize(("place", "parameters"), [("124M", 124_475_904), ("1.3B", 1_344_899_072)])
def test_the_models_have_the_published_sizes(place, parameters):
    state, tokens, targets = jax.eval_shape(lambda: gpt_workload(place).draw(0, 2, "bfloat16"))
    assert sum(a.size for a in jax.tree.leaves(state)) == parameters
    assert tokens.shape == targets.shape == (2, {"124M": 1024, "1.3B": 2048}[place])


def test_targets_are_the_next_tokens():
    _, tokens, targets = gpt_workload("tiny").draw(0, 2, "float32")
    assert (tokens[:, 1:] == targets[:, :-1]).all() and (tokens != targets).any()


def test_the_operations_are_those_of_the_weights_and_of_causal_attention():
    counted = cost(gpt_workload("124M"), 2, "bfloat16").operations
    layers, features, vocabulary, length = 12, 768, 50_304, 1024
    per_token = layers * (12 * features**2 + (length + 1) / 2 * 2 * features) + vocabulary * features
    assert counted == pytest.approx(3 * 2 * per_token * 2 * length, rel=1e-6)


@pytest.mark.parametrize("place", ["124M", "1.3B"])
def test_a_step_of_the_full_size_lowers_for_hopper_with_our_kernels(place, on_hopper):
    # All blocks are alike.
    workload = gpt_workload(place, num_layers=1)
    (batch,), _ = workload.batches
    arguments = jax.eval_shape(lambda: workload.draw(0, batch, "bfloat16"))
    program = launching_program(workload.function("pallas", "bfloat16"), *arguments)
    of_keys_and_queries = ["attention_backward_queries", "attention_backward_keys"]
    kernels = ["attention_forward", *(of_keys_and_queries if place == "124M" else ["attention_backward"])]
    kernels += ["embedding_backward"]
    kernels += [f"linear_softmax_cross_entropy_{what}" for what in ("statistics", "gradient")]
    kernels += ["layer_norm", "layer_norm_backward"] if place == "124M" else ["rms_norm", "rms_norm_backward"]
    assert [kernel for kernel in kernels if f"@kernel.{kernel}" not in program] == []
