"""Orders of gates for which neighboring threads access different banks of shared memory.

Each thread computes one gate of an automaton, and reads the rows of shared memory with the gate's inputs. A row has 16
bytes, the values for four cells. Shared memory has 32 banks of 4 bytes, so rows with equal residues (index mod 8) are
in the same banks. Eight neighboring threads (an octet) access shared memory in one cycle if different rows have
different residues. The order of a layer's gates determines the rows of their outputs.
"""

import itertools
from collections.abc import Sequence

import numpy as np

OCTET = 8
_SWEEPS = 2
"""Passes that assign residues to gates. With one, a tick takes 1.6% more cycles; with three, 0.1% fewer."""
_BALANCE = 0.5
"""Weight of equal frequencies of residues (`roles` in `_with_residues`), relative to conflicts in reads of gradients.
Chosen for the published checkerboard automaton."""
_ROUNDING = 1e-6
"""Smaller decreases of the cost are rounding errors."""
_PAIRS = list(itertools.combinations(range(OCTET), 2))


def orders(
    layers: Sequence[tuple[np.ndarray, np.ndarray]], turns: Sequence[np.ndarray], rows: np.ndarray
) -> list[np.ndarray]:
    """Return, for each layer, its gates in an order that avoids bank conflicts. The last layer keeps its order.

    Args:
      layers: for each layer, the inputs `(a, b)` of its gates.
      turns: for each layer, `(2, gates)`: each gate's position among the gates that read its input a (row 0) or b (row
        1). In this order, the backward adds their terms of the input's gradient.
      rows: for each input of the first layer, the index of its row in shared memory. A later layer's
        inputs are in consecutive rows, the first at an index that is a multiple of 8.
    """
    found = []
    for i, (reads, turn) in enumerate(zip(map(np.stack, layers), turns, strict=True)):
        if i + 1 == len(layers):
            found.append(np.arange(reads.shape[1]))
            break
        octets = _octets(*rows[reads] % OCTET)
        readers = rows[reads] // OCTET + turn * (rows.max() // OCTET + 1)
        roles = np.stack([np.bincount(role, minlength=reads.shape[1]) for role in layers[i + 1]])
        found.append(_with_residues(octets, readers, roles))
        rows = np.argsort(found[-1])
    return found


def _octets(a: np.ndarray, b: np.ndarray) -> list[list[int]]:
    """Divide gates into lists of eight (octets), followed by a list of the rest. `a` and `b` are the residues (row of
    shared memory mod 8) of each gate's inputs.

    In an octet, the inputs a have different residues, and so have the inputs b, if all residues are equally frequent.
    This colors the edges of a bipartite graph (D. König, 1916): gates are edges from residues of a to residues of b,
    and octets are colors.
    """
    gates, count, rest = list(zip(a.tolist(), b.tolist(), strict=True)), len(a) // OCTET, []
    free = [[(1 << count) - 1] * OCTET for _ in range(2)]  # octets in which a residue is free
    taken = [[{} for _ in range(OCTET)] for _ in range(2)]  # per residue: octet -> gate
    for new, (of_a, of_b) in enumerate(gates):
        if not (free[0][of_a] and free[1][of_b]):
            rest.append(new)
            continue
        both = free[0][of_a] & free[1][of_b]
        octet, other = _lowest(both or free[0][of_a]), _lowest(both or free[1][of_b])
        free[0][of_a] ^= 1 << octet
        free[1][of_b] ^= 1 << other
        gate, displaced, role = None, new, 1
        while displaced is not None:
            gate, displaced = displaced, taken[role][gates[displaced][role]].get(octet)
            for side, residue in enumerate(gates[gate]):
                taken[side][residue][octet] = gate
            octet, other, role = other, octet, 1 - role
        if gate != new:
            role, residue = 1 - role, gates[gate][1 - role]
            del taken[role][residue][octet]
            free[role][residue] ^= 1 << octet | 1 << other
    octets = [[] for _ in range(count)]
    for octet, gate in itertools.chain.from_iterable(of_residue.items() for of_residue in taken[0]):
        octets[octet].append(gate)
    for octet in octets:
        while len(octet) < OCTET:
            octet.append(rest.pop())
    return [*octets, rest]


def _lowest(bits):
    return (bits & -bits).bit_length() - 1


def _with_residues(octets, readers, roles):
    """Return all gates, reordered within each octet to avoid bank conflicts. A gate's position in its octet becomes the
    residue (index mod 8) of its rows of shared memory.

    Args:
      octets: lists of eight gates of neighboring threads, then a list of the rest.
      readers: `(2, gates)`. In the backward, eight threads read eight gradients at once, and each such read has a
        number. Row 0 has the number of the read of each gate's gradient with respect to a, and row 1 with respect to b.
        Gates with equal numbers should have different positions.
      roles: `(2, gates)`, how many gates of the next layer read the gate as their a, and as their b. The sums for all
        positions should be similar.
    """
    *octets, rest = octets
    residues = np.arange(OCTET)
    by_reader, by_role = np.zeros((readers.max() + 1, OCTET)), np.zeros((2, OCTET))

    def put(gates, sign):
        by_reader[readers[:, gates], residues] += sign
        by_role[...] += sign * roles[:, gates]

    for sweep in range(_SWEEPS):
        for i, gates in enumerate(octets):
            if sweep:
                put(gates, -1)
            # The next layer's reads conflict more often if one residue is more frequent than others.
            cost = by_reader[readers[:, gates]].sum(axis=0) + _BALANCE * roles[:, gates].T @ by_role
            octets[i] = np.array(gates)[_cheapest(cost.tolist())]
            put(octets[i], 1)
    return np.concatenate([*octets, rest]).astype(int)


def _cheapest(cost: list[list[float]]) -> list[int]:
    """Assign a different row of `cost` to each column, so that no exchange of two rows lowers the total cost."""
    rows, exchanged = list(range(OCTET)), True
    while exchanged:
        exchanged = False
        for i, j in _PAIRS:
            k, m = rows[i], rows[j]
            if cost[k][j] + cost[m][i] < cost[k][i] + cost[m][j] - _ROUNDING:
                rows[i], rows[j], exchanged = m, k, True
    return rows
