import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_float64, normal, relative_error

import jaxbp
from jaxbp import Wires
from jaxbp.logic import gates as logic_gates
from jaxbp.logic.gates import COEFFICIENTS, PARAMETERS, TRUTH_TABLES, relaxed_gates
from jaxbp.logic.ops import gate_layer

BOOLEAN = [
    lambda a, b: False,
    lambda a, b: a and b,
    lambda a, b: a and not b,
    lambda a, b: a,
    lambda a, b: not a and b,
    lambda a, b: b,
    lambda a, b: a != b,
    lambda a, b: a or b,
    lambda a, b: not (a or b),
    lambda a, b: a == b,
    lambda a, b: not b,
    lambda a, b: a or not b,
    lambda a, b: not a,
    lambda a, b: not a or b,
    lambda a, b: not (a and b),
    lambda a, b: True,
]
BITS = list(itertools.product((False, True), repeat=2))
ONE_GATE = Wires.from_pairs([0], [1], 2)
every_gate = pytest.mark.parametrize("gate", range(16))
every_parametrization = pytest.mark.parametrize("parametrization", PARAMETERS)


@every_gate
def test_each_gate_is_numbered_by_its_truth_table(gate):
    table = [BOOLEAN[gate](a, b) for a, b in BITS]
    assert TRUTH_TABLES[gate].tolist() == table
    c0, c1, c2, c3 = COEFFICIENTS[gate]
    assert [c0 + c1 * a + c2 * b + c3 * a * b for a, b in BITS] == table


def test_the_relaxed_functions_are_the_gates_on_bits_and_linear_in_between():
    a, b = jnp.asarray(BITS, jnp.float32).T
    assert jnp.stack(relaxed_gates(a, b)).tolist() == TRUTH_TABLES.tolist()
    a, b = jnp.asarray(np.random.default_rng(0).random((2, 50)), jnp.float32)
    expected = jnp.asarray(COEFFICIENTS, jnp.float32) @ jnp.stack([jnp.ones(50), a, b, a * b])
    np.testing.assert_allclose(jnp.stack(relaxed_gates(a, b)), expected, atol=1e-6)


@every_parametrization
def test_the_backward_of_the_coefficients_is_that_of_native_autodiff(parametrization):
    pair = gate_layer.COEFFICIENTS[parametrization]
    backward = functools.partial(pair.backward, implementation="xla")
    dc, parameters = normal((5, 4), (5, PARAMETERS[parametrization]))
    found = in_float64(backward, dc, parameters)
    expected = in_float64(lambda dc, parameters: jax.vjp(pair.forward, parameters)[1](dc)[0], dc, parameters)
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


@every_parametrization
def test_hard_logits_are_hardened_to_their_gates_and_are_exact_on_bits(parametrization):
    gates = jnp.arange(16, dtype=jnp.uint8)
    logits = jaxbp.hard_logits(gates, parametrization)
    assert (jaxbp.harden(logits, parametrization) == gates).all()
    wires = Wires.from_pairs([0] * 16, [1] * 16, 2)
    y = jaxbp.gate_layer(logits, wires, jnp.asarray(BITS, jnp.float32), parametrization=parametrization)
    assert y.T.tolist() == TRUTH_TABLES.tolist()


def test_harden_takes_the_first_of_equally_probable_gates():
    assert jaxbp.harden(jnp.zeros((2, 16)).at[1, 5].set(1.0).at[1, 9].set(1.0)).tolist() == [0, 5]


@every_parametrization
def test_logits_that_are_nan_are_not_hardened(parametrization):
    logits = jnp.zeros((3, PARAMETERS[parametrization])).at[1, 2].set(jnp.nan)
    with pytest.raises(ValueError, match=r"^harden: the logits of 1 gates contain NaN; wants logits without NaN"):
        jaxbp.harden(logits, parametrization)


