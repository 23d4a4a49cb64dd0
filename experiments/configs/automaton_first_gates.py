"""Choose an automaton's gates before training: each gate outputs one of its two inputs, a or b.

With such gates, a tick only copies values between channels and neighboring cells: see docs/automata.md.
"""

import functools

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
CANDIDATES, ROUNDS = 8, 2000
"""`separating` compares this number of choices per round, in at most this number of rounds."""
CHANGED_GATES = 3
"""The average number of gates in which a candidate differs from the best choice."""


def drawn(automaton: Automaton, key: PRNGKeyArray, share: float = 0.5) -> Choice:
    """Return a random choice in which each gate outputs b with probability `share`."""
    shapes = [(automaton.kernels, w.gates) for w in automaton.perception], [(w.gates,) for w in automaton.update]
    keys = iter(jax.random.split(key, len(shapes[0]) + len(shapes[1])))
    return tuple([jax.random.bernoulli(next(keys), share, shape) for shape in part] for part in shapes)


def separating(automaton: Automaton, start: np.ndarray, target: np.ndarray, steps: int, key: PRNGKeyArray) -> Choice:
    """Return a choice with few wrong cells (see `confused`): the best random choice, improved by random changes."""
    _, wanted = np.unique(target.reshape(-1, target.shape[-1]), axis=0, return_inverse=True)
    return _search(automaton, start, wanted.ravel(), key, steps=steps, targets=int(wanted.max()) + 1)


@functools.partial(jax.jit, static_argnames=("steps", "targets"))
def _search(automaton, start, wanted, key, *, steps, targets):
    weights = jax.random.bits(jax.random.fold_in(key, 0), (NEIGHBORHOOD, automaton.channels))
    score = jax.vmap(lambda choice: confused(automaton, choice, start, wanted, weights, steps=steps, targets=targets))

    def draws(round_, share):
        return jax.vmap(lambda k: drawn(automaton, k, share))(jax.random.split(jax.random.fold_in(key, round_), CANDIDATES))

    def improved(state):
        round_, best, least = state
        changed = jax.tree.map(jnp.logical_xor, best, draws(round_, CHANGED_GATES / automaton.gates))
        counts = score(changed)
        i = jnp.argmin(counts)
        kept = jax.tree.map(lambda new, old: jnp.where(counts[i] <= least, new[i], old), changed, best)
        return round_ + 1, kept, jnp.minimum(counts[i], least)

    first = draws(1, 0.5)
    counts = score(first)
    best = jax.tree.map(lambda layer: layer[jnp.argmin(counts)], first)
    return lax.while_loop(lambda s: (s[0] < ROUNDS + 2) & (s[2] > 0), improved, (2, best, jnp.min(counts)))[1]


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
