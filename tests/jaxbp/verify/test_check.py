import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from jaxbp import Pair
from jaxbp.verify import check
from pallas_kernels.pointwise.elementwise import elementwise

quickly = functools.partial(check, order=1)


def drawn(*shapes, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def dense(x, w, b):
    return x @ w.T + b


def dense_backward(dy, x, w, b):
    return dy @ w, dy.T @ x, dy.sum(axis=0)


DENSE = Pair(dense, {"xla": dense_backward})
DENSE_ARGS = drawn((3, 4), (2, 4), (2,))


def add(x, y):
    return x + y


def subtract(x, y):
    return x - y


def mean_squared_error(x, y):
    return jnp.mean((x - y) ** 2)


def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID")


def convolve_backward(dy, x, w, *, flip):
    wt = jnp.swapaxes(w, 0, 1)
    full = [(f - 1, f - 1) for f in w.shape[2:]]
    dx = jax.lax.conv_general_dilated(dy, wt[:, :, ::-1, ::-1] if flip else wt, (1, 1), full)
    swap = functools.partial(jnp.swapaxes, axis1=0, axis2=1)
    return dx, swap(jax.lax.conv_general_dilated(swap(x), swap(dy), (1, 1), "VALID"))


def mean_squared_error_backward(dy, x, y, *, share):
    dx = dy * 2 * (x - y) * (1 / x.size if share else 1)
    return dx, -dx


def relu_backward(dy, x):
    return jnp.where(x > 0, dy, 0)


# name -> (forward, correct backward, wrong backward, arguments, argument whose gradient is wrong)
PLANTED = {
    "a missing broadcast sum": (
        add,
        lambda dy, x, y: (dy, dy.sum(axis=0, keepdims=True)),
        lambda dy, x, y: (dy, dy[:1]),
        drawn((3, 4), (1, 4)),
        "y",
    ),
    "a missing 1/N": (
        mean_squared_error,
        functools.partial(mean_squared_error_backward, share=True),
        functools.partial(mean_squared_error_backward, share=False),
        drawn((3, 4), (3, 4)),
        "x",
    ),
    "a filter that is not flipped": (
        convolve,
        functools.partial(convolve_backward, flip=True),
        functools.partial(convolve_backward, flip=False),
        drawn((1, 2, 4, 5), (3, 2, 2, 3)),
        "x",
    ),
    "a wrong sign": (
        subtract,
        lambda dy, x, y: (dy, -dy),
        lambda dy, x, y: (dy, dy),
        drawn((3,), (3,)),
        "y",
    ),
    "a dropped batch sum": (
        dense,
        dense_backward,
        lambda dy, x, w, b: (dy @ w, dy.T @ x, dy[0]),
        DENSE_ARGS,
        "b",
    ),
    "a wrong mask at 0": (
        jax.nn.relu,
        relu_backward,
        lambda dy, x: jnp.where(x >= 0, dy, 0),
        drawn((3, 4)),
        "x",
    ),
    "a wrong mask at 0, all of them 0": (
        jax.nn.relu,
        relu_backward,
        lambda dy, x: jnp.where(x >= 0, dy, 0),
        [np.zeros((2, 3), np.float32)],
        "x",
    ),
    "a forgotten gradient": (
        dense,
        dense_backward,
        lambda dy, x, w, b: (dy @ w, dy.T @ x, None),
        DENSE_ARGS,
        "b",
    ),
}


def assert_caught(mistake, dtype):
    forward, right, wrong, args, argument = PLANTED[mistake]
    args = [a.astype(dtype) for a in args]
    added = ["kinks"]
    quickly(Pair(forward, {"xla": right}), *args, implementations=["xla"], added=added).raise_if_failed()
    result = quickly(Pair(forward, {"xla": wrong}), *args, added=added)
    assert not result
    assert ("xla", dtype, argument) in {(row.implementation, row.dtype, row.argument) for row in result.failures}
    assert {row.implementation for row in result.failures} == {"xla"}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_caught_and_named(mistake):
    assert_caught(mistake, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("mistake", ["a missing 1/N", "a wrong mask at 0", "a dropped batch sum"])
def test_a_planted_mistake_is_caught_in_every_dtype(mistake, dtype):
    assert_caught(mistake, dtype)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_a_gradient_of_the_wrong_shape_is_caught(implementation):
    result = quickly(Pair(add, {implementation: lambda dy, x, y: (dy, dy)}), *drawn((3, 4), (4,)))
    assert not result and result.failures[0].implementation == implementation


def test_a_kernel_with_a_mistake_is_caught_and_its_formula_is_not():
    wrong = functools.partial(elementwise, lambda dy, x: 2.01 * x * dy)
    pair = Pair(lambda x: x * x, {"xla": lambda dy, x: 2 * x * dy, "pallas": wrong}, name="square")
    result = check(pair, *drawn((5,)))
    assert {row.implementation for row in result.failures} == {"pallas"}


def test_a_backward_that_cannot_be_differentiated_rightly_fails_at_order_2_alone():
    def backward(dy, x):
        return jax.lax.stop_gradient(2 * x) * dy

    pair = Pair(lambda x: x * x, {"xla": backward})
    assert quickly(pair, *drawn((3,)))
    assert {(row.implementation, row.order) for row in check(pair, *drawn((3,))).failures} == {("xla", 2)}


def test_a_saved_value_that_is_not_the_forwards_is_caught():
    pair = Pair(jnp.sin, {"xla": lambda dy, x: jnp.cos(x) * dy}, save=lambda x: (1.01 * jnp.sin(x), (x,)), name="sine")
    (failure,) = quickly(pair, *drawn((3,))).failures
    assert (failure.argument, failure.order) == ("value", 0)


def test_a_failure_names_the_worst_element_and_both_values():
    pair = Pair(lambda x: x * x, {"xla": lambda dy, x: dy * (2 * x).at[1, 2].add(1.0)}, name="square")
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    result = quickly(pair, x, added=())
    (row,) = result.failures
    assert (row.argument, row.index) == ("x", (1, 2))
    assert row.analytic / row.numeric == pytest.approx(13 / 12, rel=1e-5)
    assert row.absolute == pytest.approx(abs(row.analytic - row.numeric))
    with pytest.raises(
        AssertionError, match=r"square, xla, float32, order 1: x\[1, 2\] is .*; wants .*\(finite differences\)"
    ):
        result.raise_if_failed()
    assert "failed" in str(result)


def maximum_backward(dy, x, y):
    return jnp.where(x >= y, dy, 0), jnp.where(x < y, dy, 0)


def larger_double(x, y):
    return jnp.maximum(2 * x, 2 * y)


def larger_double_backward(dy, x, y):
    return jnp.where(x >= y, 2 * dy, 0), jnp.where(x < y, 2 * dy, 0)


max_of_row = functools.partial(jnp.max, axis=-1)


def max_backward(dy, x):
    return jnp.where(x == x.max(axis=-1, keepdims=True), dy[..., None], 0)


def distance(x, y):
    return jnp.abs(x - y)


def distance_backward(dy, x, y):
    dx = jnp.where(x > y, dy, -dy)
    return dx, -dx


def clip(x):
    return jnp.clip(x, -0.7, 0.5)


def shrink(x):
    return jnp.maximum(x, 3.0) + jnp.minimum(x, 0.0)


def in_bfloat16_only(dy, x):
    return dy * jnp.cos(x) * (1.2 if x.dtype == jnp.bfloat16 else 1)


def strided(x, *, stride=1):
    return 2 * x[::stride]


def strided_backward(dy, x, *, stride=1):
    return jnp.repeat(2 * dy, stride)[: x.size] if stride > 1 else 2 * dy


def of_first_example(dy, x, w):
    return dy @ w.T, x[:1].T @ dy[:1]


@jax.custom_jvp
def cosine(x):
    return jnp.cos(x)


@cosine.defjvp
def _(primals, tangents):
    return cosine(*primals), -tangents[0] * wrong_sine(primals[0])


@jax.custom_jvp
def wrong_sine(x):
    return jnp.sin(x)


@wrong_sine.defjvp
def _(primals, tangents):
    return wrong_sine(*primals), tangents[0] * 1.1 * jnp.cos(*primals)


S = drawn((3, 3), seed=5)
NONE, NAMES = dict(added=()), ("ties", "kinks", "cotangents", "large", "dtypes")
TIES, KINKS, COTANGENTS, LARGE, DTYPES = (dict(added=[name]) for name in NAMES)
# name -> (forward, wrong backward, arguments, settings of the check, among them the added data that shows it)
MISSED = {
    "ties of max": (max_of_row, max_backward, S, TIES),
    "ties of max, no convention": (max_of_row, max_backward, S, TIES | dict(kink_convention=False)),
    "ties of maximum": (jnp.maximum, maximum_backward, drawn((3, 4), (3, 4)), TIES),
    "ties of computed numbers": (larger_double, larger_double_backward, 2 * [S[0].astype(float)], NONE),
    "ties of computed numbers, float32": (larger_double, larger_double_backward, 2 * S, NONE),
    "ties of |a - b|": (distance, distance_backward, drawn((3, 4), (3, 4)), TIES),
    "slope at a clip's bound": (clip, lambda dy, x: jnp.where((x >= -0.7) & (x <= 0.5), dy, 0), S, KINKS),
    "slope at a kink away from 0": (shrink, lambda dy, x: jnp.where((x >= 3) | (x < 0), dy, 0), S, KINKS),
    "dy clipped": (jnp.sin, lambda dy, x: jnp.clip(dy, -5, 5) * jnp.cos(x), S, COTANGENTS),
    "wrong where dy is 0": (jnp.sin, lambda dy, x: jnp.where(dy == 0, 1, dy) * jnp.cos(x), S, COTANGENTS),
    "wrong for |x| > 10": (jnp.sin, lambda dy, x: jnp.where(jnp.abs(x) > 10, 0, dy * jnp.cos(x)), S, LARGE),
    "overflow beyond 88": (jax.nn.softplus, lambda dy, x: dy * jnp.exp(x) / (1 + jnp.exp(x)), S, LARGE),
    "wrong in bfloat16 only": (jnp.sin, in_bfloat16_only, S, DTYPES),
    "wrong at stride 2 only": (strided, strided_backward, drawn((6,)), NONE | dict(cases=[{"stride": 2}])),
    "wrong at batch > 1 only": (
        jnp.matmul, of_first_example, drawn((1, 3), (3, 2)), NONE | dict(cases=[(drawn((3, 3), (3, 2)), {})]),
    ),
    "third order only": (jnp.sin, lambda dy, x: dy * cosine(x), S, NONE | dict(order=3)),
    "|dy| for dy on a scalar": (lambda x: jnp.sum(x * x), lambda dy, x: jnp.abs(dy) * 2 * x, S, COTANGENTS),
    "dw transposed": (jnp.matmul, lambda dy, x, w: (dy @ w.T, (x.T @ dy).T), drawn((3, 3), (3, 3)), NONE),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISSED)
def test_a_mistake_that_random_numbers_do_not_show_is_caught(mistake):
    forward, wrong, args, settings = MISSED[mistake]
    result = check(
        Pair(forward, {"xla": wrong}, name="op"), *args, **{"order": 1, "implementations": ["xla"], **settings}
    )
    assert not result
    if settings.get("order") == 3:
        assert {row.order for row in result.failures} == {3}


@pytest.mark.parametrize("mistake", ["ties of max", "slope at a clip's bound", "wrong for |x| > 10", "dy clipped"])
def test_the_same_op_without_the_mistake_passes(mistake):
    forward, _, args, settings = MISSED[mistake]
    right = Pair(forward, {"xla": lambda dy, *args: jax.vjp(forward, *args)[1](dy)}, name="op")
    check(right, *args, order=2, **settings).raise_if_failed()


# Compilers keep the order of a sum, but may rewrite `a / 10 * 3`.
def first_two_first(a):
    return (a[0] + a[1]) + a[2]


def last_two_first(a):
    return a[0] + (a[1] + a[2])


def equal_but_for_rounding(a, b):
    return jnp.maximum(first_two_first(a), last_two_first(b))


def by_other_roundings(share):
    """The backward sums in the other order. The gradient of a is `share(sum of a, sum of b) * dy`."""

    def backward(dy, a, b):
        u, v = last_two_first(a), first_two_first(b)
        return jnp.broadcast_to(share(u, v) * dy, a.shape), jnp.broadcast_to(share(v, u) * dy, b.shape)

    return Pair(equal_but_for_rounding, {"xla": backward}, name="op")


EQUAL = 2 * drawn((3, 10), dtype="float64")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_orders_of_a_sum_give_equal_numbers_and_larger_and_smaller_ones(dtype):
    a = EQUAL[0].astype(dtype)
    assert {-1, 0, 1} == set(np.sign(first_two_first(a) - last_two_first(a)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_which_of_two_is_the_larger_may_be_decided_by_rounding(dtype):
    right = by_other_roundings(lambda u, v: jnp.where(u > v, 1, jnp.where(u == v, 0.5, 0)))
    args = [a.astype(dtype) for a in EQUAL]
    result = quickly(right, *args, added=(), implementations=["xla"]).raise_if_failed()
    gradients = [row for row in result.rows if row.order == 1 and row.data == "own data"]
    assert all(row.reason.startswith("rounding decides near-ties at ") for row in gradients)
    assert "beyond the tolerance, but rounding decides near-ties at" in str(result)


def last_of_windows(dy, x):
    back = x[..., ::-1, ::-1]
    _, first = jaxbp.max_pool2d_with_indices(back, 2)
    return jaxbp.max_pool2d_backward(dy[..., ::-1, ::-1], first, x.shape[2:], 2)[..., ::-1, ::-1]


def pool_of_sums(x):
    return jaxbp.logic_or_pool2d(0.1 * x + 0.3, implementation="autodiff")


def last_of_sums(dy, x):
    return 0.1 * last_of_windows(dy, 0.1 * x + 0.3)


OR_POOL = functools.partial(jaxbp.logic_or_pool2d, implementation="autodiff")
ROWS = np.float32([[0.3, -1.2, 0.8, 0.1]]).reshape(1, 1, 1, 4).repeat(2, axis=2)
# name -> (op, arguments, their dtype)
WRONG_AT_TIES = {
    "both get it all": (by_other_roundings(lambda u, v: jnp.where(u >= v, 1, 0)), EQUAL, "float32"),
    "nobody gets it": (by_other_roundings(lambda u, v: jnp.where(u > v, 1, 0)), EQUAL, "float64"),
    "the last place of a pool": (Pair(OR_POOL, {"xla": last_of_windows}, name="op"), [ROWS], "float32"),
    "the last place of a pool of sums": (Pair(pool_of_sums, {"xla": last_of_sums}, name="op"), [ROWS], "float64"),
}


@pytest.mark.parametrize("mistake", WRONG_AT_TIES)
def test_what_rounding_decides_hides_no_mistake_at_ties(mistake):
    op, args, dtype = WRONG_AT_TIES[mistake]
    result = quickly(op, *(a.astype(dtype) for a in args), added=(), implementations=["xla", "autodiff"])
    assert {row.implementation for row in result.failures} == {"xla"}


def test_without_a_convention_a_tie_may_go_to_the_first_or_be_shared():
    def to_the_first(dy, x):
        return dy[..., None] * jax.nn.one_hot(x.argmax(axis=-1), x.shape[-1], dtype=x.dtype)

    x = np.float32([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    pair = Pair(functools.partial(jnp.max, axis=-1), {"xla": to_the_first}, name="op")
    assert quickly(pair, x, kink_convention=False, implementations=["xla", "autodiff"])
    assert not quickly(pair, x)


def test_a_hand_written_rule_without_implementations_is_held_against_differences_everywhere():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (jnp.where(jnp.abs(x) > 10, 0, dy * jnp.cos(x)),))
    failures = quickly(sine, *S).failures
    assert failures and {row.data for row in failures} == {"large", "very large", "very negative"}


def test_arguments_stay_in_their_range():
    def log_of_probability(p):
        return jnp.log(p) + jnp.where(p > 1, jnp.nan, 0)

    pair = Pair(log_of_probability, {"xla": lambda dy, p: dy / p}, name="op")
    result = quickly(pair, np.float32([0.2, 0.5, 0.9]), implementations=["xla"], kinks=())
    assert result.raise_if_failed() and "large" not in {row.data for row in result.rows if row.dtype == "float32"}


def test_the_report_says_what_was_tried_and_what_was_not():
    result = check(jaxbp.relu, *drawn((3,)), order=1, implementations=["xla"])
    text = " ".join(str(result).split())
    assert "tried: own data, dy times -4,096, dy times 1e-9, dy with zeros, x at 0, -0 and subnormals, ties" in text
    assert "zeros, small, large, very large, very negative" in text
    assert "outside jit, vmap, vmap of an argument, vmap of dy, remat, cond, scan, shard_map" in text
    assert "not tried: float64, several devices, other options, other shapes (cases=)" in text
    assert all(len(line) <= 80 for line in str(result).splitlines())
    assert len(str(check(jaxbp.relu, *drawn((3,)), order=1, added=())).splitlines()) == 3 + 5


def test_the_report_names_the_implementation_that_did_not_try_a_dtype():
    def sine(x, implementation=None):
        if implementation == "xla" and x.dtype == jnp.bfloat16:
            raise NotImplementedError("float32 only")
        return jnp.sin(x)

    text = " ".join(str(quickly(sine, *S, implementations=["xla", "autodiff"], added=["dtypes"])).split())
    tried, not_tried = text.split("not tried: ")
    assert "bf16" in tried and not_tried.startswith("bfloat16 in xla (NotImplementedError: float32 only), ")
    assert not_tried.count("bfloat16") == 1


@pytest.mark.parametrize(
    ("wrong", "looks"),
    [
        (lambda dy, x: -dy * jnp.cos(x), "the sign is wrong"),
        (lambda dy, x: 3 * dy * jnp.cos(x), "3 times what it should be"),
        (lambda dy, x: 0 * dy, "zero"),
        (lambda dy, x: (dy * jnp.cos(x)).T, "transposed"),
        (lambda dy, x: (dy * jnp.cos(x))[::-1], "flipped"),
        (lambda dy, x: dy * jnp.cos(x) + 1, "off by a constant"),
        (lambda dy, x: (dy * jnp.cos(x)).at[0, 1].add(1.0), "wrong in 1 of 9 elements"),
    ],
)
def test_a_failure_says_what_it_looks_like(wrong, looks):
    failure = quickly(Pair(jnp.sin, {"xla": wrong}, name="op"), *S, added=(), implementations=["xla"]).failures[0]
    assert failure.reason == looks and str(failure).endswith(looks)


def test_an_op_of_the_library_passes_in_every_implementation_and_order():
    result = check(jaxbp.relu, *drawn((2, 3))).raise_if_failed()
    assert {row.implementation for row in result.rows if row.verdict == "ok"} == set(jaxbp.IMPLEMENTATIONS)
    assert {row.order for row in result.rows} == {0, 1, 2}


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_float32_is_held_to_its_own_tolerance_also_where_the_numbers_are_large_or_small(scale):
    check(DENSE, *(np.float32(scale) * a for a in DENSE_ARGS), implementations=["xla"]).raise_if_failed()


def test_what_runs_in_float64_is_held_to_1e_7():
    x = drawn((4,), dtype="float64")
    almost = Pair(jnp.sin, {"xla": lambda dy, x: (1 + 1e-6) * jnp.cos(x) * dy}, name="sine")
    assert quickly(Pair(jnp.sin, {"xla": lambda dy, x: jnp.cos(x) * dy}, name="sine"), *x)
    assert not quickly(almost, *x)
    assert quickly(almost, *(a.astype(np.float32) for a in x))


def test_an_implementation_that_does_not_take_the_arguments_is_skipped_and_says_why():
    result = quickly(jaxbp.relu, *drawn((3,), dtype="float64"))
    (row,) = [row for row in result.rows if row.implementation == "pallas" and row.dtype == "float64"]
    assert row.verdict == "skipped" and "does not take dtype float64" in row.reason
    assert result


def test_integers_are_skipped_and_said_so():
    result = quickly(jaxbp.softmax_cross_entropy, *drawn((2, 3)), np.array([0, 2]), implementations=["xla"])
    (row,) = [row for row in result.rows if row.argument == "labels"]
    assert (row.verdict, row.reason) == ("skipped", "not floating-point, so it has no gradient")


def test_a_function_without_implementations_is_checked_as_it_is():
    result = check(lambda x: jnp.sin(x) * x, *drawn((3,))).raise_if_failed()
    assert {row.implementation for row in result.rows} == {None}


def test_the_arrays_of_a_pytree_have_names():
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["layers"][0]["w"]) * params["scale"])

    w, scale, x = drawn((3, 2), (), (4, 3))
    result = quickly(loss, {"layers": [{"w": w}], "scale": scale}, x).raise_if_failed()
    assert {"params.layers.0.w", "params.scale", "x"} <= {row.argument for row in result.rows}


def test_at_a_singular_point_the_gradient_is_held_against_autodiff():
    right, wrong = (
        Pair(jnp.log, {"xla": backward}, name="log")
        for backward in (lambda dy, x: dy / x, lambda dy, x: dy / jnp.maximum(x, 1e-6))
    )
    x = np.array([0.5, 0.0, 2.0], np.float32)
    assert quickly(right, x)
    assert [row.index for row in quickly(wrong, x, added=()).failures] == [(1,)]
    assert quickly(lambda x: 1 / x, x)  # the function is infinite at 0


def test_an_empty_square_matrix_is_checked():
    assert quickly(jnp.sin, np.zeros((0, 0), np.float32))


def test_without_a_convention_any_slope_will_do_at_a_kink_and_only_there():
    pair = Pair(jax.nn.relu, {"xla": lambda dy, x: jnp.where(x >= 0, dy, 0)}, name="relu")
    x = np.array([-1.0, 0.0, 2.0], np.float32)
    assert not quickly(pair, x)
    assert quickly(pair, x, kink_convention=False)
    wrong = Pair(jax.nn.relu, {"xla": lambda dy, x: jnp.where(x >= 0, 2 * dy, 0)}, name="wrong")
    assert {row.index for row in quickly(wrong, x, kink_convention=False, added=["kinks"]).failures} <= {(1,), (2,)}


@pytest.mark.parametrize("function", [jnp.square, jax.nn.softplus, lambda x: x**3])
def test_a_smooth_function_has_no_kink_where_its_slope_or_its_curvature_is_0(function):
    result = quickly(function, np.array([0.5, 0.0, -2.0]))
    assert result.raise_if_failed()
    assert {
        row.against for row in result.rows if row.order == 1 and row.data == "own data" and row.dtype == "float64"
    } == {"finite differences"}


def ruled(forward, backward):
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), x), backward)
    return function


