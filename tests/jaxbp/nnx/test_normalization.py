import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import IMAGES, ROWS, assert_agree, assert_layers_agree, make, state_of

import jaxbp

MASK = jnp.asarray(np.random.default_rng(3).random(IMAGES.shape) < 0.8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LayerNorm", dict(use_bias=False, epsilon=0.1, reduction_axes=2, feature_axes=(2,))),
        ("LayerNorm", dict(reduction_axes=(1, 2))),
        ("RMSNorm", dict(use_scale=False, epsilon=0.1)),
        ("RMSNorm", dict(reduction_axes=(-2, -1))),
        ("GroupNorm", dict(num_groups=None, group_size=2, use_scale=False)),
        ("GroupNorm", dict(num_groups=2, reduction_axes=(1, 2))),
        ("BatchNorm", dict(momentum=0.5, use_scale=False, epsilon=0.1)),
        ("BatchNorm", dict(use_fast_variance=False, use_bias=False)),
        ("BatchNorm", dict(use_running_average=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_norms_take_the_options_of_flax(name, options):
    assert_layers_agree(name, 6, x=ROWS, **options)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"])
def test_a_mask_excludes_elements_as_in_flax(name):
    assert_layers_agree(name, x=IMAGES, call=lambda layer, x: layer(x, mask=MASK))


def test_batch_norm_takes_another_axis():
    assert_layers_agree("BatchNorm", 4, axis=1, x=IMAGES)


@pytest.mark.parametrize("x", [IMAGES, ROWS[0]], ids=["images", "examples with one axis"])
def test_a_mapped_axis_extends_the_statistics(x):
    results = []
    for module in (jaxbp.nnx, nnx):
        layer = make(module, "BatchNorm", axis_name="devices")
        y = nnx.vmap(lambda layer, x: layer(x), axis_name="devices", in_axes=(None, 0))(layer, x)
        results.append((y, state_of(layer)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


def test_running_averages_keep_their_digits_in_half_precision():
    layer = make(jaxbp.nnx, "BatchNorm", dtype=jnp.bfloat16, use_running_average=True)
    layer.mean[...] = jnp.full(6, 1 + 2**-9)
    y = layer(jnp.ones((2, 6)))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), -(2**-9), rtol=0.01)


@pytest.mark.parametrize(
    ("name", "options", "axis"), [("LayerNorm", {}, -1), ("BatchNorm", dict(use_fast_variance=False), (0, 1))]
)
def test_the_variance_of_numbers_far_from_zero_keeps_its_digits(name, options, axis):
    x = ROWS + 1000
    float64 = np.asarray(x, np.float64)
    expected = (float64 - float64.mean(axis, keepdims=True)) / float64.std(axis, keepdims=True)
    np.testing.assert_allclose(make(jaxbp.nnx, name, epsilon=0.0, **options)(x), expected, atol=1e-3)


def test_statistics_that_are_not_chosen_are_an_error():
    with pytest.raises(ValueError, match="use_running_average"):
        make(jaxbp.nnx, "BatchNorm", use_running_average=None)(ROWS)


def test_a_view_in_evaluation_leaves_the_running_averages():
    layers = [make(module, "BatchNorm") for module in (jaxbp.nnx, nnx)]
    assert_agree(*layers, ROWS, call=lambda layer, x: layer(x, use_running_average=True))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"])
def test_a_number_is_an_error(name):
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        make(jaxbp.nnx, name)(jnp.float32(1))


def test_options_that_only_flax_has_are_refused_with_an_implementation():
    wanted = "^LayerNorm: implementation='xla' does not take reduction_axes; wants 'autodiff' or None"
    with pytest.raises(NotImplementedError, match=wanted):
        make(jaxbp.nnx, "LayerNorm", reduction_axes=1, implementation="xla")(ROWS)
    with pytest.raises(NotImplementedError, match=r"^GroupNorm: implementation='xla' does not take axis_name"):
        make(jaxbp.nnx, "GroupNorm", axis_name="devices", implementation="xla")
    with pytest.raises(NotImplementedError, match=r"^RMSNorm: implementation='pallas' does not take mask"):
        make(jaxbp.nnx, "RMSNorm", implementation="pallas")(IMAGES, mask=MASK)
