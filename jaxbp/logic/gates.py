"""Two-input logic gates: the 16 functions, their relaxation to real numbers, and the parameters that mix them.

A gate computes one of 16 functions of two bits a and b. As in the literature, the number of a function encodes its
truth table. The bits of the number, from the highest, are the values at (a, b) = (0, 0), (0, 1), (1, 0) and (1, 1).
Relaxed to numbers between 0 and 1 (`relaxed_gates`), each function is linear in a and in b. Every mixture of them is
linear, too. A gate is therefore `y = c0 + c1 a + c2 b + c3 ab`, whichever parameters determine its four coefficients.
"""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import Precision
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, PRNGKeyArray, UInt8

from jaxbp.common import checks
from jaxbp.common.numerics import upcast

Parametrization = Literal["softmax", "input_wise", "walsh"]

GATES = 16
PASS_THROUGH = 3
"""The number of the function `a`, which passes its first input through."""
PARAMETERS = {"softmax": 16, "input_wise": 4, "walsh": 4}
"""The number of parameters per gate."""

TRUTH_TABLES = np.arange(GATES)[:, None] >> np.array([3, 2, 1, 0]) & 1
"""The truth tables of the 16 functions, `(16, 4)`: the values at (a, b) = (0, 0), (0, 1), (1, 0) and (1, 1)."""
INTERPOLATION = np.array([[1, -1, -1, 1], [0, 0, 1, -1], [0, 1, 0, -1], [0, 0, 0, 1]])
"""The matrix from a truth table to c0, c1, c2, c3. Its row r has the coefficients of the function that is 1 in row r of
the truth table and 0 in the other rows."""
COEFFICIENTS = TRUTH_TABLES @ INTERPOLATION
"""The coefficients c0, c1, c2, c3 of each of the 16 functions: `(16, 4)`."""
WALSH = np.array([[1, -1, -1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, 1, 1, 1]])
"""The values of 1, A, B and AB in each row of the truth table, where A and B are -1 for a 0 and 1 for a 1."""
BASES = {"input_wise": np.eye(4, dtype=int), "walsh": WALSH}
"""Maps each parametrization to a matrix B. The values in the four rows of a gate's truth table are
`sigmoid(B parameters)`."""
TINY = 1e-20
"""A number that is added to probabilities before their logarithm is computed, so that it is finite. The number is small
enough not to change a probability near 1 in float32. It is large enough that its products with gradients are not
subnormal."""


def relaxed_gates(a: Array, b: Array) -> list[Array]:
    """Return the values of the 16 relaxed gates for the inputs a and b, by the formulas of the literature."""
    zero, one, ab = jnp.zeros_like(a), jnp.ones_like(a), a * b
    first = [zero, ab, a - ab, a, b - ab, b, a + b - 2 * ab, a + b - ab]
    last = [1 - (a + b - ab), 1 - (a + b - 2 * ab), 1 - b, 1 - b + ab, 1 - a, 1 - a + ab, 1 - ab, one]
    return first + last


# ----------------------------------------------------------------------------------- from parameters to coefficients


def softmax(logits: Array) -> Array:
    """Return the coefficients `(gates, 4)` of the 16 functions weighted with the softmax of `(gates, 16)` logits."""
    return _times(jax.nn.softmax(upcast(logits)), COEFFICIENTS)


def softmax_backward(dc: Array, logits: Array) -> Array:
    """Return `dlogits = p (u - Σ p u)`, with `p = softmax(logits)` and `u = T dc`.

    T is the matrix `COEFFICIENTS` of the 16 functions.
    """
    wide = upcast(logits)
    p, du = jax.nn.softmax(wide), _times(dc, COEFFICIENTS.T)
    # Subtracting a constant from u does not change `u - Σ p u`. The constant subtracted here is u of the most probable
    # function. If the probability of this function is nearly 1, `Σ p u` is nearly its u, and without the subtraction
    # the difference would lose its digits.
    is_largest = wide == jnp.max(wide, axis=-1, keepdims=True)
    du -= lax.stop_gradient(jnp.max(jnp.where(is_largest, du, -jnp.inf), axis=-1, keepdims=True))
    return (p * (du - jnp.sum(p * du, axis=-1, keepdims=True))).astype(logits.dtype)


def of_rows(parameters: Array, *, parametrization: str) -> Array:
    """Return the coefficients `(gates, 4)` of gates, given parameters `(gates, 4)` of the rows of their truth tables.

    For "input_wise", the value of a row is the sigmoid of one parameter. For "walsh", it is the sigmoid of
    `w0 ± w1 ± w2 ± w3`, a sum of 1, A, B and AB with the parameters as weights.
    """
    return _times(_rows(parameters, parametrization), INTERPOLATION)


