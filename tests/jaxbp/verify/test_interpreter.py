import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxbp import Pair
from jaxbp.nnx import Linear
from jaxbp.verify import check
from jaxbp.verify.derivatives import float64, value_and_gradients
from jaxbp.verify.differences import EPS
from jaxbp.verify.interpreter import CannotLiftError, lifted, narrowest, rounded_otherwise, rounding

X = np.array([[0.3, -1.2, 0.8], [0.1, 0.7, -0.4]])
C = np.array([[0.5, -1.5, 2.0], [1.0, -0.25, 0.75]])


def with_a_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), jnp.cos(primals[0]) * tangents[0]))
    return wrapped


def with_a_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: (function(x), x), lambda x, dy: (dy * jnp.cos(x),))
    return wrapped


def on_a_mesh(function):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows"))


PROGRAMS = {
    "conversion": lambda narrow, x: jnp.sin(narrow(x)),
    "jit": lambda narrow, x: jax.jit(lambda x: jnp.sin(narrow(x)))(x),
    "remat": lambda narrow, x: jax.checkpoint(lambda x: jnp.sin(narrow(x)))(x),
    "custom_jvp": lambda narrow, x: with_a_jvp(lambda x: jnp.sin(x))(narrow(x)),
    "custom_vjp": lambda narrow, x: with_a_vjp(lambda x: jnp.sin(x))(narrow(x)),
    "scan": lambda narrow, x: lax.scan(lambda c, row: (c + jnp.sin(row), c * row), 0 * narrow(x[0]), narrow(x)),
    "cond": lambda narrow, x: lax.cond(x[0, 0] > 0, lambda x: jnp.sin(narrow(x)), lambda x: jnp.cos(narrow(x)), x),
    "fori_loop": lambda narrow, x: lax.fori_loop(0, 3, lambda i, y: y * jnp.sin(y), narrow(x)),
    "shard_map": lambda narrow, x: on_a_mesh(lambda x: jnp.sin(narrow(x)))(x),
    "scatter": lambda narrow, x: narrow(jnp.asarray(x)).at[0].add(narrow(x[1])).at[:, 1].set(0.5),
    "solve": lambda narrow, x: lax.custom_linear_solve(
        lambda v: 3 * v, narrow(x), lambda matvec, b: b / 3, lambda matvec, b: b / 3
    ),
    "product": lambda narrow, x: jnp.matmul(x, x.T, preferred_element_type=narrow(x).dtype),
    "constants": lambda narrow, x: narrow(x) * jnp.arange(3, dtype=narrow(x).dtype) + narrow(jnp.full(3, 0.1)),
    "reduce_precision": lambda narrow, x: jnp.sin(narrow(x)),
    "sort": lambda narrow, x: jnp.sort(narrow(x), axis=-1) @ jnp.ones(3, narrow(x).dtype),
    "fft": lambda narrow, x: jnp.abs(jnp.fft.rfft(narrow(x))),
    "random": lambda narrow, x: narrow(x) + 0 * jax.random.normal(jax.random.key(0), (3,), narrow(x).dtype),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_lifted_program_computes_in_float64(name):
    narrow = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    narrow = narrow if name == "reduce_precision" else lambda a: a.astype(jnp.float32)
    function = lambda narrow: lambda x: jax.tree.leaves(PROGRAMS[name](narrow, x))  # noqa: E731
    with float64():
        (x, y) = X, jax.eval_shape(function(lambda a: a), X)
        assert narrowest(jax.make_jaxpr(function(narrow))(x)) != np.float64
        wanted = function(lambda a: a)(x)
        found = lifted(function(narrow))(x)
        assert {a.dtype for a in found} == {np.dtype(np.float64)}
        jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-14), found, wanted)
        if name == "fori_loop":  # if its bounds are unknown, it has no reverse mode
            return
        cotangents = [np.ones(a.shape) for a in y]
        _, wanted = value_and_gradients(function(lambda a: a))([x], cotangents)
        _, found = lifted(value_and_gradients(function(narrow)))([x], cotangents)
        jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-14), found, wanted)


def test_constants_alone_do_not_narrow():
    function = lambda x: x * jnp.arange(3, dtype=jnp.float32)  # noqa: E731
    with float64():
        assert narrowest(jax.make_jaxpr(function)(X)) == np.float64


def test_a_callback_in_float32_cannot_be_lifted():
    def function(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, np.float32), x.astype(np.float32))

    with float64(), pytest.raises(CannotLiftError, match="pure_callback computes in float32"):
        lifted(function)(X)


