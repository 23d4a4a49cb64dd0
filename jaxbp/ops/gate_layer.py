"""Differentiable logic gates: layers of two-input gates whose functions are learned.

A gate's function of two bits is one of 16, numbered as in the literature by its truth table: the bits of the number,
from the highest, are its values at (a, b) = (0, 0), (0, 1), (1, 0) and (1, 1). Relaxed to numbers between 0 and 1, each
is linear in a and in b:

    0  False     4  b - ab        8  1 - (a + b - ab)     12  1 - a
    1  ab        5  b             9  1 - (a + b - 2ab)    13  1 - a + ab
    2  a - ab    6  a + b - 2ab  10  1 - b                14  1 - ab
    3  a         7  a + b - ab   11  1 - b + ab           15  True

So is every mixture of them: a gate is `y = c0 + c1 a + c2 b + c3 ab`, whichever parameters its four coefficients come
from. A layer is made of two pairs. One leads from parameters to coefficients, a few numbers a gate. The other is on the
coefficients: it has the wires, the batch, and the kernels.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jaxbp import barriers
from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.wires import Wires
from jaxbp.ops import _checks, _gates
from jaxbp.ops._checks import AnyArray
from jaxbp.ops._numerics import widen
from jaxbp.pairing import Implementation, Op, Pair, composed, differentiable, given_arguments, saving_arguments
from jaxbp.sharding import leading
from pallas_kernels.core.launch import batch_first, batch_last, on_gpu
from pallas_kernels.logic import backward as backward_kernels
from pallas_kernels.logic import forward as forward_kernel
from pallas_kernels.logic.graph import Graph
from pallas_kernels.logic.mixture import mixture, mixture_gradient

# ------------------------------------------------------------------------------------- the formulas on coefficients


def _forward(coefficients, wires, x, *, groups=None):
    return _grouped(_mixed(coefficients, _inputs_of_gates(wires, widen(_features_first(x))), x), groups)


def _grouped(y, groups):
    """The sums of runs of neighbouring gates, if there are to be groups."""
    return y if groups is None else gates.group_sum(widen(y), groups)


def _of_gates(dy, wires, x):
    """The gradient of each gate, features first, from that of the layer's results, which may be sums of groups."""
    rows = _features_first(dy.astype(x.dtype))
    return jnp.repeat(rows, wires.gates // len(rows), axis=0)


def _mixed(coefficients, inputs, x):
    y = _gates.mixed(coefficients.T, *inputs)
    return _features_last(y.astype(x.dtype), x.shape[:-1])


def _inputs_of_gates(wires, rows):
    return rows[wires.a], rows[wires.b]


def _gradients(dy, coefficients, wires, x, *, groups=None):
    rows, dy = widen(_features_first(x)), widen(_of_gates(dy, wires, x))
    dc, dx = _gates.gradients(dy, coefficients.T, wires, rows)
    return dc.T.astype(coefficients.dtype), None, _features_last(dx.astype(x.dtype), x.shape[:-1])


def _gradients_by_autodiff(dy, coefficients, wires, x, *, groups=None):
    """`_gradients`, for JAX to differentiate: with `_copies_of_inputs`, so that every run adds up in the same order."""

    def forward(coefficients, x):
        return _grouped(_mixed(coefficients, _copies_of_inputs(wires, widen(_features_first(x))), x), groups)

    dc, dx = jax.vjp(forward, coefficients, x)[1](dy)
    return dc, None, dx


def _copies_of_inputs(wires, rows):
    """`_inputs_of_gates`, from copies of the rows, each of which is read at most once.

    Its transpose, which JAX makes, adds up the copies instead of scattering into one row, in whichever order a GPU does
    that. Where a few inputs have most of the consumers there would be too many copies, and it does scatter.
    """
    if _gates.few_have_most(wires):
        return _inputs_of_gates(wires, rows)
    copies, place = jnp.repeat(rows, wires.most_consumers, axis=0), _copies_read(wires)
    return (copies.at[place[role::2]].get(unique_indices=True, mode="promise_in_bounds") for role in (0, 1))


def _copies_read(wires):
    """Which of the rows' copies, `most_consumers` of each, gate g reads as its a, at 2 g, and as its b, at 2 g + 1."""
    places = np.arange(2 * wires.gates, dtype=np.int32)
    row = jnp.searchsorted(wires.offsets[2::2], places, side="right").astype(jnp.int32)
    turn = places - wires.offsets[2 * row]
    return jnp.zeros_like(row).at[wires.consumers].set(row * wires.most_consumers + turn, unique_indices=True)


def _features_first(x):
    """`(..., features) -> (features, examples)`."""
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
    # Else XLA's compiler for the CPU would leave the array as it lies, and gather single numbers instead of whole rows.
    return lax.platform_dependent(x, cpu=_as_rows, default=lambda x: x)


def _features_last(x, shape):
    """The inverse, to `(*shape, features)`."""
    return barriers.on_cpu(x).T.reshape(*shape, x.shape[0])


@functools.partial(jax.jit, inline=True)
def _as_rows(x):
    # A vector lies in memory in one way alone. (A constraint on the layout would do, but cannot be exported.)
    return barriers.optimization_barrier(x.ravel()).reshape(x.shape)


# -------------------------------------------------------------------------------------------------------- the kernels


def _forward_kernel(coefficients, wires, x, *, groups=None):
    y = forward_kernel.forward(coefficients, _graph(wires), _examples_last(x))
    return _grouped(batch_first(y, math.prod(x.shape[:-1])).reshape(*x.shape[:-1], wires.gates), groups)


def _gradients_kernel(dy, coefficients, wires, x, *, groups=None):
    # The kernels find a gate's row of dy by its group.
    dx, dc = _fastest_gradients(_examples_last(dy.astype(x.dtype)), coefficients, _graph(wires), _examples_last(x))
    dx = batch_first(dx, math.prod(x.shape[:-1])).reshape(x.shape)
    return dc.astype(coefficients.dtype), None, dx


def _fastest_gradients(dy, coefficients, graph, x):
    """(dx, dc), features first, by the fastest kernels for these wires. Without a GPU, and so without shared memory, by
    `gradients_by_input`."""
    arrays = dy, coefficients, graph, x
    by_input = backward_kernels.gradients_by_input
    for kernel in (backward_kernels.gradients_by_gate, backward_kernels.gradients_along_trail):
        if kernel.pays(*arrays):
            return on_gpu(kernel, by_input, *arrays)
    if backward_kernels.input_gradient.pays(*arrays) and backward_kernels.coefficients_gradient.pays(dy, graph, x):
        return on_gpu(_gradients_by_two_kernels, by_input, *arrays)
    return by_input(*arrays)


def _gradients_by_two_kernels(dy, coefficients, graph, x):
    dx = backward_kernels.input_gradient(dy, coefficients, graph, x)
    return dx, backward_kernels.coefficients_gradient(dy, graph, x)


def _graph(wires):
    """The wires as the kernels take them, whose names they share."""
    return Graph(*(getattr(wires, field.name) for field in dataclasses.fields(Graph)))


def _examples_last(x):
    return batch_last(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))