def of_rows_backward(dc: Array, parameters: Array, *, parametrization: str) -> Array:
    """Return `dparameter = r (1 - r) dr` for "input_wise", or `dw = Σ_rows r (1 - r) dr (1, A, B, AB)` for "walsh".

    Here r is the value of a row of the truth table, and dr the gradient with respect to it.
    """
    row = _rows(parameters, parametrization)
    dsums = _times(dc, INTERPOLATION.T) * row * (1 - row)
    return _times(dsums, BASES[parametrization]).astype(parameters.dtype)


def _rows(parameters, parametrization):
    return jax.nn.sigmoid(_times(upcast(parameters), BASES[parametrization].T))


def _times(a, constant):
    """Return the product of a and `constant`, a small integer matrix. Its only error is the rounding of the sums."""
    return jnp.matmul(a, jnp.asarray(constant, a.dtype), precision=Precision.HIGHEST)


# -------------------------------------------------------------------------------------- starting, hardening and scoring


def initial_logits(
    key: PRNGKeyArray,
    gates: int,
    *,
    initialization: Literal["normal", "residual"] = "residual",
    parametrization: Parametrization = "softmax",
    residual_logit: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "gates parameters"]:
    """Return parameters to start training from.

    Args:
      key: the key for normal parameters.
      initialization: "normal" for standard normal numbers, or "residual" for gates that pass their input a through.
      residual_logit: for "softmax", the logit of the pass-through function; the other 15 logits are 0. By default, it
        is 5, which gives the function a probability of 0.91. For the other parametrizations, plus or minus this number
        is the logit of each row of the truth table. By default, it is log 19, which gives rows of 0.95 and 0.05.

    Source for "residual": F. Petersen et al., "Convolutional differentiable logic gate networks", NeurIPS 2024.
    """
    op = "initial_logits"
    _check_choice(op, "parametrization", parametrization, get_args(Parametrization))
    _check_choice(op, "initialization", initialization, ("normal", "residual"))
    if initialization == "normal":
        return jax.random.normal(key, (gates, PARAMETERS[parametrization]), dtype)
    if parametrization == "softmax":
        one = jnp.zeros(GATES).at[PASS_THROUGH].set(5.0 if residual_logit is None else residual_logit)
    else:
        row = math.log(19.0) if residual_logit is None else residual_logit
        row = row * (2.0 * TRUTH_TABLES[PASS_THROUGH] - 1)
        one = jnp.asarray(row if parametrization == "input_wise" else row @ WALSH / 4)
    return jnp.tile(one.astype(dtype), (gates, 1))


def harden(
    logits: Float[Array, "*kernels gates parameters"], parametrization: Parametrization = "softmax"
) -> UInt8[Array, "*kernels gates"]:
    """Return the number, from 0 to 15, of each gate's most probable function; in a tie, the first of them.

    For "input_wise" and "walsh", each row of the truth table is rounded, and 0.5 becomes 0.

    Raises:
      TypeError, ValueError: as in `gate_layer`.
      ValueError: the logits are NaN. Within `jax.jit`, no error is raised, because their values are unknown.
    """
    (logits,) = checks.floating("harden", logits=logits)
    check_parameters("harden", logits, "gates", parametrization, kernels=logits.shape[:-2])
    if not isinstance(logits, jax.core.Tracer) and (count := int(jnp.isnan(logits).any(axis=-1).sum())):
        raise ValueError(f"harden: the logits of {count} gates are NaN; wants numbers")
    if parametrization == "softmax":
        return jnp.argmax(logits, axis=-1).astype(jnp.uint8)
    row = logits if parametrization == "input_wise" else _times(upcast(logits), WALSH.T)
    return jnp.sum((row > 0) * np.array([8, 4, 2, 1]), axis=-1).astype(jnp.uint8)


def hard_logits(
    gates: UInt8[Array, "*kernels gates"], parametrization: Parametrization = "softmax", dtype: DTypeLike = jnp.float32
) -> Float[Array, "*kernels gates parameters"]:
    """Return parameters with which gates compute exactly the given functions. `harden` returns the same numbers.

    A layer with these parameters is exact on bits, because the probabilities of its functions are 0 and 1.
    """
    row = jnp.asarray(TRUTH_TABLES, dtype)[gates]
    if parametrization == "softmax":
        return jnp.where(gates[..., None] == np.arange(GATES), 0.0, -jnp.inf).astype(dtype)
    large = jnp.asarray(2.0**10, dtype) * (2 * row - 1)
    return large if parametrization == "input_wise" else _times(large, WALSH) / 4


