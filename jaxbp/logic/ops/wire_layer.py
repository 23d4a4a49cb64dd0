"""Learned wires: the inputs of gates choose among candidates."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbp.common import barriers, checks
from jaxbp.common.cases import BATCH, Case, Entry, case_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.logic import gates
from jaxbp.logic.ops._layers import checked_inputs, layer_ops
from jaxbp.logic.ops._rows import (
    features_first,
    features_last,
    from_rows_of_kernels,
    rows_of_kernels,
    rows_of_readers,
    sum_over_consumers,
)
from jaxbp.logic.wires.learned_wires import LearnedWires, LearnedWiresArgument
from jaxbp.pairing import Implementation, formula_and_kernel
from jaxbp.pairing.gradients import in_dtypes_of
from pallas_kernels.logic.learned_wires import mixtures, mixtures_gradients, unsupported_group
from pallas_kernels.logic.readers import sums_over_readers


def _weights(logits, wires):
    wide = upcast(logits)
    return jax.nn.softmax(wide) if wires.relaxation == "softmax" else _one_hot(wide)


@jax.custom_jvp
def _one_hot(logits):
    """Return 1 for the largest logit and 0 for the others, with the derivatives of the softmax."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.isnan(largest), largest, gates.one_hot_of_largest(logits))


@_one_hot.defjvp
def _(primals, tangents):
    return _one_hot(*primals), jax.jvp(jax.nn.softmax, primals, tangents)[1]


