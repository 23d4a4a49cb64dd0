"""A client is another project's program. To use jaxbp, it replaces the namespace of layers and functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbp

STEPS = 20
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

every_implementation = pytest.mark.parametrize("implementation", [None, "xla"])
"""On a CPU, None may choose autodiff."""
every_dtype = pytest.mark.parametrize("dtype, implementation", [("float32", "xla"), ("bfloat16", None)])
needs_eight_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")


class Namespace:
    def __init__(self, *modules, **options):
        self.modules, self.options = modules, options

    def __getattr__(self, name):
        found = next(filter(callable, (getattr(module, name, None) for module in self.modules)), None)
        if found is None:
            raise AttributeError(name)
        return functools.partial(found, **self.options) if self.options else found


def theirs(*modules):
    return Namespace(*modules, nnx, jax.nn, optax, jnp)


def ours(implementation, *modules):
    return Namespace(*modules, jaxbp.nnx, jaxbp, implementation=implementation)


def assert_same_losses(actual, expected, dtype="float32"):
    assert len(actual) == len(expected) == STEPS
    assert expected[-1] < 0.95 * expected[0], "the original does not learn, so its gradients are hardly tested"
    np.testing.assert_allclose(np.asarray(actual, float), np.asarray(expected, float), rtol=TOLERANCE[dtype])


def images(batch, size, classes=4):
    random = np.random.default_rng(0)
    x = random.standard_normal((batch, size, size, 1)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(random.integers(0, classes, batch))


def tokens(batch, length, vocabulary):
    return jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (batch, length)))
