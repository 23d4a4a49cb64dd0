import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_numerical_gradients_agree,
    cuda_program,
    every_implementation,
    in_float64,
    last_program_first,
    normal,
    on_the_cpu,
    ours,
    relative_error,
)
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

import jaxbp
from jaxbp import Wires
from jaxbp.logic.gates import PARAMETERS
from jaxbp.logic.ops._rows import copies_read
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting

# The relaxed functions, and their derivatives with respect to a and b.
RELAXED = [
    (lambda a, b: 0 * a, lambda a, b: 0 * a, lambda a, b: 0 * a),
    (lambda a, b: a * b, lambda a, b: b, lambda a, b: a),
    (lambda a, b: a - a * b, lambda a, b: 1 - b, lambda a, b: -a),
    (lambda a, b: a, lambda a, b: 1 + 0 * a, lambda a, b: 0 * a),
    (lambda a, b: b - a * b, lambda a, b: -b, lambda a, b: 1 - a),
    (lambda a, b: b, lambda a, b: 0 * a, lambda a, b: 1 + 0 * a),
    (lambda a, b: a + b - 2 * a * b, lambda a, b: 1 - 2 * b, lambda a, b: 1 - 2 * a),
    (lambda a, b: a + b - a * b, lambda a, b: 1 - b, lambda a, b: 1 - a),
    (lambda a, b: 1 - (a + b - a * b), lambda a, b: b - 1, lambda a, b: a - 1),
    (lambda a, b: 1 - (a + b - 2 * a * b), lambda a, b: 2 * b - 1, lambda a, b: 2 * a - 1),
    (lambda a, b: 1 - b, lambda a, b: 0 * a, lambda a, b: 0 * a - 1),
    (lambda a, b: 1 - b + a * b, lambda a, b: b, lambda a, b: a - 1),
    (lambda a, b: 1 - a, lambda a, b: 0 * a - 1, lambda a, b: 0 * a),
    (lambda a, b: 1 - a + a * b, lambda a, b: b - 1, lambda a, b: a),
    (lambda a, b: 1 - a * b, lambda a, b: -b, lambda a, b: -a),
    (lambda a, b: 1 + 0 * a, lambda a, b: 0 * a, lambda a, b: 0 * a),
]
BITS = list(itertools.product((False, True), repeat=2))
ONE_GATE = Wires.from_pairs([0], [1], 2)
# One input is shared, one is unused, and a gate reads one twice.
SHARED = Wires.from_pairs([0, 0, 1, 2, 0, 4], [1, 0, 4, 4, 4, 4], 5)
every_gate = pytest.mark.parametrize("gate", range(16))
every_parametrization = pytest.mark.parametrize("parametrization", PARAMETERS)


@functools.cache
def of_layer(implementation, parametrization="softmax"):
    options = dict(implementation=implementation, parametrization=parametrization)

    @jax.jit
    def run(dy, logits, wires, x):
        y = jaxbp.gate_layer(logits, wires, x, **options)
        return (y, *jaxbp.gate_layer_backward(dy, logits, wires, x, **options))

    return run


@every_implementation
@every_gate
def test_each_gate_and_both_its_derivatives_are_those_of_the_literature(gate, implementation):
    x = jnp.asarray(np.random.default_rng(gate).random((20, 2)), jnp.float32)
    a, b = x.T
    y, _, dx = of_layer(implementation)(jnp.ones((20, 1)), jaxbp.hard_logits(jnp.array([gate])), ONE_GATE, x)
    expected = jnp.stack([f(a, b) for f in RELAXED[gate]])
    np.testing.assert_allclose(jnp.concatenate([y, dx], axis=1).T, expected, rtol=1e-6, atol=1e-6)


@every_implementation
def test_the_gradient_in_the_logits_is_that_of_the_formula(implementation):
    dy, logits, x = normal((7, 6), (6, 16), (7, 5), seed=1)
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    functions = np.stack([f(np.float64(x[:, SHARED.a]), np.float64(x[:, SHARED.b])) for f, _, _ in RELAXED], axis=-1)
    y = (p * functions).sum(axis=-1)
    dlogits = (np.float64(dy)[..., None] * p * (functions - y[..., None])).sum(axis=0)
    assert_close(of_layer(implementation)(dy, logits, SHARED, x)[:2], (y, dlogits), "float32")


