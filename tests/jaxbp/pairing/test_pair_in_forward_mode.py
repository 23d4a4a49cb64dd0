import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ENTRIES, REMAT3_ALONE, assert_close, drawn, of_floats, op_of
from jax.test_util import check_grads

import jaxbp
from jaxbp import Op, Pair
from jaxbp.pairing import per_implementation

X = jnp.array([-1.5, 0.5, 2.0])
CUBE = Pair(lambda x: x**3, {"xla": lambda dy, x: 3 * x**2 * dy}, name="cube")
MESSAGE = r'^cube: has no forward mode, because its backward is hand-written; use implementation="autodiff"$'


def cube(x):
    return CUBE(x, implementation="xla")


def steps(x):
    return jax.lax.scan(lambda x, _: (cube(x), None), x, None, length=2)[0]


FORWARD = {
    "jvp": lambda: jax.jvp(cube, (X,), (X,)),
    "jvp of jit": lambda: jax.jvp(jax.jit(cube), (X,), (X,)),
    "jit of jvp": lambda: jax.jit(lambda x: jax.jvp(cube, (x,), (x,)))(X),
    "linearize": lambda: jax.linearize(cube, X)[1](X),
    "linearize, under jit": lambda: jax.jit(lambda x: jax.linearize(cube, x)[1](x))(X),
    "jacfwd": lambda: jax.jacfwd(cube)(X),
    "jacfwd under jit": lambda: jax.jit(jax.jacfwd(cube))(X),
    "scan": lambda: jax.jvp(steps, (X,), (X,)),
    "jacfwd of a scan under jit": lambda: jax.jit(jax.jacfwd(steps))(X),
    "while_loop": lambda: jax.jvp(lambda x: jax.lax.fori_loop(0, jnp.int32(2), lambda i, x: cube(x), x), (X,), (X,)),
    "cond": lambda: jax.jit(lambda x: jax.jvp(lambda x: jax.lax.cond(x[0] > 0, cube, cube, x), (x,), (x,)))(X),
    "vmap": lambda: jax.jvp(jax.vmap(cube), (X,), (X,)),
    "checkpoint": lambda: jax.jvp(jax.checkpoint(cube), (X,), (X,)),
    "forward over forward mode": lambda: jax.jacfwd(jax.jacfwd(cube))(X),
}


@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_names_the_op_and_the_way_out(how):
    with pytest.raises(TypeError, match=MESSAGE):
        FORWARD[how]()


def twice_in_reverse(f):
    return jax.jacrev(jax.jacrev(f))


REVERSE = {
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x)))(X),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda x: jnp.sum(f(x))))(X),
    "jit of grad of vmap": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))))(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(X),
    "vmap over devices' axis": lambda f: jax.vmap(jax.grad(f), axis_name="i")(X),
    "Hessian": lambda f: jax.hessian(lambda x: jnp.sum(f(x)))(X),
    "reverse over reverse mode": lambda f: jax.jit(jax.jacrev(jax.jacrev(f)))(X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: jnp.sum(f(f(x)))))(X),
    "Hessian of checkpoint": lambda f: (twice_in_reverse if REMAT3_ALONE else jax.hessian)(
        jax.checkpoint(lambda x: jnp.sum(f(x)))
    )(X),
    "scan": lambda f: jax.hessian(lambda x: jnp.sum(jax.lax.scan(lambda x, _: (f(x), x), x, None, 2)[0]))(X),
}


@pytest.mark.parametrize("how", REVERSE)
def test_reverse_mode_is_that_of_jax(how):
    assert_close(REVERSE[how](cube), REVERSE[how](lambda x: x**3), "float32")


def test_in_reverse_mode_a_tangent_may_be_a_zero_that_jax_keeps_as_an_array():
    product = Pair(lambda x, k: x * k, {"xla": lambda dy, x, k: (dy * k, dy * x)}, name="product")
    function = functools.partial(product, implementation="xla")
    of_x = jax.custom_jvp(function)
    of_x.defjvp(lambda primals, tangents: jax.jvp(function, primals, (tangents[0], jnp.zeros_like(tangents[1]))))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(of_x(x, 2 * x)))(X), 2 * X)


