import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, compare_with_twin, formulas, normal

import jaxbp
from jaxbp.pairing import IMPLEMENTATIONS

NWC = ("NWC", "WIO", "NWC")


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", "CAUSAL", 1, ((2, 1),)], ids=str)
def test_conv1d_is_flax_conv(padding):
    x, w, b = normal((2, 7, 3), (3, 3, 4), (4,))
    layer = flax.linen.Conv(4, 3, strides=2, padding=padding)
    twin = lambda x, w, b: layer.apply({"params": {"kernel": w, "bias": b}}, x)  # noqa: E731
    ours = functools.partial(jaxbp.conv1d, stride=2, padding=padding, dimension_numbers=NWC)
    compare_with_twin(ours, twin, (x, w, b), IMPLEMENTATIONS)


@formulas
@pytest.mark.parametrize("dilation", [1, 2])
def test_depthwise_causal_conv1d_is_flax_conv(dilation, implementation):
    x, w, b = normal((2, 9, 4), (4, 1, 4), (4,))
    layer = flax.linen.Conv(4, 4, padding="CAUSAL", feature_group_count=4, kernel_dilation=dilation)
    twin = lambda x, w, b: layer.apply({"params": {"kernel": w, "bias": b}}, x)  # noqa: E731
    options = dict(padding="CAUSAL", groups=4, dilation=dilation, dimension_numbers=NWC, implementation=implementation)
    compare_with_twin(functools.partial(jaxbp.conv1d, **options), twin, (x, w, b))
    y, vjp = jax.vjp(twin, x, w, b)
    (dy,) = normal(y.shape, seed=1)
    assert_close(jaxbp.conv1d_backward(dy, x, w, **options), vjp(dy), "float32")


@formulas
def test_causal_conv1d_does_not_look_ahead(implementation):
    x, w = normal((1, 2, 8), (2, 1, 4))
    conv = functools.partial(jaxbp.conv1d, w=w, padding="CAUSAL", groups=2, implementation=implementation)
    later = conv(x.at[:, :, 5:].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(later[0, 0]), np.arange(8) >= 5)
    assert_close(later[:, :, :5], conv(x)[:, :, :5], "float32")


@formulas
def test_without_a_bias_and_in_the_default_layout_it_is_conv_general_dilated(implementation):
    x, w = normal((2, 4, 9), (6, 2, 3))
    options = dict(padding=((2, 1),), groups=2)
    twin = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), options["padding"], feature_group_count=2, dimension_numbers=("NCH", "OIH", "NCH")
    )
    compare_with_twin(functools.partial(jaxbp.conv1d, **options, implementation=implementation), twin, (x, w))