def test_a_gradient_of_another_dtype_is_reported():
    cube = ruled(lambda x: x**3, lambda x, dy: ((3 * dy * x * x).astype(jnp.float32),))
    (x,) = drawn((3,))
    (row,) = check(cube, x.astype(jnp.bfloat16)).rows
    assert (row.verdict, row.reason) == ("failed", "the gradient of x is float32; wants bfloat16, as x")
    result = check(cube, x, added=("dtypes",))
    assert "the gradient of x is float32; wants float16, as x" in result.notes
    assert result and all(row.verdict == "ok" for row in result.rows if row.order == 2)


def test_a_rule_that_cannot_be_traced_is_one_failure_with_the_whole_error():
    (row,) = check(ruled(lambda x: jnp.sum(x), lambda x, dy: (jnp.ones(2),)), *drawn((3, 4))).rows
    assert row.verdict == "failed" and "of type float32[2] corresponding to an input of type float32[3,4]" in row.reason


def test_a_backward_within_stop_gradient_fails_at_second_order():
    stopped = ruled(lambda x: x**3, lambda x, dy: (jax.lax.stop_gradient(3 * dy * x.astype(jnp.float32) ** 2),))
    (row,) = check(stopped, *drawn((3,)), added=()).failures
    assert (row.order, row.analytic) == (2, 0)


