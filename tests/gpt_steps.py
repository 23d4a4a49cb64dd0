"""Three training steps of a small language model, in the forms of the bench's workloads."""

import functools

import jax
import numpy as np

from experiments.bench.gpt_workload import gpt_workload

SIZES = dict(num_layers=1, features=32, num_heads=4, hidden_features=48, vocab_size=64)


@functools.cache
def workload_and_arguments(place):
    workload = gpt_workload(place, **SIZES)
    parameters, tokens, targets = workload.draw(0, 2, "float32")
    return workload, (parameters, tokens[:, :32], targets[:, :32])


@functools.cache
def losses(place, name):
    workload, arguments = workload_and_arguments(place)
    optimizer = "autodiff" if name in workload.baselines else name
    program = workload.chain(workload.named(name, "float32"), 3, optimizer)
    found = np.asarray(jax.jit(program)((arguments,))[1])
    assert found[2] < found[0]
    return found
