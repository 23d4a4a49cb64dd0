import inspect
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxbp
from jaxbp.common.windows import PoolOptions, Windows, output_size, pool_windows, window_padding

CASES = list(
    itertools.product(
        [(5, 7), (8, 3)], [(2, 3), (1, 1)], [(1, 1), (2, 3)], [0, (1, 0), ((0, 1), 1), "SAME", "SAME_LOWER"]
    )
)


@pytest.mark.parametrize(("size", "window", "stride", "padding"), CASES)
def test_there_are_as_many_windows_as_xla_has(size, window, stride, padding):
    pads = window_padding("op", padding, size, window, stride)
    reduced = jax.eval_shape(lambda x: lax.reduce_window(x, 0.0, lax.add, window, stride, pads), jnp.zeros(size))
    assert output_size(size, window, stride=stride, padding=pads) == reduced.shape


def test_dilation_spreads_the_window():
    assert output_size((9, 9), (3, 2), stride=(1, 2), padding=((0, 0), (1, 1)), dilation=(2, 4)) == (5, 4)


def test_causal_padding_of_one_axis_is_all_before():
    assert window_padding("op", "CAUSAL", (9,), (4,), (1,)) == ((3, 0),)


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "dilation", "windows"),
    [
        (5, 2, 2, 0, 1, 3),
        (5, 2, 4, 0, 1, 2),
        (5, 3, 4, 1, 1, 2),
        (4, 2, 4, 1, 1, 2),
        (3, 2, 4, 1, 1, 1),
        (6, 2, 2, 0, 2, 3),
    ],
    ids=str,
)
def test_ceil_mode_adds_the_last_window_unless_it_starts_in_the_padding(
    size, window, stride, padding, dilation, windows
):
    options = dict(stride=stride, padding=padding, dilation=dilation)
    rounded_up, given = pool_windows("op", (size, size), window, **options, ceil_mode=True)
    assert rounded_up.output_size == (windows, windows)
    assert given == ((padding, padding), (padding, padding))
    (before, after), _ = rounded_up.padding
    last = (windows - 1) * stride - before
    assert before == padding and after >= padding and last < size
    assert last + rounded_up.extent[0] <= size + after


@pytest.mark.parametrize("padding", ["FULL", "CAUSAL", -1, (1, 2, 3), 1.5, ((1, 2), (3,)), ((0, -1), (0, 0))])
def test_a_padding_that_is_none_is_refused_by_name(padding):
    with pytest.raises(ValueError, match=r"^op: padding is "):
        window_padding("op", padding, (4, 4), (2, 2), (1, 1))


@pytest.mark.parametrize(
    ("window", "padding", "message"),
    [(2, 2, "padding is .* wants less than the size"), (6, 0, "the window is 6 x 6; wants at most 4 x 4, the size of")],
)
def test_a_pool_refuses_windows_of_padding_alone_or_beyond_the_input(window, padding, message):
    with pytest.raises(ValueError, match=f"^op: {message}"):
        pool_windows("op", (4, 4), window, padding=padding)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "result"),
    [((4, 6), None, 0, True), ((4, 5), None, 0, False), ((4, 6), 1, 0, False), ((4, 6), None, 1, False)],
)
def test_windows_stand_side_by_side_where_each_position_is_in_one(size, stride, padding, result):
    windows, _ = pool_windows("op", size, 2, stride=stride, padding=padding)
    assert windows.nonoverlapping == result


def test_the_signature_of_every_pool_shows_the_options_of_pools_with_their_defaults():
    for pool in (jaxbp.max_pool2d, jaxbp.max_pool2d_backward, jaxbp.avg_pool2d, jaxbp.logic_or_pool2d):
        parameters = inspect.signature(pool).parameters
        shown = {name: parameters[name].default for name in PoolOptions.__annotations__}
        assert shown == dict(stride=None, padding=0, dilation=1, ceil_mode=False, channel_axis=1)
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_windows_describe_themselves_to_reduce_window():
    windows = Windows((7, 9), (2, 3), (2, 1), ((1, 0), (0, 2)), (3, 2))
    x = jax.ShapeDtypeStruct((1, 1, 7, 9), jnp.float32)
    reduced = jax.eval_shape(lambda x: lax.reduce_window(x, 0.0, lax.add, **windows.arguments()), x)
    assert reduced.shape[2:] == windows.output_size
    assert windows.extent == (4, 5) and windows.positions == 6
