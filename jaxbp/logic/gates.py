"""Two-input logic gates, and their relaxation to real numbers (docs/logic_gates.md).

A relaxed gate computes `c0 + c1 * a + c2 * b + c3 * a * b`. `jaxbp.logic.ops.gate_layer` numbers the functions of
gates.
"""

import functools
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

Initialization = Literal["normal", "residual"]
Parametrization = Literal["softmax", "input_wise", "walsh"]

GATES = 16
PASS_THROUGH = 3
"""The number of the function `a`."""
PARAMETERS = {"softmax": 16, "input_wise": 4, "walsh": 4}

TRUTH_TABLES = np.arange(GATES)[:, None] >> np.array([3, 2, 1, 0]) & 1
INTERPOLATION = np.array([[1, -1, -1, 1], [0, 0, 1, -1], [0, 1, 0, -1], [0, 0, 0, 1]])
"""A matrix with `truth_table @ INTERPOLATION = (c0, c1, c2, c3)`."""
COEFFICIENTS = TRUTH_TABLES @ INTERPOLATION
WALSH = np.array([[1, -1, -1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, 1, 1, 1]])
"""`(1, A, B, A * B)` in each row of a truth table, for `A = 2 * a - 1` and `B = 2 * b - 1`."""
BASES = {"input_wise": np.eye(4, dtype=int), "walsh": WALSH}
"""The matrix M of each parametrization. A truth table is `sigmoid(M @ parameters)`."""
TINY = 1e-20
"""Keeps logarithms of probabilities finite. Its products with gradients are not subnormal."""


def relaxed_gates(a: Array, b: Array) -> list[Array]:
    """Return the values of the 16 relaxed functions of a and b, ordered by number."""
    zero, one, ab = jnp.zeros_like(a), jnp.ones_like(a), a * b
    first = [zero, ab, a - ab, a, b - ab, b, a + b - 2 * ab, a + b - ab]
    last = [1 - (a + b - ab), 1 - (a + b - 2 * ab), 1 - b, 1 - b + ab, 1 - a, 1 - a + ab, 1 - ab, one]
    return first + last


def softmax(logits: Array) -> Array:
    """Return the coefficients c0 to c3 of each gate, `softmax(logits) @ COEFFICIENTS`: `(gates, 16) -> (gates, 4)`."""
    return _times(jax.nn.softmax(upcast(logits)), COEFFICIENTS)


def softmax_backward(dc: Array, logits: Array) -> Array:
    """Return the gradient with respect to the logits, `softmax_gradient(COEFFICIENTS @ dc, logits)`."""
    return softmax_gradient(_times(dc, COEFFICIENTS.T), logits)


def softmax_gradient(dp: Array, logits: Array) -> Array:
    """Return the gradient `p * (dp - Σ p * dp)` with respect to the logits. Here `p = softmax(logits)`."""
    wide = upcast(logits)
    p = jax.nn.softmax(wide)
    # If one p is nearly 1, `dp - Σ p * dp` loses digits, unless the dp of the largest p is subtracted first.
    is_largest = wide == jnp.max(wide, axis=-1, keepdims=True)
    dp -= lax.stop_gradient(jnp.max(jnp.where(is_largest, dp, -jnp.inf), axis=-1, keepdims=True))
    return (p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True))).astype(logits.dtype)


def of_rows(parameters: Array, *, parametrization: str) -> Array:
    """Return the coefficients c0 to c3 of each gate, `r @ INTERPOLATION`. Here `r = sigmoid(M @ parameters)` has the
    four rows of the gate's relaxed truth table, and M is `BASES[parametrization]`."""
    return _times(_rows(parameters, parametrization), INTERPOLATION)


def of_rows_backward(dc: Array, parameters: Array, *, parametrization: str) -> Array:
    """Return the gradient `Σ_k r_k * (1 - r_k) * dr_k * M_k` with respect to the parameters.

    Here r and M are as in `of_rows`, M_k is row k of M, and dc is the gradient with respect to `r @ INTERPOLATION`, so
    that `dr = INTERPOLATION @ dc`.
    """
    row = _rows(parameters, parametrization)
    dsums = _times(dc, INTERPOLATION.T) * row * (1 - row)
    return _times(dsums, BASES[parametrization]).astype(parameters.dtype)


def _rows(parameters, parametrization):
    return jax.nn.sigmoid(_times(upcast(parameters), BASES[parametrization].T))


def _times(a, constant):
    return jnp.matmul(a, jnp.asarray(constant, a.dtype), precision=Precision.HIGHEST)