_TABLE = tuple(map(tuple, gates.COEFFICIENTS.tolist()))


def _where_it_pays(kernel, formula):
    """`kernel` of the gates' functions where it pays, else `formula`."""

    def function(*arrays):
        if not kernel.pays(*arrays, table=_TABLE):
            return formula(*arrays)
        return on_gpu(functools.partial(kernel, table=_TABLE), formula, *arrays)

    return differentiable(function, formula, leading(0, 1))


_SOFTMAX_KERNEL = _where_it_pays(mixture, gates.softmax)
_SOFTMAX_BACKWARD_KERNEL = _where_it_pays(mixture_gradient, gates.softmax_backward)


# ---------------------------------------------------------------------------------------------------------- the pairs

_GATES_BACKWARD = Op(
    "gates_backward",
    {
        "xla": differentiable(_gradients, _gradients_by_autodiff),
        "pallas": differentiable(_gradients_kernel, _gradients_by_autodiff, leading(0, 3)),
    },
)
_GATES = Op(
    "gates",
    {
        "xla": functools.partial(Pair(_forward, _GATES_BACKWARD, name="gates"), implementation="xla"),
        "pallas": functools.partial(
            Pair(differentiable(_forward_kernel, _forward, leading(2)), _GATES_BACKWARD, name="gates"),
            implementation="pallas",
        ),
    },
)
"""Of coefficients, wires and x. Under "pallas" the forward is a kernel, too, so each implementation is a pair."""
COEFFICIENTS = {
    "softmax": Pair(
        gates.softmax,
        {"xla": gates.softmax_backward, "pallas": _SOFTMAX_BACKWARD_KERNEL},
        save={
            "xla": functools.partial(saving_arguments, gates.softmax),
            "pallas": functools.partial(saving_arguments, _SOFTMAX_KERNEL),
        },
        residuals=given_arguments,
        name="softmax_gates",
    ),
    # No kernel would be faster for four parameters a gate: XLA needs no sums over functions.
    **{
        name: Pair(
            functools.partial(gates.of_rows, parametrization=name),
            dict.fromkeys(("pallas", "xla"), functools.partial(gates.of_rows_backward, parametrization=name)),
            name=f"{name}_gates",
        )
        for name in gates.BASES
    },
}


def _layer(parameters, wires, x, *, parametrization, groups, implementation):
    coefficients = COEFFICIENTS[parametrization](widen(parameters), implementation=implementation)
    return _GATES(coefficients, wires, x, groups=groups, implementation=implementation)


