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


def gradients(dy: Array, coefficients, consumers, partners, offsets, x: Array, *, length: int = 512, chunks: int = 1, sums=True):
    gates, N = dy.shape
    inputs = x.shape[0]
    length = LANES * largest_divisor(N // LANES, length // LANES)
    chunks = largest_divisor(N // length, chunks)

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, x_ref, dx_ref, *rest, block, i):
        lanes = [pl.ds((block * chunks + k) * length, length) for k in range(chunks)]
        own = [x_ref[i, here].astype(jnp.float32) for here in lanes]
        dx = tuple(zeros_like(v) for v in own)
        for role in (0, 1):

            def add_consumer(e, dx, role=role):
                g = consumers_ref[role, e]
                p = partners_ref[role, e]
                rows = [(dy_ref[g, here].astype(jnp.float32), x_ref[p, here].astype(jnp.float32)) for here in lanes]
                slope, curve = c_ref[g, 1 + role], c_ref[g, 3]
                if role == 0 and sums:
                    (sums_ref,) = rest
                    first = [jnp.float32(0)] * 0
                    t = [[d, d * o, d * b, d * o * b] for (d, b), o in zip(rows, own, strict=True)]
                    for k in range(4):
                        total = t[0][k]
                        for other in t[1:]:
                            total = total + other[k]
                        sums_ref[block, g, k] = jnp.sum(total)
                return tuple(s + d * (slope + curve * p) for s, (d, p) in zip(dx, rows, strict=True))

            dx = lax.fori_loop(offsets_ref[role, i], offsets_ref[role, i + 1], add_consumer, dx)
        for here, value in zip(lanes, dx, strict=True):
            dx_ref[i, here] = value.astype(dx_ref.dtype)

    blocks = N // (length * chunks)
    out = (jax.ShapeDtypeStruct((inputs, N), x.dtype),)
    if sums:
        out += (jax.ShapeDtypeStruct((blocks, gates, 4), jnp.float32),)
    result = launch(
        body,
        dy,
        coefficients.astype(jnp.float32),
        consumers,
        partners,
        offsets,
        x,
        out=out,
        grid={"block": blocks, "i": inputs},
        name="gate_layer_backward",
    )
    return (result[0], jnp.sum(result[1], axis=0)) if sums else result[0]


def coefficient_sums(dy, a, b, x, *, length=512, parts=1):
    gates, N = dy.shape
    length = LANES * largest_divisor(N // LANES, length // LANES)
    parts = largest_divisor(N // length, parts)
    per = N // length // parts

    def body(dy_ref, a_ref, b_ref, x_ref, sums_ref, *, part, g):
        ia, ib = a_ref[g], b_ref[g]

        def step(k, acc):
            lanes = pl.ds((part * per + k) * length, length)
            d, a, b = (ref[at, lanes].astype(jnp.float32) for ref, at in ((dy_ref, g), (x_ref, ia), (x_ref, ib)))
            da = d * a
            return acc[0] + d, acc[1] + da, acc[2] + d * b, acc[3] + da * b

        zero = zeros_like(dy_ref[g, pl.ds(0, length)].astype(jnp.float32))
        acc = lax.fori_loop(0, per, step, (zero,) * 4)
        for k in range(4):
            sums_ref[part, g, k] = jnp.sum(acc[k])

    return jnp.sum(
        launch(body, dy, a, b, x, out=jax.ShapeDtypeStruct((parts, gates, 4), jnp.float32), grid={"part": parts, "g": gates}, name="gate_sums"),
        axis=0,
    )
