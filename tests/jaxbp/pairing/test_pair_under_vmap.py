import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, normal

import jaxbp
from jaxbp import Pair
from jaxbp.pairing.pair import mapped_axis_first


def saves_along_another_axis(x):
    """`jnp.sin`'s result has the mapped axis elsewhere."""
    y = jnp.moveaxis(jnp.sin(jnp.moveaxis(x, 0, 1)), 1, 0)
    return y, (x,)


PAIR = Pair(jnp.sin, {"xla": lambda dy, x: dy * jnp.cos(x)}, save=saves_along_another_axis)
CASES = {
    "a pair": (PAIR, jnp.sin, [(3, 3, 3)], 2),
    "a scan": (
        lambda x: jaxbp.checkpointed_scan(lambda c, a: (jnp.sin(c) + a, 2 * c), x, jnp.ones((3, 3)), memory=1),
        lambda x: jax.lax.scan(lambda c, a: (jnp.sin(c) + a, 2 * c), x, jnp.ones((3, 3))),
        [(3, 3)],
        0,
    ),
    "max_pool2d": (
        lambda x: jaxbp.max_pool2d(x, 2, stride=1, implementation="xla"),
        lambda x: jaxbp.max_pool2d(x, 2, stride=1, implementation="autodiff"),
        [(3, 3, 4, 4, 3)],
        -1,
    ),
    "max": (lambda x: jaxbp.max(x, axis=2, implementation="xla"), lambda x: x.max(2), [(3, 3, 3, 3)], -1),
    "conv2d": (
        lambda x, w: jaxbp.conv2d(x, w, implementation="xla"),
        lambda x, w: jaxbp.conv2d(x, w, implementation="autodiff"),
        [(3, 3, 2, 4, 4), (3, 3, 2, 2, 2)],
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mapped_values_and_gradients_are_those_without_a_hand_written_backward(case):
    function, plain, shapes, axis = CASES[case]
    arrays = normal(*shapes)

    def results(f):
        def loss(*arrays):
            y = jax.jit(jax.vmap(f, in_axes=axis))(*arrays)
            return sum(jnp.sum(jnp.sin(jnp.arange(a.size).reshape(a.shape)) * a) for a in jax.tree.leaves(y)), y

        return jax.value_and_grad(loss, has_aux=True)(*arrays)

    assert_close(results(function), results(plain), "float32")


@pytest.mark.parametrize("implementation", ["xla", None])
def test_arguments_that_are_not_mapped_have_the_gradients_of_each_call(implementation):
    images, w, dy = normal((2, 3, 4, 4), (2, 3, 3, 3), (5, 2, 2, 2, 2))

    def gradients(dy, implementation):
        op = functools.partial(jaxbp.conv2d, implementation=implementation)
        return dy * jax.jit(op)(images, w), *jax.vjp(op, images, w)[1](dy)

    mapped = jax.vmap(functools.partial(gradients, implementation=implementation))
    each = [gradients(one, "autodiff") for one in dy]
    assert_close(mapped(dy), jax.tree.map(lambda *a: jnp.stack(a), *each), "float32")


def test_it_is_the_identity_under_every_transformation():
    (x,) = normal((2, 3))
    f = lambda x: mapped_axis_first({"a": jnp.sin(x)})[0]["a"]  # noqa: E731
    assert_close(f(x), jnp.sin(x), 1e-7)
    assert_close(jax.jvp(f, (x,), (x,))[1], x * jnp.cos(x), "float32")
    assert_close(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x)))(x)))(x), -jnp.sin(x), "float32")
    assert "mapped_axis_first" not in jax.jit(jax.vmap(f, in_axes=1)).lower(x).as_text()


def test_a_residual_that_is_also_a_result_remains_one_array():
    def same(x):  # traced, because outside of a trace every array remains the same one
        results, residuals = mapped_axis_first({"a": x}, (x, x + 1))
        assert results["a"] is residuals[0] and results["a"] is not x
        return residuals

    jax.eval_shape(same, jnp.ones((2, 3)))