@ours
@pytest.mark.parametrize("sizes", [(8, 4), (16, 8), (64, 32)], ids=lambda sizes: f"{sizes[0]}->{sizes[1]}")
def test_layers_match_float64(sizes, implementation):
    inputs, gates = sizes
    wires = Wires.random(inputs, gates, seed=0)
    arrays = [*normal((3, gates), (gates, 16)), wires, *normal((3, inputs), seed=1)]
    reference = in_float64(of_layer("autodiff"), *arrays)
    for a, r in zip(of_layer(implementation)(*arrays), reference, strict=True):
        assert relative_error(a, r) < 1e-5
    if implementation == "xla":
        for a, r in zip(in_float64(of_layer("xla"), *arrays), reference, strict=True):
            assert relative_error(a, r) < 1e-14


@every_implementation
def test_a_gate_that_passes_on_its_a_does(implementation):
    logits = jnp.zeros((1, 16)).at[0, 3].set(10.0)
    x = jnp.asarray(np.random.default_rng(0).random((20, 2)), jnp.float32)
    y, _, dx = of_layer(implementation)(jnp.ones((20, 1)), logits, ONE_GATE, x)
    np.testing.assert_allclose(y[:, 0], x[:, 0], atol=1e-3)
    np.testing.assert_allclose(dx, jnp.broadcast_to(jnp.array([1.0, 0.0]), (20, 2)), atol=1e-3)


@every_parametrization
@every_implementation
def test_every_parametrization_matches_finite_differences(implementation, parametrization):
    arrays = normal((6, PARAMETERS[parametrization]), (3, 5), seed=2)
    layer = lambda logits, x, **options: jaxbp.gate_layer(logits, SHARED, x, **options)  # noqa: E731
    options = dict(implementation=implementation, parametrization=parametrization)
    assert_numerical_gradients_agree(layer, arrays, step=2e-2, **options)


@every_parametrization
def test_every_parametrization_matches_native_autodiff_in_float64(parametrization):
    arrays = [*normal((3, 6), (6, PARAMETERS[parametrization])), SHARED, *normal((3, 5), seed=1)]
    reference = in_float64(of_layer("autodiff", parametrization), *arrays)
    assert_close(in_float64(of_layer("xla", parametrization), *arrays), reference, 1e-14)
    assert_close(of_layer("pallas", parametrization)(*arrays), reference, "float32")


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_are_sums_of_neighboring_gates(implementation, dtype):
    logits, (dy, x) = normal((6, 16))[0], (a.astype(dtype) for a in normal((2, 3), (2, 5), seed=1))
    options = dict(implementation=implementation)

    def summed(logits, x):
        return jaxbp.group_sum(jaxbp.gate_layer(logits, SHARED, x, **options).astype("float32"), 3)

    def of_groups(logits, x):
        return jaxbp.gate_layer(logits, SHARED, x, groups=3, **options)

    @jax.jit
    def run(dy, logits, x):
        of_functions = [jax.vjp(function, logits, x) for function in (summed, of_groups)]
        backward = jaxbp.gate_layer_backward(dy, logits, SHARED, x, groups=3, **options)
        return [(y, vjp(dy)) for y, vjp in of_functions], backward

    ((y, gradients), (results, gradients_of_groups)), backward = run(dy.astype("float32"), logits, x)
    assert results.dtype == "float32"
    assert_close(results, y, dtype)
    assert_close(gradients_of_groups, gradients, dtype)
    assert_close(backward, gradients, dtype)


@pytest.mark.parametrize("groups", [0, 4, True, 2.0])
def test_groups_that_do_not_divide_the_gates_are_refused(groups):
    with pytest.raises(
        ValueError, match=r"gate_layer: groups is .*; wants None, or a divisor of 6, the number of gates"
    ):
        jaxbp.gate_layer(jnp.zeros((6, 16)), SHARED, jnp.zeros((2, 5)), groups=groups)


