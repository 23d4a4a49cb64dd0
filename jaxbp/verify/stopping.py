"""Programs with fixed arguments of `stop_gradient`, for finite differences."""

import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.verify.interpreter import bind, evaluate, has, programs_in, structured

STOP = frozenset({"stop_gradient"})
SOLVES = frozenset({"custom_linear_solve", "linear_solve"})
"""Primitives whose factorization is an argument of `stop_gradient`."""


class Streams(NamedTuple):
    """Three values of one variable of a program.

    Attributes:
      held: as `moved`, but arguments of `stop_gradient` have their values from `base`.
      base: the value at the original arguments.
      moved: the value at the arguments that a finite difference changed.
    """

    held: Array
    base: Array
    moved: Array


def held(function: Callable) -> Callable:
    """Return `function(*moved)` as a function of `(moved, base)`.

    Inside `function`, arguments of `stop_gradient` keep the values that they have in `function(*base)`.
    """

    def run(moved, base):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*moved)
        pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(base), strict=True)
        arguments = [Streams(m := jnp.asarray(a), jnp.asarray(b), m) for a, b in pairs]
        results = evaluate(program, arguments, _hold, _constant)
        return jax.tree.unflatten(jax.tree.structure(shapes), [y.held for y in results])

    return run


def _hold(equation, inputs):
    name, params = equation.primitive.name, equation.params
    if name in STOP:
        return [Streams(a.base, a.base, a.moved) for a in inputs]
    if any(has(program, STOP | SOLVES) for program in programs_in(equation)):
        results = structured(equation, inputs, _hold, _constant)
        if results is not None:
            return results
    given = list(inputs)
    if name == "custom_linear_solve":
        # JAX applies `stop_gradient` to the factorization. If it were fixed, the solution would ignore the matrix.
        lengths = params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        for i in range(start, start + lengths.solve + lengths.transpose_solve):
            given[i] = inputs[i]._replace(held=inputs[i].moved)
    elif name == "linear_solve":  # lineax does not pass the factorization separately
        given = [a._replace(held=a.moved) for a in inputs]
    found = {}
    for stream in Streams._fields:
        arguments = [getattr(a, stream) for a in given]
        same = next((f for f, (known, _) in found.items() if all(map(operator.is_, known, arguments))), None)
        found[stream] = found[same] if same else (arguments, bind(equation, arguments))
    return [Streams(*results) for results in zip(*(results for _, results in found.values()), strict=True)]


def _constant(a):
    return Streams(a, a, a)
