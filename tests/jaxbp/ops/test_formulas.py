"""Formulas of ops that share kernels and pairing with another entry, in one program per family to save time."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    BROADCASTING,
    ENTRIES,
    EXTREMES,
    NAN_AT_INFINITY,
    NAN_SPREADS,
    assert_close,
    assert_launches_as_recorded,
    assert_second_derivatives_match_differences,
    case_of,
    dot,
    drawn,
    every_implementation,
    expected_at,
    floats,
    in_float64,
    is_float,
    launches,
    of_floats,
    op_of,
    ours,
    poison_memory,
    promoting_nothing,
    results_of,
    value_and_gradients,
    with_extreme,
    with_floats,
    wrong_at,
)

import jaxbp
from jaxbp.catalogue import CATALOGUE

LIKE = [entry for entry in CATALOGUE if entry.like]
FORWARDS = [entry.name.removesuffix("_backward") for entry in LIKE if "_backward" in entry.name]
FAMILIES = {}
for _name in FORWARDS:
    FAMILIES.setdefault(ENTRIES[_name].function.__module__.rpartition(".")[2], []).append(_name)

OWN_KERNELS = [
    *("linear_algebra", "reductions", "avg_pool2d", "batch_norm", "dropout"),
    *("dot_product_attention", "grouped_linear"),
]
"""Families of ops whose arrays are rearranged for a kernel or have several dtypes, or whose kernels take no float32."""

every_family = pytest.mark.parametrize("family", FAMILIES)
with_float32 = pytest.mark.parametrize(
    ("family", "implementation"),
    [
        (family, implementation)
        for family, names in FAMILIES.items()
        for implementation in ("pallas", "xla")
        if implementation == "xla" or any("float32" in ENTRIES[name].kernel_dtypes for name in names)
    ],
)
every_name = pytest.mark.parametrize("name", [entry.name for entry in LIKE])
every_kernel = pytest.mark.parametrize("name", [entry.name for entry in LIKE if entry.kernel_dtypes])


def test_what_an_entry_is_like_is_itself_tested_in_full():
    full = {entry.name for entry in CATALOGUE if not entry.like}
    assert {entry.like for entry in LIKE} <= full


def drawn_family(family, dtype="float32", implementation=None):
    names = [name for name in FAMILIES[family] if implementation != "pallas" or dtype in ENTRIES[name].kernel_dtypes]
    return {name: drawn(name, dtype=dtype) for name in names}


def public_backward(name, implementation, arrays, dy):
    entry = ENTRIES[f"{name}_backward"]
    named = dict(zip(inspect.signature(ENTRIES[name].function).parameters, arrays, strict=False))
    taken = [a for at, a in named.items() if at in inspect.signature(entry.function).parameters]
    return jax.tree.leaves(entry.function(dy, *taken, **entry.small.options, implementation=implementation))


@functools.cache
def compiled_family(family, implementation, public=False):
    """The result maps names to (results, gradients), with `public` also to the gradients by the public backward and the
    pair."""

    def one(name, arrays, cotangents):
        y, vjp = jax.vjp(of_floats(op_of(name, None, implementation), arrays), *floats(arrays))
        gradients = vjp(cotangents)
        if not public:
            return y, gradients
        first = vjp([cotangents[0], *map(jnp.zeros_like, cotangents[1:])]) if len(cotangents) > 1 else gradients
        return y, gradients, public_backward(name, implementation, arrays, cotangents[0]), first

    return jax.jit(lambda drawn: {name: one(name, *arrays) for name, arrays in drawn.items()})


@functools.cache
def family_reference(family, dtype="float32"):
    return in_float64(compiled_family(family, "autodiff", public=True), drawn_family(family, dtype))


def directions(family, dtype):
    random = np.random.default_rng(0)
    moves = lambda a: random.standard_normal(a.shape).astype(a.dtype)  # noqa: E731
    return {name: [moves(a) for a in floats(arrays)] for name, (arrays, _) in drawn_family(family, dtype).items()}


def moved(drawn, direction, by):
    def move(arrays, steps):
        return with_floats(arrays, [np.asarray(a) + by * d for a, d in zip(floats(arrays), steps, strict=True)])

    return {name: (move(arrays, direction[name]), cotangents) for name, (arrays, cotangents) in drawn.items()}


@every_family
def test_autodiff_matches_finite_differences(family):
    with jax.enable_x64(True):
        at, direction = drawn_family(family, "float64"), directions(family, "float64")
        run = compiled_family(family, "autodiff", public=True)
        here, ahead, behind = (run(moved(at, direction, by)) for by in (0, 1e-5, -1e-5))
        for name, (_, cotangents) in at.items():
            difference = (dot(cotangents, ahead[name][0]) - dot(cotangents, behind[name][0])) / 2e-5
            slope = dot(here[name][1], direction[name])
            np.testing.assert_allclose(slope, difference, rtol=1e-7, atol=1e-7, err_msg=name)


@with_float32
def test_values_gradients_and_public_backwards_match_float64(family, implementation):
    results = compiled_family(family, implementation, public=True)(drawn_family(family, "float32", implementation))
    expected = family_reference(family)
    for name, result in results.items():
        _check(name, result, expected[name], "float32")


def with_extremes(drawn, at, value):
    """Replace one element of the float argument number `at` of each op."""
    return {n: (with_extreme(a, at % len(floats(a)), value), cotangents) for n, (a, cotangents) in drawn.items()}


@functools.cache
def family_limits(family):
    run, drawn = compiled_family(family, "autodiff", public=True), drawn_family(family)
    count = max(len(floats(arrays)) for arrays, _ in drawn.values())
    return {
        (at, extreme): expected_at(extreme, lambda x, at=at: in_float64(run, with_extremes(drawn, at, x)))
        for at in range(count)
        for extreme in EXTREMES
    }


@with_float32
def test_values_and_gradients_at_zeros_infinities_nan_and_the_largest_number_are_limits(family, implementation):
    run, drawn = compiled_family(family, implementation, public=True), drawn_family(family, "float32", implementation)
    with_nan = set()
    for (at, extreme), expected in family_limits(family).items():
        for name, found in run(with_extremes(drawn, at, EXTREMES[extreme])).items():
            if wrong_at(extreme, found, expected[name]):
                with_nan.add(name)
            assert wrong_at(extreme, found, expected[name], name) == [], (name, at, extreme)
    assert implementation == "pallas" or with_nan == (NAN_AT_INFINITY | NAN_SPREADS) & {*drawn}


@every_family
def test_public_backwards_by_autodiff_are_the_pairs_gradients(family):
    for name, result in family_reference(family).items():
        _check(name, result, result, "float64")


# Kernels that take a formula as an argument treat half precisions alike.
@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    [(family, "xla", ("float16", "bfloat16")[i % 2]) for i, family in enumerate(FAMILIES)]
    + [(family, "pallas", "bfloat16") for family in OWN_KERNELS],
)
def test_half_precisions_match_float64_and_stay(family, implementation, dtype):
    drawn, broadcasts = drawn_family(family, dtype, implementation), family == "arithmetic"
    with promoting_nothing(broadcasts):
        results = compiled_family(family, implementation)(drawn)
    reference = family_reference(family, dtype)
    for name, result in results.items():
        assert all(a.dtype == dtype for a in jax.tree.leaves(result)), name
        _check(name, result, reference[name], dtype)


def _check(name, result, reference, tolerance):
    assert_close(result[:2], reference[:2], tolerance, name)
    if len(result) > 2:
        assert_close(result[2], reference[3][: len(result[2])], tolerance, name)


@every_family
def test_first_and_second_derivatives_of_the_formulas_match_finite_differences(family):
    with jax.enable_x64(True):
        arrays = {name: arrays for name, (arrays, _) in drawn_family(family, "float64").items()}
    functions = {name: of_floats(op_of(name, None, "xla"), a) for name, a in arrays.items()}
    assert_second_derivatives_match_differences(functions, {name: floats(a) for name, a in arrays.items()})


@pytest.mark.parametrize(("name", "dtype"), [(n, launches.dtypes(ENTRIES[n])[i % 2]) for i, n in enumerate(FORWARDS)])
def test_pallas_launches_the_recorded_kernels_on_cuda(name, dtype):
    place, *_ = ENTRIES[name].real
    assert_launches_as_recorded(name, place, dtype)


def _apart(name):
    return any(argument.apart for case in ENTRIES[name].real.values() for argument in case.floats)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in FORWARDS for d in ENTRIES[n].kernel_dtypes[: 1 if _apart(n) else 2]],
)
def test_gpu_kernels_at_real_shapes_match_float64_and_give_the_same_bits_twice(name, dtype):
    place, *_ = ENTRIES[name].real
    run, (arrays, cotangents) = value_and_gradients(op_of(name, place, "pallas")), drawn(name, place, dtype, 129)
    reference = in_float64(value_and_gradients(op_of(name, place, "autodiff")), arrays, cotangents)
    poison_memory()
    once, again = run(arrays, cotangents), run(arrays, cotangents)
    assert_close(once, reference, dtype)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True))


def _of_one_rank(arrays):
    ndim = max(a.ndim for a in arrays)
    return [jax.ShapeDtypeStruct((1,) * (ndim - a.ndim) + a.shape, a.dtype) for a in arrays]


@every_family
def test_an_empty_batch_has_gradients_of_every_shape_and_promotes_nothing(family):
    for name in FAMILIES[family]:
        place, *_ = ENTRIES[name].real
        for implementation in ("pallas", "xla", "autodiff", None):
            if implementation == "pallas" and not ENTRIES[name].kernel_dtypes:
                continue
            op, arrays = op_of(name, place, implementation), case_of(name, place).structs(0, jnp.bfloat16)
            arrays = _of_one_rank(arrays) if name in BROADCASTING else arrays
            with promoting_nothing():
                _, gradients = jax.eval_shape(value_and_gradients(op), arrays, results_of(op, arrays))
            assert [gradient.shape for gradient in gradients] == [a.shape for a in floats(arrays)], name


@pytest.mark.parametrize("name", [entry.name for entry in LIKE if "_backward" in entry.name])
def test_public_backwards_promote_nothing(name):
    arrays = ENTRIES[name].small.structs(2, jnp.float16)
    arrays = _of_one_rank(arrays) if name.removesuffix("_backward") in BROADCASTING else arrays
    with promoting_nothing():
        jax.eval_shape(op_of(name, None, "xla"), *arrays)


@every_kernel
def test_an_empty_batch_is_mapped_and_differentiated(name):
    place, *_ = ENTRIES[name].real
    structs = case_of(name, place).structs(batch=0, dtype=jnp.dtype(ENTRIES[name].kernel_dtypes[0]))
    arrays = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), structs)
    mapped = jax.jit(jax.vmap(of_floats(op_of(name, place, "pallas"), arrays)))
    values = [jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in floats(arrays)]
    gradients = jax.eval_shape(lambda *values: jax.vjp(mapped, *values)[1](mapped(*values)), *values)
    assert [gradient.shape for gradient in gradients] == [a.shape for a in values]


@every_name
def test_float64_kernels_some_integers_lists_and_unknown_implementations_are_refused(name):
    arrays = list(drawn(name)[0])
    at = next(i for i, a in enumerate(arrays) if hasattr(a, "dtype") and is_float(a))
    argument = list(inspect.signature(ENTRIES[name].function).parameters)[at]
    with pytest.raises(
        ValueError, match=f"^{name}: implementation is 'cuda'; wants 'pallas', 'xla', 'autodiff', or None"
    ):
        op_of(name, None, "cuda")(*arrays)
    integers = [*arrays[:at], jnp.ones(arrays[at].shape, jnp.int32), *arrays[at + 1 :]]
    try:
        found = op_of(name, None, None)(*integers)
    except TypeError as error:
        assert str(error).startswith(f"{name}: {argument} has dtype int32; wants a floating dtype")
    else:
        ones = [*arrays[:at], jnp.ones(arrays[at].shape), *arrays[at + 1 :]]
        assert_close(found, op_of(name, None, None)(*ones), "float32")
    with pytest.raises(TypeError, match=f"^{name}: {argument} is a list; wants an array"):
        op_of(name, None, None)(*arrays[:at], [1.0], *arrays[at + 1 :])
    with jax.enable_x64(True):
        arrays = drawn(name, dtype="float64")[0]
        reason = "dtype float64, only" if ENTRIES[name].kernel_dtypes else "any array, because"
        with pytest.raises(NotImplementedError, match=f"^{name}: .*does not take {reason}"):
            op_of(name, None, "pallas")(*arrays)
        assert all(y.dtype == jnp.float64 for y in results_of(op_of(name, None, None), arrays))


ANY_SHAPE = {"negative_backward", "transpose_backward", "dropout_backward", "outer"}
OF_SHAPES = [
    entry.name
    for entry in LIKE
    if entry.name not in ANY_SHAPE
    and (
        "_backward" in entry.name
        or sum(getattr(argument, "below", 0) is None for argument in entry.small.arguments) > 1
    )
]


@pytest.mark.parametrize("name", OF_SHAPES)
def test_another_shape_of_dy_or_of_the_second_argument_is_refused(name):
    arrays = list(drawn(name)[0])
    at = 0 if "_backward" in name else 1
    arrays[at] = jnp.ones((7, *arrays[at].shape, 7))
    with pytest.raises(ValueError, match=f"^{name}: .*wants"):
        op_of(name, None, None)(*arrays)


def test_kernels_refuse_more_elements_than_an_index_counts():
    huge = jax.ShapeDtypeStruct((2**31,), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"^relu: .*does not take 2\^31 or more elements"):
        jax.eval_shape(functools.partial(ENTRIES["relu"].function, implementation="pallas"), huge)
    assert jax.eval_shape(ENTRIES["relu"].function, huge).shape == huge.shape


def test_every_function_has_annotations_and_a_formula():
    for entry in LIKE:
        parameters = inspect.signature(entry.function).parameters.values()
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters), entry.name
        assert "`" in entry.function.__doc__, entry.name


INF, NAN = math.inf, math.nan
HUGE = [-200.0, 200.0, -6e19, 6e19, -INF, INF]
LINEAR = [0, 200, 0, 6e19, 0, INF], [[0, 1, 0, 1, 0, 1]]
SINGULAR = {
    # name of the op and the case -> (options, arguments, values, gradients for dy = 1)
    "relu": ({}, [[0.0, NAN]], [0, NAN], [[0, 0]]),
    "leaky_relu": (dict(negative_slope=0.5), [[0.0, -2.0]], [0, -1], [[0.5, 0.5]]),
    "prelu": ({}, [[0.0, -2.0, 2.0], [0.5, 0.5, 0.5]], [0, -1, 2], [[0.5, 0.5, 1], [0, -2, 0]]),
    "elu": (dict(alpha=0.5), [[0.0, -INF, INF]], [0, -0.5, INF], [[0.5, 0, 1]]),
    "sigmoid": ({}, [[-200.0, 200.0, -INF, INF]], [0, 1, 0, 1], [[0, 0, 0, 0]]),
    "tanh": ({}, [[-200.0, 200.0, -INF]], [-1, 1, -1], [[0, 0, 0]]),
    "softplus": ({}, [HUGE], *LINEAR),
    "mish": ({}, [HUGE], *LINEAR),
    "silu": ({}, [HUGE], *LINEAR),
    "gelu": (dict(approximate=False), [HUGE], *LINEAR),
    "gelu approximate": (dict(approximate=True), [HUGE], *LINEAR),
    "softmax": ({}, [[1e4, 0.0, -INF]], [1, 0, 0], [[0, 0, 0]]),
    "log_softmax": ({}, [[1e4, 0.0]], [0, -1e4], [[-1, 1]]),
    "logsumexp": ({}, [[1e4, 0.0, -INF]], 1e4, [[1, 0, 0]]),
    "logsumexp of nothing": ({}, [[-INF, -INF]], -INF, [[0, 0]]),
    "log": ({}, [[0.0, -0.0, -1.0, INF]], [-INF, -INF, NAN, INF], [[INF, -INF, -1, 0]]),
    "sqrt": ({}, [[0.0, -1.0, INF]], [0, NAN, INF], [[INF, NAN, 0]]),
    "abs": ({}, [[0.0, -0.0, -INF]], [0, 0, INF], [[0, 0, -1]]),
    "exp": ({}, [[-INF, 200.0]], [0, INF], [[0, INF]]),
    "clip": (dict(min=-1.0, max=1.0), [[-1.0, 1.0, 1.5, -INF, NAN]], [-1, 1, 1, -1, NAN], [[1, 1, 0, 0, 1]]),
    "divide": (
        {},
        [[1.0, -1.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, -0.0, INF, -2.0]],
        [INF, -INF, NAN, -INF, 0, -0.5],
        [[INF, INF, INF, -INF, 0, -0.5], [-INF, INF, NAN, -INF, 0, -0.25]],
    ),
    "power": (
        {},
        [[0.0] * 6 + [-2.0, 2.0, -2.0, 2.0], [2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 3.0, 0.0, 0.5, -1.0]],
        [0, 0, 0, 1, INF, INF, -8, 1, NAN, 0.5],
        [
            [0, 1, INF, 0, -INF, -INF, 12, 0, NAN, -0.25],
            [0, 0, 0, -INF, -INF, -INF, NAN, math.log(2), NAN, 0.5 * math.log(2)],
        ],
    ),
    "maximum": (
        {},
        [[1.0, 0.0, 2.0, NAN], [1.0, -0.0, 1.0, 1.0]],
        [1, 0, 2, NAN],
        [[0.5, 0.5, 1, 0], [0.5, 0.5, 0, 0]],
    ),
    "minimum": (
        {},
        [[1.0, 0.0, 2.0, NAN], [1.0, -0.0, 1.0, 1.0]],
        [1, 0, 1, NAN],
        [[0.5, 0.5, 0, 0], [0.5, 0.5, 1, 0]],
    ),
    "mean_absolute_error": ({}, [[1.0, 2.0], [1.0, 0.0]], 1, [[0, 0.5], [0, -0.5]]),
    "huber": (
        {},
        [[2.0, 1.0, -5.0, 0.0], [1.0, 0.5, 0.0, 0.0]],
        [0.5, 0.125, 4.5, 0],
        [[1, 0.5, -1, 0], [-1, -0.5, 1, 0]],
    ),
    "binary_cross_entropy": (
        {},
        [[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]],
        [0, 0, INF, INF],
        [[1, -1, -INF, INF], [INF, -INF, INF, -INF]],
    ),
    "sigmoid_binary_cross_entropy": (
        {},
        [[200.0, -200.0, 200.0, -200.0, INF, -INF, INF, -INF], [1.0, 0.0, 0.0, 1.0] * 2],
        [0, 0, 200, 200, 0, 0, INF, INF],
        [[0, 0, 1, -1] * 2, [-200, 200, -200, 200, -INF, INF, -INF, INF]],
    ),
    "kl_divergence": ({}, [[0.0, -INF], [1.0, 0.0]], 0, [[-1, 0], [1, -INF]]),
    "softmax_cross_entropy": (
        {},
        [[-INF, 0.0, 0.0], [0.0, 1.0, 0.0]],
        math.log(2),
        [[0, -0.5, 0.5], [0, math.log(2), math.log(2)]],
    ),
    # The squares of these numbers overflow.
    "layer_norm": ({}, [[1e20, -1e20, 2e20, 0.0], [1.0] * 4, [0.0] * 4], [NAN] * 4, [[NAN] * 4, [NAN] * 4, [1] * 4]),
    "rms_norm": ({}, [[1e20, -1e20, 2e20, 0.0], [1.0] * 4], [NAN] * 4, [[NAN] * 4, [NAN] * 4]),
}


@functools.cache
def _at_singular_points(implementation):
    def one(name):
        options, arguments, *_ = SINGULAR[name]
        op, _, _ = name.partition(" ")
        op = functools.partial(ENTRIES[op].function, **options, implementation=implementation)
        y, vjp = jax.vjp(op, *(jnp.array(a, jnp.float32) for a in arguments))
        return y, vjp(jnp.ones_like(y))

    return jax.jit(lambda: {name: one(name) for name in SINGULAR})()


@every_implementation
@pytest.mark.parametrize("name", SINGULAR)
def test_singular_points_give_what_calculus_and_ieee_say(name, implementation):
    *_, values, gradients = SINGULAR[name]
    y, found = _at_singular_points(implementation)[name]
    np.testing.assert_allclose(y, values, rtol=1e-6, atol=1e-30)
    for gradient, expected in zip(found, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-30)


# Where a derivative jumps or is infinite, the second derivative is one-sided, like the first.
SECOND = {
    # op -> (options, argument, other arguments, second derivative with respect to the argument)
    "binary_cross_entropy": ({}, [0.0, 1.0, 0.5], [[0.0, 1.0, 0.0]], [1, 1, 4]),
    "elu": (dict(alpha=0.5), [0.0, 1.0], [], [0.5, 0]),
    "huber": (dict(delta=1.0), [1.0, -1.0, 0.5, 2.0], [[0.0] * 4], [1, 1, 1, 0]),
    "power": ({}, [0.0, 0.0, 0.0, 2.0], [[0.0, 2.0, 3.0, 3.0]], [0, 2, 0, 12]),
}


@ours
def test_the_derivative_of_the_gradient_of_sqrt_is_0_for_a_dy_of_0_at_the_smallest_normal_numbers(implementation):
    backward = functools.partial(jaxbp.sqrt_backward, implementation=implementation)
    slope = jax.grad(lambda x: jnp.sum(backward(jnp.zeros(3), x)))(jnp.array([1.2e-38, 1e-30, 4.0]))
    np.testing.assert_array_equal(slope, np.zeros(3))


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_at_singular_points(name):
    options, x, others, expected = SECOND[name]
    op = functools.partial(ENTRIES[name].function, **options, implementation="xla")

    @jax.jit
    def second(x, *others):
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(op(x, *others)))(x)))(x)

    np.testing.assert_allclose(second(*(jnp.array(a, jnp.float32) for a in (x, *others))), expected, rtol=1e-6)


def test_the_second_derivatives_of_power_in_both_arguments_are_no_nan_at_0_to_the_0():
    gradient = jax.grad(functools.partial(ENTRIES["power"].function, implementation="xla"), (0, 1))
    hessian = [jax.grad(lambda *x, i=i: gradient(*x)[i], (0, 1))(0.0, 0.0) for i in (0, 1)]
    np.testing.assert_array_equal(hessian, np.zeros((2, 2)))


def test_a_power_in_kernels_keeps_its_digits_at_large_exponents():
    # exp(x2 ln x1) would multiply the logarithm's rounding error by x2.
    base, exponent = jnp.linspace(0.5, 2, 64), jnp.linspace(50, 100, 64)
    (dx1, dx2) = jaxbp.power_backward(jnp.ones(64), base, exponent, implementation="pallas")
    wide = np.asarray(base, np.float64), np.asarray(exponent, np.float64)
    np.testing.assert_allclose(dx1, wide[1] * wide[0] ** (wide[1] - 1), rtol=3e-6)
    np.testing.assert_allclose(dx2, wide[0] ** wide[1] * np.log(wide[0]), rtol=3e-6, atol=1e-6)
