"""Vectors and tiles: their lengths."""

import jax
import pytest

from pallas_kernels.core.layouts import largest_divisor, vector_length


@pytest.mark.parametrize(
    ("lanes", "dtypes", "length"),
    [
        (128, ["float32"], 128),
        (256, ["float32"], 256),
        (384, ["float32"], 128),
        (512, ["float32"], 512),
        (1024, ["float32", "float32"], 512),
        (1024, ["float32", "uint8"], 256),
        (1024, ["bfloat16", "int32"], 256),
    ],
)
def test_vectors_are_the_longest_that_divide_the_lanes_and_load_at_once(lanes, dtypes, length):
    assert vector_length(*(jax.ShapeDtypeStruct((3, lanes), dtype) for dtype in dtypes)) == length


@pytest.mark.parametrize(
    ("n", "limit", "divisor"), [(12, 8, 6), (7, 8, 7), (13, 8, 1), (1, 8, 1), (8, 0, 1), (0, 8, 1)]
)
def test_largest_divisor(n, limit, divisor):
    assert largest_divisor(n, limit) == divisor