def silu(x):
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    return scale * (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(q, k, v):
    scores = jnp.einsum("ik,jk->ij", q, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(scores, axis=-1).astype(q.dtype) @ v


quickly = functools.partial(check, order=1, added=())
LLAMA = {"silu": (silu, 1), "rms_norm": (rms_norm, 2), "attention": (attention, 3)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", LLAMA)
def test_a_function_that_computes_in_float32_passes(name, dtype):
    function, count = LLAMA[name]
    result = quickly(function, *(np.roll(X, i, -1).astype(dtype) for i in range(count))).raise_if_failed()
    assert result.notes[1:] == ("computes in float32; the reference runs the same program in float64",)
    assert any(row.against == "finite differences" for row in result.rows)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_backward_of_a_function_in_float32_is_held_to_float32(factor):
    backward = lambda dy, x: factor * jax.vjp(silu, x)[1](dy)[0]  # noqa: E731
    assert bool(quickly(Pair(silu, {"xla": backward}, name="silu"), X, implementations=["xla"])) == (factor == 1)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_where_a_program_cannot_be_lifted_the_step_survives_the_conversion(factor):
    call = lambda f, x: jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, np.float32), x, vmap_method="expand_dims")  # noqa: E731

    @jax.custom_vjp
    def sine(x):
        return call(np.sin, x.astype(jnp.float32)).astype(x.dtype)

    sine.defvjp(lambda x: (sine(x), x), lambda x, dy: (factor * dy * jnp.cos(x),))
    result = quickly(sine, X)
    assert bool(result) == (factor == 1)
    assert result.notes[0].endswith("(pure_callback computes in float32); finite differences take larger steps")


@pytest.mark.parametrize("split", [False, True])
def test_the_projects_own_layers_can_be_checked(split):
    from flax import nnx

    layer = Linear(3, 2, rngs=nnx.Rngs(0))
    if not split:
        quickly(lambda layer, x: layer(x), layer, X, implementations=["xla"]).raise_if_failed()
        return
    graph, state = nnx.split(layer)
    quickly(lambda state, x: nnx.merge(graph, state)(x), state, X).raise_if_failed()


def moved(function, *args, **settings):
    with float64():
        (found,) = rounding(function, *(np.asarray(a, np.float64) for a in args), **settings)
    return found


def test_a_product_moves_by_one_rounding_of_itself():
    assert moved(jnp.multiply, [3.0, -1e-5], [7.0, 2.0]) == pytest.approx(np.array([21.0, 2e-5]) * EPS, rel=1)


def with_its_tangent(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), *tangents))
    return wrapped


def with_its_cotangent(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: (function(x), None), lambda _, dy: (dy,))
    return wrapped


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, with_its_tangent, with_its_cotangent, jax.checkpoint])
def test_what_cancels_moves_by_the_rounding_of_what_it_cancels_from(wrapped):
    off = moved(wrapped(lambda x: 1 - jax.nn.sigmoid(x)), [28.0])
    assert EPS / 4 < off[0] < 4 * EPS


def test_roundings_are_those_of_a_dtype():
    off = moved(lambda x: 1 - jax.nn.sigmoid(x), [8.0], dtype=np.float32)
    eps = float(np.finfo(np.float32).eps)
    assert eps / 4 < off[0] < 4 * eps


def test_what_only_chooses_does_not_round():
    assert not moved(lambda x: jnp.sort(jnp.maximum(x, 0.1))[::-1], [0.3, -0.7, 0.1]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_jump_where_a_tie_is_broken_counts_for_little(dtype):
    slope = jax.grad(lambda x: jnp.maximum(2 * x, 4 * x - 2))
    assert 0 < moved(slope, 1.0, dtype=dtype) < 2e-3


def test_a_number_that_is_not_finite_does_not_move():
    assert (moved(jnp.log, [0.0, -1.0, 1.0]) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounded_otherwise_what_is_alike_stays_alike_and_what_is_exact_stays(dtype):
    x = np.array([0.1, 0.1, -0.1, 0.5], dtype).astype(np.float64)
    with float64():
        (found,) = rounded_otherwise(lambda x: 3 * x, x, dtype=dtype, roundings=4, runs=5)
    assert found.shape == (6, 4) and (found[0] == 3 * x).all()
    assert (found[:, 0] == found[:, 1]).all() and (found[:, 0] == -found[:, 2]).all() and (found[:, 3] == 1.5).all()
    assert len(set(found[:, 0])) > 2 and np.abs(found / found[0] - 1).max() < 5 * np.finfo(dtype).eps
