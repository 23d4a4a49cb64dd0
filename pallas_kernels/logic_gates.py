"""Layers of two-input gates, features first: a wire is a row of examples, which programs read whole.

Gate g computes `y = c0 + c1 a + c2 b + c3 a b` of its inputs a and b, with four coefficients of its own.

The batch is the slow axis of both grids: a stretch of it is done for all gates before the next begins, so that its
part of x, which every gate reads in random places, is read from memory once and then from the cache.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import LANES, largest_divisor, launch, zeros_like


def forward(coefficients: Array, a: Array, b: Array, x: Array, *, length: int = 512, per_program: int = 4) -> Array:
    gates, N = a.shape[0], x.shape[1]
    length = LANES * largest_divisor(N // LANES, length // LANES)
    per_program = largest_divisor(gates, per_program)

    def body(c_ref, a_ref, b_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * length, length)
        these = [group * per_program + k for k in range(per_program)]
        # All loads before the first store, so that they are under way together.
        rows = [[x_ref[wires[g], lanes].astype(jnp.float32) for wires in (a_ref, b_ref)] for g in these]
        for g, (a, b) in zip(these, rows, strict=True):
            c = [c_ref[g, k] for k in range(4)]
            y_ref[g, lanes] = (c[0] + c[1] * a + (c[2] + c[3] * a) * b).astype(y_ref.dtype)

    return launch(
        body,
        coefficients.astype(jnp.float32),
        a,
        b,
        x,
        out=jax.ShapeDtypeStruct((gates, N), x.dtype),
        grid={"block": N // length, "group": gates // per_program},
        name="gate_layer",
    )


def gradients(
    dy: Array,
    coefficients: Array,
    consumers: Array,
    partners: Array,
    offsets: Array,
    x: Array,
    *,
    length: int = 512,
    chunks: int = 1,
    together: int = 4,
) -> tuple[Array, Array]:
    gates, N = dy.shape
    inputs = x.shape[0]
    length = LANES * largest_divisor(N // LANES, length // LANES)
    chunks = largest_divisor(N // length, chunks)

    def body(dy_ref, slope_ref, curve_ref, consumers_ref, partners_ref, offsets_ref, x_ref, dx_ref, sums_ref, *, block, i):
        lanes = [pl.ds((block * chunks + k) * length, length) for k in range(chunks)]
        own = [x_ref[i, here].astype(jnp.float32) for here in lanes]

        def add_consumers(count, first, dx):
            entries = [first + k for k in range(count)]
            slots = [consumers_ref[e] for e in entries]
            others = [partners_ref[e] for e in entries]
            gates = [lax.shift_right_logical(s, 1) for s in slots]
            dys = [[dy_ref[g, here].astype(jnp.float32) for here in lanes] for g in gates]
            rows = [[x_ref[p, here].astype(jnp.float32) for here in lanes] for p in others]
            for slot, g, d, p in zip(slots, gates, dys, rows, strict=True):
                slope, curve = slope_ref[slot], curve_ref[g]
                dx = [s + dd * (slope + curve * pp) for s, dd, pp in zip(dx, d, p, strict=True)]
                is_b = (slot & 1) == 1
                first = second = None
                for dd, pp, o in zip(d, p, own, strict=True):
                    do = dd * o
                    third = jnp.where(is_b, do * pp, dd)
                    first = do if first is None else first + do
                    second = third if second is None else second + third
                sums_ref[block, slot, 0] = jnp.sum(first)
                sums_ref[block, slot, 1] = jnp.sum(second)
            return tuple(dx)

        start, end = offsets_ref[i], offsets_ref[i + 1]
        full = (end - start) // together
        dx = tuple(zeros_like(o) for o in own)
        dx = lax.fori_loop(0, full, lambda k, dx: add_consumers(together, start + k * together, dx), dx)
        if together > 1:
            dx = lax.fori_loop(start + full * together, end, lambda e, dx: add_consumers(1, e, dx), dx)
        for here, value in zip(lanes, dx, strict=True):
            dx_ref[i, here] = value.astype(dx_ref.dtype)

    blocks = N // (length * chunks)
    dx, sums = launch(
        body,
        dy,
        coefficients[:, 1:3].astype(jnp.float32).ravel(),
        coefficients[:, 3].astype(jnp.float32),
        consumers,
        partners,
        offsets,
        x,
        out=(jax.ShapeDtypeStruct((inputs, N), x.dtype), jax.ShapeDtypeStruct((blocks, 2 * gates, 2), jnp.float32)),
        grid={"block": blocks, "i": inputs},
        name="gate_layer_backward",
    )
    (s1, s0), (s2, s3) = jnp.sum(sums, axis=0).reshape(gates, 2, 2).transpose(1, 2, 0)
    return dx, jnp.stack([s0, s1, s2, s3], axis=1)
