"""What the tests share: an op as a function of its floats, a float64 reference, and the tolerances."""

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "float64": 1e-12}
"""Largest relative norm of an error against float64."""


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def floats(arrays):
    return [a for a in arrays if is_float(a)]


def of_floats(entry, case, arrays, implementation):
    """The op as a function of its floating arguments, with its floating results as a list."""

    def function(*values):
        values = iter(values)
        full = [next(values) if is_float(a) else a for a in arrays]
        out = entry.function(*full, **case.options, implementation=implementation)
        return [y for y in jax.tree.leaves(out) if is_float(y)]

    return function


def value_and_gradients(entry, case, arrays, cotangents, implementation):
    """(results, gradients in the floating arguments) of an op, jitted."""

    @jax.jit
    def run(values, cotangents):
        y, vjp = jax.vjp(of_floats(entry, case, arrays, implementation), *values)
        return y, list(vjp(cotangents))

    return run(floats(arrays), cotangents)


def draw_cotangents(entry, case, arrays, seed=1):
    y = jax.eval_shape(of_floats(entry, case, arrays, "autodiff"), *floats(arrays))
    keys = jax.random.split(jax.random.key(seed), len(y))
    return [jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, y, strict=True)]


def float64_reference(entry, case, arrays, cotangents):
    """(results, gradients) by JAX's own differentiation in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        widen = lambda a: jnp.asarray(np.asarray(a, np.float64) if is_float(a) else np.asarray(a))  # noqa: E731
        wide = [widen(a) for a in arrays]
        return value_and_gradients(entry, case, wide, [widen(c) for c in cotangents], "autodiff")


def relative_error(a, reference):
    """‖a - reference‖ / ‖reference‖ in float64; infinite when a has a NaN that the reference has not."""
    a, reference = np.asarray(a, np.float64), np.asarray(reference, np.float64)
    error = np.linalg.norm(a - reference) / max(np.linalg.norm(reference), 1e-300)
    return np.inf if np.isnan(error) else error


def assert_close(actual, reference, dtype):
    actual, reference = jax.tree.leaves(actual), jax.tree.leaves(reference)
    assert len(actual) == len(reference)
    for a, r in zip(actual, reference, strict=True):
        assert a.shape == r.shape
        assert relative_error(a, r) < TOLERANCE[jnp.dtype(dtype).name]
