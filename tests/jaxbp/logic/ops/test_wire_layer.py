import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cuda_compiler import missing
from helpers import assert_close, cuda_program, every_implementation, in_float64, launching_program, normal, ours

import jaxbp
from experiments.ahead_of_time import gpus
from jaxbp import LearnedWires
from jaxbp.verify import check
from pallas_kernels.core.device import HOPPER, targeting

RELAXATIONS = ("softmax", "straight_through")
# Input 4 is no candidate, and a group has an input twice.
CANDIDATES = [[3, 0, 3], [0, 5, 1], [2, 0, 1]]
WIRES = {relaxation: LearnedWires.from_candidates(CANDIDATES, 6, 6, relaxation) for relaxation in RELAXATIONS}
every_relaxation = pytest.mark.parametrize("relaxation", RELAXATIONS)


@functools.cache
def value_and_gradients(implementation):

    @jax.jit
    def run(dy, logits, wires, x):
        layer = functools.partial(jaxbp.wire_layer, wires=wires, implementation=implementation)
        y, vjp = jax.vjp(lambda logits, x: layer(logits, x=x), logits, x)
        return (y, *vjp(dy)), jaxbp.wire_layer_backward(dy, logits, wires, x, implementation=implementation)

    return run


def by_the_definition(dy, logits, wires, x):
    """Return y, dlogits, and dx, one wire and one candidate at a time."""
    dy, logits, x = (np.asarray(a, np.float64) for a in (dy, logits, x))
    y, dlogits, dx = np.zeros_like(dy), np.zeros_like(logits), np.zeros_like(x)
    of_group = len(logits) // wires.groups
    for w, row in enumerate(logits):
        p = np.exp(row) / np.exp(row).sum()
        weights = p if wires.relaxation == "softmax" else np.eye(len(row))[np.argmax(row)]
        candidates = np.asarray(wires.candidates)[w // of_group]
        y[..., w] = x[..., candidates] @ weights
        dweights = dy[..., w].ravel() @ x[..., candidates].reshape(-1, len(row))
        dlogits[w] = p * (dweights - p @ dweights)
        for weight, candidate in zip(weights, candidates, strict=True):
            dx[..., candidate] += weight * dy[..., w]
    return y, dlogits, dx


@every_relaxation
@every_implementation
def test_values_and_gradients_are_the_formulas_also_for_logits_wider_than_x(implementation, relaxation):
    dy, x, logits = (*(a.astype("bfloat16") for a in normal((2, 3, 12), (2, 3, 6))), *normal((12, 3), seed=1))
    exact = by_the_definition(dy, logits, WIRES[relaxation], x)
    results, gradients = value_and_gradients(implementation)(dy, logits, WIRES[relaxation], x)
    assert_close(results, exact, "bfloat16")
    assert_close(gradients, exact[1:], "bfloat16")
    assert_close(results[1], exact[1], "float32")
    assert [a.dtype for a in results] == ["bfloat16", "float32", "bfloat16"]


@every_relaxation
def test_in_float64_the_formula_and_autodiff_agree(relaxation):
    arrays = *normal((3, 12), (12, 3)), WIRES[relaxation], *normal((3, 6), seed=1)
    results = (in_float64(value_and_gradients(name), *arrays) for name in ("xla", "autodiff"))
    assert_close(*results, 1e-14)


def test_the_gradient_of_straight_through_passes_check_against_a_function_with_this_gradient():

    def layer(logits, x, relaxation="straight_through"):
        return jaxbp.wire_layer(logits, WIRES[relaxation], x, implementation="xla")

    def with_this_gradient(logits, x):
        frozen = [jax.lax.stop_gradient(a) for a in (logits, x)]
        return layer(logits, frozen[1], "softmax") + layer(frozen[0], x)

    arrays = normal((12, 3), (3, 6))
    # Numbers near ties would change the selected candidate.
    assert check(layer, *arrays, gradient_of=with_this_gradient, added=["cotangents"])


@every_relaxation
@ours
def test_all_inputs_may_be_candidates(implementation, relaxation):
    wires = LearnedWires.random(41, 16, seed=0, candidates="all", relaxation=relaxation)
    arrays = *normal((3, 32), (32, 41)), wires, *normal((3, 41), seed=1)
    exact = by_the_definition(*arrays)
    results, gradients = value_and_gradients(implementation)(*arrays)
    assert_close(results, exact, "float32")
    assert_close(gradients, exact[1:], "float32")


@ours
@pytest.mark.parametrize("logit", [12.0, 20.0])
def test_the_logit_of_a_candidate_that_is_nearly_sure_has_its_gradient(logit, implementation):
    wires = LearnedWires.random(41, 16, seed=0, candidates="all")
    dy, logits, x = normal((3, 32), (32, 41), (3, 41))
    logits = logits.at[:, 5].add(logit)
    dlogits = jaxbp.wire_layer_backward(dy, logits, wires, x, implementation=implementation)[0]
    exact = by_the_definition(dy, logits, wires, x)[1]
    assert_close([dlogits, dlogits[:, 5]], [exact, exact[:, 5]], "float32")


@pytest.mark.parametrize("candidates", ["all", 3])
@every_relaxation
@ours
def test_the_derivative_of_this_gradient_keeps_its_digits(implementation, relaxation, candidates):
    wires = LearnedWires.random(41, 16, seed=0, candidates=candidates, relaxation=relaxation)
    dy, logits, x, weights = normal((3, 32), (32, wires.choices), (3, 41), (32, wires.choices))
    logits = logits.at[:, 2].add(12.0)

    def derivative(implementation, dy, logits, x, weights):
        backward = functools.partial(jaxbp.wire_layer_backward, implementation=implementation)
        return jax.grad(lambda logits: jnp.sum(weights * backward(dy, logits, wires, x)[0]))(logits)

    got = derivative(implementation, dy, logits, x, weights)
    exact = in_float64(functools.partial(derivative, "xla"), dy, logits, x, weights)
    assert_close([got, got[:, 2]], [exact, exact[:, 2]], "float32")


def test_values_of_selected_candidates_are_exact_and_logits_that_are_nan_give_nan():
    (x,), logits = normal((2, 6)), jnp.zeros((12, 3)).at[:, 1].set(1.0).at[0].set(jnp.nan)
    x = x.at[0, 3].set(jnp.inf)  # no wire selects this candidate
    y = jaxbp.wire_layer(logits, WIRES["straight_through"], x, implementation="xla")
    assert jnp.isnan(y[:, 0]).all()
    expected = x[:, np.repeat([0, 5, 0], 4)[1:]]
    assert np.array_equal(y[:, 1:], expected)


@ours
@pytest.mark.parametrize("candidates", [[[5, 0]] * 8, [[0, 1]] * 7 + [[0, 40]]], ids=["all groups", "skewed"])
def test_gradients_sum_over_all_groups_with_a_candidate(candidates, implementation):
    wires = LearnedWires.from_candidates(candidates, 8, 41, "softmax")
    arrays = *normal((3, 16), (16, 2)), wires, *normal((3, 41), seed=1)
    assert_close(value_and_gradients(implementation)(*arrays)[1], by_the_definition(*arrays)[1:], "float32")


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_array_has_one_number_per_wire_candidate_and_example(implementation):
    wires = jax.eval_shape(lambda: LearnedWires.random(64, 64, seed=0, candidates=16))
    shapes = (256, 128), (128, 16), (256, 64)
    dy, logits, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    with targeting(HOPPER):
        program = str(jax.make_jaxpr(value_and_gradients(implementation))(dy, logits, wires, x))
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", program)]
    assert max(sizes) == 256 * 128


def test_on_a_gpu_the_formula_multiplies_as_exactly_as_the_kernels():
    arrays = normal((2, 3, 12), (12, 3), (2, 3, 6))
    dy, logits, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    with jax.default_matmul_precision("default"):
        program = cuda_program(value_and_gradients("xla"), dy, logits, WIRES["softmax"], x)
    products = re.findall("dot_general.*", program)
    assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_a_step_with_all_inputs_as_candidates_writes_the_gradient_of_the_weights_once():
    wires, adam = LearnedWires.random(784, 500, seed=0, candidates="all"), optax.adam(0.1)

    def step(logits, state, x, labels):
        loss = lambda logits: jnp.sum(jnp.square(jaxbp.wire_layer(logits, wires, x) - labels))  # noqa: E731
        changes, state = adam.update(jax.grad(loss)(logits), state)
        return optax.apply_updates(logits, changes), state

    shapes = (1000, 784), (128, 784), (128, 1000)
    logits, x, labels = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    arguments = logits, jax.eval_shape(adam.init, logits), x, labels
    with gpus(HOPPER) as (gpu,):
        sharding = jax.sharding.SingleDeviceSharding(gpu)
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*arguments)
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        program = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()
    computations = [part for part in re.split(r"\n(?=%|ENTRY)", program) if "[1000,784]" in part]
    results = re.findall(r" = (\(.*?\)|\S+) (?:fusion|custom-call)\(", computations.pop())
    # One product, and one kernel that writes the logits and both moments.
    assert sorted(count for r in results if (count := r.count("f32[1000,784]"))) == [1, 3]
    # The other kernels find the largest logits, gather one element per row, and sum rows.
    assert len([part for part in computations if part.startswith("%fused")]) == 4


