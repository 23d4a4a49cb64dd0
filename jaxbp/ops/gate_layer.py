"""Differentiable logic gates: layers of two-input gates whose functions are learned, and what they harden to.

A gate's function of two bits is one of 16, numbered as in the literature by its truth table: the bits of the number,
from the highest, are its values at (a, b) = (0, 0), (0, 1), (1, 0) and (1, 1). Relaxed to numbers between 0 and 1, each
is linear in a and in b:

    0  False     4  b - ab        8  1 - (a + b - ab)     12  1 - a
    1  ab        5  b             9  1 - (a + b - 2ab)    13  1 - a + ab
    2  a - ab    6  a + b - 2ab  10  1 - b                14  1 - ab
    3  a         7  a + b - ab   11  1 - b + ab           15  True

So is every mixture of them: a gate is `y = c0 + c1 a + c2 b + c3 ab`, whichever parameters its four coefficients come
from. What touches the batch, forward and backward, is one pair on the coefficients; how parameters become
coefficients, and gradients of coefficients those of parameters, is another, of a few numbers a gate.
"""

import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import Precision
from jax.typing import DTypeLike
from jaxtyping import Float, PRNGKeyArray, UInt8

from jaxbp.logic.wires import Wires
from jaxbp.ops import _checks
from jaxbp.ops._numerics import widen
from jaxbp.pairing import Implementation, Op, Pair, differentiable
from pallas_kernels.core.launch import batch_first, batch_last
from pallas_kernels.logic import gate_layer as kernels

Parametrization = Literal["softmax", "input_wise", "walsh"]

GATES = 16
PASS_THROUGH = 3
"""The gate `a`."""

TRUTH_TABLES = np.arange(GATES)[:, None] >> np.array([3, 2, 1, 0]) & 1
"""The rows (0, 0), (0, 1), (1, 0) and (1, 1) of each gate: `(16, 4)`."""
INTERPOLATION = np.array([[1, -1, -1, 1], [0, 0, 1, -1], [0, 1, 0, -1], [0, 0, 0, 1]])
"""From a truth table to c0, c1, c2, c3: row r are the coefficients of what is 1 there and 0 in the other rows."""
COEFFICIENTS = TRUTH_TABLES @ INTERPOLATION
"""c0, c1, c2, c3 of each gate: `(16, 4)`."""
WALSH = np.array([[1, -1, -1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, 1, 1, 1]])
"""1, A, B and AB in each row of the truth table, where A and B are -1 for a 0 and 1 for a 1."""


def _times(a, constant):
    """The product with a small matrix of integers, exact but for the sum's rounding."""
    return jnp.matmul(a, jnp.asarray(constant, a.dtype), precision=Precision.HIGHEST)


# ----------------------------------------------------------------------------------- from parameters to coefficients


def _softmax(logits):
    return _times(jax.nn.softmax(widen(logits)), COEFFICIENTS)


def _softmax_backward(dc, logits):
    p, du = jax.nn.softmax(widen(logits)), _times(dc, COEFFICIENTS.T)
    return (p * (du - jnp.sum(p * du, axis=-1, keepdims=True))).astype(logits.dtype)


def _rows(basis):
    """A pair: the rows of the truth table are the sigmoids of `basis` times the parameters."""

    def forward(parameters):
        return _times(jax.nn.sigmoid(_times(widen(parameters), basis.T)), INTERPOLATION)

    def backward(dc, parameters):
        row = jax.nn.sigmoid(_times(widen(parameters), basis.T))
        return _times(_times(dc, INTERPOLATION.T) * row * (1 - row), basis).astype(parameters.dtype)

    return forward, backward


_PARAMETRIZATIONS = {
    # No kernel would be faster: there are a few parameters a gate, and the batch has no part in it.
    name: Pair(forward, {"xla": backward, "pallas": backward}, name=f"{name}_gates")
    for name, (forward, backward) in {
        "softmax": (_softmax, _softmax_backward),
        "input_wise": _rows(np.eye(4, dtype=int)),
        "walsh": _rows(WALSH),
    }.items()
}
PARAMETERS = {"softmax": 16, "input_wise": 4, "walsh": 4}
"""How many parameters a gate has."""


