import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every_implementation, gradients_of, normal

import jaxbp

INF = np.inf


@every_implementation
@pytest.mark.parametrize("loss", [jaxbp.mean_squared_error, jaxbp.mean_absolute_error])
def test_gradients_of_a_mean_of_nothing_are_empty(loss, implementation):
    nothing = jnp.zeros((0, 3))
    gradients = gradients_of(loss, (nothing, nothing), [jnp.ones(())], implementation=implementation)
    assert [g.shape for g in gradients] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("loss", [jaxbp.mean_squared_error, jaxbp.mean_absolute_error])
def test_means_in_half_precision_are_rounded_once(loss):
    arrays = [a.astype(jnp.float16) for a in normal((100, 2), (100, 2))]
    wide = jax.vmap(loss)(*(a.astype(jnp.float32) for a in arrays))
    np.testing.assert_allclose(jax.vmap(loss)(*arrays).astype(jnp.float32), wide, rtol=1.001 * 2**-11)


@every_implementation
def test_huber_is_half_the_square_within_delta_and_a_line_beyond(implementation):
    (error,) = normal((100,))
    zero = jnp.zeros(100)
    loss = jaxbp.huber(error, zero, 0.7, implementation=implementation)
    beyond = np.abs(error) > 0.7
    assert 0 < beyond.sum() < 100
    assert_close(loss[~beyond], 0.5 * np.square(error[~beyond]), "float32")
    assert_close(loss[beyond], 0.7 * (np.abs(error[beyond]) - 0.35), "float32")
    dpredictions, dtargets = jaxbp.huber_backward(jnp.ones(100), error, zero, 0.7, implementation=implementation)
    assert_close(dpredictions, np.clip(error, -0.7, 0.7), "float32")
    np.testing.assert_array_equal(dtargets, -dpredictions)


@every_implementation
def test_both_cross_entropies_agree_where_the_probabilities_are_those_of_the_logits(implementation):
    logits, labels = normal((3, 4))[0], jax.nn.sigmoid(normal((3, 4), seed=1)[0])
    of_logits = jaxbp.sigmoid_binary_cross_entropy(logits, labels, implementation=implementation)
    of_probabilities = jaxbp.binary_cross_entropy(jax.nn.sigmoid(logits), labels, implementation=implementation)
    assert_close(of_logits, of_probabilities, "float32")


@every_implementation
def test_the_divergence_of_a_distribution_from_itself_is_zero_and_from_a_narrower_one_infinite(implementation):
    p = jnp.array([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]])
    same = jaxbp.kl_divergence(jnp.log(p), p, implementation=implementation)
    np.testing.assert_array_equal(same, [0, 0])
    narrower = jnp.log(jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))
    np.testing.assert_array_equal(jaxbp.kl_divergence(narrower, p, implementation=implementation), [INF, INF])
