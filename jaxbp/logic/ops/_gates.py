"""A layer of gates as formulas in jnp. Its inputs are rows `(inputs, ..., examples)`, and its coefficients `(4, gates,
...)`.

The middle axes `...` index circuits with the same wires. If the rows have size 1 along such an axis, all circuits along
the axis read the same rows.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxbp.common import barriers
from jaxbp.logic.wires.wires import Wires


def mixed(coefficients: Array, a: Array, b: Array) -> Array:
    c0, c1, c2, c3 = coefficients[..., None]
    return c0 + c1 * a + (c2 + c3 * a) * b


def forward(coefficients: Array, wires: Wires, rows: Array) -> Array:
    return mixed(coefficients, rows[wires.a], rows[wires.b])


def gradients(dy: Array, coefficients: Array, wires: Wires, rows: Array) -> tuple[Array, Array]:
    """Return the gradients with respect to the coefficients and with respect to `rows`, the inputs of the layer."""
    rows = barriers.on_cpu(rows)
    dc = jnp.stack(_sums_over_examples(dy, rows[wires.a], rows[wires.b]))
    shared = [axis for axis in range(1, rows.ndim - 1) if rows.shape[axis] == 1]
    if shared:  # The terms of circuits that read the same rows are summed first.
        dy = [jnp.expand_dims(d, shared) for d in _sums(shared, *(c[..., None] * dy for c in coefficients[1:]))]
        slopes, curve = _interleaved(jnp.stack(dy[:2])), dy[2]
    else:
        slopes, curve = _interleaved(coefficients[1:3])[..., None], coefficients[3][..., None]

    def of_consumers(places):
        consumer = wires.consumers[places]
        gate = consumer // 2
        slope = slopes[consumer] + curve[gate] * rows[wires.partners[places]]
        return slope if shared else dy[gate] * slope

    return dc, barriers.on_cpu(sum_over_consumers(of_consumers, wires))


_MOST_PARTS = 16
"""LLVM unrolls sums of up to this number of terms, and then uses vector instructions."""


def _sums_over_examples(dy: Array, a: Array, b: Array) -> list[Array]:
    def terms(dy, a, b):
        da = dy * a
        return dy, da, dy * b, da * b

    def by_parts(*rows):
        examples, axes = dy.shape[-1], [dy.ndim - 1]
        parts = max(n for n in range(1, _MOST_PARTS + 1) if examples % n == 0)
        rows = (x.reshape(*x.shape[:-1], parts, examples // parts) for x in rows)
        return _in_one_loop(axes, *_in_one_loop(axes, *terms(*rows)))

    def at_once(*rows):
        return _one_by_one([dy.ndim - 1], *terms(*rows))

    return lax.platform_dependent(dy, a, b, cpu=by_parts, default=at_once)


def _sums(axes: Sequence[int], *terms: Array) -> list[Array]:
    on_cpu, default = (functools.partial(sums, axes) for sums in (_in_one_loop, _one_by_one))
    return lax.platform_dependent(*terms, cpu=on_cpu, default=default)


def _one_by_one(axes: Sequence[int], *terms: Array) -> list[Array]:
    return [jnp.sum(term, axis=axes) for term in terms]


def _in_one_loop(axes: Sequence[int], *terms: Array) -> list[Array]:
    # On a CPU, separate sums are ten times slower.
    zeros = [jnp.zeros((), term.dtype) for term in terms]
    return lax.reduce(list(terms), zeros, lambda *pair: jax.tree.map(jnp.add, *pair), axes)


def _interleaved(pair: Array) -> Array:
    return jnp.moveaxis(pair, 0, 1).reshape(2 * pair.shape[1], *pair.shape[2:])


_MOST_TURNS = 32
"""Sums over up to this number of consumers per input are unrolled into gathers."""

_LARGEST_PRODUCT = 2**14
"""Up to this number of elements, a product with a 0-1 matrix `(inputs, consumers)` sums over consumers."""


def few_have_most(wires: Wires) -> bool:
    most = wires.max_fan_out
    return most > _MOST_TURNS or most * wires.inputs > 4 * wires.gates + wires.inputs


def sum_over_consumers(terms: Callable[[Array], Array], wires: Wires) -> Array:
    """Sum, for each input, one term per consumer (a gate that reads the input), `(inputs, ...)`.

    `terms` maps n indices into `wires.consumers` to the terms of these consumers, `(n, ...)`.
    """
    first, end, places = wires.offsets[:-1:2], wires.offsets[2::2], np.arange(2 * wires.gates)
    if few_have_most(wires):
        inputs, values = jnp.searchsorted(end, places, side="right"), terms(places)
        if wires.inputs * places.size > _LARGEST_PRODUCT:
            return jax.ops.segment_sum(values, inputs, wires.inputs, indices_are_sorted=True)
        reads = jax.nn.one_hot(inputs, wires.inputs, dtype=values.dtype, axis=0)
        return jnp.tensordot(reads, values, 1, precision=lax.Precision.HIGHEST)
    total = 0
    for turn in range(wires.max_fan_out):
        values = terms(jnp.minimum(first + turn, places[-1]))
        taken = (first + turn < end).reshape(-1, *[1] * (values.ndim - 1))
        total = total + jnp.where(taken, values, 0)
    return total
