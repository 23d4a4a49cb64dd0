"""Differentiable logic gates: layers of two-input gates whose functions are learned.

A gate computes one of 16 functions of two bits, relaxed to numbers between 0 and 1:

    0  False     4  b - ab        8  1 - (a + b - ab)     12  1 - a
    1  ab        5  b             9  1 - (a + b - 2ab)    13  1 - a + ab
    2  a - ab    6  a + b - 2ab  10  1 - b                14  1 - ab
    3  a         7  a + b - ab   11  1 - b + ab           15  True

The bits of a function's number, from the highest, are its values at (a, b) = (0, 0), (0, 1), (1, 0), and (1, 1).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import barriers, checks
from jaxbp.common.cases import BATCH, Case, Entry, case_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.ops._layers import checked_inputs, layer_ops
from jaxbp.logic.ops._rows import (
    features_first,
    features_last,
    from_rows_of_kernels,
    rows_of_inputs,
    rows_of_kernels,
    sum_over_consumers,
    sums,
    sums_over_examples,
    take,
)
from jaxbp.logic.ops.wire_layer import wire_layer
from jaxbp.logic.wires.learned_wires import LearnedWires
from jaxbp.logic.wires.wires import Wires, WiresArgument
from jaxbp.pairing import Implementation, Pair, differentiable, formula_and_kernel, given_arguments, saving_arguments
from jaxbp.pairing.gradients import in_dtypes_of
from jaxbp.pairing.mesh import batched
from pallas_kernels.core import device
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.logic import backward as backward_kernels
from pallas_kernels.logic import forward as forward_kernel
from pallas_kernels.logic.mixture import mixture, mixture_gradient


def mixed(coefficients: Array, a: Array, b: Array) -> Array:
    c0, c1, c2, c3 = coefficients[..., None]
    return c0 + c1 * a + (c2 + c3 * a) * b


def gradients_of_rows(dy: Array, coefficients: Array, wires: Wires, rows: Array) -> tuple[Array, Array]:
    """Return the gradients with respect to the coefficients `(4, gates, ...)`, and with respect to a layer's inputs
    `rows (inputs, ..., examples)`.

    The middle axes `...` index circuits with the same wires. If the rows have size 1 along such an axis, all circuits
    along the axis read the same rows.
    """
    rows = barriers.on_cpu(rows)
    dc = jnp.stack(sums_over_examples(_terms, dy, take(rows, wires.a), take(rows, wires.b)))
    shared = [axis for axis in range(1, rows.ndim - 1) if rows.shape[axis] == 1]
    if shared:  # The terms of circuits that read the same rows are summed first.
        dy = [jnp.expand_dims(d, shared) for d in sums(shared, *(c[..., None] * dy for c in coefficients[1:]))]
        slopes, curve = _interleaved(jnp.stack(dy[:2])), dy[2]
    else:
        slopes, curve = _interleaved(coefficients[1:3])[..., None], coefficients[3][..., None]

    def of_consumers(places):
        consumer = take(wires.consumers, places)
        gate = consumer >> 1
        slope = take(slopes, consumer) + take(curve, gate) * take(rows, take(wires.partners, places))
        return slope if shared else take(dy, gate) * slope

    return dc, barriers.on_cpu(sum_over_consumers(of_consumers, wires.offsets[::2], 2 * wires.gates, wires.max_fan_out))


def _terms(dy: Array, a: Array, b: Array) -> tuple[Array, ...]:
    da = dy * a
    return dy, da, dy * b, da * b


def _interleaved(pair: Array) -> Array:
    return jnp.moveaxis(pair, 0, 1).reshape(2 * pair.shape[1], *pair.shape[2:])


def _forward(coefficients, wires, x, *, groups=None):
    rows = upcast(features_first(x))
    return _values((rows[wires.a], rows[wires.b]), coefficients, x, groups)


def _values(inputs, coefficients, x, groups):
    y = features_last(mixed(coefficients.T, *inputs).astype(x.dtype), x.shape[:-1])
    return y if groups is None else gates.group_sum(upcast(y), groups)


def _gradients(dy, coefficients, wires, x, *, groups=None):
    rows, dy = upcast(features_first(x)), features_first(dy.astype(x.dtype))
    dy = upcast(jnp.repeat(dy, wires.gates // len(dy), axis=0))
    dc, dx = gradients_of_rows(dy, coefficients.T, wires, rows)
    return dc.T.astype(coefficients.dtype), features_last(dx.astype(x.dtype), x.shape[:-1])


def _gradients_by_autodiff(dy, coefficients, wires, x, *, groups=None):

    def forward(coefficients, x):
        rows = rows_of_inputs(wires, upcast(features_first(x)))
        return _values((rows[::2], rows[1::2]), coefficients, x, groups)

    return jax.vjp(forward, coefficients, x)[1](dy)


def _forward_kernel(coefficients, wires, x, *, groups=None):
    y = forward_kernel.forward(coefficients, wires, rows_of_kernels(x))
    y = from_rows_of_kernels(y, x.shape[:-1])
    return y if groups is None else gates.group_sum(upcast(y), groups)


def _gradients_kernel(dy, coefficients, wires, x, *, groups=None):
    dx, dc = _fastest_gradients(rows_of_kernels(dy.astype(x.dtype)), coefficients, wires, rows_of_kernels(x))
    return dc.astype(coefficients.dtype), from_rows_of_kernels(dx, x.shape[:-1])


_SHORT_ROW = 512
"""Largest batch for which separate kernels for dx and dc are faster: docs/lab/2026-11-22-trees.md."""
_SHORT_ROW_IN_L2 = 1024
"""The same limit if x fits in the L2 cache: docs/lab/2026-11-22-logic.md."""
_L2_SHARE = 0.8
"""Largest fraction of the L2 cache for x, to leave room for dy. Not tuned."""


def _fastest_gradients(dy, coefficients, graph, x):
    arrays = dy, coefficients, graph, x
    for kernel in (backward_kernels.gradients_by_gate, backward_kernels.gradients_along_trail):
        if kernel.unsupported(*arrays) is None:
            return kernel(*arrays)
    in_l2 = x.size * x.dtype.itemsize <= _L2_SHARE * device.target().l2_bytes
    is_short = x.shape[1] <= (_SHORT_ROW_IN_L2 if in_l2 else _SHORT_ROW)
    if is_short and backward_kernels.coefficients_gradient.unsupported(dy, graph, x) is None:
        return backward_kernels.input_gradient(*arrays), backward_kernels.coefficients_gradient(dy, graph, x)
    return backward_kernels.gradients_by_input(*arrays)


_TABLE = tuple(map(tuple, gates.COEFFICIENTS.tolist()))
_MIN_GATES = 2**15
"""Fewest gates for which the kernels of `mixture` are faster than XLA, measured with 8,000 and 64,000:
docs/lab/2026-11-24-logic.md."""


def _for_many_gates(kernel, formula, *batch):
    def function(*arrays):
        logits = arrays[-1]
        if math.prod(logits.shape[:-1]) < _MIN_GATES or kernel.unsupported(*arrays, table=_TABLE):
            return formula(*arrays)
        return on_gpu(functools.partial(kernel, table=_TABLE), formula, *arrays)

    return differentiable(function, formula, batched(*batch))


_FORWARD = formula_and_kernel(_forward, _forward_kernel, "x")
_GRADIENTS = formula_and_kernel(_gradients, _gradients_kernel, "dy", "x", derivatives_of=_gradients_by_autodiff)
_COEFFICIENTS = {
    "softmax": {
        "xla": (gates.softmax, gates.softmax_backward),
        "pallas": (
            _for_many_gates(mixture, gates.softmax, "logits"),
            _for_many_gates(mixture_gradient, gates.softmax_backward, "logits", "dc"),
        ),
    },
    # Parametrizations without sums over the 16 functions are as fast in XLA as in a kernel.
    **{
        name: dict.fromkeys(
            ("xla", "pallas"),
            tuple(functools.partial(f, parametrization=name) for f in (gates.of_rows, gates.of_rows_backward)),
        )
        for name in gates.BASES
    },
}
COEFFICIENTS = {
    name: Pair(
        rules["xla"][0],
        {key: backward for key, (_, backward) in rules.items()},
        save={key: functools.partial(saving_arguments, forward) for key, (forward, _) in rules.items()},
        residuals=given_arguments,
        name=f"{name}_gates",
    )
    for name, rules in _COEFFICIENTS.items()
}


def _definition(parameters, wires, x, *, parametrization, groups):
    if parametrization != "softmax":
        return _forward(COEFFICIENTS[parametrization].forward(parameters), wires, x, groups=groups)
    wide = upcast(x)
    functions = jnp.stack(gates.relaxed_gates(wide[..., wires.a], wide[..., wires.b]), axis=-1)
    weights = lax.broadcast_to_rank(jax.nn.softmax(upcast(parameters)), functions.ndim)
    y = jnp.sum(weights * functions, axis=-1).astype(x.dtype)
    return y if groups is None else gates.group_sum(upcast(y), groups)


_GATE_LAYER, _GATE_LAYER_BACKWARD = layer_ops(
    "gate_layer",
    _definition,
    lambda p, wires, by, *, parametrization, groups: _COEFFICIENTS[parametrization][by][0](p),
    lambda dc, p, by, *, parametrization, groups: _COEFFICIENTS[parametrization][by][1](dc, p),
    _FORWARD,
    _GRADIENTS,
)


def gate_layer(
    logits: Float[AnyArray, "gates parameters"],
    wires: Wires | LearnedWires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    wire_logits: Float[AnyArray, "2*gates K"] | None = None,
    parametrization: Parametrization = "softmax",
    groups: int | None = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch results"]:
    """Return the values of a layer of relaxed logic gates, `y_g = Σ_i softmax(logits_g)_i op_i(a, b)`.

    Here `wires` gives gate g the inputs a and b. The module's docstring lists the functions op_i. They are linear in a
    and in b, so `y = c0 + c1 a + c2 b + c3 ab`.

    Args:
      logits: possibly in a wider dtype than x.
      x: numbers between 0 and 1.
      wire_logits: the logits of `LearnedWires`, whose values `wire_layer` computes; None for `Wires`.
      parametrization: the meaning of the logits.
        "softmax": 16 logits, one per function.
        "input_wise": 4 numbers, one per row of the truth table, whose sigmoid is the gate's value in this row.
        "walsh": 4 weights of 1, A, B, and AB, where A = 2 a - 1 and B = 2 b - 1. The gate's value in a row of the truth
          table is the sigmoid of the weighted sum. Between 0 and 1, y interpolates these values, unlike in the source.
      groups: the number of groups of neighboring gates whose values are summed, as in `jaxbp.group_sum`, or None.

    Returns:
      y, in x's dtype, or with `groups` in float32 or wider.

    Source: F. Petersen et al., "Deep differentiable logic gate networks", NeurIPS 2022; "input_wise": L. Rüttgers et
    al., "Light differentiable logic gate networks", 2025; "walsh": L. Gerlach et al., "WARP logic neural networks",
    2026.
    """
    if isinstance(wires, LearnedWires):
        x = wire_layer(_wire_logits(wires, wire_logits), wires, x, implementation=implementation)
        wires, wire_logits = wires.gate_wires, None
    if wire_logits is not None:
        raise TypeError("gate_layer: wire_logits is given; wants None, because wires is no jaxbp.LearnedWires")
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
    """Gradients of `gate_layer`. With p the softmax of a gate's logits, and c and op_i as in `gate_layer`,

        dlogits_i = Σ_batch dy p_i (op_i - y)
        da = dy Σ_i p_i ∂op_i/∂a = dy (c1 + c3 b)
        db = dy Σ_i p_i ∂op_i/∂b = dy (c2 + c3 a)
        dx_j = Σ da over the gates that read input j as their a + Σ db over the gates that read input j as their b

    docs/logic_gates.md derives dlogits from `dc = Σ_batch dy (1, a, b, ab)`. In other parametrizations,
    `dlogits_i = Σ_k dc_k ∂c_k/∂logits_i`. With `groups`, a gate's dy is its group's dy.
    """
    op = "gate_layer_backward"
    arguments = logits, x
    logits, x = _check(op, logits, wires, x, parametrization, groups)
    like_y = x if groups is None else upcast(x)
    dy, promoted = checks.floating(op, dy=dy, x=like_y)
    x = x if promoted.dtype == like_y.dtype else promoted
    checks.shape(op, "dy", dy, *x.shape[:-1], groups or wires.gates)
    options = dict(parametrization=parametrization, groups=groups, implementation=implementation)
    return in_dtypes_of(arguments, _GATE_LAYER_BACKWARD(dy, logits, wires, x, **options))


def _wire_logits(wires, logits):
    if logits is None:
        raise TypeError("gate_layer: wire_logits is None; wants the logits of wires, a jaxbp.LearnedWires")
    return wires.checked_logits("gate_layer", logits, "wire_logits")


def _check(op, logits, wires, x, parametrization, groups):
    x = checked_inputs(op, wires, Wires, x)
    (logits,) = checks.only_floating(op, logits=logits)
    gates.check_parameters(op, logits, wires.gates, parametrization)
    if groups is not None and (not checks.is_int(groups) or groups < 1 or wires.gates % groups):
        raise ValueError(f"{op}: groups is {groups!r}; wants None, or a divisor of {wires.gates}, the number of gates")
    return logits, x


def _gate_case(inputs: int, gates: int, *dy: tuple) -> Case:
    case = case_of(*dy, (gates, 16), WiresArgument(inputs, gates), (BATCH, inputs))
    return dataclasses.replace(case, batch=8192)


ENTRIES = (
    Entry(
        gate_layer,
        case_of((6, 16), WiresArgument(5, 6), (2, 3, 5)),
        {"4096->8192": _gate_case(4096, 8192), "8000->8000": _gate_case(8000, 8000)},
    ),
    Entry(
        gate_layer_backward,
        case_of((2, 3, 6), (6, 16), WiresArgument(6, 6), (2, 3, 6)),  # equally many gates read each input
        {"4096->8192": _gate_case(4096, 8192, (BATCH, 8192))},
    ),
)