def variance(
    logits: Float[Array, "*kernels gates parameters"], parametrization: Parametrization = "softmax"
) -> Float[Array, "*kernels gates"]:
    """Return the uncertainty of a relaxed gate: `Σ_rows r (1 - r)`, with r the rows of its truth table.

    r is the probability that the gate outputs 1 for the inputs of the row. The result is therefore the variance of the
    output, summed over the rows. It is 0 for a hard gate.

    Raises:
      ValueError: the parametrization is unknown.
    """
    _check_choice("variance", "parametrization", parametrization, get_args(Parametrization))
    if parametrization == "softmax":
        rows = _times(jax.nn.softmax(upcast(logits)), TRUTH_TABLES)
    else:
        rows = _rows(logits, parametrization)
    return jnp.sum(rows * (1 - rows), axis=-1)


def straight_through(
    logits: Float[Array, "*kernels gates parameters"],
    hard: Bool[Array, "*kernels gates"],
    parametrization: Parametrization = "softmax",
) -> Float[Array, "*kernels gates functions"]:
    """Return softmax parameters that make some gates hard, but keep the gradients of relaxed gates.

    A hard gate computes its most probable function. Let c be the coefficients of a relaxed gate, and h the coefficients
    of the hard gate. A gate with the returned parameters has the coefficients `c + hard * stop_gradient(h - c)`, to
    1e-18. The parameters are logarithms of probabilities, because the softmax of these is the probabilities.

    Args:
      hard: which gates to make hard.

    Raises:
      ValueError: the parametrization is unknown.

    Source: Y. Bengio, N. Léonard, A. Courville, "Estimating or propagating gradients through stochastic neurons for
    conditional computation", 2013.
    """
    _check_choice("straight_through", "parametrization", parametrization, get_args(Parametrization))
    hard = hard[..., None]
    if parametrization == "softmax":
        relaxed = jax.nn.softmax(upcast(logits))
        one = jax.nn.one_hot(jnp.argmax(logits, axis=-1), GATES, dtype=relaxed.dtype)
        probabilities = jnp.where(hard, _with_gradient_of(relaxed, one), relaxed)
    else:
        row = _rows(logits, parametrization)
        row = jnp.where(hard, _with_gradient_of(row, (row > 0.5).astype(row.dtype)), row)[..., None, :]
        probabilities = jnp.prod(jnp.where(TRUTH_TABLES, row, 1 - row), axis=-1)
    return jnp.log(probabilities + TINY)


def _with_gradient_of(relaxed, value):
    return value + (relaxed - lax.stop_gradient(relaxed))


def group_sum(x: Float[Array, "*batch inputs"], groups: int, tau: float = 1.0) -> Float[Array, "*batch groups"]:
    """Return class scores from a layer of gates: the sums of neighboring inputs in equal groups, divided by tau.

    `groups` is the number of groups.

    Raises:
      TypeError: x is not floating.
      ValueError: groups does not divide the number of inputs, or tau is not a number above 0.
    """
    (x,) = checks.floating("group_sum", x=x)
    if x.ndim == 0 or not checks.is_int(groups) or groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"group_sum: x has shape {x.shape} and groups is {groups!r}; wants groups to divide x's last axis"
        )
    check_tau("group_sum", tau)
    sums = jnp.sum(upcast(x).reshape(*x.shape[:-1], groups, x.shape[-1] // groups), axis=-1)
    return (sums / tau).astype(x.dtype)


def check_tau(op: str, tau: Any) -> None:
    """Require that tau, by which scores are divided, is a number above 0."""
    if not checks.is_number(tau) or not tau > 0:
        raise ValueError(f"{op}: tau is {tau!r}; wants a number above 0")


def check_parameters(
    op: str,
    logits: Array,
    gates: int | str,
    parametrization: Any,
    *,
    name: str = "logits",
    kernels: tuple[int, ...] = (),
) -> None:
    """Require a known parametrization, and logits of the shape `(*kernels, gates, parameters)`."""
    _check_choice(op, "parametrization", parametrization, get_args(Parametrization))
    checks.shape(op, name, logits, *kernels, gates, PARAMETERS[parametrization])


def _check_choice(op, name, value, choices):
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; wants one of {', '.join(choices)}")
