"""JAX transformations of ops. Each takes a function `(*arrays) -> list of arrays`, and returns another."""

import jax
import jax.numpy as jnp


def plain(function):
    return function


def vmapped(function):
    return lambda *values: jax.vmap(function)(*map(_and_half, values))


def vmapped_in_one(function):
    def vmapped(first, *others):
        return jax.vmap(function, in_axes=(0, *[None] * len(others)))(_and_half(first), *others)

    return vmapped


def scanned(function):
    def total(*values):
        def tick(totals, values):
            return [total + y for total, y in zip(totals, function(*values), strict=True)], None

        zeros = [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(function, *values)]
        return jax.lax.scan(tick, zeros, [*map(_and_half, values)])[0]

    return total


def _and_half(a):
    return jnp.stack([a, a / 2])


SECOND_ORDER = ("gradient_of_gradient", "forward_over_reverse")
TRANSFORMATIONS = {
    **{function.__name__: function for function in (plain, vmapped, vmapped_in_one, scanned)},
    "rematerialised": jax.checkpoint,
    "donated": plain,  # `Trial` donates the arguments
    **dict.fromkeys(SECOND_ORDER, plain),
}
