"""A function with other roundings: what the error of a formula might as well have been.

The error of one run is one draw. Terms that cancel may do so exactly, by luck: `t - mean(t)` is 0 for a single t,
but `t - (t/2 + t/2)` need not be, once the halves are rounded. So the same program is run with each result of its
arithmetic moved by up to a rounding, as in stochastic arithmetic.

Source: J. Vignes, "A stochastic arithmetic for reliable scientific computation", 1993.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxbp.verify.rounding import ROUNDED, rerun

LOOPS = ("scan", "while", "cond")
"""What is rounded in them is not seen: their results are moved."""


def with_other_roundings(function: Callable) -> Callable:
    """`(seed, *arguments)`, of which each seed stands for other roundings."""

    def run(seed: Array, *arguments: Any) -> Any:
        return rerun(function, functools.partial(_moved, seed, itertools.count(1)))(*arguments)

    return run


def _moved(seed: Array, number: Iterator[int], equation: Any, a: Array) -> Array:
    """The result of an equation that rounds, moved by up to the distance to its neighbours; a zero stays zero."""
    if equation.primitive.name not in (*ROUNDED, *LOOPS) and not _is_rounding_conversion(equation):
        return a
    phase = 1e3 * seed + 1e2 * next(number)
    by = jnp.sin(1e2 * jnp.arange(a.size, dtype=jnp.float32) + phase).reshape(a.shape).astype(a.dtype)
    return a * (1 + jnp.finfo(a.dtype).eps * by)


def _is_rounding_conversion(equation: Any) -> bool:
    """Whether it converts to a dtype that does not hold all numbers of the one before."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, after) != after
