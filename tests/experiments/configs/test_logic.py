import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs.logic import LogicConfig
from experiments.output.errors import UserError
from experiments.training import loop as training


def test_gradients_are_clipped_element_by_element_at_100():
    assert LogicConfig().gradient_clip == 100.0
    clipped = training.make_optimizer(0.1, 10, clip=100.0)
    plain = training.make_optimizer(0.1, 10)
    updates = []
    for optimizer, gradient in ((clipped, [1e9, 1.0]), (plain, [100.0, 1.0])):
        _, state = optimizer.update(jnp.array(gradient), optimizer.init(jnp.zeros(2)))
        updates.append(optimizer.update(jnp.array([1.0, 1.0]), state)[0])
    assert np.array_equal(*updates)


def test_sizes_and_tau_are_the_published_ones_for_mnist():
    config = LogicConfig(dataset="mnist")
    assert (config.layers, config.gates, config.tau, config.batch_size) == (6, 8000, 10, 128)
    assert config.learning_rate == 0.05  # published: 0.01


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("layers", 0, "a whole number of at least 1"),
        ("gates", 2001, "a positive multiple of 10"),
        ("gates", 1000, "at least half of the 2352 bits of an image, or wiring 'random'"),
        ("tau", 0.0, "a finite number above 0"),
        ("levels", 0, "a whole number of at least 1"),
        ("wiring", "all", "one of unique, random"),
        ("initialization", "zeros", "one of residual, normal"),
        ("parametrization", "fourier", "one of softmax, input_wise, walsh"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(field, value, wanted):
    with pytest.raises(UserError, match=f"^{field} is {value!r}; wants {wanted}"):
        LogicConfig(**{field: value})