def initial_logits(
    key: PRNGKeyArray,
    gates: int,
    *,
    initialization: Initialization = "residual",
    parametrization: Parametrization = "softmax",
    residual_logit: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "gates parameters"]:
    """Return parameters to start training from.

    Args:
      initialization: "normal" for standard normal numbers, or "residual" for gates that pass their input a through.
      residual_logit: for `parametrization="softmax"`, the logit of the function a, by default 5 (probability 0.91).
        Other logits are 0. For other parametrizations, each entry of the truth table is the sigmoid of plus or minus
        this number, by default log 19 (0.95 or 0.05).

    Source for "residual": F. Petersen et al., "Convolutional differentiable logic gate networks", NeurIPS 2024.
    """
    op = "initial_logits"
    _check_choice(op, "parametrization", parametrization, Parametrization)
    _check_choice(op, "initialization", initialization, Initialization)
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
    """Return the number, from 0 to 15, of each gate's most probable function; in a tie, the lowest number.

    For other parametrizations than "softmax", each entry of the truth table is rounded to 0 or 1, and 0.5 to 0.

    Raises:
      TypeError: the logits are not floating.
      ValueError: the parametrization is unknown; the logits have a wrong shape; or, outside of `jax.jit`, a logit is
        NaN.
    """
    (logits,) = checks.floating("harden", logits=logits)
    check_parameters("harden", logits, "gates", parametrization, kernels=logits.shape[:-2])
    if not isinstance(logits, jax.core.Tracer) and (count := int(_count_with_nan(logits))):
        raise ValueError(f"harden: the logits of {count} gates contain NaN; wants logits without NaN")
    return _harden(logits, parametrization)


# Without jit, JAX would compile each operation for every shape.
@jax.jit
def _count_with_nan(logits):
    return jnp.isnan(logits).any(axis=-1).sum()


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _harden(logits, parametrization):
    if parametrization == "softmax":
        return jnp.argmax(logits, axis=-1).astype(jnp.uint8)
    row = logits if parametrization == "input_wise" else _times(upcast(logits), WALSH.T)
    return jnp.sum((row > 0) * np.array([8, 4, 2, 1]), axis=-1).astype(jnp.uint8)


def hard_logits(
    gates: UInt8[Array, "*kernels gates"], parametrization: Parametrization = "softmax", dtype: DTypeLike = jnp.float32
) -> Float[Array, "*kernels gates parameters"]:
    """Return parameters that `harden` maps to `gates`. For inputs 0 and 1, relaxed gates with these parameters return
    exactly the outputs of `gates`."""
    return _hard_logits(gates, parametrization, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _hard_logits(gates, parametrization, dtype):
    row = jnp.asarray(TRUTH_TABLES, dtype)[gates]
    if parametrization == "softmax":
        return jnp.where(gates[..., None] == np.arange(GATES), 0.0, -jnp.inf).astype(dtype)
    large = jnp.asarray(2.0**10, dtype) * (2 * row - 1)
    return large if parametrization == "input_wise" else _times(large, WALSH) / 4


def variance(
    logits: Float[Array, "*kernels gates parameters"], parametrization: Parametrization = "softmax"
) -> Float[Array, "*kernels gates"]:
    """Return the variance of each gate: the sum of `r * (1 - r)` over the entries r of its relaxed truth table."""
    _check_choice("variance", "parametrization", parametrization, Parametrization)
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
    """Return "softmax" logits of gates that are hardened where `hard` is true, but have the gradients of relaxed gates.

    These logits give each gate the coefficients `c + hard * stop_gradient(h - c)`. Here c are the relaxed
    gate's coefficients c0 to c3, and h are the hardened gate's coefficients.

    Source: Y. Bengio et al., "Estimating or propagating gradients through stochastic neurons for conditional
    computation", 2013.
    """
    _check_choice("straight_through", "parametrization", parametrization, Parametrization)
    hard = hard[..., None]
    if parametrization == "softmax":
        relaxed = jax.nn.softmax(upcast(logits))
        probabilities = jnp.where(hard, with_gradient_of(relaxed, one_hot_of_largest(logits)), relaxed)
    else:
        row = _rows(logits, parametrization)
        row = jnp.where(hard, with_gradient_of(row, (row > 0.5).astype(row.dtype)), row)[..., None, :]
        probabilities = jnp.prod(jnp.where(TRUTH_TABLES, row, 1 - row), axis=-1)
    return jnp.log(probabilities + TINY)


def one_hot_of_largest(logits: Array) -> Array:
    """Return 1 for the largest logit along the last axis, the first in a tie, and 0 for the others, in float32 or
    wider."""
    return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=upcast(logits).dtype)


def with_gradient_of(relaxed: Array, value: Array) -> Array:
    """Return `value`, with the gradient of `relaxed`."""
    return value + (relaxed - lax.stop_gradient(relaxed))


def group_sum(x: Float[Array, "*batch inputs"], groups: int, tau: float = 1.0) -> Float[Array, "*batch groups"]:
    """Return the sum of each group of neighboring inputs, divided by tau.

    Raises:
      TypeError: x is not floating.
      ValueError: groups does not divide the number of inputs, or tau is not a number above 0.
    """
    (x,) = checks.floating("group_sum", x=x)
    if x.ndim == 0 or not checks.is_int(groups) or groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"group_sum: x has shape {x.shape} and groups is {groups!r}; wants a divisor of the size of x's last axis"
        )
    check_tau("group_sum", tau)
    sums = jnp.sum(upcast(x).reshape(*x.shape[:-1], groups, x.shape[-1] // groups), axis=-1)
    return (sums / tau).astype(x.dtype)


def check_tau(op: str, tau: Any) -> None:
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
    _check_choice(op, "parametrization", parametrization, Parametrization)
    checks.shape(op, name, logits, *kernels, gates, PARAMETERS[parametrization])


def _check_choice(op, name, value, choices):
    if value not in get_args(choices):
        raise ValueError(f"{op}: {name} is {value!r}; wants one of {', '.join(get_args(choices))}")