def _by_group(rows, wires):
    return rows.reshape(wires.groups, rows.shape[0] // wires.groups, rows.shape[-1])


_exact_products = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _forward(logits, wires, x):
    rows = upcast(features_first(x))
    if wires.relaxation == "softmax":
        return _mixtures(_weights(logits, wires), wires, rows[wires.candidates], x)
    chosen = jnp.argmax(logits, axis=-1).reshape(wires.groups, -1)
    read = jnp.take_along_axis(wires.candidates, chosen, axis=1).ravel()
    largest = jnp.max(logits, axis=-1, keepdims=True)
    y = jnp.where(jnp.isnan(largest), largest, rows[read])
    return features_last(y.astype(x.dtype), x.shape[:-1])


def _mixtures_of_candidates(logits, wires, x):
    return _mixtures(_weights(logits, wires), wires, upcast(features_first(x))[wires.candidates], x)


def _mixtures(weights, wires, values, x):
    y = _exact_products("qwk,qkn->qwn", _by_group(weights, wires), values)
    return features_last(y.reshape(2 * wires.gates, y.shape[-1]).astype(x.dtype), x.shape[:-1])


def _gradients(dy, logits, wires, x):
    dlogits, dvalues = _gradients_of_groups(features_first(dy), logits, wires, features_first(x))
    dvalues, offsets, fan_out = barriers.on_cpu(dvalues), wires.reader_offsets, wires.max_fan_out
    dx = sum_over_consumers(lambda at: dvalues[wires.readers[at]], offsets, wires.readers.size, fan_out)
    return dlogits, features_last(dx.astype(x.dtype), x.shape[:-1])


def _gradients_of_groups(dy, logits, wires, rows):
    # Small groups have kernels, which multiply exactly.
    is_small = unsupported_group(logits, wires.candidates) is None
    products = _exact_products if is_small else jnp.einsum
    softmax_gradient = gates.softmax_gradient if is_small else _softmax_gradient_of_large_groups
    dy, values = _by_group(upcast(dy), wires), upcast(rows)[wires.candidates]
    dweights = products("qwn,qkn->qwk", dy, values).reshape(logits.shape)
    dvalues = products("qwk,qwn->qkn", _by_group(_weights(logits, wires), wires), dy)
    return softmax_gradient(dweights, logits), dvalues.reshape(wires.readers.size, dvalues.shape[-1])


def _softmax_gradient_of_large_groups(dp, logits):
    """Return `gates.softmax_gradient(dp, logits)`, with a barrier after the sums of each row.

    On a GPU, one kernel then computes the sums, and the optimizer's kernel computes the gradient where it reads it.
    Without the barrier, XLA computes the gradient once per moment of the optimizer, in kernels that keep a whole row
    in the registers of one CTA: docs/lab/2026-11-30-learned-wires.md.
    """
    largest = jnp.argmax(logits, axis=-1, keepdims=True)
    shift, dp_of_largest = (jnp.take_along_axis(a, largest, axis=-1) for a in (logits, dp))
    e, dp = jnp.exp(logits - shift), dp - dp_of_largest
    total, weighted = barriers.stored([jnp.sum(terms, axis=-1, keepdims=True) for terms in (e, e * dp)])
    return (e / total * (dp - weighted / total)).astype(logits.dtype)


def _gradients_by_autodiff(dy, logits, wires, x):

    def forward(weights, x):
        readers = wires.candidates.ravel(), wires.readers, wires.reader_offsets
        values = rows_of_readers(upcast(features_first(x)), *readers, wires.max_fan_out)
        return _mixtures(weights, wires, values.reshape(*wires.candidates.shape, -1), x)

    dweights, dx = jax.vjp(forward, _weights(logits, wires), x)[1](dy)
    # The gradient of jax.nn.softmax, and its derivatives, would lose digits if a candidate is nearly sure.
    return gates.softmax_gradient(dweights, logits), dx


def _forward_kernel(logits, wires, x):
    if unsupported_group(logits, wires.candidates):
        return _forward(logits, wires, x)
    rows = mixtures(_weights(logits, wires), wires.candidates, rows_of_kernels(x))
    return from_rows_of_kernels(rows, x.shape[:-1])


def _gradients_kernel(dy, logits, wires, x):
    rows, dy = rows_of_kernels(x), rows_of_kernels(dy)
    if unsupported_group(logits, wires.candidates):
        dlogits, dvalues = _gradients_of_groups(dy, logits, wires, rows)
    else:
        dvalues, dweights = mixtures_gradients(dy, _weights(logits, wires), wires.candidates, rows)
        dlogits = gates.softmax_gradient(dweights, logits)
    options = dict(max_fan_out=wires.max_fan_out, dtype=x.dtype)
    dx = sums_over_readers(dvalues, wires.readers, wires.reader_offsets, **options)
    return dlogits, from_rows_of_kernels(dx, x.shape[:-1])


_FORWARD = formula_and_kernel(_forward, _forward_kernel, "x", derivatives_of=_mixtures_of_candidates)
_GRADIENTS = formula_and_kernel(_gradients, _gradients_kernel, "dy", "x", derivatives_of=_gradients_by_autodiff)


def _definition(logits, wires, x):
    values = upcast(x)[..., wires.candidates]
    y = _exact_products("qwk,...qk->...qw", _by_group(_weights(logits, wires), wires), values)
    return y.reshape(*x.shape[:-1], 2 * wires.gates).astype(x.dtype)


_WIRE_LAYER, _WIRE_LAYER_BACKWARD = layer_ops(
    "wire_layer",
    _definition,
    lambda logits, wires, by: logits,
    lambda dlogits, logits, by: dlogits,
    _FORWARD,
    _GRADIENTS,
)


def wire_layer(
    logits: Float[AnyArray, "2*gates K"],
    wires: LearnedWires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch 2*gates"]:
    """Return the values of learned wires, `y = Σ_k w_k v_k`.

    Here v_k is the value of candidate k of the wire, `x[..., candidates[q, k]]` for the wire's group q. With
    `relaxation="softmax"`, the weights w are the softmax of the wire's logits. With "straight_through", the weight of
    the candidate with the largest logit is 1, and the others are 0.

    Args:
      logits: one row per wire, possibly in a wider dtype than x.
      x: numbers between 0 and 1.

    Returns:
      y, in x's dtype. `gate_layer` reads it through `wires.gate_wires`.

    Source: as in `jaxbp.LearnedWires`.
    """
    logits, x = _check("wire_layer", logits, wires, x)
    return _WIRE_LAYER(logits, wires, x, implementation=implementation)


def wire_layer_backward(
    dy: Float[AnyArray, "*batch 2*gates"],
    logits: Float[AnyArray, "2*gates K"],
    wires: LearnedWires,
    x: Float[AnyArray, "*batch inputs"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "2*gates K"], Float[Array, "*batch inputs"]]:
    """Gradients of `wire_layer`. With p the softmax of a wire's logits, and with v and w as in `wire_layer`,

        dw_k = Σ_batch dy v_k
        dlogits_k = p_k (dw_k - Σ_j p_j dw_j)
        dv_k = Σ w_k dy over the wires of the group
        dx_i = Σ dv_k over the groups that have input i as a candidate k

    With `relaxation="straight_through"`, dlogits is not the derivative of the forward, which is 0 almost everywhere.
    """
    op = "wire_layer_backward"
    arguments = logits, x
    logits, x = _check(op, logits, wires, x)
    dy, x = checks.floating(op, dy=dy, x=x)
    checks.shape(op, "dy", dy, *x.shape[:-1], 2 * wires.gates)
    return in_dtypes_of(arguments, _WIRE_LAYER_BACKWARD(dy, logits, wires, x, implementation=implementation))


def _check(op, logits, wires, x):
    x = checked_inputs(op, wires, LearnedWires, x)
    logits = wires.checked_logits(op, logits)
    return logits, x


def _wire_case(inputs: int, gates: int, *dy: tuple) -> Case:
    arguments = (2 * gates, 8), LearnedWiresArgument(inputs, gates, 8), (BATCH, inputs)
    return Case(case_of(*dy, *arguments).arguments, batch=8192)


_SMALL = (8, 3), LearnedWiresArgument(5, 4, 3, 2), (2, 3, 5)
ENTRIES = (
    Entry(wire_layer, case_of(*_SMALL), {"8000->8000": _wire_case(8000, 8000)}),
    Entry(wire_layer_backward, case_of((2, 3, 8), *_SMALL), {"8000->8000": _wire_case(8000, 8000, (BATCH, 16000))}),
)
