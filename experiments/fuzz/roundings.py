"""A function with other roundings: what the error of a formula might as well have been.

The error of one run is one draw. Terms that cancel may do so exactly, by luck: `t - mean(t)` is 0 for a single t,
but `t - (t/2 + t/2)` need not be, once the halves are rounded. So the same program is run with each result of its
arithmetic moved by up to a rounding, as in stochastic arithmetic.

Source: J. Vignes, "A stochastic arithmetic for reliable scientific computation", 1993.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal

ARITHMETIC = (
    *("add", "add_any", "sub", "mul", "div", "square", "integer_pow", "pow", "sqrt", "rsqrt", "convert_element_type"),
    *("dot_general", "conv_general_dilated", "reduce_sum", "reduce_window_sum", "cumsum"),
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sin", "cos"),
)
"""Primitives whose results are rounded. All others move numbers, or compare them, or are loops: of these the results
alone are."""
LOOPS = ("scan", "while", "cond")


def with_other_roundings(function: Callable) -> Callable:
    """`(seed, *arguments)`, of which each seed stands for other roundings."""

    def run(seed: Array, *arguments: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _run(program, jax.tree.leaves(arguments), _Roundings(seed))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


class _Roundings:
    """Another one at each call."""

    def __init__(self, seed: Array):
        self.seed, self.calls = seed, 0

    def __call__(self, a: Array) -> Array:
        """Numbers moved by up to the distance to their neighbours; zeros stay zero."""
        self.calls += 1
        phase = 1e3 * self.seed + 1e2 * self.calls
        by = jnp.sin(1e2 * jnp.arange(a.size, dtype=jnp.float32) + phase).reshape(a.shape).astype(a.dtype)
        return a * (1 + jnp.finfo(a.dtype).eps * by)


def _run(program: ClosedJaxpr, arguments: Sequence[Array], rounded: _Roundings) -> list[Array]:
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments], strict=True))
    read = lambda variable: variable.val if isinstance(variable, Literal) else values[variable]  # noqa: E731
    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        inner, name = _inner(equation), equation.primitive.name
        if inner is not None and name not in LOOPS:
            results = _run(inner, given, rounded)
        else:
            results = equation.primitive.bind(*given, **equation.params)
            results = list(results) if equation.primitive.multiple_results else [results]
            if (name in ARITHMETIC or name in LOOPS) and not _exact(equation):
                results = [rounded(a) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(variable) for variable in jaxpr.outvars]


def _inner(equation: Any) -> ClosedJaxpr | None:
    """The program that a call stands for."""
    inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    return inner if inner is None or hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _exact(equation: Any) -> bool:
    """A conversion to a dtype that holds all numbers of the one before."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return not jnp.issubdtype(before, jnp.floating) or jnp.promote_types(before, after) == after