@every_parametrization
def test_residual_gates_pass_on_their_a(parametrization):
    logits = jaxbp.initial_logits(jax.random.key(0), 7, parametrization=parametrization)
    assert logits.shape == (7, PARAMETERS[parametrization])
    assert (jaxbp.harden(logits, parametrization) == logic_gates.PASS_THROUGH).all()
    y = jaxbp.gate_layer(logits[:1], ONE_GATE, jnp.asarray(BITS, jnp.float32), parametrization=parametrization)
    assert (jnp.abs(y[:, 0] - jnp.array([0.0, 0.0, 1.0, 1.0])) < 0.06).all()


@pytest.mark.parametrize(("parametrization", "row"), [("input_wise", [-7, -7, 7, 7]), ("walsh", [0, 7, 0, 0])])
def test_residual_gates_are_as_sure_as_asked(parametrization, row):
    logits = jaxbp.initial_logits(jax.random.key(0), 2, parametrization=parametrization, residual_logit=7.0)
    assert logits.tolist() == [row, row]


@pytest.mark.parametrize("parametrization", logic_gates.BASES)
def test_residual_gates_of_four_inputs_pass_on_their_a(parametrization):
    logits = jaxbp.initial_logits(jax.random.key(0), 3, parametrization=parametrization, residual_logit=7.0, arity=4)
    tables = logic_gates.truth_tables(logits, parametrization=parametrization)
    np.testing.assert_allclose(tables, [1 / (1 + np.exp(np.repeat([7.0, -7.0], 8)))] * 3, rtol=1e-4)
    assert jaxbp.harden(logits, parametrization).tolist() == [0x00FF] * 3
    np.testing.assert_allclose(logic_gates.variance(logits, parametrization), (tables * (1 - tables)).sum(axis=-1))


@every_parametrization
def test_normal_logits_differ_by_key(parametrization):
    draw = functools.partial(jaxbp.initial_logits, gates=1000, initialization="normal", parametrization=parametrization)
    one, other = draw(jax.random.key(0)), draw(jax.random.key(1))
    assert (one != other).any() and abs(float(one.std()) - 1) < 0.05


def test_group_sum_adds_up_neighbors():
    x = jnp.arange(12.0).reshape(2, 6)
    assert jaxbp.group_sum(x, 3, tau=2.0).tolist() == [[0.5, 2.5, 4.5], [6.5, 8.5, 10.5]]


def zeros(*shape):
    return jnp.zeros(shape)


