import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxbp import Pair
from jaxbp.verify import check


def drawn(*shapes, dtype="float32"):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


X, V = (3, 4), (4,)
(A,) = drawn(X)


def times(factor):
    return lambda dy, x: dy * jnp.cos(x) * jnp.asarray(factor(dy, x), x.dtype)


def vjp_times(forward, factor):
    return lambda dy, *args: tuple(g * jnp.asarray(factor(*args), g.dtype) for g in jax.vjp(forward, *args)[1](dy))


def in_dtype(dtype, factor):
    return lambda x, *_: factor if x.dtype == dtype else 1


@jax.custom_batching.custom_vmap
def doubled_by_vmap(x):
    return x


@doubled_by_vmap.def_vmap
def _(size, batched, x):
    return 2 * x, batched[0]


def is_tracer(x):
    return isinstance(x, jax.core.Tracer)


def is_in_remat():
    return any(frame.filename.endswith("ad_checkpoint.py") for frame in inspect.stack(0))


def rms_norm(x, scale):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


def rms_norm_eps_outside(dy, x, scale):
    inv = lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)
    t, xhat = dy * scale, x / (jnp.sqrt((x * x).mean(-1, keepdims=True)) + 1e-3)
    return inv * (t - xhat * (t * xhat).mean(-1, keepdims=True)), (dy * x * inv).sum(0)


def rms_norm_scale_not_summed(dy, x, scale):
    dx, _ = jax.vjp(rms_norm, x, scale)[1](dy)
    return dx, (dy * x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3))[0]


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


def attention_backward(scale, mask):
    def backward(dy, q, k, v):
        p = jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5)
        dp = dy @ v.T
        ds = mask * p * (dp - (dp * p).sum(-1, keepdims=True)) * scale / q.shape[-1] ** 0.5
        return ds @ k, ds.T @ q, p.T @ dy

    return backward


def rnn(x, w):
    step = lambda h, a: ((n := jnp.tanh(w * h + a)), n)  # noqa: E731
    return lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def rnn_residual_of_another_step(dy, x, w):
    h = rnn(x, w)

    def step(dh, of):
        d, now = of
        da = (dh + d) * (1 - now * now)
        return w * da, (da, da * now)  # correct: the state before the step

    _, (dx, dw) = lax.scan(step, jnp.zeros_like(x[0]), (dy, h), reverse=True)
    return dx, dw.sum(0)


def take_rows(x, rows):
    return x[rows]


ROWS = np.array([0, 2, 0])


def overwritten(dy, x, rows):
    return jnp.zeros_like(x).at[rows].set(dy), None


def power(x, *, p=2):
    return x**p


def power_backward(dy, x, *, p=2):
    return dy * (p if p != 3 else 2) * x ** (p - 1)


def dropout(x):
    return jnp.where(np.arange(4) % 2 == 0, x / 0.5, 0)


def log_softmax_of_labels(x):
    return -jax.nn.log_softmax(x)[:, 0]


def solve_triangular(a, b):
    return jax.scipy.linalg.solve_triangular(jnp.tril(a, -1) + 3 * jnp.eye(3, dtype=a.dtype), b, lower=True)


def triangular_not_transposed(dy, a, b):
    db = jax.scipy.linalg.solve_triangular(jnp.tril(a, -1) + 3 * jnp.eye(3, dtype=a.dtype), dy, lower=True)
    return jnp.tril(-jnp.outer(db, solve_triangular(a, b)), -1), db


def kl(p, q):
    return (p * (jnp.log(p) - jnp.log(q))).sum(-1)


