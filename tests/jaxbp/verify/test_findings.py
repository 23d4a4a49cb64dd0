import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from jaxbp import Pair
from jaxbp.verify import check
from jaxbp.verify.report import progress_of

X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
SMALL = X[:2, :3]
quickly = functools.partial(check, order=1)


def scaled_in_bfloat16(forward, factor):
    def backward(dy, x):
        dx = jax.vjp(forward, x)[1](dy)[0]
        return dx * jnp.asarray(factor, x.dtype) if x.dtype == jnp.bfloat16 else dx

    return Pair(forward, {"xla": backward}, name="op")


@pytest.mark.parametrize("forward", [jnp.square, jnp.exp, jax.nn.softmax])
@pytest.mark.parametrize("factor", [1.05, 1.3])
def test_no_kink_excuses_a_smooth_function_in_bfloat16(forward, factor):
    failures = quickly(scaled_in_bfloat16(forward, factor), X, implementations=["xla"], added=["dtypes"]).failures
    assert {row.dtype for row in failures} == {"bfloat16"}


def test_a_factor_of_all_elements_is_no_rounding():
    x = X.astype(jnp.bfloat16)
    failures = quickly(scaled_in_bfloat16(jax.nn.softmax, 1.05), x, implementations=["xla"], added=()).failures
    assert [row.order for row in failures] == [1]


def test_near_a_kink_rounding_still_decides_in_bfloat16():
    forward = lambda x: jnp.maximum(x, 1.001)  # noqa: E731
    backward = lambda dy, x: jnp.where(x >= jnp.asarray(1.001, x.dtype), dy, 0)  # noqa: E731
    x = np.array([[1.0, -2.0, 3.0]], jnp.bfloat16)
    pair = Pair(forward, {"xla": backward}, name="op")
    result = quickly(pair, x, implementations=["xla"], added=())
    assert result.raise_if_failed()


@pytest.mark.parametrize("name", ["inv", "eigh", "cholesky"])
def test_a_dtype_that_jax_does_not_support_is_not_tried(name):
    a = SMALL[:, :2] @ SMALL[:, :2].T + 2 * np.eye(2, dtype=np.float32)
    result = quickly(lambda a: getattr(jnp.linalg, name)(a), a, added=["dtypes"]).raise_if_failed()
    skipped = [row for row in result.rows if row.dtype == "bfloat16"]
    assert [(row.verdict, row.data) for row in skipped] == [("skipped", "bfloat16")]
    assert re.search(r"not tried: bfloat16 \(\w+: .*bfloat16", " ".join(str(result).split()))


def test_an_error_of_a_librarys_rule_in_a_dtype_of_the_check_is_not_a_failure():
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda primals, tangents: (sine(*primals), jnp.float32(1) * jnp.cos(primals[0]) * tangents[0]))
    result = quickly(sine, SMALL, added=["dtypes"]).raise_if_failed()
    assert [row.verdict for row in result.rows if row.dtype == "bfloat16"] == ["skipped"]


def test_float8_is_not_tried():
    result = check(jnp.sin, SMALL.astype(jnp.float8_e4m3fn))
    assert [row.reason for row in result.rows] == ["there is no tolerance for float8_e4m3fn"]
    assert "skipped sin" in " ".join(str(result).split())


def test_a_function_with_other_implementations_has_its_default_one():
    q = SMALL.reshape(1, 2, 1, 3)
    result = quickly(jax.nn.dot_product_attention, q, 2 * q, q[::, ::-1].copy(), added=()).raise_if_failed()
    assert {row.implementation for row in result.rows} == {None}


def logsumexp_backward(at_infinity):
    def backward(dy, x):
        masked = jnp.isneginf(x.max(-1, keepdims=True))
        return dy[:, None] * jnp.where(masked, at_infinity, jax.nn.softmax(x))

    return Pair(functools.partial(jax.nn.logsumexp, axis=-1), {"xla": backward}, name="logsumexp")


def test_a_finite_gradient_where_autodiff_has_none_is_inconclusive():
    x = np.float32([[-np.inf] * 3, [1, 2, 3]])
    result = quickly(logsumexp_backward(0.0), x, implementations=["xla"], added=()).raise_if_failed()
    assert {row.verdict for row in result.rows if row.order == 1 and row.argument == "a"} == {"inconclusive"}
    assert "inconclusive: order 1 on own data: autodiff is not finite" in " ".join(str(result).split())
    assert not quickly(logsumexp_backward(np.nan), x[1:] * 0 - 1, implementations=["xla"], added=()).failures


def test_one_sided_differences_decide_where_autodiff_is_not_finite():
    forward = lambda x: jnp.sqrt(x) ** 2  # JAX returns NaN at 0, but the slope is 1  # noqa: E731
    x = np.array([0.0, 1.0, 4.0])
    right, wrong = (Pair(forward, {"xla": lambda dy, x, f=f: f * dy}, name="op") for f in (1, 2))
    assert {row.verdict for row in quickly(right, x, implementations=["xla"], added=()).rows} == {"ok"}
    failures = quickly(wrong, x, implementations=["xla"], added=()).failures
    assert failures and failures[0].numeric != failures[0].analytic