def test_kernels_that_nothing_needs_are_not_launched():
    arrays = normal((12, 3), (128, 6))
    layer = functools.partial(jaxbp.wire_layer, wires=WIRES["softmax"], implementation="pallas")
    for argnums, launches in (((0, 1), 3), (0, 2), (1, 3)):
        gradient = jax.grad(lambda logits, x: jnp.sum(jnp.sin(layer(logits, x=x))), argnums)
        assert launching_program(gradient, *arrays).count("@kernel.") == launches


def test_kernels_add_the_gradients_of_the_most_read_inputs_in_a_fixed_order():
    skewed = LearnedWires.from_candidates([[0, 1 + group] for group in range(64)], 128, 300)
    backward = functools.partial(jaxbp.wire_layer_backward, wires=skewed, implementation="pallas")
    arrays = normal((2, 256), (256, 2), (2, 300))
    program = launching_program(lambda dy, logits, x: backward(dy, logits, x=x), *arrays)
    assert program.count("@kernel.") == 2 and "scatter" not in program


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


SOFT = WIRES["softmax"]
REFUSED = {
    "fixed wires": (
        lambda: jaxbp.wire_layer(zeros(12, 3), SOFT.gate_wires, zeros(2, 6)),
        TypeError,
        "wire_layer: wires is a Wires; wants a jaxbp.LearnedWires",
    ),
    "other logits": (
        lambda: jaxbp.wire_layer(zeros(6, 3), SOFT, zeros(2, 6)),
        ValueError,
        "wire_layer: logits has shape (6, 3); wants (12, 3)",
    ),
    "other inputs": (
        lambda: jaxbp.wire_layer(zeros(12, 3), SOFT, zeros(2, 5)),
        ValueError,
        "wire_layer: x has shape (2, 5); wants (..., 6), the number of inputs of wires",
    ),
    "dy of other wires": (
        lambda: jaxbp.wire_layer_backward(zeros(2, 6), zeros(12, 3), SOFT, zeros(2, 6)),
        ValueError,
        "wire_layer_backward: dy has shape (2, 6); wants (2, 12)",
    ),
    "bits": (
        lambda: jaxbp.wire_layer(zeros(12, 3), SOFT, zeros(2, 6, dtype=bool)),
        TypeError,
        "wire_layer: x has dtype bool; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "no logits of wires": (
        lambda: jaxbp.gate_layer(zeros(6, 16), SOFT, zeros(2, 6)),
        TypeError,
        "gate_layer: wire_logits is None; wants the logits of wires, a jaxbp.LearnedWires",
    ),
    "logits of fixed wires": (
        lambda: jaxbp.gate_layer(zeros(6, 16), SOFT.gate_wires, zeros(2, 12), wire_logits=zeros(12, 3)),
        TypeError,
        "gate_layer: wire_logits is given; wants None, because wires is no jaxbp.LearnedWires",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
