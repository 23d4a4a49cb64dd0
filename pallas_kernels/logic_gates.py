"""Layers of two-input gates, features first: a wire is a row of examples, which programs read whole.

Gate g computes `y = c0 + c1 a + c2 b + c3 a b` of its inputs a and b, with four coefficients of its own.

The batch is the slow axis of both grids: a stretch of it is done for all gates before the next begins, so that its
part of x, which every gate reads in random places, is read from memory once and then from the cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import LANES, largest_divisor, launch, zeros_like


def forward(
    coefficients: Array, a: Array, b: Array, order: Array, x: Array, *, length: int = 512, per_program: int = 4
) -> Array:
    gates, N = a.shape[0], x.shape[1]
    length = LANES * largest_divisor(N // LANES, length // LANES)
    per_program = largest_divisor(gates, per_program)

    def body(c_ref, a_ref, b_ref, order_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * length, length)
        these = [group * per_program + k for k in range(per_program)]
        # All loads before the first store, so that they are under way together.
        rows = [[x_ref[wires[k], lanes].astype(jnp.float32) for wires in (a_ref, b_ref)] for k in these]
        for k, (a, b) in zip(these, rows, strict=True):
            g = order_ref[k]
            c0, c1, c2, c3 = (c_ref[g, i] for i in range(4))
            y_ref[g, lanes] = (c0 + c1 * a + (c2 + c3 * a) * b).astype(y_ref.dtype)

    return launch(
        body,
        coefficients.astype(jnp.float32),
        a,
        b,
        order,
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
    order: Array,
    x: Array,
    *,
    length: int = 512,
    chunks: int = 2,
    per_program: int = 1,
) -> tuple[Array, Array]:
    gates, N = dy.shape
    inputs = x.shape[0]
    length = LANES * largest_divisor(N // LANES, length // LANES)
    chunks = largest_divisor(N // length, chunks)
    per_program = largest_divisor(inputs, per_program)

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, order_ref, x_ref, dx_ref, sums_ref, *, block, group):
        lanes = [pl.ds((block * chunks + k) * length, length) for k in range(chunks)]

        def of_input(k, _):
            i = order_ref[group * per_program + k]
            own = [x_ref[i, here].astype(jnp.float32) for here in lanes]
            dx = tuple(zeros_like(o) for o in own)
            for role in (0, 1):

                def add_consumer(e, dx, role=role):
                    g, p = lax.shift_right_logical(consumers_ref[e], 1), partners_ref[e]
                    dys = [dy_ref[g, here].astype(jnp.float32) for here in lanes]
                    others = [x_ref[p, here].astype(jnp.float32) for here in lanes]
                    if role == 0:
                        products = [(d, d * o, d * p, d * o * p) for d, o, p in zip(dys, own, others, strict=True)]
                        for n, terms in enumerate(zip(*products, strict=True)):
                            sums_ref[block, g, n] = jnp.sum(functools.reduce(jnp.add, terms))
                    slope, curve = c_ref[g, 1 + role], c_ref[g, 3]
                    return tuple(s + d * (slope + curve * p) for s, d, p in zip(dx, dys, others, strict=True))

                dx = lax.fori_loop(offsets_ref[2 * i + role], offsets_ref[2 * i + role + 1], add_consumer, dx)
            for here, value in zip(lanes, dx, strict=True):
                dx_ref[i, here] = value.astype(dx_ref.dtype)

        if per_program == 1:
            of_input(0, None)
        else:
            lax.fori_loop(0, per_program, of_input, None)

    blocks = N // (length * chunks)
    dx, sums = launch(
        body,
        dy,
        coefficients.astype(jnp.float32),
        consumers,
        partners,
        offsets,
        order,
        x,
        out=(jax.ShapeDtypeStruct((inputs, N), x.dtype), jax.ShapeDtypeStruct((blocks, gates, 4), jnp.float32)),
        grid={"block": blocks, "group": inputs // per_program},
        name="gate_layer_backward",
    )
    return dx, jnp.sum(sums, axis=0)
