import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from jaxbp.verify import find_nan

X = jnp.array([0.0, 1.0, 4.0])
HERE = __file__


def line_of(function):
    return inspect.getsourcelines(function)[1]


def logarithm(x):
    return jnp.log(x)


def root(x):
    return jnp.sqrt(x)


WRAPPED = {
    "plain": logarithm,
    "jit": jax.jit(logarithm),
    "checkpoint": jax.checkpoint(logarithm),
    "jit of checkpoint of jit": jax.jit(jax.checkpoint(jax.jit(logarithm))),
    "cond": lambda x: jax.lax.cond(x[1] > 0, logarithm, lambda x: x, x),
    "vmap": jax.vmap(logarithm),
    "map": lambda x: jax.lax.map(logarithm, x),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_it_names_the_operation_its_line_and_its_inputs(how):
    found = find_nan(WRAPPED[how], X)
    assert (found.operation, found.op, found.implementation, found.cotangent) == ("log", "", "", False)
    assert found.source == f"{HERE}:{line_of(logarithm) + 1}"
    assert np.min(found.inputs[0]) == 0 and np.isneginf(found.results[0]).any()
    assert str(found).startswith("log: a value becomes inf\n")


def test_it_returns_none_if_values_and_gradients_are_finite():
    assert find_nan(lambda x: jnp.sum(jnp.sin(x)), X) is None


def test_a_value_that_no_result_depends_on_does_not_count():
    assert find_nan(lambda x: jnp.where(jnp.isinf(jnp.log(x)), 0.0, x), X) is None


def test_a_nan_in_the_gradient_of_a_masked_value_is_traced_to_the_division():
    masked = lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))  # noqa: E731
    assert np.isfinite(masked(X)) and np.isnan(jax.grad(masked)(X)).any()
    found = find_nan(masked, X)
    assert found.operation == "div" and np.min(found.inputs[1]) == 0


def test_the_infinities_of_a_mask_do_not_count_but_a_nan_from_them_does():
    masked = lambda x, kept: jax.nn.softmax(jnp.where(jnp.arange(3) < kept, x, -jnp.inf))  # noqa: E731
    assert find_nan(lambda x: masked(x, 2), X) is None
    found = find_nan(lambda x: masked(x, 0), X)
    assert found.operation == "sub" and np.isneginf(found.inputs[0]).all() and np.isnan(found.results[0]).all()


def test_a_loop_names_its_iteration():
    def grow(x):
        return jax.lax.scan(lambda x, i: (jnp.exp(x + i), x), x[1], jnp.arange(8.0))

    found = find_nan(jax.jit(grow), X)
    assert (found.operation, found.loops) == ("exp", ("scan, iteration 3",))
    assert np.isfinite(found.inputs[0]) and np.isposinf(found.results[0])
    outer = find_nan(lambda x: jax.lax.scan(lambda c, _: (0.5 * c, grow(x * c)), x[1], None, length=2), X)
    assert outer.loops == ("scan, iteration 0", "scan, iteration 3")


def test_a_while_loop_of_integers_and_a_loop_backwards_are_followed():
    def lower(x):
        steps = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        return jax.lax.scan(lambda c, a: (c / a, c), 1.0, x * steps, reverse=True)[0]

    found = find_nan(lower, X)
    assert (found.operation, found.loops) == ("div", ("scan, iteration 0",))


@pytest.mark.parametrize("implementation", [*jaxbp.IMPLEMENTATIONS, None])
def test_it_names_an_op_of_jaxbp_and_its_implementation(implementation):
    found = find_nan(lambda x: jaxbp.sqrt(x, implementation=implementation), X)
    assert found.op == "sqrt"
    assert found.implementation == (implementation or "xla")
    assert found.source.startswith(HERE) and "/pointwise/" in found.inner_source
    assert f"in sqrt, implementation={found.implementation!r}" in str(found)


def twice(x):
    return 2 * x


@jax.custom_vjp
def with_backward(x):
    return twice(x)


def quotient(x, dy):
    return (dy / x,)


@jax.custom_vjp
def with_forward(x):
    return twice(x)


def saved_logarithm(x):
    return twice(x), jnp.log(x)


@jax.custom_jvp
def with_jvp(x):
    return twice(x)


@with_jvp.defjvp
def tangent(primals, tangents):
    return twice(*primals), tangents[0] / primals[0]


def quotient_of_pair(dy, x):
    return dy / x


with_backward.defvjp(lambda x: (twice(x), x), quotient)
with_forward.defvjp(saved_logarithm, lambda log, dy: (dy * log,))
PAIR = jaxbp.Pair(twice, {"xla": quotient_of_pair}, name="pair")
# name -> (function, operation, the rule that contains it)
RULES = {
    "backward": (with_backward, "div", quotient),
    "forward": (with_forward, "log", saved_logarithm),
    "jvp": (with_jvp, "div", tangent),
    "pair": (PAIR, "div", quotient_of_pair),
    "pair, xla": (lambda x: PAIR(x, implementation="xla"), "div", quotient_of_pair),
}
AROUND = {
    "nothing": lambda f: f,
    "jit": lambda f: jax.jit(lambda x: f(x).sum()),
    "scan of checkpoint": lambda f: lambda x: jax.lax.scan(jax.checkpoint(lambda c, _: (f(c), None)), x, None, 2)[0],
    "cond in vmap": lambda f: jax.vmap(lambda x: jax.lax.cond(x > -1, f, lambda x: x, x)),
    "a training step": lambda f: jax.jit(jax.value_and_grad(lambda x: f(x).sum())),
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("name", RULES)
def test_it_names_the_line_in_a_custom_rule(name, how):
    function, operation, rule = RULES[name]
    found = find_nan(AROUND[how](function), X)
    assert found.operation == operation
    lines, first = inspect.getsourcelines(rule)
    assert found.source == f"{HERE}:{first + len(lines) - 1}"


def test_it_names_the_line_in_a_rule_that_jax_has_traced_before():
    step = jax.jit(jax.grad(lambda x: with_backward(x).sum()))
    assert not np.isfinite(step(X)).all()
    assert find_nan(step, X).source == f"{HERE}:{line_of(quotient) + 1}"


def test_a_backward_may_divide_by_a_constant_zero():
    @jax.custom_vjp
    def op(x):
        return twice(x)

    op.defvjp(lambda x: (twice(x), None), lambda _, dy: (dy / 0.0,))
    found = find_nan(op, X)
    assert (found.operation, found.cotangent) == ("div", True)
    assert find_nan(lambda x: x * jnp.log(jnp.float32(-1.0)), X).operation == "log"


def test_it_enters_an_op_of_jaxbp_within_a_backward():
    pair = jaxbp.Pair(twice, {"xla": lambda dy, x: jaxbp.divide(dy, x)}, name="pair")
    found = find_nan(pair, X)
    assert (found.operation, found.op, found.cotangent) == ("div", "pair", True)


def test_an_argument_that_is_not_finite_is_named():
    found = find_nan(lambda tree, n: jnp.sum(tree["w"] * n), {"w": jnp.array([1.0, jnp.nan])}, jnp.int32(2))
    assert (found.operation, found.source) == ("argument", "<lambda>, argument [0]['w']")
    assert find_nan(lambda x, unused: x, X, jnp.array(jnp.nan)) is None


def test_options_and_functions_without_floating_arguments_are_taken():
    scaled = lambda n, *, k: k / n  # noqa: E731
    assert find_nan(scaled, jnp.int32(0), k=2.0).operation == "div"
    assert find_nan(scaled, jnp.int32(1), k=2.0) is None