def _layer_backward(dy, parameters, wires, x, *, parametrization, groups, implementation):
    # Widened once: what both uses add to a gradient of this one is then rounded, and may overflow, as a sum alone.
    pair, wide = COEFFICIENTS[parametrization], widen(parameters)
    dc, _, dx = _GATES_BACKWARD(dy, pair.forward(wide), wires, x, groups=groups, implementation=implementation)
    return pair.backward(dc, wide, implementation=implementation).astype(parameters.dtype), dx


def _definition(parameters, wires, x, *, parametrization, groups):
    """The layer for JAX to differentiate: of logits, the 16 functions weighted with their probabilities."""
    if parametrization != "softmax":
        return _forward(COEFFICIENTS[parametrization].forward(parameters), wires, x, groups=groups)
    wide = widen(x)
    functions = jnp.stack(gates.relaxed_gates(wide[..., wires.a], wide[..., wires.b]), axis=-1)
    return _grouped(jnp.sum(jax.nn.softmax(widen(parameters)) * functions, axis=-1).astype(x.dtype), groups)


def _definition_backward(dy, parameters, wires, x, **options):
    return jax.vjp(lambda p, x: _definition(p, wires, x, **options), parameters, x)[1](dy)


_public_op = functools.partial(Op, unsupported=_checks.unsupported_dtype, shares=True, jit=True)
_GATE_LAYER = _public_op("gate_layer", {"autodiff": _definition, **composed(_layer)})
_GATE_LAYER_BACKWARD = _public_op(
    "gate_layer_backward", {"autodiff": _definition_backward, **composed(_layer_backward)}
)


# ------------------------------------------------------------------------------------------------ the public functions


def gate_layer(
    logits: Float[AnyArray, "gates parameters"],
    wires: Wires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    parametrization: Parametrization = "softmax",
    groups: int | None = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch results"]:
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
      groups: the results are the sums of so many equal runs of neighbouring gates, as by `jaxbp.group_sum`. The
        backward under "pallas" then reads a gradient a group, and none a gate is ever in memory.
      implementation: "pallas", "xla", "autodiff", or None for the fastest. "autodiff" is the 16 functions as they
        are written above, stacked; of the other two parametrizations, the four coefficients.

    Returns:
      y, a result a gate in x's dtype, computed in float32 or wider; with `groups` a sum a group, in float32 or wider.

    Raises:
      TypeError: wires that are none, or arguments that are not floating.
      ValueError: shapes that do not fit, an unknown parametrization, or groups that do not divide the gates.

    Source: F. Petersen et al., "Deep differentiable logic gate networks", NeurIPS 2022; "input_wise": L. Rüttgers et
    al., "Light differentiable logic gate networks", 2025; "walsh": L. Gerlach et al., "WARP logic neural networks",
    2026.
    """
    logits, x = _check("gate_layer", logits, wires, x, parametrization, groups)
    options = dict(parametrization=parametrization, groups=groups, implementation=implementation)
    return _GATE_LAYER(logits, wires, x, **options)


def gate_layer_backward(
    dy: Float[AnyArray, "*batch results"],
    logits: Float[AnyArray, "gates parameters"],
    wires: Wires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    parametrization: Parametrization = "softmax",
    groups: int | None = None,
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
      dy: gradient of the loss in y, of x's dtype; with `groups` in the sums, of their dtype.
      logits, wires, x, parametrization, groups: the forward's.

    Returns:
      (dlogits, dx), each in the shape and dtype of what it is the gradient of.

    Raises:
      TypeError, ValueError: as in `gate_layer`.
    """
    op = "gate_layer_backward"
    logits, x = _check(op, logits, wires, x, parametrization, groups)
    dy, _ = _checks.floating(op, dy=dy, x=x if groups is None else widen(x))
    _checks.shape(op, "dy", dy, *x.shape[:-1], groups or wires.gates)
    options = dict(parametrization=parametrization, groups=groups, implementation=implementation)
    return _GATE_LAYER_BACKWARD(dy, logits, wires, x, **options)


def _check(op, logits, wires, x, parametrization, groups):
    if not isinstance(wires, Wires):
        raise TypeError(f"{op}: wires is a {type(wires).__name__}; wants a jaxbp.Wires")
    (logits,) = _checks.floating(op, logits=logits)
    (x,) = _checks.floating(op, x=x)
    gates.check_parameters(op, logits, wires.gates, parametrization)
    if x.ndim == 0 or x.shape[-1] != wires.inputs:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., {wires.inputs}), the inputs of wires")
    if groups is not None and (not _checks.is_int(groups) or groups < 1 or wires.gates % groups):
        raise ValueError(f"{op}: groups is {groups!r}; wants None, or a divisor of the {wires.gates} gates")
    return logits, x
