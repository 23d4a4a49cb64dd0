import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    every_implementation,
    in_float64,
    normal,
    on_the_cpu,
    ours,
    relative_error,
    skipped_outputs,
)

import jaxbp
from jaxbp import TreeWires
from jaxbp.logic.gates import PARAMETERS
from jaxbp.logic.ops import logic_conv2d as op
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import trees
from pallas_kernels.logic.trees import Config, input_gradient

WIRES = TreeWires.random(3, 4, (3, 2), seed=0)
# Kernel 0 reads one position four times, kernel 1 the corners. No kernel reads channel 1.
SHARED = TreeWires.from_leaves(
    [[[0, 1, 1]] * 4, [[2, 0, 0], [2, 0, 2], [2, 2, 0], [2, 2, 2]], [[0, 1, 1], [2, 1, 1], [0, 0, 1], [0, 1, 1]]], 3, 3
)
GEOMETRIES = {
    "stride and padding": dict(stride=(2, 1), padding=((2, 1), (0, 2))),
    "pool with a remainder, stride and padding": dict(pool=(2, 3), stride=(1, 2), padding=(2, 1)),
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


def images(batch=3, channels=3, size=(7, 8), seed=0):
    return jnp.asarray(np.random.default_rng(seed).random((batch, channels, *size)), jnp.float32)


def by_loops(logits, wires, x, stride=1, padding=0, pool=1):
    (s, t), (p, q), (r, c) = ((n, n) if isinstance(n, int) else n for n in (stride, padding, pool))
    sides = ((n, n) if isinstance(n, int) else n for n in (p, q))
    x = np.pad(np.float64(x), ((0, 0), (0, 0), *sides))
    weights = np.asarray(jax.nn.softmax(logits), np.float64)
    sizes = [(n - w) // step + 1 for n, w, step in zip(x.shape[2:], wires.window, (s, t), strict=True)]
    values = np.empty((len(x), wires.kernels, *sizes))
    for k, i, j in itertools.product(range(wires.kernels), *map(range, sizes)):
        level, gate = [x[:, c, i * s + u, j * t + v] for c, u, v in np.asarray(wires.leaves[k])], 0
        while len(level) > 1:
            pairs = list(zip(level[::2], level[1::2], strict=True))
            level = [_mixture(weights[k, gate + g], a, b) for g, (a, b) in enumerate(pairs)]
            gate += len(pairs)
        values[:, k, i, j] = level[0]
    rows, columns = sizes[0] // r, sizes[1] // c
    windows = values[:, :, : rows * r, : columns * c].reshape(*values.shape[:2], rows, r, columns, c)
    windows = np.moveaxis(windows, 3, 4).reshape(*values.shape[:2], rows, columns, r * c)
    return windows.max(-1), windows.argmax(-1)


def _mixture(weights, a, b):
    ab, zero = a * b, 0 * a
    functions = [zero, ab, a - ab, a, b - ab, b, a + b - 2 * ab, a + b - ab]
    return sum(w * f for w, f in zip(weights, [*functions, *(1 - f for f in reversed(functions))], strict=True))


@functools.cache
def of_op(implementation, **options):
    options = dict(options, implementation=implementation)

    @jax.jit
    def run(logits, wires, x, dy=None):
        y, places = jaxbp.logic_conv2d_or_pool2d_with_indices(logits, wires, x, **dict(pool=1) | options)
        dy = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) if dy is None else dy
        return (
            y,
            places,
            *jaxbp.logic_conv2d_or_pool2d_backward(dy, places, logits, wires, x, **dict(pool=1) | options),
        )

    return run


@every_geometry
@every_implementation
def test_values_places_and_gradients_are_those_of_the_definition(implementation, geometry):
    (logits,) = normal((4, 7, 16), seed=1)
    y, places, *gradients = of_op(implementation, **geometry)(logits, WIRES, images())
    expected, at = by_loops(logits, WIRES, images(), **geometry)
    assert relative_error(y, expected) < 1e-6
    np.testing.assert_array_equal(places, at)
    reference = in_float64(of_op("autodiff", **geometry), logits, WIRES, images())[2:]
    for gradient, wanted in zip(gradients, reference, strict=True):
        assert relative_error(gradient, wanted) < 1e-5


@pytest.mark.parametrize("parametrization", PARAMETERS)
@ours
def test_each_parametrization_has_its_own_gradient(implementation, parametrization):
    (logits,) = normal((4, 7, PARAMETERS[parametrization]), seed=1)
    options = dict(pool=2) | ({} if parametrization == "softmax" else dict(parametrization=parametrization))
    run = of_op(implementation, **options)
    reference = in_float64(of_op("autodiff", **options), logits, WIRES, images())
    assert_close(run(logits, WIRES, images()), reference, "float32")


@ours
def test_hardened_trees_are_exact_on_bits(implementation):
    gates = np.random.default_rng(0).integers(16, size=(4, 7))
    logits = jaxbp.hard_logits(jnp.asarray(gates.ravel())).reshape(4, 7, 16)
    x = jnp.round(images())
    y, places, *_ = of_op(implementation, pool=2)(logits, WIRES, x)
    expected, at = by_loops(logits, WIRES, x, pool=2)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(places, at)


@every_implementation
def test_of_equal_places_the_first_has_the_gradient(implementation):
    wires = TreeWires.from_leaves([[[0, 0, 0], [0, 0, 0]]], 1, 1)
    logits = jaxbp.hard_logits(jnp.array([3]))[None]
    x = jnp.array([[[[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]]]])
    y, places, _, dx = of_op(implementation, pool=2)(logits, wires, x, jnp.ones((1, 1, 1, 2)))
    np.testing.assert_array_equal(y.ravel(), [1, 1])
    np.testing.assert_array_equal(places.ravel(), [1, 0])
    np.testing.assert_array_equal(dx[0, 0], [[0, 1, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(dx, jax.grad(lambda x: jnp.sum(jaxbp.logic_or_pool2d(x)))(x))


@every_implementation
def test_a_place_that_several_leaves_read_has_the_sum_of_their_gradients(implementation):
    (logits,) = normal((3, 3, 16), seed=3)
    x = images()
    _, _, _, dx = of_op(implementation, padding=1)(logits, SHARED, x)
    reference = in_float64(of_op("autodiff", padding=1), logits, SHARED, x)[3]
    assert relative_error(dx, reference) < 1e-6
    assert not dx[:, 1].any()


@ours
def test_a_nan_stays_and_is_in_no_other_window(implementation):
    (logits,) = normal((4, 7, 16), seed=1)
    x = images().at[1, :, 0, 0].set(jnp.nan)
    y, places, *_ = of_op(implementation, pool=2)(logits, WIRES, x)
    assert jnp.isnan(y[1, :, 0, 0]).any()
    assert not jnp.isnan(y[0]).any()
    assert not jnp.isnan(y[:, :, 1:]).any()
    assert places[1].max() < 4


@ours
def test_batches_of_none_and_of_one(implementation):
    (logits,) = normal((4, 7, 16), seed=1)
    y, places, dlogits, dx = of_op(implementation, pool=2)(logits, WIRES, images(0))
    assert (y.shape, places.shape, dx.shape) == ((0, 4, 2, 3), (0, 4, 2, 3), (0, 3, 7, 8))
    assert not dlogits.any()
    one = of_op(implementation, pool=2)(logits, WIRES, images(1))
    reference = in_float64(of_op("autodiff", pool=2), logits, WIRES, images(1))
    assert_close((one[0], *one[2:]), (reference[0], *reference[2:]), "float32")


@ours
def test_a_gradient_of_a_gradient_in_half_precision_is_rounded_once(implementation):
    wires = TreeWires.random(1, 2, (1, 2), depth=1, seed=0)
    dy, logits, x = (a.astype(jnp.float16) for a in normal((9, 2, 1, 1), (2, 1, 16), (9, 1, 1, 2), seed=6))

    def second(dtype):
        dy_, x_, logits_ = (a.astype(dtype) for a in (dy, 5 * x, logits))
        backward = functools.partial(jaxbp.logic_conv2d_backward, implementation=implementation)
        _, vjp = jax.vjp(lambda logits: backward(dy_, logits, wires, x_), logits_)
        return np.float64(vjp((logits_, x_))[0])

    np.testing.assert_allclose(second(jnp.float16), second(jnp.float32), rtol=1.001 * 2**-11, atol=2**-24)


@ours
def test_a_hundred_runs_give_the_same_bits(implementation):
    (logits,) = normal((4, 7, 16), seed=1)
    run = of_op(implementation, pool=2)
    first = run(logits, WIRES, images())
    for _ in range(99):
        for a, b in zip(run(logits, WIRES, images()), first, strict=True):
            np.testing.assert_array_equal(a, b)


def examples_first(arrays):
    return jax.tree.map(lambda a: jnp.moveaxis(a, -1, 0), arrays)


def examples_last(arrays):
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), arrays)


@pytest.mark.parametrize(
    ("window", "stride", "pad", "pool"),
    [((2, 2), (1, 1), (1, 1), (2, 2)), ((2, 2), (1, 1), (0, 1), (1, 1)), ((1, 2), (2, 1), (0, 0), (1, 2))],
    ids=["pool", "no pool", "stride"],
)
def test_kernels_in_the_simulator_match_the_formula(window, stride, pad, pool):
    wires = TreeWires.random(2, 2, window, depth=2, seed=0)
    coefficients, *_ = normal((2, 3, 4), seed=1)
    padding = tuple((p, p) for p in pad)
    x = jnp.asarray(np.random.default_rng(0).random((2, 3, 3, 128)), jnp.float32)
    padded, geometry = jnp.pad(x, ((0, 0), *padding, (0, 0))), dict(stride=stride, pool=pool)
    with on_the_cpu():
        found = op._forward(coefficients, wires, examples_first(x), padding=padding, **geometry)
        y, places = examples_last(found)
        (dy,) = normal(y.shape, seed=2)
        arrays = *examples_first((dy, places)), coefficients, wires, examples_first(x)
        dc, _, dx = op._gradients(*arrays, padding=padding, **geometry)
        with targeting(HOPPER), simulated():
            found = trees.forward(coefficients, wires.leaves, padded, window=window, **geometry)
            assert_close(found[0], y, "float32")
            assert found[1] is None if places is None else (found[1] == places).all()
            arrays = dy, places, coefficients, wires.leaves, padded
            sums, dleaves = trees.leaf_gradients(*arrays, window=window, **geometry)
            assert_close(sums, dc, "float32")
            for rows in (1, 2, 3):  # per CTA
                found = input_gradient(
                    *(dleaves, places, wires.leaves, wires.readers, wires.reader_offsets),
                    **geometry | dict(size=x.shape[:3], padding=pad, config=Config(rows)),
                )
                assert_close(found, examples_last(dx), "float32")


@pytest.mark.parametrize("skipped", [0, 1], ids=["leaves", "coefficients"])
def test_a_kernel_computes_one_gradient_alone_in_the_simulator(skipped):
    wires = TreeWires.random(2, 2, (2, 2), depth=2, seed=0)
    (coefficients,), x = normal((2, 3, 4), seed=1), jnp.asarray(np.random.default_rng(0).random((2, 3, 3, 128)))
    with on_the_cpu():
        options = dict(stride=(1, 1), padding=((0, 0), (0, 0)), pool=(2, 2))
        y, places = examples_last(op._forward(coefficients, wires, examples_first(x), **options))
        arrays = *normal(y.shape, seed=2), places, coefficients, wires.leaves, x.astype(jnp.float32)
        run = functools.partial(trees.leaf_gradients, *arrays, window=(2, 2), stride=(1, 1), pool=(2, 2))
        with targeting(HOPPER), simulated():
            expected = run()
            with skipped_outputs(trees, skipped):
                found = run()
    assert not found[skipped].any()
    np.testing.assert_array_equal(found[1 - skipped], expected[1 - skipped])


def test_the_program_of_a_gradient_keeps_a_byte_for_each_pooled_output():
    wires = TreeWires.random(16, 32, 3, seed=0)
    logits, x = jnp.zeros((32, 7, 16)), jnp.zeros((64, 16, 12, 12))
    op = functools.partial(jaxbp.logic_conv2d_or_pool2d, padding=1, implementation="xla")
    _, vjp = jax.eval_shape(lambda logits, x: jax.vjp(lambda *a: op(a[0], wires, a[1]), logits, x), logits, x)
    kept = [a for a in jax.tree.leaves(vjp) if a.size >= 64 * 32 * 6 * 6]
    assert sorted((a.dtype.name, a.size) for a in kept) == [("float32", x.size), ("uint8", 64 * 32 * 6 * 6)]


@pytest.mark.parametrize("pool", [1, 2])
def test_a_gradient_in_the_logits_alone_computes_none_in_the_image(pool):
    wires = TreeWires.random(3, 8, 3, seed=0)
    structs = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 7, 16), (4, 3, 12, 12))]

    def program(implementation, arguments, platform):
        def loss(logits, x):
            op = functools.partial(jaxbp.logic_conv2d_or_pool2d, pool=pool, implementation=implementation)
            return jnp.sum(op(logits, wires, x) ** 2)

        trace = jax.jit(jax.grad(loss, arguments)).trace(*structs)
        return trace.lower(lowering_platforms=(platform,)).as_text()

    for arguments, gradients in (((0,), 0), ((0, 1), 1)):
        launched = set(re.findall(r"trees\w*?(?=_mosaic_gpu)", program("pallas", arguments, "cuda")))
        assert launched == {"trees", "trees_backward", *["trees_backward_input"] * gradients}
    # The formula adds each of a kernel's 8 leaves to the image's gradient.
    of_both, of_logits = (program("xla", which, "cpu").count("dynamic_update_slice") for which in ((0, 1), (0,)))
    assert of_both - of_logits == 8


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def call(logits=(4, 7, 16), x=(2, 3, 7, 8), wires=WIRES, **options):
    return lambda: jaxbp.logic_conv2d_or_pool2d(zeros(*logits), wires, zeros(*x), **options)