# -------------------------------------------------------------------------------------- the layer on the coefficients


def _features_first(x):
    """`(..., features) -> (features, examples)`."""
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
    # Else XLA's compiler for the CPU would leave the array as it lies, and gather single numbers instead of whole rows.
    return lax.platform_dependent(x, cpu=_as_rows, default=lambda x: x)


def _features_last(x, shape):
    """The inverse, to `(*shape, features)`."""
    x = lax.platform_dependent(x, cpu=_as_rows, default=lambda x: x)
    return x.T.reshape(*shape, x.shape[0])


@functools.partial(jax.jit, inline=True)
def _as_rows(x):
    return lax.optimization_barrier(with_layout_constraint(x, Layout(major_to_minor=(0, 1))))


def _by_gate(coefficients):
    return (c[:, None] for c in coefficients.T)


def _read(wires, rows):
    return rows[wires.a], rows[wires.b]


def _read_once(wires, rows):
    """The same, of copies of the rows, each of which is read at most once.

    Its transpose, which JAX makes, adds up the copies instead of scattering into one row, in whichever order a GPU does
    that. Where a few inputs have most of the consumers there would be too many copies, and it does scatter.
    """
    if _few_have_most(wires):
        return _read(wires, rows)
    copies, place = jnp.repeat(rows, wires.most_consumers, axis=0), _copies_read(wires)
    return (copies.at[place[role::2]].get(unique_indices=True, mode="promise_in_bounds") for role in (0, 1))


def _copies_read(wires):
    """Which of the rows' copies, `most_consumers` of each, gate g reads as its a, at 2 g, and as its b, at 2 g + 1."""
    at = np.arange(2 * wires.gates, dtype=np.int32)
    own = jnp.searchsorted(wires.offsets[2::2], at, side="right").astype(jnp.int32)
    turn = at - wires.offsets[2 * own]
    return jnp.zeros_like(own).at[wires.consumers].set(own * wires.most_consumers + turn, unique_indices=True)


def _forward_formula(coefficients, wires, x, read=_read):
    a, b = read(wires, widen(_features_first(x)))
    c0, c1, c2, c3 = _by_gate(coefficients)
    y = c0 + c1 * a + (c2 + c3 * a) * b
    return _features_last(y.astype(x.dtype), x.shape[:-1])


def _forward_kernel(coefficients, wires, x):
    y = kernels.forward(coefficients, wires.trail, _examples_last(x))
    return batch_first(y, math.prod(x.shape[:-1])).reshape(*x.shape[:-1], wires.gates)


def _gradients_formula(dy, coefficients, wires, x):
    rows, dy = widen(_features_first(x)), widen(_features_first(dy))
    a, b = rows[wires.a], rows[wires.b]
    da = dy * a
    dc = jnp.stack([jnp.sum(terms, axis=1) for terms in (dy, da, dy * b, da * b)], axis=1)
    slope, curve = coefficients[:, 1:3].ravel(), coefficients[:, 3]

    def of_consumers(at):
        slot = wires.consumers[at]
        gate = slot // 2
        return dy[gate] * (slope[slot][:, None] + curve[gate][:, None] * rows[wires.partners[at]])

    dx = _sum_over_consumers(of_consumers, wires)
    return dc.astype(coefficients.dtype), None, _features_last(dx.astype(x.dtype), x.shape[:-1])


def _sum_over_consumers(terms, wires):
    """The sums of `terms(positions among the consumers) -> (positions, examples)` over each input's own."""
    first, end, all_of_them = wires.offsets[:-1:2], wires.offsets[2::2], np.arange(2 * wires.gates)
    if _few_have_most(wires):
        of_input = jnp.searchsorted(end, all_of_them, side="right")
        return jax.ops.segment_sum(terms(all_of_them), of_input, wires.inputs, indices_are_sorted=True)
    turns = [jnp.minimum(first + turn, all_of_them[-1]) for turn in range(wires.most_consumers)]
    return sum(jnp.where((first + turn < end)[:, None], terms(at), 0) for turn, at in enumerate(turns))


