"""Layers of two-input gates, features first: a wire is a row of examples, of which programs read long pieces.

Gate g computes `y = c0 + c1 a + c2 b + c3 a b` of its inputs a and b, with four coefficients of its own.

The batch is the slow axis of both grids: a stretch of it is done for all gates before the next begins, so that its part
of x, which gates read in random places, comes from memory once and then from the L2 cache. What bounds the kernels is
that cache: see docs/logic_gates.md.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import LANES, largest_divisor, launch, zeros_like

# Of a thread in one load.
_BYTES = 16
# Examples of all gates in a program: shorter stretches of the batch leave it several gates or inputs.
_EXAMPLES = 1024


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
    several = largest_divisor(gates, max(2, _EXAMPLES // length))

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


def gradients(
    dy: Array, coefficients: Array, consumers: Array, partners: Array, offsets: Array, order: Array, x: Array
) -> tuple[Array, Array]:
    """The gradients of `forward` in x and in the coefficients, in one pass.

        dx[i, n] = sum over the gates g that read i as their a of dy[g, n] * (c[g, 1] + c[g, 3] * x[b[g], n])
                 + sum over those that read it as their b of dy[g, n] * (c[g, 2] + c[g, 3] * x[a[g], n])
        dc[g] = sum over n of dy[g, n] * (1, a, b, a * b)

    A program owns an input and a stretch of the batch, and goes over the input's consumers. Where the input is a gate's
    a, it has all that the gate's sums need in its registers.

    Args:
      dy: `(gates, N)`, the batch N a multiple of `LANES`.
      coefficients: `(gates, 4)`.
      consumers: `(2 * gates,)`, for each input 2 g for all gates g whose a it is, then 2 g + 1 for those whose b it is.
      partners: `(2 * gates,)`, the other input of each of these gates.
      offsets: `(2 * inputs + 1,)`, where an input's consumers in either role begin and end.
      order: `(inputs,)`, in which programs of several inputs take them: neighbours best share a gate.
      x: `(inputs, N)`, of dy's dtype.

    Returns:
      dx `(inputs, N)` in x's dtype and dc `(gates, 4)` in float32, both summed in float32.
    """
    gates, N = dy.shape
    inputs = x.shape[0]
    length = _vector_length(x)
    # Pieces of the batch in a program: the more, the fewer sums over lanes, and the fewer loads of indices.
    pieces = largest_divisor(N // length, max(1, _EXAMPLES // length))
    several = largest_divisor(inputs, 4) if length * pieces == LANES else 1

    def body(
        dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, order_ref, x_ref, dx_ref, dc_ref, *, block, group
    ):
        lanes = [pl.ds((block * pieces + k) * length, length) for k in range(pieces)]

        def rows(ref, i):
            return [ref[i, here].astype(jnp.float32) for here in lanes]

        def gather(i):
            own = rows(x_ref, i)

            def add_consumer(e, dx, role):
                g = consumers_ref[e] >> 1
                dy, other = rows(dy_ref, g), rows(x_ref, partners_ref[e])
                if role == 0:
                    terms = [(d, d * a, d * b, d * a * b) for d, a, b in zip(dy, own, other, strict=True)]
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

        if several == 1:
            gather(group)
        else:
            lax.fori_loop(0, several, lambda k, _: gather(order_ref[group * several + k]), None)

    blocks = N // (length * pieces)
    dx, dc = launch(
        body,
        dy,
        coefficients.astype(jnp.float32),
        consumers,
        partners,
        offsets,
        order,
        x,
        out=(jax.ShapeDtypeStruct((inputs, N), x.dtype), jax.ShapeDtypeStruct((blocks, gates, 4), jnp.float32)),
        grid={"block": blocks, "group": inputs // several},
        name="gate_layer_backward",
    )
    return dx, jnp.sum(dc, axis=0)


def _vector_length(x: Array) -> int:
    return LANES * largest_divisor(x.shape[1] // LANES, _BYTES // x.dtype.itemsize)
