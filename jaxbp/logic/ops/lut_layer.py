"""Gates of four inputs: lookup tables (LUTs) whose truth tables are learned.

The number of a gate's function has 16 bits. From the highest, they are its values at (a, b, c, d) = (0, 0, 0, 0),
(0, 0, 0, 1), ..., (1, 1, 1, 1).
"""

import jax
import jax.numpy as jnp
from jax import Array
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
    sums_over_examples,
)
from jaxbp.logic.wires.wires import Wires, WiresArgument
from jaxbp.pairing import Implementation, formula_and_kernel
from jaxbp.pairing.gradients import in_dtypes_of
from pallas_kernels.logic.lookup_tables import (
    interpolated,
    interpolation_gradients,
    lookup_tables,
    lookup_tables_gradients,
)
from pallas_kernels.logic.readers import sums_over_readers


def _inputs(wires, rows):
    a, b = rows[wires.a], rows[wires.b]
    return a[::2], b[::2], a[1::2], b[1::2]


def _forward(tables, wires, x):
    return _values(tables, _inputs(wires, upcast(features_first(x))), x)


def _values(tables, inputs, x):
    y = interpolated([*tables.T[..., None]], inputs)
    return features_last(y.astype(x.dtype), x.shape[:-1])


def _gradients(dy, tables, wires, x):
    dy, inputs = upcast(features_first(dy)), _inputs(wires, barriers.on_cpu(upcast(features_first(x))))
    dinputs, _ = interpolation_gradients(dy, [*tables.T[..., None]], inputs)
    dtables = jnp.stack(
        sums_over_examples(lambda dy, *inputs: interpolation_gradients(dy, None, inputs)[1], dy, *inputs), axis=-1
    )
    dreads = jnp.stack(dinputs, axis=1).reshape(wires.consumers.size, -1)
    consumers, offsets, dreads = wires.consumers, wires.offsets[::2], barriers.on_cpu(dreads)
    dx = sum_over_consumers(lambda at: dreads[consumers[at]], offsets, consumers.size, wires.max_fan_out)
    return dtables, features_last(dx.astype(x.dtype), x.shape[:-1])


def _gradients_by_autodiff(dy, tables, wires, x):

    def forward(tables, x):
        rows = rows_of_inputs(wires, upcast(features_first(x)))
        return _values(tables, [rows[v::4] for v in range(4)], x)

    return jax.vjp(forward, tables, x)[1](dy)


def _forward_kernel(tables, wires, x):
    return from_rows_of_kernels(lookup_tables(tables, wires.a, wires.b, rows_of_kernels(x)), x.shape[:-1])


def _gradients_kernel(dy, tables, wires, x):
    arrays = rows_of_kernels(dy), tables, wires.a, wires.b, rows_of_kernels(x)
    dreads, dtables = lookup_tables_gradients(*arrays)
    options = dict(max_fan_out=wires.max_fan_out, dtype=x.dtype)
    dx = sums_over_readers(dreads, wires.consumers, wires.offsets[::2], **options)
    return dtables.astype(tables.dtype), from_rows_of_kernels(dx, x.shape[:-1])


_FORWARD = formula_and_kernel(_forward, _forward_kernel, "x")
_GRADIENTS = formula_and_kernel(_gradients, _gradients_kernel, "dy", "x", derivatives_of=_gradients_by_autodiff)


def _definition(logits, wires, x, *, parametrization):
    tables = gates.truth_tables(logits, parametrization=parametrization).reshape(-1, 2, 2, 2, 2)
    a, b = (jnp.stack([1 - upcast(x), upcast(x)], axis=-1)[..., reads, :] for reads in (wires.a, wires.b))
    inputs = a[..., ::2, :], b[..., ::2, :], a[..., 1::2, :], b[..., 1::2, :]
    y = jnp.einsum("...gi,...gj,...gk,...gl,gijkl->...g", *inputs, tables, precision=jax.lax.Precision.HIGHEST)
    return y.astype(x.dtype)


_LUT_LAYER, _LUT_LAYER_BACKWARD = layer_ops(
    "lut_layer",
    _definition,
    lambda logits, wires, by, **options: gates.truth_tables(logits, **options),
    lambda dtables, logits, by, **options: gates.truth_tables_backward(dtables, logits, **options),
    _FORWARD,
    _GRADIENTS,
)