def test_a_function_without_a_rule_is_noted():
    assert quickly(jnp.sin, *drawn((3,)), added=()).notes == (
        "sin has no custom rule, so the check compares JAX's autodiff",
    )


def test_elements_beyond_the_most_are_held_against_autodiff():
    pair = Pair(lambda x: x * x, {"xla": lambda dy, x: dy * (2 * x).at[7].add(1.0)}, name="square")
    (row,) = quickly(pair, *drawn((20,)), most_elements=2, added=()).failures
    assert row.index == (7,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check(jaxbp.relu, np.ones(2), order=4), ValueError, "check: order is 4; wants 1, 2, or 3"),
        (
            lambda: check(jaxbp.relu, np.ones(2), added=["tie"]),
            ValueError,
            "check: the argument added contains 'tie'; wants only names among",
        ),
        (lambda: check("relu", np.ones(2)), TypeError, "check: op is 'relu'; wants a function"),
        (lambda: check(jaxbp.relu, np.ones(2), implementations="xla"), TypeError, "'xla'; wants a sequence, say"),
        (lambda: check(lambda i: i, np.arange(3)), ValueError, "check: <lambda> has no floating argument"),
        (lambda: check(lambda x: jnp.argmax(x), np.ones(3)), ValueError, "check: <lambda> has no floating result"),
        (lambda: check(jaxbp.relu, np.ones(3), window=2), TypeError, "window"),
        (
            lambda: check(lambda x: jax.lax.add(x, jax.pure_callback(np.sin, np.float32(1), x[0])), np.float32([1])),
            TypeError,
            "^check: <lambda> does not take float64, which the reference needs: lax.add requires",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_summary_says_apart_from_the_others_what_is_right_beyond_the_tolerance():
    length = Pair(lambda x: jnp.sqrt(1 + x * x), {"xla": lambda dy, x: dy * x / jnp.sqrt(1 + x * x)}, name="length")
    first, second, *_ = str(quickly(length, *drawn((40,)), implementations=["xla"])).splitlines()
    assert first.startswith("ok      length, xla: ") and all(float(off) < 0.05 for off in first.split()[-3::2])
    assert second == "        beyond the tolerance, but the same as autodiff in float16: on large"
    assert max(map(len, (first, second))) <= 80
