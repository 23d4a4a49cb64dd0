import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, draw_cotangents, in_float64, normal, value_and_gradients
from hypothesis import strategies as st

from jaxbp import conv2d, linear, max_pool2d

# An interpreted kernel takes a second to compile per shape.
few = hypothesis.settings(
    max_examples=5, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
)
batches = st.sampled_from([1, 2, 7, 127, 128, 129, 257])
small = st.integers(1, 3)
pairs = st.tuples(small, small)


def _check(function, arrays, **options):
    ops = {name: functools.partial(function, **options, implementation=name) for name in ("autodiff", "xla", "pallas")}
    cotangents = draw_cotangents(ops["autodiff"], arrays)
    expected = in_float64(value_and_gradients(ops.pop("autodiff")), arrays, cotangents)
    for op in ops.values():
        assert_close(value_and_gradients(op)(arrays, cotangents), expected, "float32")


@few
@hypothesis.given(st.data())
def test_conv2d(data):
    batch, channels, filters = data.draw(batches), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    window, stride, more = data.draw(pairs), data.draw(pairs), data.draw(pairs)
    padding = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    size = [f + m for f, m in zip(window, more, strict=True)]
    arrays = normal((batch, channels, *size), (filters, channels, *window), (filters,))
    _check(conv2d, arrays, stride=stride, padding=padding)


@few
@hypothesis.given(st.data())
def test_max_pool2d(data):
    batch, channels = data.draw(batches), data.draw(small)
    window, stride, more = data.draw(pairs), data.draw(pairs), data.draw(pairs)
    padding = tuple(data.draw(st.integers(0, f - 1)) for f in window)
    shape = (batch, channels, *(f + m for f, m in zip(window, more, strict=True)))
    x = jax.random.permutation(jax.random.key(0), jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)
    _check(max_pool2d, (x,), window=window, stride=stride, padding=padding)


@few
@hypothesis.given(st.lists(st.sampled_from([1, 2, 3, 43, 129]), max_size=2), st.sampled_from([1, 2, 5, 11]), small)
def test_linear(batch, in_features, out_features):
    _check(linear, normal((*batch, in_features), (out_features, in_features), (out_features,)))