_MOST_TURNS = 32


def _few_have_most(wires):
    """Whether a few inputs have most of the consumers."""
    most = wires.most_consumers
    return most > _MOST_TURNS or most * wires.inputs > 4 * wires.gates + wires.inputs


def _gradients_by_autodiff(dy, coefficients, wires, x):
    """The same once more, for derivatives: with `_read_once`, so that their sums are the same on every run."""
    forward = functools.partial(_forward_formula, read=_read_once)
    dc, dx = jax.vjp(lambda coefficients, x: forward(coefficients, wires, x), coefficients, x)[1](dy)
    return dc, None, dx


def _gradients_kernel(dy, coefficients, wires, x):
    dx, dc = kernels.gradients(_examples_last(dy), coefficients, wires, _examples_last(x))
    dx = batch_first(dx, math.prod(x.shape[:-1])).reshape(x.shape)
    return dc.astype(coefficients.dtype), None, dx


def _examples_last(x):
    return batch_last(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))


_BACKWARD = Op(
    "gate_layer_backward",
    {
        "xla": differentiable(_gradients_formula, _gradients_by_autodiff),
        "pallas": differentiable(_gradients_kernel, _gradients_by_autodiff),
    },
)
_GATES = {
    "xla": Pair(_forward_formula, _BACKWARD, name="gates"),
    "pallas": Pair(differentiable(_forward_kernel, _forward_formula), _BACKWARD, name="gates"),
}


# ------------------------------------------------------------------------------------------------ the layer, as a whole


def _relaxed(parameters, wires, x, *, parametrization):
    """The definition, for JAX to differentiate: of logits, the 16 functions weighted with their probabilities."""
    if parametrization != "softmax":
        return _forward_formula(_PARAMETRIZATIONS[parametrization].forward(parameters), wires, x)
    wide = widen(x)
    functions = jnp.stack(relaxed_gates(wide[..., wires.a], wide[..., wires.b]), axis=-1)
    return jnp.sum(jax.nn.softmax(widen(parameters)) * functions, axis=-1).astype(x.dtype)


def relaxed_gates(a: Array, b: Array) -> list[Array]:
    """The 16 functions of two arrays, one by one, as they are written in the literature."""
    zero, one, ab = jnp.zeros_like(a), jnp.ones_like(a), a * b
    first = [zero, ab, a - ab, a, b - ab, b, a + b - 2 * ab, a + b - ab]
    last = [1 - (a + b - ab), 1 - (a + b - 2 * ab), 1 - b, 1 - b + ab, 1 - a, 1 - a + ab, 1 - ab, one]
    return first + last


def _by_hand(implementation):
    def layer(parameters, wires, x, *, parametrization):
        coefficients = _PARAMETRIZATIONS[parametrization].implementations[implementation](parameters)
        return _GATES[implementation].implementations[implementation](coefficients, wires, x)

    return layer


def _backward_by_hand(implementation):
    def backward(dy, parameters, wires, x, *, parametrization):
        pair = _PARAMETRIZATIONS[parametrization]
        dc, _, dx = _BACKWARD.implementations[implementation](dy, pair.forward(parameters), wires, x)
        return pair.backward.implementations[implementation](dc, parameters), dx

    return backward


def _backward_autodiff(dy, parameters, wires, x, *, parametrization):
    return jax.vjp(lambda p, x: _relaxed(p, wires, x, parametrization=parametrization), parameters, x)[1](dy)


def _unsupported(*arrays, parametrization):
    return _checks.unsupported_dtype(*jax.tree.leaves(arrays))


_GATE_LAYER = Op(
    "gate_layer",
    {"autodiff": _relaxed, "xla": _by_hand("xla"), "pallas": _by_hand("pallas")},
    unsupported=_unsupported,
)
_GATE_LAYER_BACKWARD = Op(
    "gate_layer_backward",
    {"autodiff": _backward_autodiff, "xla": _backward_by_hand("xla"), "pallas": _backward_by_hand("pallas")},
    unsupported=_unsupported,
)


