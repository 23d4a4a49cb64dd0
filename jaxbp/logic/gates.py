"""Logic gates, and their relaxation to real numbers (docs/logic_gates.md).

A relaxed gate of two inputs computes `c0 + c1 * a + c2 * b + c3 * a * b`. `jaxbp.logic.ops.gate_layer` numbers the
functions of these gates, and `jaxbp.logic.ops.lut_layer` the functions of gates with four inputs.
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
from jaxtyping import Bool, Float, PRNGKeyArray, UInt

from jaxbp.common import checks
from jaxbp.common.numerics import upcast
from jaxbp.logic.wires.wires import require_below

Initialization = Literal["normal", "residual"]
Parametrization = Literal["softmax", "input_wise", "walsh"]
Arity = Literal[2, 4]

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
"""The matrix M of each parametrization, for gates of two inputs. A truth table is `sigmoid(M @ parameters)`."""
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
    """Return the coefficients c0 to c3 of each gate, `truth_tables(parameters) @ INTERPOLATION`."""
    return _times(truth_tables(parameters, parametrization=parametrization), INTERPOLATION)


def of_rows_backward(dc: Array, parameters: Array, *, parametrization: str) -> Array:
    """Return the gradient with respect to the parameters, `truth_tables_backward(INTERPOLATION @ dc, parameters)`."""
    return truth_tables_backward(_times(dc, INTERPOLATION.T), parameters, parametrization=parametrization)


def truth_tables(parameters: Array, *, parametrization: str) -> Array:
    """Return the relaxed truth table of each gate, `r = sigmoid(M @ parameters)`, which has one row per value of the
    inputs. M is `BASES[parametrization]`, or with 16 parameters, its Kronecker product with itself."""
    return jax.nn.sigmoid(_times(upcast(parameters), _basis(parameters, parametrization).T))


def truth_tables_backward(dr: Array, parameters: Array, *, parametrization: str) -> Array:
    """Return the gradient `Σ_k r_k * (1 - r_k) * dr_k * M_k` with respect to the parameters.

    Here r and M are as in `truth_tables`, and M_k is row k of M.
    """
    row = truth_tables(parameters, parametrization=parametrization)
    return _times(dr * row * (1 - row), _basis(parameters, parametrization)).astype(parameters.dtype)


def _basis(parameters, parametrization):
    basis = BASES[parametrization]
    return basis if parameters.shape[-1] == len(basis) else np.kron(basis, basis)


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
    arity: Arity = 2,
) -> Float[Array, "gates parameters"]:
    """Return parameters to start training from.

    Args:
      initialization: "normal" for standard normal numbers, or "residual" for gates that pass their input a through.
      residual_logit: for `parametrization="softmax"`, the logit of the function a, by default 5 (probability 0.91).
        Other logits are 0. For other parametrizations, each entry of the truth table is the sigmoid of plus or minus
        this number, by default log 19 (0.95 or 0.05).
      arity: the number of inputs per gate. With 4, the parametrization is one of `jaxbp.lut_layer`.

    Source for "residual": F. Petersen et al., "Convolutional differentiable logic gate networks", NeurIPS 2024.
    """
    op = "initial_logits"
    gates = checks.count(op, "gates", gates, at_least=0)
    _check_dtype(op, dtype)
    parameters = parameters_of(op, parametrization, arity)
    check_choice(op, "initialization", initialization, get_args(Initialization))
    if initialization == "normal":
        return jax.random.normal(key, (gates, parameters), dtype)
    if parametrization == "softmax":
        one = jnp.zeros(GATES).at[PASS_THROUGH].set(5.0 if residual_logit is None else residual_logit)
        return jnp.tile(one.astype(dtype), (gates, 1))
    row = math.log(19.0) if residual_logit is None else residual_logit
    is_on = np.arange(parameters) >= parameters // 2  # in the last half of the rows, a is 1
    return jnp.tile(_of_logits(jnp.where(is_on, row, -row).astype(dtype), parametrization), (gates, 1))


def _of_logits(rows, parametrization):
    # The rows of the basis are orthogonal.
    basis = _basis(rows, parametrization)
    return rows if parametrization == "input_wise" else _times(rows, basis) / len(basis)


def harden(
    logits: Float[Array, "*kernels gates parameters"], parametrization: Parametrization = "softmax"
) -> UInt[Array, "*kernels gates"]:
    """Return the number, from 0 to 15, of each gate's most probable function; in a tie, the lowest number.

    For other parametrizations than "softmax", each entry of the truth table is rounded to 0 or 1, and 0.5 to 0. They
    may have 16 parameters per gate. Then, gates have four inputs, and numbers from 0 to 65535 (see `jaxbp.lut_layer`).

    Raises:
      TypeError: the logits are not floating.
      ValueError: the parametrization is unknown; the logits have a wrong shape; or, outside of `jax.jit`, a logit is
        NaN.
    """
    (logits,) = checks.only_floating("harden", logits=logits)
    arity = 4 if parametrization in BASES and logits.shape[-1:] == (16,) else 2
    check_parameters("harden", logits, "gates", parametrization, kernels=logits.shape[:-2], arity=arity)
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
    row = (
        upcast(logits) if parametrization == "input_wise" else _times(upcast(logits), _basis(logits, parametrization).T)
    )
    bits = 1 << np.arange(row.shape[-1])[::-1]
    return jnp.sum((row > 0) * bits, axis=-1).astype(jnp.uint8 if len(bits) == 4 else jnp.uint16)


def hard_logits(
    gates: UInt[Array, "*kernels gates"],
    parametrization: Parametrization = "softmax",
    dtype: DTypeLike = jnp.float32,
    arity: Arity = 2,
) -> Float[Array, "*kernels gates parameters"]:
    """Return parameters that `harden` maps to `gates`. For inputs 0 and 1, relaxed gates with these parameters return
    exactly the outputs of `gates`.

    Raises:
      TypeError: the gates are not integers, or the dtype is not floating.
      ValueError: the parametrization or the arity is invalid; or, outside of `jax.jit`, there is no function with the
        number of a gate.
    """
    op = "hard_logits"
    parameters_of(op, parametrization, arity)
    _check_dtype(op, dtype)
    gates, functions = checks.integers(op, "gates", gates), 2**2**arity
    if not isinstance(gates, jax.core.Tracer):
        require_below(op, "gates", np.asarray(gates), functions, "the number of functions")
    return _hard_logits(gates, parametrization, jnp.dtype(dtype), arity)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _hard_logits(gates, parametrization, dtype, arity):
    if parametrization == "softmax":
        return jnp.where(gates[..., None] == np.arange(GATES), 0.0, -jnp.inf).astype(dtype)
    row = jnp.asarray(gates, jnp.int32)[..., None] >> np.arange(2**arity)[::-1] & 1
    return _of_logits(jnp.asarray(2.0**10, dtype) * (2 * row.astype(dtype) - 1), parametrization)


def variance(
    logits: Float[Array, "*kernels gates parameters"], parametrization: Parametrization = "softmax"
) -> Float[Array, "*kernels gates"]:
    """Return the variance of each gate: the sum of `r * (1 - r)` over the entries r of its relaxed truth table."""
    check_choice("variance", "parametrization", parametrization, get_args(Parametrization))
    if parametrization == "softmax":
        rows = _times(jax.nn.softmax(upcast(logits)), TRUTH_TABLES)
    else:
        rows = truth_tables(logits, parametrization=parametrization)
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
    check_choice("straight_through", "parametrization", parametrization, get_args(Parametrization))
    hard = hard[..., None]
    if parametrization == "softmax":
        relaxed = jax.nn.softmax(upcast(logits))
        probabilities = jnp.where(hard, with_gradient_of(relaxed, one_hot_of_largest(logits)), relaxed)
    else:
        row = truth_tables(logits, parametrization=parametrization)
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
    (x,) = checks.only_floating("group_sum", x=x)
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
    arity: Arity = 2,
) -> None:
    checks.shape(op, name, logits, *kernels, gates, parameters_of(op, parametrization, arity))


def parameters_of(op: str, parametrization: Any, arity: Any = 2) -> int:
    """Return the number of parameters per gate. Raise an error that names `op` if gates with this number of inputs lack
    the parametrization."""
    check_choice(op, "arity", arity, get_args(Arity))
    check_choice(op, "parametrization", parametrization, tuple(BASES) if arity == 4 else get_args(Parametrization))
    return 16 if arity == 4 else PARAMETERS[parametrization]


def _check_dtype(op, dtype):
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"{op}: dtype is {jnp.dtype(dtype)}; wants a floating dtype")


def check_choice(op, name, value, choices):
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; wants one of {', '.join(map(str, choices))}")