OP = "logic_conv2d_or_pool2d"
REFUSED = {
    "logits of other kernels": (call((5, 7, 16)), ValueError, f"{OP}: logits has shape (5, 7, 16); wants (4, 7, 16)"),
    "logits of other gates": (call((4, 3, 16)), ValueError, f"{OP}: logits has shape (4, 3, 16); wants (4, 7, 16)"),
    "x of other channels": (
        call(x=(2, 2, 7, 8)),
        ValueError,
        f"{OP}: x has shape (2, 2, 7, 8); wants (batch, 3, height, width)",
    ),
    "a small image": (
        call(x=(2, 3, 2, 8)),
        ValueError,
        f"{OP}: the window is 3 x 2; wants at most 2 x 8, the size of the padded input",
    ),
    "a large pool": (
        call(pool=6),
        ValueError,
        f"{OP}: pool is 6 x 6; wants at most 5 x 7, the number of positions",
    ),
    "a pool of none": (
        call(pool=0),
        ValueError,
        f"{OP}: pool is 0; wants an int of at least 1, or a pair of such ints",
    ),
    "other wires": (
        call(wires=jaxbp.Wires.moore()),
        TypeError,
        f"{OP}: wires is a Wires; wants a jaxbp.TreeWires",
    ),
    "a parametrization": (
        call(parametrization="fourier"),
        ValueError,
        f"{OP}: parametrization is 'fourier'; wants one of softmax, input_wise, walsh",
    ),
    "deep trees for the kernel": (
        call((4, 31, 16), wires=TreeWires.random(3, 4, 3, depth=5, seed=0), implementation="pallas"),
        NotImplementedError,
        f"{OP}: implementation='pallas' does not take trees of 32 leaves, at most 16; wants 'xla', 'autodiff', or None",
    ),
    "dy of the unpooled size": (
        lambda: jaxbp.logic_conv2d_or_pool2d_backward(
            zeros(2, 4, 5, 7), zeros(2, 4, 5, 7, dtype="uint8"), zeros(4, 7, 16), WIRES, zeros(2, 3, 7, 8)
        ),
        ValueError,
        f"{OP}_backward: dy has shape (2, 4, 5, 7); wants (2, 4, 2, 3)",
    ),
    "places in floats": (
        lambda: jaxbp.logic_conv2d_or_pool2d_backward(
            zeros(2, 4, 2, 3), zeros(2, 4, 2, 3), zeros(4, 7, 16), WIRES, zeros(2, 3, 7, 8)
        ),
        TypeError,
        f"{OP}_backward: indices has dtype float32; wants an array of integers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()


def test_kernels_refuse_more_leaves_than_an_index_counts():
    op = functools.partial(jaxbp.logic_conv2d_or_pool2d, implementation="pallas")
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 7, 16), (2**24, 3, 7, 8))]
    with pytest.raises(NotImplementedError, match=rf"^{OP}: .*does not take 2\^31 or more leaves of all trees"):
        jax.eval_shape(lambda logits, x: op(logits, WIRES, x), *shapes)


def test_a_sum_over_thousands_of_places_is_as_accurate_as_autodiffs():
    random = np.random.default_rng(0)
    wires = TreeWires.random(2, 2, 3, depth=2, seed=0)
    x, logits = random.random((16, 2, 12, 12), np.float32), random.normal(size=(2, 3, 16)).astype(np.float32)
    dy = random.normal(size=(16, 2, 10, 10)).astype(np.float32)

    def gradient(implementation):
        return jaxbp.logic_conv2d_backward(dy, logits, wires, x, implementation=implementation)[0]

    wide = functools.partial(jaxbp.logic_conv2d_backward, implementation="autodiff")
    exact = in_float64(lambda dy, logits, x: wide(dy, logits, wires, x)[0], dy, logits, x)
    error, native = (relative_error(gradient(of), exact) for of in ("xla", "autodiff"))
    assert error < 2 * native
