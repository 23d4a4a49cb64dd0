"""Coefficients of gates as softmax mixtures of functions, and the gradient with respect to the logits.

    c[g] = Σ_i p_i table[i],    p = softmax(logits[g])
    dlogits[g, i] = p_i (u_i - Σ_j p_j u_j),    u_i = table[i] · dc[g]

table[i] has the four coefficients of function i. The kernels run only on GPUs and in the Mosaic GPU simulator.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.core.gathers import block_of, columns, load_of, store_to
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.tiles import kernel

_WIDTH = 4
"""Float32 elements of a thread's widest access."""

Table = Sequence[Sequence[int]]


class Config(NamedTuple):
    """Each thread computes one gate."""


def _plan(*arrays: Any, table: Table) -> Config | str:
    *_, logits = arrays
    if unknown := {a.dtype.name for a in arrays} - {"float32"}:
        return f"dtype {min(unknown)}, only float32"
    if len(table) % _WIDTH or len(table[0]) != _WIDTH:
        return f"a table of {len(table)} x {len(table[0])}, only multiples of {_WIDTH} x {_WIDTH}"
    return Config() if logits.size else "no gates"


@kernel(plan=_plan)
def mixture(logits: Array, *, table: Table, config: Config) -> Array:
    """Return the coefficients of gates, `(*gates, 4)`: `softmax(logits) @ table`."""
    return _launch(_mixture, logits, table=table, width=_WIDTH, name="softmax_gates")


@kernel(plan=_plan)
def mixture_gradient(dc: Array, logits: Array, *, table: Table, config: Config) -> Array:
    """Return the gradient of `mixture` with respect to the logits.

    Args:
      dc: `(*gates, 4)` float32, the gradient with respect to the coefficients.
      logits: `(*gates, functions)`, float32.
      table: the four coefficients of each function.
    """
    return _launch(_gradient, dc, logits, table=table, width=len(table), name="softmax_gates_backward")


def _launch(function, *arrays, table, width, name):
    gates, widths = math.prod(arrays[0].shape[:-1]), [a.shape[-1] for a in arrays]

    def body(*refs, program):
        *arrays, result = refs
        array, first = jnp.int32(0), program * LANES
        blocks = [load_of([[a]], array, first * n, (LANES, n))[0] for a, n in zip(arrays, widths, strict=True)]
        block = block_of(function(*map(columns, blocks), table))
        store_to([[result]], array, first * width, [block])

    result = launch(
        body,
        *(a.reshape(-1) for a in arrays),
        out=jax.ShapeDtypeStruct((gates * width,), jnp.float32),
        grid={"program": -(-gates // LANES)},
        barriers=False,
        sums_across_warps=False,
        name=name,
    )
    return result.reshape(*arrays[0].shape[:-1], width)


def _softmax(logits):
    largest = functools.reduce(jnp.maximum, logits)
    powers = [jnp.exp(value - largest) for value in logits]
    share = 1 / functools.reduce(jnp.add, powers)
    return [power * share for power in powers], largest


def _mixture(logits, table):
    p, _ = _softmax(logits)
    return [_combination(p, coefficients) for coefficients in zip(*table, strict=True)]


def _gradient(dc, logits, table):
    p, largest = _softmax(logits)
    u = [_combination(dc, coefficients) for coefficients in table]
    # Subtracting the u of the largest p from all u avoids cancellation if this p is nearly 1.
    of_largest = [jnp.where(value == largest, each, -jnp.inf) for value, each in zip(logits, u, strict=True)]
    base = functools.reduce(jnp.maximum, of_largest)
    u = [each - base for each in u]
    mean = functools.reduce(jnp.add, (weight * each for weight, each in zip(p, u, strict=True)))
    return [weight * (each - mean) for weight, each in zip(p, u, strict=True)]


def _combination(vectors, coefficients):
    terms = [vector * jnp.float32(c) for vector, c in zip(vectors, coefficients, strict=True) if c]
    return functools.reduce(jnp.add, terms) if terms else vectors[0] * 0.0
