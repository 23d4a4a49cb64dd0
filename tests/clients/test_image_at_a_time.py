"""An Equinox MNIST: `vmap` over images, inside `vmap` over an ensemble of models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clients.namespaces import STEPS, assert_same_losses, every_implementation, images, ours, theirs
from helpers import normal
from jax import lax

ENSEMBLE = 3


class Layers:
    def conv2d(x, w, b):
        return lax.conv_general_dilated(x, w, (1, 1), "VALID") + b[:, None, None]

    def max_pool2d(x, window, stride):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, window, window), (1, 1, stride, stride), "VALID")

    def linear(x, w, b):
        return w @ x + b


def initial():
    shapes = dict(conv=(3, 1, 4, 4), hidden=(8, 48), output=(4, 8))
    weights = normal(*((ENSEMBLE, *shape) for shape in shapes.values()))
    return {
        name: (w / np.prod(w.shape[2:]) ** 0.5, jnp.zeros(w.shape[:2])) for name, w in zip(shapes, weights, strict=True)
    }


def model(n, parameters, image):
    x = n.conv2d(image[None], *parameters["conv"])
    x = n.relu(n.max_pool2d(x, 2, stride=1))
    x = n.sigmoid(n.linear(x.ravel(), *parameters["hidden"]))
    return n.log_softmax(n.linear(x, *parameters["output"]))


def losses(n):
    x, labels = images(batch=8, size=8)
    optimizer = optax.sgd(0.1, momentum=0.9)
    parameters = initial()
    state = jax.vmap(optimizer.init)(parameters)

    def loss(parameters):
        y = jax.vmap(lambda image: model(n, parameters, image))(x.transpose(0, 3, 1, 2))
        return -n.mean(jnp.take_along_axis(y, labels[:, None], axis=1))

    @jax.jit
    @jax.vmap
    def step(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    found = []
    for _ in range(STEPS):
        parameters, state, values = step(parameters, state)
        found.append(values.max())
    return found


@functools.cache
def expected():
    return losses(theirs(Layers))


@every_implementation
def test_losses_are_those_of_jax(implementation):
    assert_same_losses(losses(ours(implementation)), expected())
