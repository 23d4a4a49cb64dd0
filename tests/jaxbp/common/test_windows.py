"""The geometry of windows, compared with the windows that XLA counts."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxbp.common.windows import is_nonoverlapping, output_size, pool_options, window_padding

CASES = list(itertools.product([(5, 7), (8, 3)], [(2, 3), (1, 1)], [(1, 1), (2, 3)], [0, (1, 0), "SAME", "VALID"]))


@pytest.mark.parametrize(("size", "window", "stride", "padding"), CASES)
def test_there_are_as_many_windows_as_xla_has(size, window, stride, padding):
    pads = window_padding("op", padding, size, window, stride)
    reduced = jax.eval_shape(lambda x: lax.reduce_window(x, 0.0, lax.add, window, stride, pads), jnp.zeros(size))
    assert output_size(size, window, stride=stride, padding=pads) == reduced.shape


def test_dilation_spreads_the_window():
    assert output_size((9, 9), (3, 2), stride=(1, 2), padding=((0, 0), (1, 1)), dilation=(2, 4)) == (5, 4)


@pytest.mark.parametrize("padding", ["FULL", -1, (1, 2, 3), 1.5])
def test_a_padding_that_is_none_is_refused_by_name(padding):
    with pytest.raises(ValueError, match=r"^op: padding is "):
        window_padding("op", padding, (4, 4), (2, 2), (1, 1))


@pytest.mark.parametrize(
    ("window", "padding", "message"),
    [(2, 2, "padding is .* wants less than the window"), (6, 0, "the window, 6 x 6, is larger than the input, 4 x 4")],
)
def test_a_pool_refuses_windows_of_padding_alone_or_beyond_the_input(window, padding, message):
    with pytest.raises(ValueError, match=f"^op: {message}"):
        pool_options("op", (4, 4), window, None, padding)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "result"),
    [((4, 6), None, 0, True), ((4, 5), None, 0, False), ((4, 6), 1, 0, False), ((4, 6), None, 1, False)],
)
def test_windows_stand_side_by_side_where_each_position_is_in_one(size, stride, padding, result):
    assert is_nonoverlapping(**pool_options("op", size, 2, stride, padding)) == result
