import functools

import jax.numpy as jnp
import numpy as np

import jaxbp
from jaxbp.verify.arguments import bind, name_of, take_apart


def op(x, layers, labels, *more):
    return x * layers["w"], labels, *more


X, W = np.ones(2, np.float32), np.full(2, 3.0, np.float32)
TAKEN = take_apart(op, (X, {"w": W}, np.array([1, 2]), 2.0))


def test_arrays_are_named_by_parameter_and_place():
    assert TAKEN.names == ("x", "layers.w", "labels", "argument 3")
    assert TAKEN.float_names == ("x", "layers.w", "argument 3")


def test_positions_are_those_of_the_floats_of_some_arguments():
    assert TAKEN.positions(None) == [0, 1, 3]
    assert TAKEN.positions([1, 2]) == [1]


def test_a_function_of_the_floats_has_the_rest_as_it_was():
    product, more = TAKEN.of_floats(op)(X, 2 * W, jnp.float32(5))
    np.testing.assert_array_equal(product, 6)
    assert more == 5


def test_only_what_takes_an_implementation_is_given_one():
    assert bind(op, "xla", {}).keywords == {}
    assert bind(jaxbp.relu, "xla", {}).keywords == {"implementation": "xla"}


def test_names_are_those_of_the_function_within():
    pair = jaxbp.Pair(jnp.sin, {"xla": lambda dy, x: dy * jnp.cos(x)}, name="sine")
    assert (name_of(functools.partial(op, X)), name_of(pair)) == ("op", "sine")
