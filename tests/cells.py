import numpy as np

from jaxbp import CellularCircuit, Circuit, Netlist, Wires

NUMBERS = {"and": 1, "a and not b": 2, "xor": 6, "or": 7, "one": 15}


class Gates:
    """`gates("and", a, b)` adds a gate to the netlist and returns its source."""

    def __init__(self, inputs):
        self.inputs, self.listed = inputs, []

    def __call__(self, function, a, b):
        self.listed.append((NUMBERS[function], a, b))
        return self.inputs + len(self.listed) - 1

    def adder(self, x, y, z):
        half = self("xor", x, y)
        return self("xor", half, z), self("or", self("and", x, y), self("and", half, z))

    def netlist(self, *outputs):
        return Netlist.from_gates(self.inputs, *np.array(self.listed).T, outputs)


def life_gates():
    gates = Gates(9)
    (ones0, twos0), (ones1, twos1) = gates.adder(0, 1, 2), gates.adder(3, 5, 6)
    ones2, twos2 = gates("xor", 7, 8), gates("and", 7, 8)
    odd, twos3 = gates.adder(ones0, ones1, ones2)
    twos, fours0 = gates.adder(twos0, twos1, twos2)
    two_or_three = gates("a and not b", gates("xor", twos, twos3), gates("or", fours0, gates("and", twos, twos3)))
    return gates.netlist(gates("and", two_or_three, gates("or", odd, 4)))


def life(periodic):
    return CellularCircuit(life_gates(), 1, periodic)


def life_step(x, periodic):
    height, width = x.shape[1:]
    bordered = np.pad(x.astype(int), ((0, 0), (1, 1), (1, 1)), mode="wrap" if periodic else "constant")
    around = sum(bordered[:, r : r + height, c : c + width] for r in range(3) for c in range(3)) - x
    return (around == 3) | (x & (around == 2))


def checkerboard():
    gates = Gates(18)
    above, left = (2, 3), (6, 7)
    of_left = gates("a and not b", left[1], left[0])
    of_above = gates("a and not b", gates("a and not b", above[1], above[0]), left[1])
    return CellularCircuit(gates.netlist(gates("or", of_left, of_above), gates("one", 0, 0)), 2)


def checkerboard_target(height, width):
    return (np.indices((height, width)).sum(axis=0) % 2 == 1)[..., None]


def random_circuit(channels, widths, seed=0):
    random, layers, reads = np.random.default_rng(seed), [], 9 * channels
    for i, gates in enumerate([*widths, channels]):
        layers.append(
            (random.choice([*range(16), 1, 6, 7, 6, 9, 14], gates), Wires.random(reads, gates, seed=seed + i))
        )
        reads = gates
    return Circuit.of(layers)
