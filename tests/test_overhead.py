"""The host's time in jaxbp, relative to JAX in the same process. The bounds allow for a busy machine."""

import json
import subprocess
import sys

PROGRAM = """
import json, time
from time import process_time as now

def least(run, times):
    def seconds():
        start = now()
        run()
        return now() - start
    return min(seconds() for _ in range(times))

start = now()
import jax
with_jax = now() - start
import jaxbp
print(json.dumps(["import", (now() - start) / with_jax]))
jaxbp.linear
print(json.dumps(["op", (now() - start) / with_jax]))

import jax.numpy as jnp
x, w, b = jnp.ones((8, 16)), jnp.ones((4, 16)), jnp.ones(4)
ours, theirs = lambda: jaxbp.linear(x, w, b), lambda: jnp.matmul(x, w.T) + b
print(json.dumps(["call", least(ours, 200) / least(theirs, 200)]))

from flax import nnx
from jaxbp.nn import LeNet

def trace(implementation):
    jax.clear_caches()
    graph, state = nnx.split(nnx.eval_shape(lambda: LeNet(implementation=implementation, rngs=nnx.Rngs(0))))
    images, labels = jax.ShapeDtypeStruct((128, 1, 28, 28), 'float32'), jax.ShapeDtypeStruct((128,), 'int32')
    loss = lambda state, *batch: nnx.merge(graph, state).loss(*batch)[0].mean()
    return least(lambda: jax.jit(jax.grad(loss)).trace(state, images, labels), 1)

trace("autodiff")
print(json.dumps(["trace", min(trace("pallas") for _ in range(2)) / min(trace("autodiff") for _ in range(2))]))
"""


def test_importing_calling_and_tracing_cost_a_few_times_what_jax_takes():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    ratios = dict(map(json.loads, run.stdout.splitlines()))
    assert ratios.keys() == {"import", "op", "call", "trace"}
    assert ratios["import"] < 1.2 and ratios["op"] < 2 and ratios["call"] < 4 and ratios["trace"] < 6, ratios


def test_importing_every_name_leaves_mosaic_gpu_to_the_first_kernel():
    program = "import sys; from jaxbp import *; print(*(m for m in sys.modules if m.startswith('jax.experimental.')))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "jax.experimental.pallas" in run.stdout.split()
    assert not [m for m in run.stdout.split() if m.endswith(("mosaic.gpu", "mosaic_gpu"))]


def test_a_mistyped_name_is_answered_with_the_right_one():
    run = subprocess.run([sys.executable, "-c", "import jaxbp; jaxbp.layer_nrom"], capture_output=True, text=True)
    assert run.stderr.endswith(
        "AttributeError: module 'jaxbp' has no attribute 'layer_nrom'. Did you mean: 'layer_norm'?\n"
    )
