import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax import lax

from jaxbp.ops.conv import _layouts as layouts


@pytest.mark.parametrize("value", [None, ("NHWC", "HWIO", "NHWC"), ["CWNH", "IOHW", "NCWH"]], ids=str)
def test_dimension_numbers_are_those_of_lax(value):
    expected = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), value and tuple(value))
    found = layouts.dimension_numbers("op", value)
    assert found == expected
    assert layouts.dimension_numbers("op", found) == expected


@pytest.mark.parametrize("value", ["NHWC", ("NHWC", "HWIO"), ("NHWC", "HWIO", "NHHC"), ("NWC", "WIO", "NWC"), 3])
def test_what_describes_no_layouts_is_refused(value):
    with pytest.raises(ValueError, match=r"^op: dimension_numbers is .*; wants None or three layouts"):
        layouts.dimension_numbers("op", value)


@pytest.mark.parametrize("channel_axis", [1, 2, 3, -1, -2, -3])
def test_arrange_puts_the_channels_second_and_restore_puts_them_back(channel_axis):
    (nchw,) = normal((2, 3, 4, 5))
    a = jnp.moveaxis(nchw, 1, channel_axis)
    layout = layouts.of_images("op", channel_axis=channel_axis)
    arranged = layouts.arrange("op", "x", a, layout, 2, 3, 4, 5)
    np.testing.assert_array_equal(arranged, nchw)
    np.testing.assert_array_equal(layouts.restore(arranged, layout), a)


def test_the_default_layout_adds_no_transpose():
    (a,) = normal((2, 3, 4, 5))
    layout = layouts.of_images("op")
    assert layouts.arrange("op", "x", a, layout, 2, 3, 4, 5) is a and layouts.restore(a, layout) is a


def test_the_error_about_a_shape_names_the_axes_in_the_layout_of_the_caller():
    with pytest.raises(ValueError, match=r"^op: x has shape \(2, 3\); wants \(batch, height, width, channels\)"):
        layout = layouts.of_images("op", channel_axis=-1)
        layouts.arrange("op", "x", jnp.zeros((2, 3)), layout, "batch", "channels", "height", "width")
