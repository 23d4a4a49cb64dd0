"""tokamax's norms, in JAX with Triton kernels."""

import functools
from importlib import metadata

import jax
import tokamax

from experiments.bench.measure import floats, time_chain
from experiments.bench.workloads import forward_and_backward, one_after_another

VERSION = metadata.version("tokamax")
EPS = 1e-5  # the default of jaxbp's norms

FORWARDS = {
    "layer_norm": functools.partial(tokamax.layer_norm, epsilon=EPS),
    "rms_norm": lambda x, scale: tokamax.layer_norm(x, scale, None, epsilon=EPS, subtract_mean=False),
}


def variants(task):
    if task.op in FORWARDS:
        yield "default", None, functools.partial(measure, task)


def measure(task):
    function = forward_and_backward(FORWARDS[task.op])
    timed = time_chain(one_after_another(function, task.calls), tuple(task.sets), task.calls, task.seconds)
    return timed | {"results": floats(jax.jit(function)(*task.small))}
