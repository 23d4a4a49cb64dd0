import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_numerical_gradients_agree,
    every_implementation,
    in_float64,
    normal,
    relative_error,
    value_and_gradients,
)

from jaxbp import softmax_cross_entropy, softmax_cross_entropy_backward


@functools.cache
def _run(implementation):
    return value_and_gradients(functools.partial(softmax_cross_entropy, implementation=implementation))


def loss_and_gradients(logits, labels, implementation):
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    (loss,), gradients = _run(implementation)((logits, labels), [jnp.ones(logits.shape[:-1])])
    return loss, gradients


def weights(seed=5):
    return jnp.exp(normal((4, 3), seed=seed)[0])


@pytest.mark.parametrize("labels", [jnp.array([0, 2, 1, 2]), weights()], ids=["classes", "weights"])
@every_implementation
def test_numerical_gradients_agree_to_a_thousandth(labels, implementation):
    (logits,) = normal((4, 3))
    assert_numerical_gradients_agree(softmax_cross_entropy, (logits, labels), step=0.02, implementation=implementation)


@every_implementation
def test_huge_logits_stay_finite_and_right(implementation):
    loss, (gradient,) = loss_and_gradients([[1e4, 0, -1e4]] * 3, [0, 1, 2], implementation)
    np.testing.assert_array_equal(loss, [0, 1e4, 2e4])
    np.testing.assert_array_equal(gradient, [[0, 0, 0], [1, -1, 0], [1, 0, -1]])


@every_implementation
def test_a_class_ruled_out_by_minus_infinity_has_no_part_in_the_others(implementation):
    loss, (gradient,) = loss_and_gradients([[1.0, -np.inf, 3.0]] * 2, [0, 2], implementation)
    expected = loss_and_gradients([[1.0, 3.0]] * 2, [0, 1], implementation)
    assert_close((loss, gradient[:, ::2]), expected, "float32")
    np.testing.assert_array_equal(gradient[:, 1], [0, 0])


@every_implementation
def test_classes_and_their_one_hot_weights_agree(implementation):
    (logits,), labels = normal((4, 3)), np.array([0, 2, 1, 2])
    loss, (gradient,) = loss_and_gradients(logits, labels, implementation)
    one_hot_loss, (one_hot_gradient, _) = loss_and_gradients(logits, np.eye(3, dtype="f")[labels], implementation)
    assert_close((one_hot_loss, one_hot_gradient), (loss, gradient), "float32")


@every_implementation
def test_weights_need_not_sum_to_1(implementation):
    (logits,), y = normal((4, 3)), weights()
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    loss, (gradient, _) = loss_and_gradients(logits, y, implementation)
    assert_close(loss, -(y * np.log(p)).sum(-1), "float32")
    assert_close(gradient, p * np.sum(y, -1, keepdims=True) - y, "float32")


@every_implementation
def test_the_gradient_in_the_weights_is_minus_the_log_of_the_softmax(implementation):
    (logits,) = normal((4, 3))
    _, (_, gradient) = loss_and_gradients(logits, weights(), implementation)
    assert_close(gradient, -jax.nn.log_softmax(logits), "float32")


@pytest.mark.parametrize(("dtype", "outside"), [("int32", -1), ("int32", 2**31 - 1), ("int8", -128), ("uint8", 255)])
@every_implementation
def test_a_label_out_of_range_makes_its_example_nan_and_no_other(dtype, outside, implementation):
    (logits,), labels = normal((4, 3)), np.array([0, outside, 3, 2], dtype)
    loss, (gradient,) = loss_and_gradients(logits, labels, implementation)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(gradient), np.array([[False], [True], [True], [False]]) * np.ones(3, bool))


@every_implementation
def test_an_example_that_a_mask_leaves_out_has_no_gradient(implementation):
    (logits,), labels = normal((4, 3)), np.array([0, -100, 3, 2])

    def masked(logits):
        loss = softmax_cross_entropy(logits, labels, implementation=implementation)
        return jnp.sum(jnp.where((labels >= 0) & (labels < 3), loss, 0))

    _, (expected,) = loss_and_gradients(logits, np.clip(labels, 0, 2), implementation)
    np.testing.assert_array_equal(jax.jit(jax.grad(masked))(logits), expected.at[1:3].set(0))


@every_implementation
def test_nan_in_logits_stays_in_its_example(implementation):
    loss, (gradient,) = loss_and_gradients([[1, np.nan, 3], [1, 2, 3]], [0, 2], implementation)
    np.testing.assert_array_equal(np.isnan(loss), [True, False])
    np.testing.assert_array_equal(np.isnan(gradient), [[True] * 3, [False] * 3])


@every_implementation
def test_backward_scales_each_examples_gradient(implementation):
    (logits,), labels, dy = normal((4, 3)), jnp.array([0, 2, 1, 2]), jnp.array([0.0, 1, -2, 0.5])
    _, (gradient,) = loss_and_gradients(logits, labels, implementation)
    backward = softmax_cross_entropy_backward(dy, logits, labels, implementation=implementation)
    assert_close(backward, dy[:, None] * gradient, "float32")


@pytest.mark.parametrize("labels", [jnp.zeros((0,), jnp.int32), jnp.zeros((0, 3))], ids=["classes", "weights"])
@every_implementation
def test_an_empty_batch_works(labels, implementation):
    loss, gradients = loss_and_gradients(jnp.zeros((0, 3)), labels, implementation)
    assert loss.shape == (0,)
    assert all(gradient.shape == (0, 3) for gradient in gradients)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_with_a_z_loss_the_default_rounds_the_gradient_as_often_as_the_formula(dtype):
    labels = jnp.arange(200) % 10
    logits, dy = (a.astype(dtype) for a in normal((200, 10), (200,)))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(implementation, logits, dy):
        losses = functools.partial(softmax_cross_entropy, z_loss=0.5, implementation=implementation)
        return jax.vjp(lambda logits: losses(logits, labels), logits)[1](dy)[0]

    exact = in_float64(functools.partial(gradient, "xla"), logits, dy)
    error, allowed = (relative_error(gradient(implementation, logits, dy), exact) for implementation in (None, "xla"))
    assert error <= 1.05 * allowed
