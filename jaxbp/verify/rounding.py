"""Measure rounding errors (Parker, "Monte Carlo Arithmetic", 1997)."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.verify.interpreter import bind, called, evaluate

RUNS, MANY = 4, 1024
MOST = 2.0**-10
"""The largest fraction by which a result is moved, unless one rounding is larger."""
ROUNDED = frozenset({
    "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "conv_general_dilated", "cos",
    "cosh", "cumlogsumexp", "cumprod", "cumsum", "digamma", "div", "dot_general", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "logistic", "mul", "pow", "reduce_prod", "reduce_sum",
    "reduce_window_sum", "rsqrt", "scatter-add", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
})  # fmt: skip


def rounding(function: Callable, *args: Any, dtype: Any = np.float64) -> list[np.ndarray]:
    """Return how far each result of `function` moves at most if operations outside of loops are rounded to `dtype`.

    Change operations' results by a multiple of their rounding error, and divide the effect by this multiple. A jump
    of `function` does not grow with the multiple, so that the division makes it small.
    """
    eps = float(jnp.finfo(dtype).eps)
    many = max(1.0, min(MANY, MOST / eps))
    random = np.random.default_rng(0)
    program, leaves = jax.make_jaxpr(function)(*args), [jnp.asarray(a) for a in jax.tree.leaves(args)]
    run = lambda moved: [np.asarray(y) for y in evaluate(program, leaves, _floats_moved(moved))]  # noqa: E731

    def change(equation, inputs, y):
        if equation.primitive.name not in ROUNDED:
            return y
        return y * (1 + many * eps * random.choice((-1, 1), y.shape)).astype(y.dtype)

    exactly = run(lambda equation, inputs, y: y)
    moved = [run(change) for _ in range(RUNS)]
    with np.errstate(invalid="ignore"):
        off = [[np.abs(m - y) for m in some] for y, *some in zip(exactly, *moved, strict=True)]
    return [np.max([np.where(np.isfinite(m), m, 0.0) for m in some], axis=0) / many for some in off]


def _floats_moved(moved: Callable) -> Callable:

    def rule(equation, inputs):
        if (program := called(equation)) is not None:
            return evaluate(program, inputs, rule)
        results = bind(equation, inputs)
        return [moved(equation, inputs, y) if jnp.issubdtype(y.dtype, jnp.floating) else y for y in results]

    return rule


def rounded_otherwise(function: Callable, *args: Any, dtype: Any, roundings: float, runs: int) -> list[np.ndarray]:
    """Return one array `(1 + runs, *y.shape)` per result y of `function`. Run 0 is exact.

    In the other runs, the result of each operation changes at random by at most `roundings` rounding errors of `dtype`.
    Equal operands give equal changes, so that ties remain.
    """
    program = jax.make_jaxpr(function)(*args)
    leaves = [jnp.asarray(a) for a in jax.tree.leaves(args)]
    by = roundings * float(jnp.finfo(dtype).eps)
    narrow = np.float32 if jnp.dtype(dtype) == np.float64 else dtype

    def moved(seed, equation, operands, y):
        if seed == 0 or equation.primitive.name not in ROUNDED:
            return y
        is_float = [jnp.issubdtype(variable.aval.dtype, jnp.floating) for variable in equation.invars]
        mixed = [
            _mixed(seed, a).astype(variable.aval.dtype) if floating else a
            for a, floating, variable in zip(operands, is_float, equation.invars, strict=True)
        ]
        alike = equation.primitive.bind(*mixed, **equation.primitive.get_bind_params(equation.params))
        # Sums of equal operands in another order differ in their last bits, which rounding to float32 removes.
        share = _mixed(seed, np.float32(np.abs(alike)))
        exact = _is_short(y, narrow)
        for a in itertools.compress(operands, is_float):
            short = _is_short(a, narrow)
            exact &= short if short.shape == y.shape else short.all()
        return y * np.where(exact, 1, 1 + by * (4 * share - 3)).astype(y.dtype)

    found = [evaluate(program, leaves, _floats_moved(functools.partial(moved, seed))) for seed in range(1 + runs)]
    return [np.stack(each) for each in zip(*found, strict=True)]


def _is_short(a, narrow):
    a = np.asarray(a, np.float64)
    return a == a.astype(narrow)


def _mixed(seed, a):
    bits = np.abs(np.asarray(a, np.float64)).view(np.uint64) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of SplitMix64
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    size = 0.5 + (bits >> np.uint64(11)) / 2.0**54
    return np.where(np.asarray(a) < 0, -size, size)
