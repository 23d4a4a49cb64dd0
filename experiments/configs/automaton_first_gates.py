"""Choose an automaton's gates before training: each gate outputs one of its two inputs, a or b.

With such gates, a tick only copies values between channels and neighboring cells: see docs/automata.md.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array

from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.wires.automaton_wires import CENTER, Automaton

Draw = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
"""One boolean array per perception layer, and one per update layer. A gate outputs b if its element is true, else a."""
SEPARATING_DRAWS, SEPARATING_CHANGES = 200, 500
CHANGED_GATES = 3
"""The average number of gates that a change of `separating` affects."""


def separating(
    draw: Callable[[], Draw],
    automaton: Automaton,
    start: np.ndarray,
    target: np.ndarray,
    steps: int,
    random: np.random.Generator,
) -> Draw:
    """Return gates with few wrong cells (see `confused`): the best of random choices, improved by random changes."""
    draws = [draw() for _ in range(SEPARATING_DRAWS)]
    counts = [confused(automaton, drawn, start, target, steps) for drawn in draws]
    least, best = min(counts), draws[np.argmin(counts)]
    share = CHANGED_GATES / sum(layer.size for part in best for layer in part)
    for _ in range(SEPARATING_CHANGES):
        changed = [[layer ^ (random.random(layer.shape) < share) for layer in part] for part in best]
        count = confused(automaton, changed, start, target, steps)
        if count <= least:
            least, best = count, changed
    return best


def confused(automaton: Automaton, drawn: Draw, start: np.ndarray, target: np.ndarray, steps: int) -> int:
    """Return the number of cells that are wrong after `steps` ticks with the best last tick.

    Earlier ticks use the gates `drawn`. The last tick may be any function of a cell's 3 x 3 neighborhood. The best
    function gives cells with equal neighborhoods their most frequent target.

    Args:
      start: the initial state, `(height, width, channels)`.
      target: the visible channels after `steps` ticks, `(height, width, visible)`.
    """
    targets = target.reshape(-1, target.shape[-1])
    channels, places = np.array(_sources(automaton, *drawn)).T
    seen = _seen(start, automaton.periodic)
    for _ in range(steps - 1):
        seen = _seen(seen[:, :, places, channels], automaton.periodic)
    seen = np.packbits(seen.reshape(len(targets), -1), axis=1)
    _, seen = np.unique(seen.view(f"V{seen.shape[1]}").ravel(), return_inverse=True)
    _, wanted = np.unique(targets, axis=0, return_inverse=True)
    counts = np.zeros((seen.max() + 1, wanted.max() + 1), int)
    np.add.at(counts, (seen.ravel(), wanted.ravel()), 1)
    return len(targets) - counts.max(axis=1).sum()


def with_inputs_exchanged(logits: Array, parametrization: Parametrization) -> Array:
    order = [0, 2, 1, 3]  # swaps a and b in the rows 00, 01, 10, 11, and in the terms 1, a, b, ab
    if parametrization == "softmax":
        order = [list(map(tuple, gates.TRUTH_TABLES)).index(tuple(table[order])) for table in gates.TRUTH_TABLES]
    return logits[..., np.array(order)]


def _sources(
    automaton: Automaton, perception: Sequence[np.ndarray], update: Sequence[np.ndarray]
) -> list[tuple[int, int]]:
    """Return, for each channel, from where a tick copies its value: a channel, and a cell of the 3 x 3 neighborhood.

    The cells are numbered from 0 to 8, row by row. `perception` and `update` are the parts of a `Draw`.
    """

    def passed_on(part, chosen):
        return [np.where(c, np.asarray(w.b), np.asarray(w.a)) for w, c in zip(part, chosen, strict=True)]

    perceived, updated = passed_on(automaton.perception, perception), passed_on(automaton.update, update)
    sources = []
    for place in range(automaton.channels):
        for layer in reversed(updated):
            place = layer[place]
        if place < automaton.channels:
            sources.append((int(place), CENTER))
            continue
        channel, bit, kernel = np.unravel_index(
            place - automaton.channels, (automaton.channels, automaton.bits, automaton.kernels)
        )
        for layer in reversed(perceived):
            bit = layer[kernel, bit]
        sources.append((int(channel), int(bit)))
    return sources


def _seen(state: np.ndarray, periodic: bool) -> np.ndarray:
    around = np.pad(state, ((1, 1), (1, 1), (0, 0)), mode="wrap" if periodic else "constant")
    height, width = state.shape[:2]
    return np.stack([around[i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=2)
