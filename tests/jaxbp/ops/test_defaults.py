import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import results_of, value_and_gradients

import jaxbp

NCW = dict(padding="CAUSAL", groups=128, dimension_numbers=("NCW", "OIW", "NCW"))
LINEAR, DOT, CONV1D = [(4, 5), (3, 5), (3,)], [(4, 5), (5, 3)], [(2, 128, 9), (128, 1, 4)]
WEIGHTS, MORE_WEIGHTS = [(4, 10), (4, 10)], [(4, 11), (4, 11)]


@pytest.mark.parametrize(
    ("op", "shapes", "dtype", "options", "is_autodiff"),
    [
        (jaxbp.linear, LINEAR, "float32", {}, True),
        (jaxbp.linear, LINEAR, "bfloat16", {}, False),
        (jaxbp.linear_backward, [(4, 3), *LINEAR[:2]], "float32", {}, False),
        (jaxbp.dot, DOT, "float32", {}, False),
        (jaxbp.dot_backward, [(4, 3), *DOT], "float32", {}, True),
        (jaxbp.dot_backward, [(4, 3), *DOT], "bfloat16", {}, False),
        (jaxbp.conv1d, CONV1D, "float32", NCW, True),
        (jaxbp.conv1d, CONV1D, "bfloat16", NCW, False),
        (jaxbp.conv1d_backward, [(2, 128, 9), *CONV1D], "float32", NCW, False),
        (jaxbp.softmax_cross_entropy, WEIGHTS, "float32", {}, True),
        (jaxbp.softmax_cross_entropy, MORE_WEIGHTS, "float32", {}, False),
        (jaxbp.softmax_cross_entropy_backward, [(4,), *WEIGHTS], "float32", {}, True),
        (jaxbp.softmax_cross_entropy_backward, [(4,), (4, 10), "labels"], "float32", {}, False),
    ],
)
def test_on_a_gpu_the_default_is_autodiff_where_it_is_faster(op, shapes, dtype, options, is_autodiff, on_hopper):
    arrays = [jnp.zeros(4, jnp.int32) if shape == "labels" else jnp.ones(shape, dtype) for shape in shapes]

    function, arguments = functools.partial(op, **options), arrays
    if not op.__name__.endswith("_backward"):
        function, arguments = value_and_gradients(function), (arrays, results_of(function, arrays))
    program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert set(re.findall(r"/(autodiff|xla|pallas)/", program)) == {"autodiff" if is_autodiff else "xla"}
