"""Layers of two-input gates, features first: a wire is a row of examples, of which programs read long pieces.

Gate g computes `y = c0 + c1 a + c2 b + c3 a b` of its inputs a and b, with four coefficients of its own.

The batch is the slow axis of every grid: a stretch of it is done for all gates before the next begins, so that its part
of x, which gates read in random places, comes from memory once and then from the L2 cache. What bounds the kernels, and
what was tried: docs/logic_gates.md.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import LANES, SUMMED_ROWS, largest_divisor, sums_over_lanes, zeros_like

# Of a thread in one load.
_BYTES = 16
# Examples of all gates, or of an input, in a program: shorter stretches of the batch leave it several gates.
_GATE_EXAMPLES, _INPUT_EXAMPLES = 512, 1024
# Where the wires are regular with so many consumers, the gradients are made along the trail: vectors of the batch in a
# program, at most, and bytes that a thread reads of the gradients for one input.
_TRAIL_CONSUMERS, _TRAIL_PIECES, _TRAIL_BYTES = (2, 4), 8, 64
# Otherwise, up to this batch and of an x that the L2 cache holds, they are made apart: inputs in a program and their
# consumers at a time, at most; gates in a program, whose sums fill whole tiles, and vectors of the batch.
_SMALL_BATCH, _SMALL_BYTES = 1024, 48 * 2**20
_INPUTS, _CONSUMERS = 4, 4
_GATES, _PIECES = SUMMED_ROWS // 4, 4


def forward(coefficients: Array, trail: Array, x: Array) -> Array:
    """`y[g, n] = c[g, 0] + c[g, 1] * x[a[g], n] + c[g, 2] * x[b[g], n] + c[g, 3] * x[a[g], n] * x[b[g], n]`.

    Args:
      coefficients: `(gates, 4)`.
      trail: `(3, gates)`: the gates in the order in which programs take them, and their a and b in that order. Where
        neighbours share an input, a program that has both reads it once.
      x: `(inputs, N)`, the batch N a multiple of `LANES`.

    Returns:
      `(gates, N)` in x's dtype, computed in float32.
    """
    gates, N = trail.shape[1], x.shape[1]
    length = _vector_length(x)
    # At least two, so that the loads of both are under way together.
    several = largest_divisor(gates, max(2, _GATE_EXAMPLES // length))

    def body(c_ref, trail_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * length, length)
        these = [group * several + k for k in range(several)]
        # All loads before the first store.
        rows = [[x_ref[trail_ref[role, k], lanes].astype(jnp.float32) for role in (1, 2)] for k in these]
        for k, (a, b) in zip(these, rows, strict=True):
            g = trail_ref[0, k]
            c0, c1, c2, c3 = (c_ref[g, i] for i in range(4))
            y_ref[g, lanes] = (c0 + c1 * a + (c2 + c3 * a) * b).astype(y_ref.dtype)

    return launch(
        body,
        coefficients.astype(jnp.float32),
        trail,
        x,
        out=jax.ShapeDtypeStruct((gates, N), x.dtype),
        grid={"block": N // length, "group": gates // several},
        name="gate_layer",
    )


def gradients(dy: Array, coefficients: Array, wires: Any, x: Array) -> tuple[Array, Array]:
    """The gradients of `forward` in x and in the coefficients.

        dx[i, n] = sum over the gates g that read i as their a of dy[g, n] * (c[g, 1] + c[g, 3] * x[b[g], n])
                 + sum over those that read it as their b of dy[g, n] * (c[g, 2] + c[g, 3] * x[a[g], n])
        dc[g] = sum over n of dy[g, n] * (1, a, b, a * b)

    Both are made in one pass along the trail where all inputs have two consumers, or all four. Of other wires they are
    made in one pass, input by input, or of a small x in a kernel each.

    Args:
      dy: `(gates, N)`, the batch N a multiple of `LANES`.
      coefficients: `(gates, 4)`.
      wires: a `jaxbp.Wires`.
      x: `(inputs, N)`, of dy's dtype.

    Returns:
      dx `(inputs, N)` in x's dtype and dc `(gates, 4)` in float32, both summed in float32.
    """
    coefficients = coefficients.astype(jnp.float32)
    if wires.regular and wires.most_consumers in _TRAIL_CONSUMERS:
        return on_gpu(_gradients_along_trail, _gradients_in_one, dy, coefficients, wires, x)
    if x.shape[1] > _SMALL_BATCH or x.size * x.dtype.itemsize > _SMALL_BYTES:
        return _gradients_in_one(dy, coefficients, wires, x)
    return on_gpu(_gradients_apart, _gradients_in_one, dy, coefficients, wires, x)


def _gradients_in_one(dy, coefficients, wires, x):
    """A program owns an input and a stretch of the batch, and goes over the input's consumers. Where the input is a
    gate's a, it has all that the gate's sums need in its registers."""
    (gates, N), inputs = dy.shape, x.shape[0]
    length = _vector_length(x)
    # Pieces of the batch in a program: the more, the fewer sums over lanes, and the fewer loads of indices.
    pieces = largest_divisor(N // length, max(1, _INPUT_EXAMPLES // length))

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, x_ref, dx_ref, dc_ref, *, block, i):
        lanes = [pl.ds((block * pieces + k) * length, length) for k in range(pieces)]

        def rows(ref, i):
            return [ref[i, here].astype(jnp.float32) for here in lanes]

        own = rows(x_ref, i)

        def add_consumer(e, dx, role):
            g = consumers_ref[e] >> 1
            dy, other = rows(dy_ref, g), rows(x_ref, partners_ref[e])
            if role == 0:
                terms = [_terms(*values) for values in zip(dy, own, other, strict=True)]
                for k, pieces_of_sum in enumerate(zip(*terms, strict=True)):
                    dc_ref[block, g, k] = jnp.sum(functools.reduce(jnp.add, pieces_of_sum))
            slope, curve = c_ref[g, 1 + role], c_ref[g, 3]
            return tuple(s + d * (slope + curve * o) for s, d, o in zip(dx, dy, other, strict=True))

        dx = tuple(zeros_like(a) for a in own)
        for role in (0, 1):
            first, end = offsets_ref[2 * i + role], offsets_ref[2 * i + role + 1]
            dx = lax.fori_loop(first, end, functools.partial(add_consumer, role=role), dx)
        for here, sums in zip(lanes, dx, strict=True):
            dx_ref[i, here] = sums.astype(dx_ref.dtype)

    blocks = N // (length * pieces)
    dx, dc = launch(
        body,
        dy,
        coefficients,
        wires.consumers,
        wires.partners,
        wires.offsets,
        x,
        out=(x, jax.ShapeDtypeStruct((blocks, gates, 4), jnp.float32)),
        grid={"block": blocks, "i": inputs},
        name="gate_layer_backward",
    )
    return dx, jnp.sum(dc, axis=0)


def _gradients_along_trail(dy, coefficients, wires, x):
    """A program has inputs that follow each other on the trail, and makes the sums of the gates by which that leaves
    them. All that it reads is under way together."""
    N, (inputs, most) = x.shape[1], (x.shape[0], wires.most_consumers)
    pieces = largest_divisor(N // LANES, min(_TRAIL_PIECES, _TRAIL_BYTES // (most * x.dtype.itemsize)))
    # Consumers in a program: more of them where of each there is little to read.
    several = largest_divisor(inputs, (8 if pieces <= 2 else 4) // most)
    blocks, groups, leaving = N // (LANES * pieces), inputs // several, most // 2
    # Four a gate, of at most four gates.
    summed = SUMMED_ROWS // 2

    def body(dy_ref, c_ref, consumers_ref, partners_ref, order_ref, x_ref, dx_ref, dc_ref, rows_ref, *, block, group):
        lanes = [pl.ds((block * pieces + k) * LANES, LANES) for k in range(pieces)]

        def rows(ref, i):
            return [ref[i, here].astype(jnp.float32) for here in lanes]

        these = [order_ref[group * several + k] for k in range(several)]
        at = [group * several * most + k for k in range(several * most)]
        slots, partners = ([ref[e] for e in at] for ref in (consumers_ref, partners_ref))
        slopes = [(c_ref[slot >> 1, 1 + (slot & 1)], c_ref[slot >> 1, 3]) for slot in slots]
        own, gradients = [rows(x_ref, i) for i in these], [rows(dy_ref, slot >> 1) for slot in slots]
        others = [rows(x_ref, partner) for partner in partners]
        for k, i in enumerate(these):
            mine = range(k * most, (k + 1) * most)
            for p, here in enumerate(lanes):
                parts = [gradients[n][p] * (slopes[n][0] + slopes[n][1] * others[n][p]) for n in mine]
                dx_ref[i, here] = functools.reduce(jnp.add, parts).astype(dx_ref.dtype)
            for row, n in enumerate(mine[:leaving], k * leaving):
                terms = [_terms(*values) for values in zip(gradients[n], own[k], others[n], strict=True)]
                for t, pieces_of_sum in enumerate(zip(*terms, strict=True)):
                    rows_ref[4 * row + t] = functools.reduce(jnp.add, pieces_of_sum)
        sums_over_lanes(rows_ref, dc_ref.at[block, pl.ds(group * summed, summed)])

    dx, sums = launch(
        body,
        dy,
        coefficients,
        wires.trail_consumers,
        wires.trail_partners,
        wires.trail_inputs,
        x,
        out=(x, jax.ShapeDtypeStruct((blocks, groups * summed), jnp.float32)),
        grid={"block": blocks, "group": groups},
        scratch=[plgpu.SMEM((summed, LANES), jnp.float32)],
        barriers=False,
        name="gate_layer_backward_along_trail",
    )
    sums = jnp.sum(sums, axis=0).reshape(groups, summed // 4, 4)
    # Of the gates, in their own order.
    place = wires.trail_places
    row = place // most * leaving + place % most
    dc = sums[row // (several * leaving), row % (several * leaving)]
    # Left from its b: that comes before its a.
    swapped = wires.trail_consumers[place] & 1 == 1
    return dx, jnp.where(swapped[:, None], dc[:, jnp.array([0, 2, 1, 3])], dc)


def _gradients_apart(dy, coefficients, wires, x):
    """Where a row is short, time goes by in waiting: a program has several inputs, or gates, and all that it reads of
    them under way together."""
    return _input_gradient(dy, coefficients, wires, x), _coefficients_gradient(dy, wires, x)


def _input_gradient(dy, coefficients, wires, x):
    (gates, N), inputs = dy.shape, x.shape[0]
    length = _vector_length(x)
    several = largest_divisor(inputs, _INPUTS)
    # Consumers of each at a time.
    most = wires.most_consumers
    together = most if most <= _CONSUMERS else 2

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, order_ref, x_ref, dx_ref, *, block, group):
        lanes = pl.ds(block * length, length)
        these = [order_ref[group * several + k] for k in range(several)]
        ends = [(offsets_ref[2 * i], offsets_ref[2 * i + 2]) for i in these]

        def add_consumers(turn, sums):
            at = [first + turn * together + k for first, _ in ends for k in range(together)]
            # Past an input's own consumers, whatever is there.
            there = [jnp.minimum(e, 2 * gates - 1) for e in at]
            slots, partners = ([ref[e] for e in there] for ref in (consumers_ref, partners_ref))
            gradients = [dy_ref[slot >> 1, lanes].astype(jnp.float32) for slot in slots]
            others = [x_ref[partner, lanes].astype(jnp.float32) for partner in partners]
            slopes = [(c_ref[slot >> 1, 1 + (slot & 1)], c_ref[slot >> 1, 3]) for slot in slots]
            sums = list(sums)
            for n, (e, d, other, (slope, curve)) in enumerate(zip(at, gradients, others, slopes, strict=True)):
                own = e < ends[n // together][1]
                sums[n // together] += jnp.where(own, d * (slope + curve * other), jnp.zeros_like(d))
            return tuple(sums)

        sums = (zeros_like(x_ref[0, lanes].astype(jnp.float32)),) * several
        if together == most:
            sums = add_consumers(0, sums)
        else:
            longest = functools.reduce(jnp.maximum, (end - first for first, end in ends))
            sums = lax.fori_loop(0, (longest + together - 1) // together, add_consumers, sums)
        for i, total in zip(these, sums, strict=True):
            dx_ref[i, lanes] = total.astype(dx_ref.dtype)

    return launch(
        body,
        dy,
        coefficients,
        wires.consumers,
        wires.partners,
        wires.offsets,
        wires.trail_inputs,
        x,
        out=x,
        grid={"block": N // length, "group": inputs // several},
        barriers=False,
        name="gate_layer_backward_input",
    )


def _coefficients_gradient(dy, wires, x):
    gates, N = dy.shape
    pieces = largest_divisor(N // LANES, _PIECES)
    blocks, groups = N // (LANES * pieces), -(-gates // _GATES)

    def body(dy_ref, a_ref, b_ref, x_ref, dc_ref, rows_ref, *, block, group):
        these = [jnp.minimum(group * _GATES + k, gates - 1) for k in range(_GATES)]
        lanes = [pl.ds((block * pieces + k) * LANES, LANES) for k in range(pieces)]
        reads = [((dy_ref, g), (x_ref, a_ref[g]), (x_ref, b_ref[g])) for g in these]
        loaded = [[[ref[i, here].astype(jnp.float32) for ref, i in read] for here in lanes] for read in reads]
        for n, values in enumerate(loaded):
            terms = [_terms(*of_piece) for of_piece in values]
            for k, pieces_of_sum in enumerate(zip(*terms, strict=True)):
                rows_ref[4 * n + k] = functools.reduce(jnp.add, pieces_of_sum)
        sums_over_lanes(rows_ref, dc_ref.at[block, pl.ds(group * 4 * _GATES, 4 * _GATES)])

    dc = launch(
        body,
        dy,
        wires.a,
        wires.b,
        x,
        out=jax.ShapeDtypeStruct((blocks, groups * 4 * _GATES), jnp.float32),
        grid={"block": blocks, "group": groups},
        scratch=[plgpu.SMEM((4 * _GATES, LANES), jnp.float32)],
        barriers=False,
        name="gate_layer_backward_coefficients",
    )
    return jnp.sum(dc, axis=0)[: 4 * gates].reshape(gates, 4)


def _terms(dy, a, b):
    return dy, dy * a, dy * b, dy * a * b


def _vector_length(x: Array) -> int:
    return LANES * largest_divisor(x.shape[1] // LANES, _BYTES // x.dtype.itemsize)
