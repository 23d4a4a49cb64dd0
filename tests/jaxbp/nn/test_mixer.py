import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, every_implementation, in_float64, normal

import jaxbp
from jaxbp.nn import Mixer
from jaxbp.nn._layers import LayerNorm, LayerNormLinear


def mixer(implementation=None, dtype=jnp.float32, **options):
    sizes = dict(patch=14, channels=6, patches_hidden=5, channels_hidden=7, blocks=2) | options
    graph, parameters = nnx.split(Mixer(**sizes, implementation=implementation, dtype=dtype, rngs=nnx.Rngs(0)))
    return lambda parameters, images: nnx.merge(graph, parameters)(images), parameters


def test_layer_norm_linear_is_the_op_of_its_parameters():
    layer = LayerNormLinear(5, 3, epsilon=0.1, rngs=nnx.Rngs(0))
    (x,) = normal((2, 4, 5))
    assert_close(layer.norm.scale[...], np.ones(5), "float32")
    parameters = layer.norm.scale[...], layer.norm.bias[...], layer.linear.weight[...], layer.linear.bias[...]
    np.testing.assert_array_equal(layer(x), jaxbp.layer_norm_linear(x, *parameters, 0.1))
    np.testing.assert_array_equal(LayerNorm(5, epsilon=0.1)(x), jaxbp.layer_norm(x, *parameters[:2], 0.1))


def test_layers_compute_in_their_dtype_and_keep_their_parameters():
    layer = LayerNormLinear(5, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 5))).dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))} == {"float32"}


def test_logits_have_a_row_an_image():
    logits, parameters = mixer(patch=7)
    assert jax.eval_shape(logits, parameters, jnp.zeros((3, 1, 28, 28))).shape == (3, 10)


def test_patches_are_squares_of_the_image():
    model = Mixer(patch=7, channels=6, patches_hidden=5, channels_hidden=7, blocks=1, rngs=nnx.Rngs(0))
    model.blocks, model.head = nnx.List([]), lambda x: x  # the rest of the model is the mean over 16 patches
    dark = jnp.zeros((1, 1, 28, 28))
    lit = dark.at[0, 0, 8, 3].set(1.0)  # row 1 and column 3 of a patch
    assert_close((model(lit) - model(dark))[0] * 16, model.embed.weight[...][:, 1 * 7 + 3], "float32")


@every_implementation
def test_gradients_agree_with_float64(implementation):
    (images,) = normal((2, 1, 28, 28))

    def gradients(implementation, dtype):
        logits, _ = mixer(implementation, dtype, blocks=1)
        return jax.jit(jax.grad(lambda parameters, images: jnp.sum(jnp.sin(logits(parameters, images)))))

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    _, parameters = mixer(blocks=1)
    actual = gradients(implementation, jnp.float32)(parameters, images)
    expected = in_float64(gradients("autodiff", jnp.float64), parameters, images)
    # The norms remove a bias along the patches, so its gradient is zero.
    assert_close(flat(actual), flat(expected), "float32")


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 3, 28, 28), (2, 1, 32, 32)])
def test_images_of_another_shape_are_refused(shape):
    logits, parameters = mixer()
    with pytest.raises(ValueError, match=re.escape(f"Mixer: images has shape {shape}; wants (batch, 1, 28, 28)")):
        logits(parameters, jnp.zeros(shape))


@pytest.mark.parametrize("patch", [0, 5])
def test_patches_that_do_not_fill_the_image_are_refused(patch):
    with pytest.raises(ValueError, match=f"Mixer: patch is {patch}; wants a divisor of 28"):
        Mixer(patch=patch, rngs=nnx.Rngs(0))


def test_the_number_of_logits_is_a_choice():
    model = nnx.eval_shape(lambda: Mixer(classes=3, channels=4, blocks=1, rngs=nnx.Rngs(0)))
    assert jax.eval_shape(lambda model, x: model(x), model, jnp.zeros((2, 1, 28, 28))).shape == (2, 3)
    with pytest.raises(ValueError, match="Mixer: classes is 0; wants an int of at least 1"):
        Mixer(classes=0, rngs=nnx.Rngs(0))
