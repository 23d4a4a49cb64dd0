"""What is done with an op: its results and gradients, and those through JAX's transformations.

Each takes `(function, values, cotangents)`, where `function(*values)` gives a list of floating arrays, and gives a
pair: results, and gradients in the values. All but `donated` are functions in the usual sense, to be compiled or not.
"""

import jax
import jax.numpy as jnp


def plain(function, values, cotangents):
    results, vjp = jax.vjp(function, *values)
    return results, vjp(cotangents)


def vmapped(function, values, cotangents):
    """Over two examples, of which the second has half the values and the cotangents with the other sign."""
    batch = [jnp.stack([a, a / 2]) for a in values]
    return jax.vmap(lambda values, dy: plain(function, values, dy))(batch, [jnp.stack([c, -c]) for c in cotangents])


def vmapped_in_one(function, values, cotangents):
    """Over the first of the values alone."""
    batch = [jnp.stack([values[0], values[0] / 2]), *values[1:]]
    axes = ([0] + [None] * (len(values) - 1), None)
    return jax.vmap(lambda values, dy: plain(function, values, dy), in_axes=axes)(batch, cotangents)


def scanned(function, values, cotangents):
    """The sum over two ticks of a scan, with its gradients in what each tick has."""

    def of_ticks(*ticks):
        def tick(totals, values):
            return [total + y for total, y in zip(totals, function(*values), strict=True)], None

        return jax.lax.scan(tick, [jnp.zeros_like(c) for c in cotangents], list(ticks))[0]

    return plain(of_ticks, [jnp.stack([a / 2, a]) for a in values], cotangents)


def rematerialised(function, values, cotangents):
    return plain(jax.checkpoint(function), values, cotangents)


def donated(function, values, cotangents):
    """The caller compiles it so that the values' memory is given away."""
    return plain(function, values, cotangents)


def gradient(function, values, cotangents):
    """Of `Σ c (y + y²/2)`: by the square, a backward is differentiated in its dy as well."""
    results, vjp = jax.vjp(function, *values)
    return vjp([c * (1 + y) for c, y in zip(cotangents, results, strict=True)])


def direction(values):
    return [jnp.cos(jnp.arange(a.size, dtype=jnp.float32)).reshape(a.shape).astype(a.dtype) for a in values]


def gradient_of_gradient(function, values, cotangents):
    """Reverse over reverse: the gradient of the gradient's product with a direction."""

    def product(*values):
        pairs = zip(gradient(function, values, cotangents), direction(values), strict=True)
        return [sum(jnp.sum((g * d).astype(jnp.promote_types(g.dtype, jnp.float32))) for g, d in pairs)]

    (result,), vjp = jax.vjp(product, *values)
    return [], vjp([jnp.ones_like(result)])


def forward_over_reverse(function, values, cotangents):
    """The derivative of the gradient along a direction."""
    along = lambda *values: gradient(function, values, cotangents)  # noqa: E731
    return [], jax.jvp(along, tuple(values), tuple(direction(values)))[1]


TRANSFORMATIONS = {
    f.__name__: f
    for f in (
        plain,
        vmapped,
        vmapped_in_one,
        scanned,
        rematerialised,
        donated,
        gradient_of_gradient,
        forward_over_reverse,
    )
}
SECOND_ORDER = ("gradient_of_gradient", "forward_over_reverse")
