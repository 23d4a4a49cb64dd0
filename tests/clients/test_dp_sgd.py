import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clients.namespaces import STEPS, assert_same_losses, every_implementation, images, ours, theirs
from helpers import normal
from jax import lax

LAYOUT = ("NHWC", "HWIO", "NHWC")


class Layers:
    def conv2d(x, w, b, stride, padding, dimension_numbers):
        return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=dimension_numbers) + b

    def max_pool2d(x, window, stride, channel_axis):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), "VALID")


def model(n, parameters, x):
    conv1, conv2, hidden, output = parameters
    x = n.relu(n.conv2d(x, *conv1, stride=2, padding="SAME", dimension_numbers=LAYOUT))
    x = n.max_pool2d(x, 2, stride=1, channel_axis=-1)
    x = n.relu(n.conv2d(x, *conv2, stride=2, padding="VALID", dimension_numbers=LAYOUT))
    x = x.reshape(x.shape[0], -1)
    x = n.relu(n.add(n.matmul(x, hidden[0]), hidden[1]))
    return n.add(n.matmul(x, output[0]), output[1])


def losses(n):
    x, labels = images(batch=8, size=10)
    targets = jax.nn.one_hot(labels, 4)
    shapes = (4, 4, 1, 4), (2, 2, 4, 6), (24, 8), (8, 4)
    parameters = [(w / w[..., 0].size ** 0.5, np.zeros(w.shape[-1], np.float32)) for w in normal(*shapes)]

    def loss(parameters, x, targets):
        return -n.mean(n.sum(n.log_softmax(model(n, parameters, x)) * targets, axis=1))

    def clipped(parameters, x, targets):
        value, gradients = jax.value_and_grad(loss)(parameters, x[None], targets[None])
        divisor = jnp.maximum(optax.tree.norm(gradients), 1.0)
        return value, jax.tree.map(lambda g: g / divisor, gradients)

    @jax.jit
    def step(parameters, key):
        values, gradients = jax.vmap(clipped, (None, 0, 0))(parameters, x, targets)
        leaves, tree = jax.tree.flatten(gradients)
        noises = [
            jax.random.normal(k, g.shape[1:]) for k, g in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
        ]
        gradients = tree.unflatten(g.mean(0) + 0.01 * noise for g, noise in zip(leaves, noises, strict=True))
        return jax.tree.map(lambda p, g: p - 0.25 * g, parameters, gradients), values.mean()

    found = []
    for key in jax.random.split(jax.random.key(1), STEPS):
        parameters, value = step(parameters, key)
        found.append(value)
    return found


@functools.cache
def expected():
    return losses(theirs(Layers))


@every_implementation
def test_losses_are_those_of_jax(implementation):
    assert_same_losses(losses(ours(implementation)), expected())
