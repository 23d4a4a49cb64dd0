import re

import jax


def test_every_call_of_a_chain_is_computed(workload_at):
    workload = workload_at("conv2d_backward_weights", "conv2")
    function = workload.function("autodiff", "float32")
    sets = tuple(workload.draw(seed, 2, "float32") for seed in range(3))
    count = lambda calls: len(_convolutions(workload.chain(function, calls), sets))  # noqa: E731
    assert count(3) == 3 * count(1) > 0


def _convolutions(program, sets):
    return re.findall(r"convolution\(|__cudnn\$conv", jax.jit(program).lower(sets).compile().as_text())