REFUSED = {
    "one gate's logits to harden": (
        lambda: jaxbp.harden(zeros(16)),
        ValueError,
        "harden: logits has shape (16,); wants (gates, 16)",
    ),
    "an unknown initialization": (
        lambda: jaxbp.initial_logits(jax.random.key(0), 3, initialization="zeros"),
        ValueError,
        "initial_logits: initialization is 'zeros'; wants one of normal, residual",
    ),
    "integers to harden": (
        lambda: jaxbp.harden(jnp.ones((3, 16), int)),
        TypeError,
        "harden: logits has dtype int32; wants a floating dtype, say logits.astype(jnp.float32)",
    ),
    "integers to sum": (
        lambda: jaxbp.group_sum(jnp.arange(6), 3),
        TypeError,
        "group_sum: x has dtype int32; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "a number of gates below zero": (
        lambda: jaxbp.initial_logits(jax.random.key(0), -1),
        ValueError,
        "initial_logits: gates is -1; wants an int of at least 0",
    ),
    "initial logits that are integers": (
        lambda: jaxbp.initial_logits(jax.random.key(0), 3, parametrization="walsh", dtype=int),
        TypeError,
        f"initial_logits: dtype is {np.dtype(int)}; wants a floating dtype",
    ),
    "hard logits that are integers": (
        lambda: jaxbp.hard_logits(jnp.array([3]), dtype=int),
        TypeError,
        f"hard_logits: dtype is {np.dtype(int)}; wants a floating dtype",
    ),
    "hard logits of a function that is none": (
        lambda: jaxbp.hard_logits(jnp.array([3, 16])),
        ValueError,
        "hard_logits: gates[1] is 16; wants at least 0 and below 16, the number of functions",
    ),
    "hard logits of numbers that are no integers": (
        lambda: jaxbp.hard_logits(jnp.array([3.0])),
        TypeError,
        "hard_logits: gates has dtype float32; wants integers, say gates.astype(jnp.int32)",
    ),
    "groups that do not divide": (
        lambda: jaxbp.group_sum(zeros(2, 7), 3),
        ValueError,
        "group_sum: x has shape (2, 7) and groups is 3; wants a divisor of the size of x's last axis",
    ),
    "a tau of nothing": (
        lambda: jaxbp.group_sum(zeros(2, 6), 3, tau=0),
        ValueError,
        "group_sum: tau is 0; wants a number above 0",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@every_parametrization
def test_straight_through_some_gates_are_hard_with_the_gradients_of_the_relaxed_ones(parametrization):
    wires, hard = jaxbp.Wires.from_pairs([0] * 40, [1] * 40, 2), jnp.arange(40) % 3 > 0
    logits = jaxbp.initial_logits(jax.random.key(0), 40, initialization="normal", parametrization=parametrization)
    x, dy = jnp.asarray(BITS, jnp.float32), jax.random.normal(jax.random.key(1), (4, 40))
    coefficients = gate_layer.COEFFICIENTS[parametrization].forward

    def straight_through(logits):
        return jaxbp.gate_layer(
            logic_gates.straight_through(logits, hard, parametrization), wires, x, implementation="xla"
        )

    def definition(logits):
        of_hard = coefficients(jaxbp.hard_logits(jaxbp.harden(logits, parametrization), parametrization))
        c = coefficients(logits)
        c = c + hard[:, None] * jax.lax.stop_gradient(of_hard - c)
        a, b = x.T[:, :, None]
        return c[:, 0] + c[:, 1] * a + c[:, 2] * b + c[:, 3] * a * b

    @jax.jit
    def run(logits, dy):
        results = [jax.vjp(function, logits) for function in (straight_through, definition)]
        return [(y, *backward(dy)) for y, backward in results]

    (y, gradient), (wanted, wanted_gradient) = run(logits, dy)
    np.testing.assert_allclose(y, wanted, atol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)


@every_parametrization
def test_the_variance_is_that_of_the_truth_table(parametrization):
    logits = jaxbp.initial_logits(jax.random.key(0), 7, initialization="normal", parametrization=parametrization)
    wires = jaxbp.Wires.from_pairs([0] * 7, [1] * 7, 2)
    rows = jaxbp.gate_layer(
        logits, wires, jnp.asarray(BITS, jnp.float32), parametrization=parametrization, implementation="xla"
    )
    wanted = jnp.sum(rows * (1 - rows), axis=0)
    np.testing.assert_allclose(logic_gates.variance(logits.reshape(7, 1, -1), parametrization)[:, 0], wanted, rtol=1e-5)
    hard = jaxbp.hard_logits(jaxbp.harden(logits, parametrization), parametrization)
    np.testing.assert_allclose(logic_gates.variance(hard, parametrization), 0, atol=1e-6)


@pytest.mark.parametrize("logit", [0.0, 12.0, 17.0, 20.0])
def test_the_logit_of_a_function_that_is_nearly_sure_has_its_gradient(logit):
    # The gate's probability p is 1 in float32, so `u - Σ p u` would be 0 or a rounding error.
    random, gate = np.random.default_rng(0), np.arange(50)
    logits, dc = random.normal(size=(50, 16)).astype(np.float32), random.normal(size=(50, 4)).astype(np.float32)
    largest = random.integers(16, size=50)
    logits[gate, largest] += logit
    exact = in_float64(lambda dc, logits: jax.vjp(logic_gates.softmax, logits)[1](dc)[0], dc, logits)
    gradient = logic_gates.softmax_backward(dc, logits)
    assert relative_error(gradient, exact) < 1e-5
    assert relative_error(gradient[gate, largest], exact[gate, largest]) < 1e-5