def gate_layer(
    logits: Float[Array, "gates parameters"],
    wires: Wires,
    x: Float[Array, "*batch inputs"],
    *,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> Float[Array, "*batch gates"]:
    """A layer of relaxed logic gates, `y_g = Σ_i softmax(logits_g)_i op_i(a, b)`, a and b the inputs `wires` gives g.

    The 16 functions op_i, in the literature's order, are those of this file's head. Each is linear in a and in b, and
    so is y: `y = c0 + c1 a + c2 b + c3 ab`, which is what is computed.

    Args:
      logits: a gate's parameters. They may be of a wider dtype than x.
      wires: a `jaxbp.Wires` of as many gates, and as many inputs as x has.
      x: inputs, with any leading axes; bits, or numbers between them.
      parametrization: what the parameters are.
        "softmax": 16 logits, one for each function.
        "input_wise": 4, one for each row of the truth table, whose value there is its sigmoid.
        "walsh": 4, weights of 1, A, B and AB, with A, B = ±1 for the bits; the sigmoid of that sum is the row's value.
          (The source takes the sigmoid of the sum at relaxed inputs too. Here it is interpolated between the rows.)
      implementation: "pallas", "xla", "autodiff", or None for the fastest here. "autodiff" is the 16 functions as they
        are written above, stacked; of the other two parametrizations, the four coefficients.

    Returns:
      y, in x's dtype, computed in float32 or wider.

    Raises:
      TypeError: wires that are none, or arguments that are not floating.
      ValueError: shapes that do not fit, or an unknown parametrization.

    Source: F. Petersen et al., "Deep differentiable logic gate networks", NeurIPS 2022; "input_wise": L. Rüttgers et
    al., "Light differentiable logic gate networks", 2025; "walsh": L. Gerlach et al., "WARP logic neural networks",
    2026.
    """
    logits, x = _check("gate_layer", logits, wires, x, parametrization)
    return _GATE_LAYER(logits, wires, x, parametrization=parametrization, implementation=implementation)


def gate_layer_backward(
    dy: Float[Array, "*batch gates"],
    logits: Float[Array, "gates parameters"],
    wires: Wires,
    x: Float[Array, "*batch inputs"],
    *,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> tuple[Float[Array, "gates parameters"], Float[Array, "*batch inputs"]]:
    """Gradients of `gate_layer`. With p the probabilities of a gate,

        dlogits_i = Σ_batch dy p_i (op_i - y)
        da = dy Σ_i p_i ∂op_i/∂a = dy (c1 + c3 b)
        db = dy Σ_i p_i ∂op_i/∂b = dy (c2 + c3 a)
        dx_j = Σ da over the gates that read input j as their a + Σ db over those that read it as their b

    The sums over the batch are those of `dc = Σ_batch dy (1, a, b, ab)`, four a gate; from them,
    `dlogits_i = p_i (u_i - Σ_j p_j u_j)` with `u = T dc`, T the coefficients of the 16 functions.

    Args:
      dy: gradient of the loss in y, of x's dtype.
      logits, wires, x, parametrization: the forward's.

    Returns:
      (dlogits, dx), each in the shape and dtype of what it is the gradient of.

    Raises:
      TypeError, ValueError: as in `gate_layer`.
    """
    op = "gate_layer_backward"
    logits, x = _check(op, logits, wires, x, parametrization)
    dy, _ = _checks.floating(op, dy=dy, x=x)
    _checks.shape(op, "dy", dy, *x.shape[:-1], wires.gates)
    return _GATE_LAYER_BACKWARD(dy, logits, wires, x, parametrization=parametrization, implementation=implementation)


def harden(
    logits: Float[Array, "gates parameters"], parametrization: Parametrization = "softmax"
) -> UInt8[Array, "gates"]:
    """Each gate's most probable function, by its number from 0 to 15; of equally probable ones the first.

    Where the parameters make a truth table, each of its rows is rounded: a half is a 0.

    Raises:
      TypeError, ValueError: as in `gate_layer`.
    """
    (logits,) = _checks.floating("harden", logits=logits)
    _check_parameters("harden", logits, "gates", parametrization)
    if parametrization == "softmax":
        return jnp.argmax(logits, axis=-1).astype(jnp.uint8)
    row = logits if parametrization == "input_wise" else _times(widen(logits), WALSH.T)
    return jnp.sum((row > 0) * np.array([8, 4, 2, 1]), axis=-1).astype(jnp.uint8)


def hard_logits(
    gates: UInt8[Array, "gates"], parametrization: Parametrization = "softmax", dtype: DTypeLike = jnp.float32
) -> Float[Array, "gates parameters"]:
    """Parameters whose gates are exactly those of these numbers: `harden` gives them back.

    A layer of them is exact on bits: its probabilities are 0 and 1, and so are its results.
    """
    row = jnp.asarray(TRUTH_TABLES, dtype)[gates]
    if parametrization == "softmax":
        return jnp.where(gates[:, None] == np.arange(GATES), 0.0, -jnp.inf).astype(dtype)
    large = jnp.asarray(2.0**10, dtype) * (2 * row - 1)
    return large if parametrization == "input_wise" else _times(large, WALSH) / 4


def initial_logits(
    key: PRNGKeyArray,
    gates: int,
    *,
    initialization: Literal["normal", "residual"] = "residual",
    parametrization: Parametrization = "softmax",
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "gates parameters"]:
    """Parameters to start training from.

    Args:
      key: draws the normal ones.
      initialization: "normal", standard normal numbers; "residual", gates that pass on their a: the logit of that
        gate is 5, the others 0 (a probability of 0.91), or the truth table's rows are 0.95 and 0.05.

    Source: of "residual", F. Petersen et al., "Convolutional differentiable logic gate networks", NeurIPS 2024.
    """
    op = "initial_logits"
    _check_choice(op, "parametrization", parametrization, get_args(Parametrization))
    _check_choice(op, "initialization", initialization, ("normal", "residual"))
    if initialization == "normal":
        return jax.random.normal(key, (gates, PARAMETERS[parametrization]), dtype)
    if parametrization == "softmax":
        one = jnp.zeros(GATES).at[PASS_THROUGH].set(5.0)
    else:
        row = math.log(0.95 / 0.05) * (2.0 * TRUTH_TABLES[PASS_THROUGH] - 1)
        one = jnp.asarray(row if parametrization == "input_wise" else row @ WALSH / 4)
    return jnp.tile(one.astype(dtype), (gates, 1))


def group_sum(x: Float[Array, "*batch inputs"], groups: int, tau: float = 1.0) -> Float[Array, "*batch groups"]:
    """The sums of `groups` equal runs of neighbouring inputs, over tau: the scores of classes from a layer of gates.

    Raises:
      TypeError: x is not floating.
      ValueError: groups does not divide the inputs, or tau is not above 0.
    """
    (x,) = _checks.floating("group_sum", x=x)
    if x.ndim == 0 or not _checks.is_int(groups) or groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"group_sum: x has shape {x.shape} and groups is {groups!r}; wants a divisor of its last axis")
    if not tau > 0:
        raise ValueError(f"group_sum: tau is {tau!r}; wants a number above 0")
    sums = jnp.sum(widen(x).reshape(*x.shape[:-1], groups, x.shape[-1] // groups), axis=-1)
    return (sums / tau).astype(x.dtype)


def _check(op, logits, wires, x, parametrization):
    if not isinstance(wires, Wires):
        raise TypeError(f"{op}: wires is a {type(wires).__name__}; wants a jaxbp.Wires")
    (logits,) = _checks.floating(op, logits=logits)
    (x,) = _checks.floating(op, x=x)
    _check_parameters(op, logits, wires.gates, parametrization)
    if x.ndim == 0 or x.shape[-1] != wires.inputs:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., {wires.inputs}), the inputs of wires")
    return logits, x


def _check_parameters(op, logits, gates, parametrization):
    _check_choice(op, "parametrization", parametrization, get_args(Parametrization))
    _checks.shape(op, "logits", logits, gates, PARAMETERS[parametrization])


def _check_choice(op, name, value, choices):
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; wants one of {', '.join(choices)}")