@ours
def test_check_grads_to_order_two_of_groups(implementation):
    layer = lambda logits, x: jaxbp.gate_layer(logits, SHARED, x, groups=2, implementation=implementation)  # noqa: E731
    check_grads(layer, normal((6, 16), (3, 5), seed=3), order=2, modes=("rev",), atol=2e-2, rtol=2e-2)


@every_parametrization
@ours
def test_check_grads_to_order_two(implementation, parametrization):
    arrays = normal((6, PARAMETERS[parametrization]), (3, 5), seed=3)
    options = dict(implementation=implementation, parametrization=parametrization)
    layer = lambda logits, x: jaxbp.gate_layer(logits, SHARED, x, **options)  # noqa: E731
    check_grads(layer, arrays, order=2, modes=("rev",), atol=2e-2, rtol=2e-2)


def test_the_light_parametrizations_interpolate_between_the_rows_of_a_truth_table():
    (w,) = normal((5, 4), seed=4)
    wires = Wires.from_pairs([0] * 5, [1] * 5, 2)
    bits = jnp.asarray(BITS, jnp.float32)
    rows = jaxbp.gate_layer(w, wires, bits, parametrization="input_wise")
    np.testing.assert_allclose(rows.T, jax.nn.sigmoid(w), rtol=1e-6)
    sign = 2 * bits - 1
    walsh = w[:, :1] + w[:, 1:2] * sign[:, 0] + w[:, 2:3] * sign[:, 1] + w[:, 3:] * sign[:, 0] * sign[:, 1]
    rows = jaxbp.gate_layer(w, wires, bits, parametrization="walsh")
    np.testing.assert_allclose(rows.T, jax.nn.sigmoid(walsh), rtol=1e-5)


@every_implementation
def test_a_batch_equals_its_examples_one_by_one(implementation):
    dy, logits, x = normal((130, 6), (6, 16), (130, 5), seed=5)
    run = of_layer(implementation)
    y, dlogits, dx = run(dy, logits, SHARED, x)
    each = [run(dy[i : i + 1], logits, SHARED, x[i : i + 1]) for i in (0, 1, 128, 129)]
    assert_close(
        [y[jnp.array([0, 1, 128, 129])], dx[jnp.array([0, 1, 128, 129])]],
        [jnp.concatenate([one[k] for one in each]) for k in (0, 2)],
        "float32",
    )
    halves = [run(dy[part], logits, SHARED, x[part]) for part in (slice(0, 65), slice(65, 130))]
    assert_close(dlogits, halves[0][1] + halves[1][1], "float32")


WIRES = {
    "shared": SHARED,
    "skewed": Wires.from_pairs([3] * 90, [3] * 45 + [0] * 45, 6),
    "sparse": Wires.from_pairs(range(9), [9] * 9, 300),
    "moore": Wires.moore(seed=0),
}


@ours
@pytest.mark.parametrize("wires", WIRES.values(), ids=WIRES)
def test_gradients_gather_over_every_consumer(wires, implementation):
    arrays = [*normal((4, wires.gates), (wires.gates, 16)), wires, *normal((4, wires.inputs), seed=1)]
    assert_close(of_layer(implementation)(*arrays), in_float64(of_layer("autodiff"), *arrays), "float32")


def test_the_kernels_give_the_same_bits_whichever_program_runs_first():
    wires = Wires.random(9, 12, seed=0)
    arrays = [*normal((300, 12), (12, 16)), wires, *normal((300, 9), seed=1)]
    with on_the_cpu():
        in_order = of_layer("pallas")(*arrays)
        with last_program_first():
            last_first = of_layer("pallas")(*arrays)
    assert all(bool((a == b).all()) for a, b in zip(in_order, last_first, strict=True))


