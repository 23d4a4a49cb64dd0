import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_implementation

import jaxbp
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


ROW, ROWS = jnp.array([-1.0, 0.2, 3.0]), jnp.array([[-2.0, -0.5, 5.0], [0.5, 1.0, 2.5]])
BOUNDS = [
    (jnp.float32(-0.1), 0.1),
    (ROW, None),
    (None, ROW[:1]),
    (ROW, ROW - 1),
    (jnp.asarray(-0.1), jnp.bfloat16(2)),
]


@every_implementation
@pytest.mark.parametrize("bounds", BOUNDS, ids=range(len(BOUNDS)))
def test_clip_to_arrays_is_that_of_jnp_and_bounds_get_gradients(bounds, implementation):
    given = [bound for bound in bounds if bound is not None]

    def of(clip):
        def run(arr, *given):
            arrays, rest = (arr,), list(given)
            return clip(*arrays, *(None if bound is None else rest.pop(0) for bound in bounds))

        dy = jnp.arange(1.0, 7.0).reshape(2, 3)
        return jax.jit(lambda *a: (run(*a), jax.vjp(run, *a)[1](dy.astype(run(*a).dtype))))(ROWS, *given)

    found, expected = of(lambda *a: jaxbp.clip(*a, implementation=implementation)), of(jnp.clip)
    assert [a.dtype for a in jax.tree.leaves(found)] == [a.dtype for a in jax.tree.leaves(expected)]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@every_implementation
def test_nan_in_an_array_or_in_its_bounds_is_nan_after_clip(implementation):
    clip = functools.partial(jaxbp.clip, implementation=implementation)
    nan, zero = jnp.float32(jnp.nan), jnp.zeros(())
    assert all(map(jnp.isnan, (clip(nan, zero, zero), clip(zero, nan, zero), clip(zero, zero, nan))))


@every_implementation
def test_at_a_bound_that_is_an_array_the_clipped_array_gets_the_gradient(implementation):
    clip = jax.grad(lambda *a: jnp.sum(jaxbp.clip(*a, implementation=implementation)), (0, 1, 2))
    darr, dmin, dmax = clip(jnp.arange(5.0), jnp.float32(1), jnp.float32(3))
    np.testing.assert_array_equal(darr, [0, 1, 1, 1, 0])
    assert dmin == dmax == 1
    found = jaxbp.clip_backward(jnp.ones(5), jnp.arange(5.0), jnp.float32(1), 3, implementation=implementation)
    np.testing.assert_array_equal(found, darr)
