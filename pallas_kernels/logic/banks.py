"""An order of gates in which neighbouring threads read rows of shared memory that lie in different banks.

Shared memory has 32 banks of 4 bytes. Of accesses of 16 bytes it serves those of eight neighbouring threads at once, an
octet, unless two of them are in the same banks: those of two rows whose numbers are equal mod 8. Each further row with
the same residue takes a cycle more.

The lanes of a layer may have its gates in any order, and a gate's row is its lane's. Of a gate, the octet decides with
whom it reads its a and b. Its residue in the octet decides with whose rows its own is read by the next layer, and with
whose gradients its own are read by those whose consumers they are.
"""

import itertools
from collections.abc import Sequence

import numpy as np

OCTET = 8
"""Threads that share out the 32 banks among their accesses of 16 bytes, and the groups of four banks."""
_SWEEPS = 2
"""Times that every octet of a layer gets its residues. Chosen by hand: a tick has 1.6% more cycles with one, 0.1% less
with three."""
_BALANCE = 0.5
"""What two reads of one residue in a whole layer cost, in gradients of one residue that are read together. Chosen by
hand for the published checkerboard automaton: three times as many cycles are reads."""
_ROUNDING = 1e-6
"""What an exchange has to gain."""
_PAIRS = list(itertools.combinations(range(OCTET), 2))


def cycles(rows: np.ndarray) -> int:
    """That shared memory takes for one access of 16 bytes by each lane, to these rows."""
    octets = np.sort(np.pad(rows, (0, -len(rows) % OCTET), mode="edge").reshape(-1, OCTET))
    is_first = np.diff(octets, axis=1, prepend=-1) != 0  # one row is read once for all
    counts = np.zeros((len(octets), OCTET), int)
    np.add.at(counts, (np.nonzero(is_first)[0], octets[is_first] % OCTET), 1)
    return int(counts.max(axis=1).sum())


def orders(
    layers: Sequence[tuple[np.ndarray, np.ndarray]], turns: Sequence[np.ndarray], rows: np.ndarray
) -> list[np.ndarray]:
    """The gates of each layer in an order that avoids conflicts; the last layer keeps its own.

    Args:
      layers: of each the inputs `(a, b)` of its gates.
      turns: of each, `(2, gates)`: as which of its consumers, from 0 on, the input's gradient sums that of a, and of b.
      rows: of the first layer's inputs. The rows of other layers begin at multiples of 8.
    """
    found = []
    for i, (reads, turn) in enumerate(zip(map(np.stack, layers), turns, strict=True)):
        if i + 1 == len(layers):
            found.append(np.arange(reads.shape[1]))
            break
        octets = _octets(*rows[reads] % OCTET)
        # Gradients that are read together: of one turn, by one octet.
        readers = rows[reads] // OCTET + turn * (rows.max() // OCTET + 1)
        found.append(_with_residues(octets, readers, _roles(layers[i + 1], reads.shape[1])))
        rows = np.argsort(found[-1])
    return found


def _octets(a: np.ndarray, b: np.ndarray) -> list[list[int]]:
    """Gates by octets, no residue twice among their a or b if each residue has as many; what is left over comes last.

    Residues are nodes of a bipartite graph, gates its edges, and octets colours of these. A gate takes an octet that is
    free for both of its residues. Where there is none, it takes one that is free for its a, and the gate there goes to
    the one that is free for its b, from which it displaces the next, by turns (D. König, 1916).
    """
    gates, count, rest = list(zip(a.tolist(), b.tolist(), strict=True)), len(a) // OCTET, []
    free = [[(1 << count) - 1] * OCTET for _ in range(2)]  # of each role and residue, octets as bits
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
        if gate != new:  # the last one leaves its octet to nobody
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
    """Of each input, how many gates of a layer read it as their a, and as their b."""
    return np.stack([np.bincount(role, minlength=inputs) for role in layer])


def _with_residues(octets, readers, roles):
    """The gates, octet after octet, in each with residues in which their rows meet few others.

    Gates of an octet exchange theirs as long as it pays, beside those of all others; so for each octet in turn.
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
            # A residue of which the next layer has more reads than of others meets itself in some of its octets.
            cost = by_reader[readers[:, gates]].sum(axis=0) + _BALANCE * roles[:, gates].T @ by_role
            octets[i] = np.array(gates)[_cheapest(cost.tolist())]
            put(octets[i], 1)
    return np.concatenate([*octets, rest]).astype(int)


def _cheapest(cost: list[list[float]]) -> list[int]:
    """Rows, one for each column, of which no two have a lower cost when exchanged."""
    rows, exchanged = list(range(OCTET)), True
    while exchanged:
        exchanged = False
        for i, j in _PAIRS:
            k, m = rows[i], rows[j]
            if cost[k][j] + cost[m][i] < cost[k][i] + cost[m][j] - _ROUNDING:
                rows[i], rows[j], exchanged = m, k, True
    return rows