def scatters(jaxpr):
    """Yield for each scatter whether it declares unique indices. Without them, a GPU adds in any order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("scatter"):
            yield equation.params["unique_indices"]
        for inner in jaxprs_in_params(equation.params):
            yield from scatters(inner)


@ours
def test_no_gradient_of_a_gradient_scatters_into_one_place_twice(implementation):
    backward = functools.partial(jaxbp.gate_layer_backward, implementation=implementation)

    def second(dy, logits, x, cotangents):
        return jax.vjp(lambda dy, logits, x: backward(dy, logits, SHARED, x), dy, logits, x)[1](cotangents)

    dy, logits, x, *cotangents = normal((3, SHARED.gates), (6, 16), (3, 5), (6, 16), (3, 5))
    found = list(scatters(jax.make_jaxpr(second)(dy, logits, x, tuple(cotangents)).jaxpr))
    assert found and all(found)


@pytest.mark.parametrize("wires", WIRES.values(), ids=WIRES)
def test_no_two_gates_read_one_copy_of_a_row(wires):
    # With indices declared unique, a GPU does not add two values of one index.
    read = np.stack([wires.a, wires.b], axis=1).ravel()
    copies = np.asarray(copies_read(read, wires.consumers, wires.offsets[::2], wires.max_fan_out))
    assert len(set(copies)) == 2 * wires.gates
    assert np.array_equal(copies // wires.max_fan_out, read)


@pytest.mark.parametrize("wires", WIRES.values(), ids=WIRES)
def test_gradients_of_gradients_match_float64(wires):
    def second(implementation):
        layer = functools.partial(jaxbp.gate_layer_backward, implementation=implementation)
        return lambda dy, logits, x: jax.grad(lambda *a: sum(jnp.sum(d**2) for d in layer(a[0], a[1], wires, a[2])))(
            dy, logits, x
        )

    arrays = normal((4, wires.gates), (wires.gates, 16), (4, wires.inputs))
    assert_close(jax.jit(second("xla"))(*arrays), in_float64(jax.jit(second("autodiff")), *arrays), "float32")


@ours
def test_a_gradient_of_a_gradient_in_half_precision_is_rounded_once(implementation):
    # Rounded terms could overflow, unlike their sum.
    dy, logits, x = (a.astype(jnp.float16) for a in normal((3, 6), (6, 16), (3, 5), seed=6))

    def second(dtype):
        arrays = [a.astype(dtype) for a in (dy, 50 * x, logits)]
        layer = functools.partial(jaxbp.gate_layer_backward, implementation=implementation)
        _, vjp = jax.vjp(lambda logits: layer(arrays[0], logits, SHARED, arrays[1]), arrays[2])
        return np.float64(vjp((arrays[2], arrays[1]))[0])

    np.testing.assert_allclose(second(jnp.float16), second(jnp.float32), rtol=1.001 * 2**-11, atol=2**-24)


@ours
def test_logits_may_be_wider_than_what_flows_through_the_gates(implementation):
    dy, logits, x = normal((3, 6), (6, 16), (3, 5), seed=6)
    half = [dy.astype(jnp.bfloat16), logits, SHARED, x.astype(jnp.bfloat16)]
    y, dlogits, dx = of_layer(implementation)(*half)
    assert (y.dtype, dlogits.dtype, dx.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    reference = in_float64(of_layer("autodiff"), *half)
    layer = functools.partial(jaxbp.gate_layer, logits, SHARED, implementation=implementation)
    (dx_of_pair,) = jax.vjp(layer, half[3])[1](half[0])
    for result, exact in ((y, reference[0]), (dx, reference[2]), (dx_of_pair, reference[2])):
        # All arithmetic is in float32, and each result is rounded once.
        np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=1.001 * 2**-8, atol=1e-5)
    assert_close(dlogits, reference[1], "float32")


def changes_of_layout(layers, batch, implementation):
    wires = Wires.random(256, 256, seed=0)

    def loss(logits, x):
        for one in logits:
            x = jaxbp.gate_layer(one, wires, x, implementation=implementation)
        return jnp.sum(x**2)

    logits, x = normal((layers, 256, 16), (batch, 256))
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(list(logits), x).compile().as_text()
    # The interpreter copies the arrays that its loops change.
    kinds = "transpose" if implementation == "pallas" else "(?:transpose|copy)"
    shapes = re.findall(rf"= \w+\[([\d,]+)\]\S* {kinds}\(", program)
    return sum(np.prod([int(size) for size in shape.split(",")]) >= x.size for shape in shapes)


@ours
def test_stacked_layers_change_the_layout_at_their_ends_alone(implementation):
    assert changes_of_layout(3, 128, implementation) == changes_of_layout(1, 128, implementation) <= 4


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=lambda gpu: gpu.kind)
def test_none_takes_the_kernels_on_every_gpu_that_runs_them(gpu):
    logits, x = normal((6, 16), (128, 5))
    loss = lambda logits, x: jnp.sum(jaxbp.gate_layer(logits, SHARED, x) ** 2)  # noqa: E731
    with targeting(gpu):
        program = cuda_program(jax.value_and_grad(loss, (0, 1)), logits, x)
    assert program.count("custom_call @mosaic_gpu") == 3


def test_none_takes_no_kernel_on_older_gpus():
    logits, x = normal((6, 16), (128, 5))
    with targeting(dataclasses.replace(HOPPER, capability=(8, 0))):
        program = cuda_program(functools.partial(jaxbp.gate_layer, logits, SHARED), x)
    assert "mosaic_gpu" not in program


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def layer(logits=(6, 16), wires=SHARED, x=(2, 5), **options):
    return lambda: jaxbp.gate_layer(zeros(*logits), wires, zeros(*x), **options)


REFUSED = {
    "logits of other gates": (layer((5, 16)), ValueError, "gate_layer: logits has shape (5, 16); wants (6, 16)"),
    "four logits of sixteen": (layer((6, 4)), ValueError, "gate_layer: logits has shape (6, 4); wants (6, 16)"),
    "sixteen parameters of four": (
        layer(parametrization="walsh"),
        ValueError,
        "gate_layer: logits has shape (6, 16); wants (6, 4)",
    ),
    "other inputs": (
        layer(x=(2, 6)),
        ValueError,
        "gate_layer: x has shape (2, 6); wants (..., 5), the number of inputs of wires",
    ),
    "a scalar": (layer(x=()), ValueError, "gate_layer: x has shape (); wants (..., 5), the number of inputs of wires"),
    "an unknown parametrization": (
        layer(parametrization="fourier"),
        ValueError,
        "gate_layer: parametrization is 'fourier'; wants one of softmax, input_wise, walsh",
    ),
    "a pair of lists": (layer(wires=([0], [1])), TypeError, "gate_layer: wires is a tuple; wants a jaxbp.Wires"),
    "bits": (
        lambda: jaxbp.gate_layer(zeros(6, 16), SHARED, zeros(2, 5, dtype="bool")),
        TypeError,
        "gate_layer: x has dtype bool; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "dy of other gates": (
        lambda: jaxbp.gate_layer_backward(zeros(2, 5), zeros(6, 16), SHARED, zeros(2, 5)),
        ValueError,
        "gate_layer_backward: dy has shape (2, 5); wants (2, 6)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@pytest.mark.parametrize(("gates", "launched"), [(8000, False), (64000, True)])
def test_kernels_compute_the_coefficients_of_large_layers(gates, launched):
    wires = jax.eval_shape(lambda: Wires.random(gates, gates, seed=0))
    shapes = (gates, 16), (128, gates)
    logits, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    layer = functools.partial(jaxbp.gate_layer, implementation="pallas")
    gradient = jax.grad(lambda logits, x, wires: jnp.sum(layer(logits, wires, x)))
    with targeting(HOPPER):
        program = str(jax.make_jaxpr(gradient)(logits, x, wires))
    assert [f"name='{name}'" in program for name in ("softmax_gates", "softmax_gates_backward")] == [launched, launched]


def test_second_derivatives_of_the_backward_in_float16_may_cancel_beyond_its_range():
    """The derivative of `4096 log(da db)` with respect to dy, with `da = dy b` and `db = dy a`, does not depend on x.
    The two terms of its gradient with respect to x are 2^18 and -2^18."""
    logits = jnp.zeros((1, 16), jnp.float16).at[0, 1].set(30)

    def of_dy(dy, x):
        backward = functools.partial(jaxbp.gate_layer_backward, implementation="xla")
        loss = lambda dy: 4096 * jnp.sum(jnp.log(backward(dy, logits, ONE_GATE, x)[1]))  # noqa: E731
        return 4096 * jnp.sum(jax.grad(loss)(dy))

    found = jax.jit(jax.grad(of_dy, argnums=1))(jnp.full(1, 64, jnp.float16), jnp.ones(2, jnp.float16))
    np.testing.assert_allclose(np.asarray(found, np.float64), 0, atol=1)
