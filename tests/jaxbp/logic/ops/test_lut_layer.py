import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, in_float64, launching_program, normal, ours

import jaxbp
from jaxbp import Wires
from jaxbp.logic.gates import BASES

ROWS = np.array(list(itertools.product((0, 1), repeat=4)))
# A gate reads an input twice, and no gate reads input 5.
WIRES = Wires.from_pairs([0, 2, 1, 4, 3, 0], [1, 0, 1, 2, 4, 1], 6)
SKEWED = Wires.from_pairs([0] * 20, [*range(1, 20), 0], 21)
every_parametrization = pytest.mark.parametrize("parametrization", BASES)


@functools.cache
def value_and_gradients(implementation, parametrization):
    options = dict(implementation=implementation, parametrization=parametrization)

    @jax.jit
    def run(dy, logits, wires, x):
        y, vjp = jax.vjp(lambda logits, x: jaxbp.lut_layer(logits, wires, x, **options), logits, x)
        return (y, *vjp(dy)), jaxbp.lut_layer_backward(dy, logits, wires, x, **options)

    return run


def by_the_definition(dy, logits, wires, x, parametrization):
    """Return y, dlogits, and dx, one gate and one row of its table at a time."""
    dy, logits, x = (np.asarray(a, np.float64) for a in (dy, logits, x))
    signs = 2 * ROWS - 1
    products = [[1, a, b, a * b] for a, b in signs[:, :2]], [[1, c, d, c * d] for c, d in signs[:, 2:]]
    basis = np.eye(16) if parametrization == "input_wise" else np.einsum("ki,kj->kij", *products).reshape(16, 16)
    y, dlogits, dx = np.zeros_like(dy), np.zeros_like(logits), np.zeros_like(x)
    for g, read in enumerate(np.stack([wires.a, wires.b], axis=1).reshape(-1, 4)):
        table = 1 / (1 + np.exp(-basis @ logits[g]))
        for k, row in enumerate(ROWS):
            factors = np.where(row, x[..., read], 1 - x[..., read])
            y[..., g] += table[k] * factors.prod(axis=-1)
            dtable = (dy[..., g] * factors.prod(axis=-1)).sum()
            dlogits[g] += dtable * table[k] * (1 - table[k]) * basis[k]
            for v, i in enumerate(read):
                others = np.delete(factors, v, axis=-1).prod(axis=-1)
                dx[..., i] += dy[..., g] * table[k] * others * (2 * row[v] - 1)
    return y, dlogits, dx


@pytest.mark.parametrize(
    ("implementation", "parametrization"),
    [("autodiff", "walsh"), ("xla", "walsh"), ("pallas", "walsh"), ("xla", "input_wise")],
)
def test_values_and_gradients_are_the_formulas_also_for_logits_wider_than_x(implementation, parametrization):
    dy, x = (a.astype("bfloat16") for a in normal((2, 2, 3), (2, 2, 6)))
    (logits,) = normal((3, 16), seed=1)
    exact = by_the_definition(dy, logits, WIRES, x, parametrization)
    results, gradients = value_and_gradients(implementation, parametrization)(dy, logits, WIRES, x)
    assert_close(results, exact, "bfloat16")
    assert_close(gradients, exact[1:], "bfloat16")
    assert_close(results[1], exact[1], "float32")
    assert [a.dtype for a in results] == ["bfloat16", "float32", "bfloat16"]


def second_derivatives(implementation):
    backward = functools.partial(jaxbp.lut_layer_backward, parametrization="walsh", implementation=implementation)
    of_gradients = lambda *arrays: sum(jnp.sum(jnp.sin(a)) for a in backward(*arrays))  # noqa: E731
    return jax.jit(jax.value_and_grad(of_gradients, (0, 1, 3)))


def test_in_float64_the_formula_and_autodiff_agree_to_the_second_order():
    arrays = *normal((4, 3), (3, 16)), WIRES, *normal((4, 6), seed=1)
    results = (in_float64(second_derivatives(name), *arrays) for name in ("xla", "autodiff"))
    assert_close(*results, 1e-13)


