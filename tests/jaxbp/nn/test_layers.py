import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbp
from jaxbp.nn._layers import Conv2d, Linear


def test_weights_are_uniform_by_the_inputs_of_an_output():
    rngs = nnx.Rngs(0)
    for layer, fan_in in ((Linear(400, 50, rngs=rngs), 400), (Conv2d(4, 30, (5, 2), rngs=rngs), 40)):
        weight, bias, largest = np.asarray(layer.weight[...]), np.asarray(layer.bias[...]), fan_in**-0.5
        assert np.abs(weight).max() < largest and np.abs(bias).max() < largest
        np.testing.assert_allclose(weight.std(), largest / 3**0.5, rtol=0.1)


X = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)


def test_a_layer_is_its_op_with_its_parameters_and_options():
    conv = Conv2d(1, 2, (2, 3), implementation="xla", rngs=nnx.Rngs(2))
    images = X.reshape(1, 1, 3, 4)
    expected = jaxbp.conv2d(images, *conv.parameters(), implementation="xla")
    np.testing.assert_array_equal(conv(images), expected)


def test_what_is_computed_in_half_precision_keeps_its_parameters():
    layer = Linear(6, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert (layer(X).dtype, layer.weight[...].dtype) == (jnp.bfloat16, jnp.float32)


def test_an_unknown_implementation_reaches_the_op():
    with pytest.raises(ValueError, match="linear: implementation is 'cuda'"):
        Linear(6, 3, implementation="cuda", rngs=nnx.Rngs(0))(X)
