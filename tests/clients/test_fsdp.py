"""Flax's FSDP: a mesh's axis "model" divides the parameters, and its axis "data" the batch."""

import functools

import jax
import numpy as np
import optax
from clients.namespaces import STEPS, assert_same_losses, every_implementation, needs_eight_devices, ours, theirs
from flax import nnx
from helpers import normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = needs_eight_devices


class MLP(nnx.Module):
    def __init__(self, n, rngs):
        columns = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        rows = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
        bias = nnx.with_partitioning(nnx.initializers.zeros_init(), ("model",))
        self.hidden = n.Linear(4, 32, kernel_init=columns, bias_init=bias, rngs=rngs)
        self.norm = n.LayerNorm(32, rngs=rngs)
        self.relu = n.relu
        self.output = n.Linear(32, 4, kernel_init=rows, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.output(self.relu(self.norm(self.hidden(x))))


def losses(n):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    x, y = normal((16, 4), (16, 4))
    x, y = jax.device_put((x, y), NamedSharding(mesh, P("data")))

    @nnx.jit
    def create():
        model = MLP(n, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(lambda model: n.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    with jax.set_mesh(mesh):
        model, optimizer = create()
        assert model.hidden.kernel[...].sharding.spec == P(None, "model")
        found = [step(model, optimizer, x, y) for _ in range(STEPS)]
        assert model.hidden.kernel[...].sharding.spec == P(None, "model"), "a step gathers the parameters"
    return found


@functools.cache
def expected():
    return losses(theirs())


@every_implementation
def test_losses_are_those_of_flax(implementation):
    assert_same_losses(losses(ours(implementation)), expected())
