import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxbp import Pair
from jaxbp.verify import check
from jaxbp.verify.derivatives import float64
from jaxbp.verify.differences import held

X = np.array([0.3, -1.2, 0.8])
FUNCTIONS = {
    "product": lambda x: lax.stop_gradient(x) * x,
    "jit": lambda x: jax.jit(lambda x: lax.stop_gradient(x) * x)(x),
    "remat": lambda x: jax.checkpoint(lambda x: lax.stop_gradient(x) * x)(x),
    "scan": lambda x: lax.scan(lambda c, a: (c + 1, lax.stop_gradient(a + c) * a), 0.0, x)[1] - x * jnp.arange(3),
    "cond": lambda x: lax.cond(x[0] > 0, lambda x: lax.stop_gradient(x) * x, lambda x: x, x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 1, lambda s: (1, lax.stop_gradient(s[1]) * s[1]), (0, x))[1],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stopped_gradient_has_its_value_at_the_base(name):
    with float64():
        found = held(FUNCTIONS[name])((X + 0.5,), (X,))
    np.testing.assert_allclose(found, X * (X + 0.5), rtol=1e-12)


quickly = functools.partial(check, implementations=["xla"], added=())
ROUND = lambda x: x + lax.stop_gradient(jnp.round(x) - x)  # noqa: E731
# name -> (forward, right backward, wrong backward)
STOPPED = {
    "x stop(x)": (FUNCTIONS["product"], lambda dy, x: dy * lax.stop_gradient(x), lambda dy, x: dy * 2 * x),
    "straight through": (ROUND, lambda dy, x: dy, lambda dy, x: 0 * dy),
}


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("order", [1, 2])
def test_a_backward_that_honours_it_passes_and_one_that_forgets_it_fails(name, order):
    forward, right, wrong = STOPPED[name]
    quickly(Pair(forward, {"xla": right}, name="op"), X, order=order).raise_if_failed()
    failures = quickly(Pair(forward, {"xla": wrong}, name="op"), X, order=1).failures
    assert failures and {row.order for row in failures} == {1}


def test_a_custom_rule_that_forgets_it_fails():
    @jax.custom_vjp
    def product(x):
        return lax.stop_gradient(x) * x

    product.defvjp(lambda x: (product(x), x), lambda x, dy: (dy * 2 * x,))
    assert not check(product, X, order=1, added=())


def straight_through(factor):
    @jax.custom_vjp
    def function(x):
        return jnp.round(x)

    function.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (factor * dy,))
    return function


def test_an_intended_gradient_is_that_of_the_surrogate():
    check(straight_through(1), X.astype(np.float32), gradient_of=lambda x: x).raise_if_failed()
    assert not check(straight_through(1), X, order=1, added=())
    assert not check(straight_through(2), X, order=1, added=(), gradient_of=lambda x: x)


def test_with_a_surrogate_the_value_is_still_that_of_the_forward():
    pair = Pair(jnp.round, {"xla": lambda dy, x: dy}, save=lambda x: (jnp.round(x) + 1, (x,)), name="op")
    failures = quickly(pair, X, order=1, gradient_of=lambda x: x).failures
    assert {row.order for row in failures} == {0}


@pytest.mark.parametrize("name", ["reversal", "clipping", "scaling"])
def test_other_intended_gradients(name):
    @jax.custom_vjp
    def function(x):
        return 1.0 * x

    clipped = lambda dy: jnp.where(jnp.abs(X) < 1, dy, 0)  # noqa: E731
    backward = {"reversal": lambda dy: -dy, "clipping": clipped, "scaling": lambda dy: 3 * dy}
    surrogate = {"reversal": lambda x: -x, "clipping": lambda x: jnp.clip(x, -1, 1), "scaling": lambda x: 3 * x}
    function.defvjp(lambda x: (1.0 * x, None), lambda _, dy: (backward[name](dy),))
    check(function, X, added=(), gradient_of=surrogate[name]).raise_if_failed()
    assert not check(function, X, added=(), order=1)


def test_a_surrogate_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"check: gradient_of=<lambda> has results of shapes \[\(\)\]; wants \[\(3,\)\]"
    ):
        check(straight_through(1), X, gradient_of=lambda x: x.sum())
