"""A user's own function, paired with a backward of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.test_util import check_grads

import jaxbp
from jaxbp import Op, Pair
from pallas_kernels.pointwise.elementwise import elementwise

X = jnp.array([-1.5, 0.5, 2.0])


def cube(x):
    return x**3


def cube_gradient(dy, x):
    return 3 * x**2 * dy


FORMULA_ALONE = Pair(cube, {"xla": cube_gradient})
WITH_KERNEL = Pair(cube, {"xla": cube_gradient, "pallas": functools.partial(elementwise, cube_gradient)})
every_cube = pytest.mark.parametrize(
    ("pair", "implementation"),
    [(FORMULA_ALONE, "xla"), (FORMULA_ALONE, None), *((WITH_KERNEL, name) for name in (*jaxbp.IMPLEMENTATIONS, None))],
)


def total(pair, implementation):
    return lambda *arrays: jnp.sum(pair(*arrays, implementation=implementation))


@every_cube
def test_the_forward_is_the_function_itself(pair, implementation):
    assert_close(pair(X, implementation=implementation), X**3, "float32")


@every_cube
def test_gradients_of_order_1_2_and_3_are_right(pair, implementation):
    # All at once and jitted, so that the interpreted kernel is compiled once.
    first = jax.grad(total(pair, implementation))
    second = jax.grad(lambda x: jnp.sum(first(x)))
    third = jax.grad(lambda x: jnp.sum(second(x)))
    assert_close(jax.jit(lambda x: (first(x), second(x), third(x)))(X), (3 * X**2, 6 * X, 6 + 0 * X), "float32")


@every_cube
def test_forward_mode_goes_over_the_backward(pair, implementation):
    product = jax.jit(lambda x, v: jax.jvp(jax.grad(total(pair, implementation)), (x,), (v,))[1])
    assert_close(product(X, X), 6 * X * X, "float32")


@pytest.mark.parametrize(("implementation", "times"), [("pallas", 20), ("xla", 10), ("autodiff", 1)])
def test_one_argument_picks_the_backward(implementation, times):
    wrong_on_purpose = {"pallas": lambda dy, x: 20 * dy, "xla": lambda dy, x: 10 * dy}
    pair = Pair(lambda x: 1 * x, wrong_on_purpose, name="identity")
    assert jax.grad(pair)(1.0, implementation=implementation) == times


def test_the_backward_is_an_op_of_its_own():
    assert_close(WITH_KERNEL.backward(X, X, implementation="pallas"), 3 * X**3, "float32")
    assert WITH_KERNEL.backward.name == "cube_backward"


def test_several_arrays_and_results_keep_their_order():
    def polar(r, angle):
        return {"x": r * jnp.cos(angle), "y": r * jnp.sin(angle)}

    def backward(dy, r, angle):
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return dy["x"] * cos + dy["y"] * sin, r * (dy["y"] * cos - dy["x"] * sin)

    pair = Pair(polar, {"xla": backward})
    arrays, cotangents = (X, X + 1), {"x": X, "y": 2 * X}
    assert_close(
        jax.vjp(functools.partial(pair, implementation="xla"), *arrays)[1](cotangents),
        jax.vjp(polar, *arrays)[1](cotangents),
        "float32",
    )


POWER = Pair(
    lambda x, *, power, scale: scale * x**power,
    {"xla": lambda dy, x, *, power, scale: scale * power * x ** (power - 1) * dy},
    name="power",
)


@pytest.mark.parametrize("options", [dict(power=2, scale=3.0), dict(scale=2.0, power=5)], ids=str)
def test_options_reach_the_forward_and_the_backward(options):
    gradients = [jax.grad(total(functools.partial(POWER, **options), name))(X) for name in ("xla", "autodiff")]
    assert_close(*gradients, "float32")


ADD_TO = Pair(
    lambda x, b: x * x if b is None else x * x + b,
    {"xla": lambda dy, x, b: (2 * x * dy, None if b is None else dy)},
    name="add_to",
)


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_an_array_may_be_none(implementation):
    gradient, of_none = jax.grad(total(ADD_TO, implementation), (0, 1))(X, None)
    assert_close(gradient, 2 * X, "float32")
    assert of_none is None


def test_an_array_without_a_gradient_gets_none_from_the_backward():
    take = Pair(lambda x, i: x[i], {"xla": lambda dy, x, i: (jnp.zeros_like(x).at[i].add(dy), None)}, name="take")
    np.testing.assert_array_equal(jax.grad(take)(X, jnp.int32(1)), [0, 1, 0])


def test_the_backward_gets_what_the_forward_saves():
    exp = Pair(jnp.exp, {"xla": lambda dy, y: dy * y}, save=lambda x: (jnp.exp(x), (jnp.exp(x),)))
    assert_close(jax.grad(total(exp, "xla"))(X), jnp.exp(X), "float32")


def test_each_implementation_may_save_something_else():
    save = {"xla": lambda x: (1 * x, (10.0,)), "pallas": lambda x: (1 * x, (20.0,))}
    pair = Pair(lambda x: 1 * x, dict.fromkeys(save, lambda dy, saved: saved * dy), save=save, name="identity")
    assert [float(jax.grad(pair)(1.0, implementation=name)) for name in save] == [10, 20]


def test_a_wrong_backward_is_found_by_check_grads():
    pair = Pair(cube, {"xla": lambda dy, x: 3.1 * x**2 * dy}, name="wrong")
    with pytest.raises(AssertionError):
        check_grads(functools.partial(pair, implementation="xla"), (X,), order=1, modes=("rev",), rtol=2e-2)


LACKING = [
    (FORMULA_ALONE, "pallas", "cube: has no implementation 'pallas'; it has 'xla', 'autodiff'"),
    (FORMULA_ALONE.backward, "autodiff", "cube_backward: has no implementation 'autodiff'; it has 'xla'"),
]


@pytest.mark.parametrize(("op", "implementation", "message"), LACKING)
def test_an_implementation_that_it_lacks_is_refused_with_those_it_has(op, implementation, message):
    assert isinstance(op, Op)
    with pytest.raises(NotImplementedError) as error:
        op(*(X, X)[: 2 if op is FORMULA_ALONE.backward else 1], implementation=implementation)
    assert str(error.value) == message


# -------------------------------------------------------------------------------------------------------------- tracing


def counting(function, calls):
    """`function`, which notes each of its calls."""

    def counted(*arrays):
        calls.append(arrays)
        return function(*arrays)

    return counted


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_jit_traces_the_forward_once(implementation):
    calls = []
    pair = Pair(counting(cube, calls), {"xla": cube_gradient})
    call = jax.jit(functools.partial(pair, implementation=implementation))
    call(X), call(X)
    assert len(calls) == 1


@pytest.mark.parametrize("implementation", ["pallas", "xla", None])
def test_without_jit_no_call_traces_the_forward(implementation):
    calls = []
    pair = Pair(counting(cube, calls), {"xla": cube_gradient, "pallas": cube_gradient})
    jax.grad(total(pair, implementation))(X)
    assert not any(isinstance(x, jax.core.Tracer) for (x,) in calls)


def test_without_jit_a_second_call_does_not_trace_the_kernel_again():
    calls = []
    kernel = functools.partial(elementwise, counting(cube_gradient, calls))
    gradient = jax.grad(total(Pair(cube, {"xla": cube_gradient, "pallas": kernel}), "pallas"))
    gradient(X)
    traces = len(calls)
    gradient(X)
    assert len(calls) == traces


def test_the_implementation_is_part_of_jits_cache_key():
    pair = Pair(lambda x: 1 * x, {"xla": lambda dy, x: 10 * dy}, name="identity")
    gradient = jax.jit(jax.grad(pair), static_argnames="implementation")
    assert [float(gradient(1.0, implementation=name)) for name in ("xla", "autodiff", "xla")] == [10, 1, 10]