ONE = dict(implementations=["xla"], order=1, added=())
SIN = jnp.sin
# name -> (forward, backward, arguments, settings, among them the added data that shows it, if the user's data do not)
PLANTED = {
    "at 129 elements only": (SIN, times(lambda dy, x: 2 if x.size == 129 else 1), [A], dict(cases=[(drawn((129,)), {})])),
    "above a batch of 8 only": (SIN, times(lambda dy, x: jnp.where(jnp.arange(x.shape[0]) < 8, 1, 0)[:, None]), [A], dict(cases=[(drawn((9, 2)), {})])),
    "one option value": (power, power_backward, [A], dict(cases=[{"p": 3}, {"p": 4}])),
    "only under vmap": (SIN, lambda dy, x: doubled_by_vmap(dy) * jnp.cos(x), [A], {}),
    "only outside jit": (SIN, times(lambda dy, x: 1 if is_tracer(x) else 2), [A], {}),
    "only under jit": (SIN, times(lambda dy, x: 2 if is_tracer(x) else 1), [A], {}),
    "only under remat": (SIN, times(lambda dy, x: 2 if is_in_remat() else 1), [A], {}),
    "only if two arguments are one array": (jnp.multiply, lambda dy, x, y: (dy * y, dy * x * (2 if x is y else 1)), drawn(X, X), {}),
    "-0.0": (jax.nn.softplus, lambda dy, x: jnp.where((x == 0) & jnp.signbit(x), 0, dy * jax.nn.sigmoid(x)), [A], dict(added=["kinks"])),
    "the smallest numbers": (jax.nn.softplus, lambda dy, x: jnp.where((x != 0) & (jnp.abs(x) < 1e-37), 0, dy * jax.nn.sigmoid(x)), [A], dict(added=["kinks"])),
    "0.02% off": (SIN, times(lambda dy, x: 1.0002), [A], {}),
    "0.02% off in one element": (SIN, times(lambda dy, x: jnp.where(jnp.arange(4) == 2, 1.0002, 1)), [A], {}),
    "one element of 40,000": (SIN, times(lambda dy, x: jnp.where(jnp.arange(x.size) == 31_415, 2, 1)), drawn((40_000,)), dict(added=())),
    "bfloat16 only, 1.05": (jnp.square, vjp_times(jnp.square, in_dtype(jnp.bfloat16, 1.05)), drawn((4, 16)), dict(added=["dtypes"])),
    "bfloat16 only, 1.1": (jax.nn.softmax, vjp_times(jax.nn.softmax, in_dtype(jnp.bfloat16, 1.1)), drawn((4, 16)), dict(added=["dtypes"])),
    "bfloat16 only, 1.3": (jnp.exp, vjp_times(jnp.exp, in_dtype(jnp.bfloat16, 1.3)), drawn((4, 16)), dict(added=["dtypes"])),
    "float16 only": (SIN, times(lambda dy, x: in_dtype(jnp.float16, 1.05)(x)), [A], dict(added=["dtypes"])),
    "float32 only": (SIN, times(lambda dy, x: in_dtype(jnp.float32, 1.001)(x)), [A.astype(jnp.bfloat16)], dict(added=["dtypes"])),
    "the residual of another step": (rnn, rnn_residual_of_another_step, drawn((4, 3), (3,)), {}),
    "repeated rows overwritten": (take_rows, overwritten, [A, ROWS], {}),
    "a gradient for an integer argument": (take_rows, lambda dy, x, rows: (jnp.zeros_like(x).at[rows].add(dy), jnp.ones(3)), [A, ROWS], {}),
    "stop_gradient forgotten": (lambda x: lax.stop_gradient(x) * x, lambda dy, x: 2 * x * dy, [A], {}),
    "stop_gradient where there is none": (jnp.square, lambda dy, x: lax.stop_gradient(x) * dy, [A], {}),
    "second order: x is a constant": (jnp.square, lambda dy, x: 2 * lax.stop_gradient(x) * dy, [A], dict(order=2)),
    "second order: dy is a constant": (SIN, lambda dy, x: lax.stop_gradient(dy) * jnp.cos(x), [A], dict(order=2)),
    "epsilon outside the root": (rms_norm, rms_norm_eps_outside, drawn(X, V), {}),
    "scale's gradient of one row": (rms_norm, rms_norm_scale_not_summed, drawn(X, V), {}),
    "attention without its scale": (attention, attention_backward(2.0, 1), drawn(X, X, X), {}),
    "attention with a mask": (attention, attention_backward(1, np.tril(np.ones((3, 3), np.float32))), drawn(X, X, X), {}),
    "gelu's other form": (lambda x: jax.nn.gelu(x, approximate=False), lambda dy, x: jax.vjp(jax.nn.gelu, x)[1](dy)[0], [A], {}),
    "silu without x": (jax.nn.silu, lambda dy, x: dy * jax.nn.sigmoid(x), [A], {}),
    "elu's slope at 0": (jax.nn.elu, lambda dy, x: dy * jnp.where(x >= 0, 1, x + 1), [A], dict(added=["kinks"])),
    "abs has a slope at 0": (jnp.abs, lambda dy, x: jnp.where(x > 0, dy, -dy), [A], dict(added=["kinks"])),
    "leaky slope at 0": (jax.nn.leaky_relu, lambda dy, x: jnp.where(x > 0, dy, 0.01 * dy), [A], dict(added=["kinks"])),
    "the upper bound belongs to the inside": (lambda x: jnp.minimum(x, 0.5), lambda dy, x: jnp.where(x <= 0.5, dy, 0), [A], dict(added=["kinks"])),
    "cumsum forward": (lambda x: jnp.cumsum(x, -1), lambda dy, x: jnp.cumsum(dy, -1), [A], {}),
    "dropout without its scale": (dropout, lambda dy, x: jnp.where(np.arange(4) % 2 == 0, dy, 0), [A], {}),
    "ddof": (lambda x: x.var(-1), lambda dy, x: dy[:, None] * 2 * (x - x.mean(-1, keepdims=True)) / (x.shape[-1] - 1), [A], {}),
    "the other label": (log_softmax_of_labels, lambda dy, x: dy[:, None] * (jax.nn.softmax(x) - jax.nn.one_hot(1, 4, dtype=x.dtype)), [A], {}),
    "triangular, not transposed": (solve_triangular, triangular_not_transposed, drawn((3, 3), (3,)), {}),
    "kl without 1": (kl, lambda dy, p, q: (dy[:, None] * (jnp.log(p) - jnp.log(q)), -dy[:, None] * p / q), [np.abs(a) / 9 + 0.1 for a in drawn(X, X)], {}),
    "matmul, arguments swapped": (jnp.matmul, lambda dy, x, y: (dy @ y, x @ dy), drawn((3, 3), (3, 3)), {}),
    "mean by the wrong number": (lambda x: x.mean(0), lambda dy, x: jnp.broadcast_to(dy / x.shape[1], x.shape), [A], {}),
    "dy of the first row": (SIN, lambda dy, x: dy[:1] * jnp.cos(x), [A], {}),
    "dy rounded": (SIN, lambda dy, x: jnp.round(dy * 100) / 100 * jnp.cos(x), [A], {}),
}  # fmt: skip
# ruff: noqa: E501


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_caught(mistake):
    forward, backward, args, settings = PLANTED[mistake]
    assert not check(Pair(forward, {"xla": backward}, name="op"), *args, **(ONE | settings))


def test_one_element_of_many_is_found_without_an_implementation_to_compare_with():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    backward = PLANTED["one element of 40,000"][1]
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (backward(dy, x),))
    failures = check(sine, *drawn((40_000,)), order=1, added=()).failures
    assert (31_415,) in {row.index for row in failures}


def test_a_gradient_for_an_integer_argument_is_caught_where_jax_refuses_it():
    """JAX 0.10 ignores such gradients."""

    @jax.custom_vjp
    def take(x, rows):
        return x[rows]

    def backward(saved, dy):
        x, rows = saved
        return jnp.zeros_like(x).at[rows].add(dy), jnp.ones(rows.shape, x.dtype)

    take.defvjp(lambda x, rows: (x[rows], (x, rows)), backward)
    try:
        jax.grad(lambda x: take(x, ROWS).sum())(A)
        refused = False
    except ValueError:
        refused = True
    failures = check(take, A, ROWS, order=1, added=()).failures
    assert ["int" in failure.reason for failure in failures] == [True] * refused


def test_there_are_45():
    assert len(PLANTED) >= 45
