"""How far rounding moves what a program computes: it is run again with each arithmetic result moved, up or down.

This is Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic", 1997). It sees what neither a program's results nor
their accuracy in a narrower dtype show: that `1 - s` of a sigmoid is in steps of `ε`, however small it is.

Each result is moved by many roundings, and the change of the program's results is divided by as many. A jump, as of a
gradient where a tie is broken, then counts for little: it is no rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RUNS, MANY = 4, 1024
ROUNDED = frozenset({
    "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "conv_general_dilated", "cos",
    "cosh", "cumlogsumexp", "cumprod", "cumsum", "digamma", "div", "dot_general", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "logistic", "mul", "pow", "reduce_prod", "reduce_sum",
    "reduce_window_sum", "rsqrt", "scatter-add", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
})  # fmt: skip
"""Primitives that round; others, such as a maximum, return one of their arguments."""
CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"})
"""Primitives that are a program of their own, with its arguments and results."""


def rounding(function: Callable, *args: Any, dtype: Any = np.float64) -> list[np.ndarray]:
    """How far one rounding to `dtype` of everything moves each element of the results, at most in a few runs.

    The results are in a flat list. Loops are run as they are: what is rounded in them is not seen.
    """
    by = MANY * float(jnp.finfo(dtype).eps)
    random = np.random.default_rng(0)
    run = lambda moved: [np.asarray(y) for y in jax.tree.leaves(rerun(function, moved)(*args))]  # noqa: E731
    exactly, moved = run(lambda equation, y: y), [run(functools.partial(_moved, random, by)) for _ in range(RUNS)]
    with np.errstate(invalid="ignore"):
        off = [[np.abs(m - y) for m in some] for y, *some in zip(exactly, *moved, strict=True)]
    return [np.max([np.where(np.isfinite(m), m, 0.0) for m in some], axis=0) / MANY for some in off]


def _moved(random, by, equation, y):
    if equation.primitive.name not in ROUNDED:
        return y
    return y * (1 + by * random.choice((-1, 1), y.shape)).astype(y.dtype)


def rerun(function: Callable, moved: Callable[[Any, jax.Array], jax.Array]) -> Callable:
    """`function`, of which every equation's floating results are what `moved(equation, result)` makes of them.

    Equations are those of its jaxpr and of the calls in it; a loop is one equation.
    """

    def run(*args):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = [jnp.asarray(a) for a in jax.tree.leaves(args)]
        results = _run(program.jaxpr, program.consts, leaves, moved)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _run(jaxpr, consts, args, moved):
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda variable: variable.val if hasattr(variable, "val") else known[variable]  # noqa: E731
    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        primitive, params = equation.primitive, equation.params
        inner = params.get("jaxpr", params.get("call_jaxpr")) if primitive.name in CALLS else None
        if inner is not None:
            results = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, moved)
        else:
            results = primitive.bind(*inputs, **primitive.get_bind_params(params))
            results = results if primitive.multiple_results else [results]
            results = [moved(equation, y) if jnp.issubdtype(y.dtype, jnp.floating) else y for y in results]
        known.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]
