import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.ops.pointwise._elementwise import Elementwise, _broadcast_axes

PRODUCT = Elementwise("product", jnp.multiply, lambda dy, a, b: (dy * b, dy * a))


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 3, 4), ()), ((4,), (0, 1)), ((3, 1), (0, 2)), ((1, 3, 4), (0,)), ((), (0, 1, 2))]
)
def test_gradients_are_summed_over_the_axes_of_the_broadcast(shape, axes):
    assert _broadcast_axes((2, 3, 4), np.ones(shape)) == axes


def test_an_axis_of_one_that_stays_one_is_not_summed():
    assert _broadcast_axes((2, 1), np.ones((2, 1))) == ()


def test_each_gradient_has_its_arguments_shape_and_the_same_number_from_a_kernel():
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.float32([[2.0], [3.0]])
    for implementation in ("xla", "pallas"):
        da, db = jax.jit(lambda *x, i=implementation: PRODUCT.vjp(*x, implementation=i))(np.ones_like(a), a, b)
        np.testing.assert_array_equal(da, np.broadcast_to(b, a.shape))
        np.testing.assert_array_equal(db, a.sum(1, keepdims=True))


def test_half_precisions_are_computed_in_float32():
    third = Elementwise("third", lambda x: (x + 1) - 1, lambda dy, x: dy)
    x = jnp.asarray([2.0**-9], jnp.bfloat16)  # adding it to 1 in bfloat16 gives 1
    assert third(x, implementation="xla").dtype == jnp.bfloat16
    np.testing.assert_array_equal(third(x, implementation="xla"), x)