def lut_layer(
    logits: Float[AnyArray, "gates 16"],
    wires: Wires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    parametrization: Parametrization = "input_wise",
    implementation: Implementation = None,
) -> Float[Array, "*batch gates"]:
    """Return the values of a layer of relaxed gates with four inputs, which interpolate learned truth tables:

        y = Σ_k r_k Π_v (x_v if row k has 1 for input v else 1 - x_v)

    Here k goes through the 16 rows of the truth table r, in the order of the module's docstring. y is linear in each
    of the gate's inputs `x_v = a, b, c, d`.

    Args:
      logits: possibly in a wider dtype than x.
      wires: two pairs of inputs per gate. Gate g reads the inputs `wires.a[2 * g]`, `wires.b[2 * g]`,
        `wires.a[2 * g + 1]`, and `wires.b[2 * g + 1]` as its inputs a, b, c, and d.
      x: numbers between 0 and 1.
      parametrization: the meaning of the logits.
        "input_wise": one number per row of the truth table, whose sigmoid is r_k. With normally distributed initial
          logits, it is at least as accurate as "walsh": docs/lab/2026-11-29-learned-wires.md.
        "walsh": the weights of the 16 products of some of A, B, C, and D, where `A = 2 a - 1`, and so on. r_k is the
          sigmoid of their weighted sum in row k. Weight `4 * i + j` belongs to the product of entry i of (1, A, B, AB)
          and entry j of (1, C, D, CD).

    Returns:
      y, in x's dtype.

    Source: as in `jaxbp.gate_layer`, for more inputs.
    """
    logits, x = _check("lut_layer", logits, wires, x, parametrization)
    return _LUT_LAYER(logits, wires, x, parametrization=parametrization, implementation=implementation)


def lut_layer_backward(
    dy: Float[AnyArray, "*batch gates"],
    logits: Float[AnyArray, "gates 16"],
    wires: Wires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    parametrization: Parametrization = "input_wise",
    implementation: Implementation = None,
) -> tuple[Float[Array, "gates 16"], Float[Array, "*batch inputs"]]:
    """Gradients of `lut_layer`. With r as in `lut_layer`, and p_k, the product that r_k multiplies,

        dr_k = Σ_batch dy p_k
        dlogits = Σ_k dr_k r_k (1 - r_k) M_k
        dx_i = Σ dy (y at x_v = 1 - y at x_v = 0) over the inputs v of gates that read input i

    M_k is the derivative of row k's weighted sum with respect to the logits: 1 for logit k alone with "input_wise", and
    the 16 products in row k with "walsh".
    """
    op = "lut_layer_backward"
    arguments = logits, x
    logits, x = _check(op, logits, wires, x, parametrization)
    dy, x = checks.floating(op, dy=dy, x=x)
    checks.shape(op, "dy", dy, *x.shape[:-1], wires.gates // 2)
    options = dict(parametrization=parametrization, implementation=implementation)
    return in_dtypes_of(arguments, _LUT_LAYER_BACKWARD(dy, logits, wires, x, **options))


def _check(op, logits, wires, x, parametrization):
    x = checked_inputs(op, wires, Wires, x)
    if wires.gates % 2:
        raise ValueError(f"{op}: wires has {wires.gates} pairs; wants an even number, two pairs per gate")
    (logits,) = checks.only_floating(op, logits=logits)
    gates.check_parameters(op, logits, wires.gates // 2, parametrization, arity=4)
    return logits, x


def _lut_case(inputs: int, gates: int, *dy: tuple) -> Case:
    arguments = (gates, 16), WiresArgument(inputs, 2 * gates), (BATCH, inputs)
    return Case(case_of(*dy, *arguments).arguments, batch=8192)


_SMALL = (3, 16), WiresArgument(5, 6), (2, 3, 5)
ENTRIES = (
    Entry(lut_layer, case_of(*_SMALL), {"8000->8000": _lut_case(8000, 8000)}),
    Entry(lut_layer_backward, case_of((2, 3, 3), *_SMALL), {"8000->8000": _lut_case(8000, 8000, (BATCH, 8000))}),
)
