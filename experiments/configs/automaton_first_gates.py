"""Choose an automaton's gates before training: each gate outputs one of its two inputs, a or b.

With such gates, a tick only copies values between channels and neighboring cells: see docs/automata.md.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, PRNGKeyArray

from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.ops._automaton_formula import neighborhoods
from jaxbp.logic.wires.automaton_wires import CENTER, NEIGHBORHOOD, Automaton

Choice = tuple[list[Array], list[Array]]
"""One boolean array per perception layer, `(kernels, gates)`, and one per update layer, `(gates,)`. A gate outputs b if
its element is true, else a."""
SEARCHES, ROUNDS, SPREAD = 32, 1500, 500
"""The number of searches of `separating`, their rounds, and after how many rounds all continue from the best choice."""
CHANGED_GATES = 0.5
"""The average number of gates per layer that a round changes."""


def drawn(automaton: Automaton, key: PRNGKeyArray, changed: float | None = None) -> Choice:
    """Return a random choice in which half of the gates output b, or `changed` gates per layer, on average."""
    shapes = [(automaton.kernels, w.gates) for w in automaton.perception], [(w.gates,) for w in automaton.update]
    keys = iter(jax.random.split(key, len(shapes[0]) + len(shapes[1])))
    share = (lambda shape: 0.5) if changed is None else (lambda shape: changed / math.prod(shape))
    return tuple([jax.random.bernoulli(next(keys), share(shape), shape) for shape in part] for part in shapes)


def separating(automaton: Automaton, start: np.ndarray, target: np.ndarray, steps: int, key: PRNGKeyArray) -> Choice:
    """Return a choice with few wrong cells (see `confused`), found by local searches that begin with random choices.

    In each round, each search changes a few gates, and keeps the change unless more cells are wrong.
    """
    _, wanted = np.unique(target.reshape(-1, target.shape[-1]), axis=0, return_inverse=True)
    return _search(automaton, start, wanted.ravel(), key, steps=steps, targets=int(wanted.max()) + 1)


@functools.partial(jax.jit, static_argnames=("steps", "targets"))
def _search(automaton, start, wanted, key, *, steps, targets):
    weights = jax.random.bits(jax.random.fold_in(key, 0), (NEIGHBORHOOD, automaton.channels))
    score = jax.vmap(lambda choice: confused(automaton, choice, start, wanted, weights, steps=steps, targets=targets))

    def draws(round_, changed=None):
        keys = jax.random.split(jax.random.fold_in(key, round_), SEARCHES)
        return jax.vmap(lambda k: drawn(automaton, k, changed))(keys)

    def improved(state):
        round_, best, least = state
        changed = jax.tree.map(jnp.logical_xor, best, draws(round_, CHANGED_GATES))
        counts = score(changed)
        kept = jnp.minimum(counts, least)
        best = jax.tree.map(lambda new, old: jnp.where(_like(counts <= least, new), new, old), changed, best)
        spread = (round_ % SPREAD == 0) & (kept > jnp.min(kept))
        best = jax.tree.map(lambda a: jnp.where(_like(spread, a), a[jnp.argmin(kept)], a), best)
        return round_ + 1, best, jnp.where(spread, jnp.min(kept), kept)

    first = draws(1)
    state = lax.while_loop(lambda s: (s[0] < ROUNDS + 2) & jnp.all(s[2] > 0), improved, (2, first, score(first)))
    return jax.tree.map(lambda layer: layer[jnp.argmin(state[2])], state[1])


def _like(searches, layer):
    return searches.reshape(-1, *[1] * (layer.ndim - 1))


def confused(
    automaton: Automaton,
    choice: Choice,
    start: Bool[Array, "height width channels"],
    wanted: Int[Array, " cells"],
    weights: Array,
    *,
    steps: int,
    targets: int,
) -> Int[Array, ""]:
    """Return the number of cells that are wrong after `steps` ticks with the best last tick.

    Earlier ticks use the gates `choice`. The last tick may be any function of a cell's 3 x 3 neighborhood. The best
    function gives cells with equal neighborhoods their most frequent target.

    Args:
      wanted: the number of each cell's target, below `targets`.
      weights: random bits, `(9, channels)`. Neighborhoods are equal if the sums of their weights are.
    """
    height, width, channels = start.shape
    channel, cell = _sources(automaton, choice)
    moves = jnp.stack([cell // 3 - 1, cell % 3 - 1])
    source, zeros = jnp.arange(channels), jnp.zeros((2, channels), int)

    def back(_, state):
        source, offset, low, high = state
        offset += moves[:, source]
        return channel[source], offset, jnp.minimum(low, offset), jnp.maximum(high, offset)

    source, offset, low, high = lax.fori_loop(0, steps - 1, back, (source, zeros, zeros, zeros))
    y, x = np.arange(height)[:, None], np.arange(width)
    (dy, dx), (low_y, low_x), (high_y, high_x) = (a[..., None, None] for a in (offset, low, high))
    image = jnp.asarray(start)[(y + dy) % height, (x + dx) % width, source[:, None, None]]
    if not automaton.periodic:  # a value that leaves the grid is lost
        image &= (y + low_y >= 0) & (y + high_y < height) & (x + low_x >= 0) & (x + high_x < width)
    sums = jnp.sum(jnp.where(image, weights[:, :, None, None], 0), axis=1)
    each = np.arange(NEIGHBORHOOD)
    seen = jnp.sum(neighborhoods(sums, automaton.periodic)[each, each], axis=0).ravel()
    order = jnp.argsort(seen)
    group = jnp.cumsum(jnp.diff(seen[order], prepend=seen[order[:1]]) != 0)
    counts = jnp.zeros((wanted.size, targets), int).at[group, wanted[order]].add(1)
    return wanted.size - jnp.sum(jnp.max(counts, axis=1))


def with_inputs_exchanged(logits: Array, parametrization: Parametrization) -> Array:
    order = [0, 2, 1, 3]  # swaps a and b in the rows 00, 01, 10, 11, and in the terms 1, a, b, ab
    if parametrization == "softmax":
        order = [list(map(tuple, gates.TRUTH_TABLES)).index(tuple(table[order])) for table in gates.TRUTH_TABLES]
    return logits[..., np.array(order)]


def _sources(automaton: Automaton, choice: Choice) -> tuple[Int[Array, " channels"], Int[Array, " channels"]]:
    """Return, for each channel, from where a tick copies its value: a channel, and a cell of the 3 x 3 neighborhood.

    The cells are numbered from 0 to 8, row by row.
    """
    C, K, bits = automaton.channels, automaton.kernels, automaton.bits
    place = jnp.arange(C)
    for wires, passes_on_b in reversed(list(zip(automaton.update, choice[1], strict=True))):
        place = jnp.where(passes_on_b[place], wires.b[place], wires.a[place])
    channel, bit, kernel = jnp.unravel_index(jnp.maximum(place - C, 0), (C, bits, K))
    for wires, passes_on_b in reversed(list(zip(automaton.perception, choice[0], strict=True))):
        bit = jnp.where(passes_on_b[kernel, bit], wires.b[bit], wires.a[bit])
    return jnp.where(place < C, place, channel), jnp.where(place < C, CENTER, bit)