@ours
def test_gradients_sum_over_all_gates_that_read_an_input(implementation):
    arrays = *normal((3, 10), (10, 16)), SKEWED, *normal((3, 21), seed=1)
    exact = by_the_definition(*arrays, "walsh")
    assert_close(value_and_gradients(implementation, "walsh")(*arrays)[1], exact[1:], "float32")


@every_parametrization
def test_hard_gates_are_exact_on_bits(parametrization):
    gates, bits = np.array([0x8001, 0x1234, 0xFFFF], np.uint16), np.array(ROWS, np.float32)
    wires = Wires.from_pairs([0, 2] * 3, [1, 3] * 3, 4)
    logits = jaxbp.hard_logits(gates, parametrization, arity=4)
    y = jaxbp.lut_layer(logits, wires, bits, parametrization=parametrization)
    assert y.T.tolist() == [[int(gate) >> 15 - k & 1 for k in range(16)] for gate in gates]
    hardened = jaxbp.harden(logits, parametrization)
    assert hardened.tolist() == gates.tolist() and hardened.dtype == jnp.uint16


def test_kernels_run_only_if_they_are_named_and_something_needs_them():
    arrays = normal((3, 16), (128, 6))
    layer = functools.partial(jaxbp.lut_layer, wires=WIRES)
    for argnums, launches in (((0, 1), 3), (0, 2), (1, 3)):
        gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(layer(a[0], x=a[1], implementation="pallas"))), argnums)
        assert launching_program(gradient, *arrays).count("@kernel.") == launches
    assert "mosaic_gpu" not in cuda_program(lambda logits, x: layer(logits, x=x), *arrays)


def test_kernels_add_the_gradients_of_the_most_read_inputs_in_a_fixed_order():
    skewed = Wires.from_pairs([0] * 64, range(1, 65), 300)
    backward = functools.partial(jaxbp.lut_layer_backward, wires=skewed, implementation="pallas")
    program = launching_program(lambda dy, logits, x: backward(dy, logits, x=x), *normal((2, 32), (32, 16), (2, 300)))
    assert program.count("@kernel.") == 2 and "scatter" not in program


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


REFUSED = {
    "another number of logits": (
        lambda: jaxbp.lut_layer(zeros(3, 4), WIRES, zeros(2, 6)),
        ValueError,
        "lut_layer: logits has shape (3, 4); wants (3, 16)",
    ),
    "half a gate": (
        lambda: jaxbp.lut_layer(zeros(3, 16), Wires.from_pairs([0], [1], 2), zeros(2, 2)),
        ValueError,
        "lut_layer: wires has 1 pairs; wants an even number, two pairs per gate",
    ),
    "logits of functions": (
        lambda: jaxbp.lut_layer(zeros(3, 16), WIRES, zeros(2, 6), parametrization="softmax"),
        ValueError,
        "lut_layer: parametrization is 'softmax'; wants one of input_wise, walsh",
    ),
    "other inputs": (
        lambda: jaxbp.lut_layer(zeros(3, 16), WIRES, zeros(2, 5)),
        ValueError,
        "lut_layer: x has shape (2, 5); wants (..., 6), the number of inputs of wires",
    ),
    "dy of other gates": (
        lambda: jaxbp.lut_layer_backward(zeros(2, 6), zeros(3, 16), WIRES, zeros(2, 6)),
        ValueError,
        "lut_layer_backward: dy has shape (2, 6); wants (2, 3)",
    ),
    "learned wires": (
        lambda: jaxbp.lut_layer(zeros(2, 16), jaxbp.LearnedWires.random(4, 4, 0, candidates=2), zeros(2, 4)),
        TypeError,
        "lut_layer: wires is a LearnedWires; wants a jaxbp.Wires",
    ),
    "an unknown arity": (
        lambda: jaxbp.initial_logits(jax.random.key(0), 3, arity=3),
        ValueError,
        "initial_logits: arity is 3; wants one of 2, 4",
    ),
    "bits": (
        lambda: jaxbp.lut_layer(zeros(3, 16), WIRES, zeros(2, 6, dtype=bool)),
        TypeError,
        "lut_layer: x has dtype bool; wants a floating dtype, say x.astype(jnp.float32)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
