"""Repair a hardened automaton: a local search over the functions of its gates.

Bit j of each 32-bit word belongs to search j, so that one evaluation tries 32 circuits. A gate computes
`c0 ^ c1 & a ^ c2 & b ^ c3 & a & b`. The four bits c of each gate and search are in the array `circuits`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, PRNGKeyArray, UInt32

from jaxbp.logic import gates
from jaxbp.logic.ops._automaton_formula import neighborhoods
from jaxbp.logic.wires.automaton_wires import CENTER, Automaton

LANES = np.arange(32, dtype=np.uint32)
ALL = np.uint32(2**32 - 1)
TERMS = gates.COEFFICIENTS.astype(np.uint32) & 1
"""The bits c0 to c3 of each function: the coefficients of a relaxed gate, modulo 2."""
SPREAD = 100
"""After this number of steps, searches with more wrong cells than the best search continue from its circuit."""

Functions = tuple[Sequence[Array], Sequence[Array]]
"""The numbers of the gates' functions per layer: `(kernels, gates)` in perception, and `(gates,)` in the update."""


class Search(NamedTuple):
    step: Int[Array, ""]
    circuits: UInt32[Array, "4 gates"]
    wrong: Int[Array, "32"]


@functools.partial(jax.jit, static_argnames=("ticks", "steps", "most"))
def repaired(
    functions: Functions,
    automaton: Automaton,
    starts: Bool[Array, "batch height width channels"],
    target: Bool[Array, "*batch height width visible"],
    key: PRNGKeyArray,
    *,
    ticks: int,
    steps: int,
    most: int,
) -> tuple[Functions, Int[Array, ""], Int[Array, ""]]:
    """Return the best circuit of 32 searches, and the numbers of wrong values before and after the searches.

    A value is wrong if it differs from `target` after `ticks` ticks. In each of at most `steps` steps, each search
    changes the functions of one or two random gates. It keeps the change unless more values are wrong. The searches end
    if one has no wrong value. They do not begin with more than `most` wrong values.
    """
    layers, structure = jax.tree.flatten(functions)
    numbers = jnp.concatenate([layer.ravel() for layer in layers])
    state, target = jnp.where(jnp.moveaxis(starts, -1, 0), ALL, 0), jnp.where(jnp.moveaxis(target, -1, 0), ALL, 0)

    def wrong(circuits):
        last = lax.fori_loop(0, ticks, lambda _, s: _tick(circuits, automaton, s), state)
        differences = (last[: len(target)] ^ target).reshape(-1, 1)
        return jnp.sum(differences >> LANES & 1, axis=0, dtype=jnp.int32)

    def change(key):
        gate, terms = jax.random.split(key)
        where = jax.random.randint(gate, LANES.shape, 0, numbers.size)
        bits = jax.random.randint(terms, LANES.shape, 1, len(TERMS)).astype(jnp.uint32)
        bits = (bits >> np.arange(4, dtype=np.uint32)[:, None] & 1) << LANES
        return jnp.zeros((4, numbers.size), jnp.uint32).at[:, where].add(bits)

    def step(search):
        first, second, both = jax.random.split(jax.random.fold_in(key, search.step), 3)
        changes = change(first) ^ change(second) & jax.random.bits(both, dtype=jnp.uint32)
        now = wrong(search.circuits ^ changes)
        kept = now <= search.wrong
        circuits = search.circuits ^ changes & _word(kept)
        least, now = jnp.argmin(jnp.where(kept, now, search.wrong)), jnp.where(kept, now, search.wrong)
        worse = (now > now[least]) & (search.step % SPREAD == SPREAD - 1)
        circuits ^= (circuits ^ (circuits >> least.astype(jnp.uint32) & 1) * ALL) & _word(worse)
        return Search(search.step + 1, circuits, jnp.where(worse, now[least], now))

    circuits = jnp.asarray(TERMS.T)[:, numbers] * ALL
    first = Search(jnp.int32(0), circuits, wrong(circuits))
    last = lax.while_loop(
        lambda search: (search.step < steps) & jnp.all(search.wrong > 0) & (first.wrong[0] <= most), step, first
    )
    least = jnp.argmin(last.wrong)
    terms = last.circuits >> least.astype(jnp.uint32) & 1
    numbers = jnp.asarray(np.argsort(TERMS @ (1 << np.arange(4))))[(1 << jnp.arange(4)) @ terms.astype(jnp.int32)]
    ends = np.cumsum([layer.size for layer in layers])[:-1]
    parts = [n.reshape(layer.shape) for n, layer in zip(jnp.split(numbers, ends), layers, strict=True)]
    return jax.tree.unflatten(structure, parts), first.wrong[0], last.wrong[least]


def _word(lanes: Bool[Array, "32"]) -> UInt32[Array, ""]:
    return jnp.sum(lanes.astype(jnp.uint32) << LANES, dtype=jnp.uint32)


def _tick(circuits, automaton, state):
    """Return the next state, `(channels, batch, height, width)`, of `jaxbp.automaton_step` with hard gates."""
    seen = neighborhoods(state, automaton.periodic)
    C, K, cells, first = automaton.channels, automaton.kernels, state[0].size, 0

    def layer(rows, wires, kernels):
        nonlocal first
        of_layer = circuits[:, first : first + kernels * wires.gates].reshape(4, kernels, wires.gates, 1)
        first += kernels * wires.gates
        a, b = rows[:, wires.a], rows[:, wires.b]
        return of_layer[0] ^ of_layer[1] & a ^ of_layer[2] & b ^ of_layer[3] & a & b

    rows = seen.reshape(1, len(seen), -1)
    for wires in automaton.perception:
        rows = layer(rows, wires, K)
    perceived = rows.reshape(K, automaton.bits, C, cells).transpose(2, 1, 0, 3).reshape(-1, cells)
    rows = jnp.concatenate([seen[CENTER].reshape(C, cells), perceived])[None]
    for wires in automaton.update:
        rows = layer(rows, wires, 1)
    return rows.reshape(state.shape)