def test_a_function_made_of_ops_is_named_and_not_its_parts():
    twice = lambda x, *, implementation: CUBE(CUBE(x, implementation=implementation), implementation=implementation)  # noqa: E731
    op = Op("twice", per_implementation(twice, jaxbp.IMPLEMENTATIONS))
    with pytest.raises(TypeError, match=r"^twice: has no forward mode"):
        jax.jvp(jax.jit(functools.partial(op, implementation="xla")), (X,), (X,))
    assert_close(jax.jvp(functools.partial(op, implementation="autodiff"), (X,), (X,)), (X**9, 9 * X**9), "float32")


@pytest.mark.parametrize("name", ENTRIES)
def test_forward_mode_works_or_names_the_op_of_the_table(name):
    arrays, _ = drawn(name)
    values = tuple(a for a in jax.tree.leaves(arrays) if jnp.issubdtype(a.dtype, jnp.floating))

    def product(implementation):
        op = of_floats(op_of(name, None, implementation), arrays)
        return jax.jit(lambda *values: jax.jvp(op, values, tuple(map(jnp.cos, values)))[1])

    try:
        product("xla").lower(*values)
    except TypeError as error:
        assert str(error).startswith(f"{name}: has no forward mode") and "autodiff" in str(error)
    else:
        # Tests of second derivatives cover the forward mode of backwards.
        if "_backward" not in name:
            assert_close(product("xla")(*values), product("autodiff")(*values), 1e-4)


PAIRS_OF_LINEAR_OPS = {
    "sum": lambda x, name: jaxbp.sum(x, axis=1, implementation=name),
    "mean": lambda x, name: jaxbp.mean(x, implementation=name),
    "avg_pool2d": lambda x, name: jaxbp.avg_pool2d(x[None], 2, implementation=name),
    "global_avg_pool2d": lambda x, name: jaxbp.global_avg_pool2d(x[None], implementation=name),
    "negative": lambda x, name: jaxbp.negative(x, implementation=name),
    "transpose": lambda x, name: jaxbp.transpose(x, (2, 0, 1), implementation=name),
}
NO_KERNEL = "transpose", "pallas"
CUBOID = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 6)), jnp.float32)


@pytest.mark.parametrize(
    ("op", "implementation"),
    [(op, of) for op in PAIRS_OF_LINEAR_OPS for of in (*jaxbp.IMPLEMENTATIONS, None) if (op, of) != NO_KERNEL],
)
def test_a_linear_op_has_a_transpose_and_both_modes(op, implementation):
    function = lambda x: PAIRS_OF_LINEAR_OPS[op](x, implementation)  # noqa: E731
    dy = jnp.ones_like(function(CUBOID))
    (gradient,) = jax.vjp(function, CUBOID)[1](dy)
    for f in (function, jax.jit(function)):
        np.testing.assert_array_equal(jax.linear_transpose(f, CUBOID)(dy)[0], gradient)
        np.testing.assert_array_equal(jax.jvp(f, (CUBOID,), (CUBOID,))[1], function(CUBOID))
    mapped = jax.jit(jax.vmap(lambda dy: jax.linear_transpose(function, CUBOID)(dy)[0], -1, -1))
    np.testing.assert_array_equal(mapped(jnp.stack([dy, 2 * dy], -1))[..., 1], 2 * gradient)
    twice = jax.linear_transpose(lambda dy: jax.linear_transpose(function, CUBOID)(dy)[0], dy)(CUBOID)[0]
    assert_close(twice, function(CUBOID), "float32")


def test_gradients_of_linear_ops_of_every_order_are_right():
    check_grads(lambda x: jnp.sin(jaxbp.sum(x, axis=0, implementation="xla")), (X,), order=3, modes=("fwd", "rev"))
