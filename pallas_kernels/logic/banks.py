"""An order of gates in which neighboring threads read rows of shared memory that lie in different banks.

Shared memory has 32 banks of 4 bytes. It serves 16-byte accesses of eight neighboring threads, an octet, at once if no
two of them use the same banks. Two rows use the same banks if their indices are equal mod 8. Each further row with the
same residue mod 8 takes one more cycle.

The lanes of a layer may hold its gates in any order, and a gate's row is its lane's. A gate's octet determines the
gates together with which it reads its a and b. Its residue in the octet determines which rows the next layer reads
together with the gate's row. It also determines which gradients are read together with the gate's.
"""

import itertools
from collections.abc import Sequence

import numpy as np

OCTET = 8
"""Threads that share the 32 banks in 16-byte accesses, and number of groups of four banks."""
_SWEEPS = 2
"""Passes over the octets of a layer that assign residues. Chosen by hand: a tick has 1.6% more cycles with one pass,
0.1% less with three."""
_BALANCE = 0.5
"""Cost of two reads of one residue in a whole layer, in gradients of one residue that are read together. Chosen by hand
for the published checkerboard automaton, where three times as many cycles are reads."""
_ROUNDING = 1e-6
"""Least gain for which two gates exchange their residues."""
_PAIRS = list(itertools.combinations(range(OCTET), 2))


def cycles(rows: np.ndarray) -> int:
    """Return the cycles that shared memory takes for one 16-byte access of each lane to these rows."""
    octets = np.sort(np.pad(rows, (0, -len(rows) % OCTET), mode="edge").reshape(-1, OCTET))
    is_first = np.diff(octets, axis=1, prepend=-1) != 0  # one row is read once for all
    counts = np.zeros((len(octets), OCTET), int)
    np.add.at(counts, (np.nonzero(is_first)[0], octets[is_first] % OCTET), 1)
    return int(counts.max(axis=1).sum())


def orders(
    layers: Sequence[tuple[np.ndarray, np.ndarray]], turns: Sequence[np.ndarray], rows: np.ndarray
) -> list[np.ndarray]:
    """Return an order of each layer's gates that avoids bank conflicts. The last layer keeps its order.

    Args:
      layers: for each layer, the inputs `(a, b)` of its gates.
      turns: for each layer, `(2, gates)`: the position, from 0, of a gate among the consumers over which its input's
        gradient is summed, for a and for b.
      rows: rows of the first layer's inputs. The rows of other layers begin at multiples of 8.
    """
    found = []
    for i, (reads, turn) in enumerate(zip(map(np.stack, layers), turns, strict=True)):
        if i + 1 == len(layers):
            found.append(np.arange(reads.shape[1]))
            break
        octets = _octets(*rows[reads] % OCTET)
        # Gradients that one octet reads together, in one turn.
        readers = rows[reads] // OCTET + turn * (rows.max() // OCTET + 1)
        found.append(_with_residues(octets, readers, _roles(layers[i + 1], reads.shape[1])))
        rows = np.argsort(found[-1])
    return found


def _octets(a: np.ndarray, b: np.ndarray) -> list[list[int]]:
    """Divide gates into octets, with the rest last. No residue occurs twice in an octet's a or b if all are equally
    frequent.

    Residues are the nodes of a bipartite graph, gates its edges, and octets the colors of the edges. A gate takes an
    octet that is free for both of its residues. If there is none, it takes an octet that is free for its a. The gate
    that held this octet moves to the octet that is free for the new gate's b, and may displace a further gate there.
    The two octets alternate until no gate is displaced (D. König, 1916).
    """
    gates, count, rest = list(zip(a.tolist(), b.tolist(), strict=True)), len(a) // OCTET, []
    free = [[(1 << count) - 1] * OCTET for _ in range(2)]  # free octets of each role and residue, as bits
    taken = [[{} for _ in range(OCTET)] for _ in range(2)]  # the gate in each octet
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
        if gate != new:  # the last gate leaves its octet to no other
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


def _roles(layer, inputs):
    """Return, for each input, the number of gates of a layer that read it as their a, and as their b."""
    return np.stack([np.bincount(role, minlength=inputs) for role in layer])


def _with_residues(octets, readers, roles):
    """Return the gates, octet by octet, with residues at which their rows meet few others.

    Octet by octet, gates exchange residues while this lowers the cost, given the residues of all other octets.
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
            # If the next layer reads one residue more often than others, the residue conflicts with itself in some
            # octets.
            cost = by_reader[readers[:, gates]].sum(axis=0) + _BALANCE * roles[:, gates].T @ by_role
            octets[i] = np.array(gates)[_cheapest(cost.tolist())]
            put(octets[i], 1)
    return np.concatenate([*octets, rest]).astype(int)


def _cheapest(cost: list[list[float]]) -> list[int]:
    """Return one row for each column, such that no exchange of two lowers the cost."""
    rows, exchanged = list(range(OCTET)), True
    while exchanged:
        exchanged = False
        for i, j in _PAIRS:
            k, m = rows[i], rows[j]
            if cost[k][j] + cost[m][i] < cost[k][i] + cost[m][j] - _ROUNDING:
                rows[i], rows[j], exchanged = m, k, True
    return rows