def test_what_jax_cannot_differentiate_twice_is_inconclusive():
    @jax.custom_jvp
    def once(x):
        return jnp.sin(x)

    @once.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return once(x), t * jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    result = check(once, SMALL.astype(np.float64), added=()).raise_if_failed()
    assert {(row.order, row.verdict) for row in result.rows if row.order == 2} == {(2, "inconclusive")}


def test_an_error_on_added_data_is_inconclusive():
    def refuses_zeros(x):
        def check_positive(x):
            if (np.abs(x) == 0).all():
                raise ValueError("zeros")
            return np.asarray(x)

        jax.debug.callback(check_positive, x)
        return jnp.sin(x)

    result = quickly(refuses_zeros, SMALL, added=["zeros"])
    assert result


calls = []


def returns_a_float(x):
    return 3.0


def keeps_a_tracer(x):
    calls.append(x)
    return calls[0] + x


def counts_its_traces(x):
    calls.append(None)
    return x * len(calls)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns_a_float, "returns_a_float returns 3.0, a Python float; wants arrays"),
        (keeps_a_tracer, "check: keeps_a_tracer leaks a tracer"),
        (counts_its_traces, "check: counts_its_traces is not pure: two traces of it differ"),
    ],
)
def test_wrong_use_is_refused(function, message):
    calls.clear()
    with pytest.raises(TypeError, match=message):
        check(function, SMALL)


def test_a_rule_that_raises_is_a_failure():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy[0],))
    failures = quickly(sine, SMALL, added=()).failures
    assert failures and failures[0].order == 1


def test_a_row_shows_the_inputs_at_the_worst_element():
    backward = lambda dy, x, y, b: (dy.at[1, 2].add(1.0) * y, dy * x, dy.sum(0))  # noqa: E731
    pair = Pair(lambda x, y, b: x * y + b, {"xla": backward}, name="op")
    (row,) = quickly(pair, SMALL, SMALL + 1, SMALL[0], implementations=["xla"], added=()).failures
    assert row.index == (1, 2)
    assert row.inputs == (("x", SMALL[1, 2]), ("y", SMALL[1, 2] + 1), ("b", SMALL[0, 2]))
    assert f", at x = {SMALL[1, 2]:.6g}, y = " in str(row)


PERCENT = [(1.001, "0.1% too large"), (0.98, "2% too small"), (1.0002, "0.02% too large")]


@pytest.mark.parametrize(("factor", "said"), PERCENT)
def test_a_small_factor_is_given_in_percent(factor, said):
    pair = Pair(jnp.sin, {"xla": lambda dy, x: factor * dy * jnp.cos(x)}, name="op")
    assert quickly(pair, SMALL, implementations=["xla"], added=()).failures[0].reason == said


def test_a_result_has_a_short_repr():
    pair = Pair(jnp.sin, {"xla": lambda dy, x: 2 * dy * jnp.cos(x)}, name="op")
    result = check(pair, SMALL, implementations=["xla", "autodiff"])
    assert len(repr(result)) < 1000 and "failed" in repr(result) and "2 times what it should be" in repr(result)


def test_a_partial_keeps_the_names_of_arguments():
    result = quickly(functools.partial(jaxbp.softmax, axis=-1), SMALL, implementations=["xla"], added=())
    assert {row.argument for row in result.rows} >= {"x"}


def test_cases_repeat_nothing():
    pair = Pair(lambda x, *, p=2: x**p, {"xla": lambda dy, x, *, p=2: dy * p * x ** (p - 1)}, name="op")
    settings = dict(implementations=["xla"], added=())
    result = quickly(pair, SMALL, cases=[{"p": 2}, {"p": 3}, {"p": 3}, ((SMALL[:1],), {})], p=2, **settings)
    assert list(dict.fromkeys(row.case for row in result.rows)) == ["", "p=3", "arguments of 1×3"]
    text = " ".join(str(result).split())
    assert text.count("own data") == 1 and "also tried with p=3; arguments of 1×3" in text


def test_transformations_of_a_hand_written_backward_are_always_tried_and_dtypes_that_are_not_are_listed():
    pair = Pair(lambda x, y: x * y, {"xla": lambda dy, x, y: (dy * y, dy * x)}, name="op")
    result = quickly(pair, SMALL, SMALL + 1, added=(), implementations=["xla", "autodiff"])
    tried = {name: {row.data for row in result.rows if row.implementation == name} for name in ("xla", "autodiff")}
    assert tried["autodiff"] == {"own data", "x = y"}
    vmap = "vmap, vmap of an argument, vmap of the other arguments, vmap of all, vmap of dy"
    others = {"outside jit", "remat, cond, scan, shard_map", "x = y, one array"}
    assert tried["xla"] - tried["autodiff"] == {vmap, *others}
    assert "bfloat16, float64" in result.untried


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_shows_progress(is_terminal, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    with progress_of("op") as progress:
        progress.update(0, doing="float32, order 1, ties", refresh=True)
    written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert ("check op, 0 s: float32, order 1, ties" in written) == is_terminal


def test_of_a_large_array_a_stated_number_of_elements_is_moved():
    (row,) = [row for row in quickly(jnp.sin, np.zeros(20_000) + 0.3, added=()).rows if "finite" in row.against]
    assert row.against == "finite differences; autodiff except for 209 of 20,000 elements"
