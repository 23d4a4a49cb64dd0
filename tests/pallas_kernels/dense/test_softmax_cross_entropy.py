import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, on_the_cpu, relative_error

from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense import softmax_cross_entropy as kernels

CLASSES, N = 5, 256


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("kind", ["classes", "weights"])
def test_the_simulator_finds_losses_and_gradients_right(kind):
    logits, weights, dy = normal((CLASSES, N), (CLASSES, N), (N,))
    classes = jnp.asarray(np.random.default_rng(0).integers(0, CLASSES, N), jnp.int32)
    labels, y = (classes, np.eye(CLASSES)[:, classes]) if kind == "classes" else (jnp.exp(weights), np.exp(weights))

    @jax.jit
    def run(logits, labels, dy):
        loss, largest, total = kernels.loss_and_statistics(logits, labels)
        return loss, largest, total, kernels.logits_gradient(dy, logits, labels, largest, total)

    with on_the_cpu(), simulated():
        loss, largest, total, dlogits = jax.block_until_ready(run(logits, labels, dy))
    z = np.asarray(logits, np.float64)
    log_p = z - np.log(np.exp(z).sum(axis=0))
    assert relative_error(loss, -(y * log_p).sum(axis=0)) < 1e-6
    assert (np.asarray(largest) == z.max(axis=0)).all()
    assert relative_error(total, np.exp(z - z.max(axis=0)).sum(axis=0)) < 1e-6
    assert relative_error(dlogits, np.asarray(dy) * (np.exp(log_p) * y.sum(axis=0) - y)) < 1e-6


@pytest.mark.parametrize(
    ("classes", "N", "labels", "config"),
    [
        (10, 128, struct(128, dtype="int32"), kernels.Config(length=128, unroll=10)),
        (10, 1024, struct(1024, dtype="int32"), kernels.Config(length=256, unroll=10)),
        (10, 1024, struct(10, 1024), kernels.Config(length=512, unroll=10)),
        (1000, 256, struct(256, dtype="int32"), kernels.Config(length=256, unroll=10)),
        (17, 128, struct(128, dtype="int32"), kernels.Config(length=128, unroll=1)),
    ],
    ids=str,
)
def test_vectors_divide_the_batch_and_turns_the_classes(classes, N, labels, config):
    logits = struct(classes, N)
    assert kernels.loss_and_statistics.plan(logits, labels) == config
    assert kernels.logits_gradient.plan(struct(N), logits, labels, struct(N), struct(N)) == config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_example_that_is_nearly_right_keeps_the_digits_of_its_gradient(dtype):
    logits = jnp.tile(jnp.array([[6.0], [1.0], [0.0]], dtype), (1, 128))
    labels, dy = jnp.zeros(128, jnp.int32), jnp.ones(128, dtype)
    with on_the_cpu(), simulated():
        _, *statistics = kernels.loss_and_statistics(logits, labels)
        dlogits = kernels.logits_gradient(dy, logits, labels, *statistics)
    p = np.exp([6.0, 1.0, 0.0]) / np.exp([6.0, 1.0, 0.0]).sum()
    # The gradient at the label, p - 1, is -0.009. With p rounded to eight bits, it would be -0.008.
    assert relative_error(dlogits[:, 0], p - [1, 0, 0]) < jnp.finfo(dtype).eps / 2
