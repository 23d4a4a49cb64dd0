"""A function with other roundings: near, of another result at each seed, and exact where nothing is rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.fuzz.roundings import with_other_roundings

X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)


def at_seeds(function, *arguments):
    run = jax.jit(with_other_roundings(function))
    return [run(jnp.float32(seed), *arguments) for seed in range(3)]


def slope(function):
    return jax.grad(lambda x: jnp.sum(function(x)))


@pytest.mark.parametrize(
    "function",
    [
        jnp.tanh,
        jax.nn.softplus,  # of JAX's own rules
        jax.jit(jnp.sin),
        slope(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))),
        slope(lambda x: x @ x.T),
        lambda x: jax.lax.scan(lambda total, row: (total + row, jnp.exp(row)), X[0], x),
    ],
)
def test_every_result_is_off_by_a_few_roundings(function):
    expected = jax.tree.leaves(function(X))
    found = [jax.tree.leaves(results) for results in at_seeds(function, X)]
    for results in found:
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert any((a != b).any() for a, b in zip(found[0], found[1], strict=True))


def test_terms_that_cancel_by_luck_do_not():
    def centred(x):
        return x - jnp.mean(x, axis=-1, keepdims=True)

    x = X.reshape(-1, 1)
    assert (centred(x) == 0).all()
    assert all((centred_ != 0).any() for centred_ in at_seeds(centred, x))


def test_what_is_not_rounded_stays():
    def moved(x):
        return x.T[::-1], jnp.maximum(x, 0), jnp.where(x > 0, x, 0), x.astype(jnp.float32), 0 * x

    x = X.astype(jnp.float16)
    for results in at_seeds(moved, x):
        for a, b in zip(results, moved(x), strict=True):
            np.testing.assert_array_equal(a, b)
