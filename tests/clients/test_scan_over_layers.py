import functools

import optax
import pytest
from clients.namespaces import STEPS, assert_same_losses, ours, theirs
from flax import nnx
from helpers import normal

LAYERS = 3


class Block(nnx.Module):
    def __init__(self, n, width, rngs):
        self.linear = n.Linear(width, width, rngs=rngs)
        self.bn = n.BatchNorm(width, rngs=rngs)
        self.dropout = n.Dropout(0.1, rngs=rngs)
        self.gelu = n.gelu

    def __call__(self, x):
        return self.gelu(self.dropout(self.bn(self.linear(x))))


class ScanMLP(nnx.Module):
    def __init__(self, n, width, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(axis_size=LAYERS)
        def blocks(rngs):
            return Block(n, width, rngs)

        self.layers = blocks(rngs)

    def __call__(self, x):
        @nnx.scan
        def apply(x, block):
            return block(x), None

        return apply(x, self.layers)[0]


def losses(n):
    x, y = normal((16, 8), (16, 8))
    model = ScanMLP(n, 8, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(lambda model: n.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    return [step(model, optimizer) for _ in range(STEPS)]


@functools.cache
def expected():
    return losses(theirs())


@pytest.mark.parametrize("implementation", [None, "xla", "pallas"])
def test_losses_are_those_of_flax(implementation):
    assert_same_losses(losses(ours(implementation)), expected())
