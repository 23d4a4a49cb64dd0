"""Which two inputs each gate of a layer reads, and for each input the gates that read it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int

from jaxbp.ops import _checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Wires:
    """The wires of a layer of two-input gates: gate g reads the inputs `a[g]` and `b[g]`.

    The wires are listed once more by the input that they read, which makes the gradient of an input a sum over its
    consumers: 2 g where gate g reads it as its a, 2 g + 1 where as its b. Those of input i are
    `consumers[offsets[2 i] : offsets[2 i + 2]]`, first the even ones, up to `offsets[2 i + 1]`. The list is made on the
    host, once, as are the wires, by the constructors `from_pairs`, `random`, `unique` and `moore`; the dataclass's own
    takes whatever it is given.

    A pytree: an argument of jitted functions, or a constant in them.

    Attributes:
      a, b: int32 in [0, inputs).
      consumers: of all inputs, one after the other.
      partners: of each of these, the other input of its gate.
      offsets: where an input's consumers in either role begin, and where the last ones end.
      trail: the gates in an order in which neighbours mostly share an input, and their a and b in that order. Kernels
        follow it: what they read is then still in the cache.
      trail_inputs: the inputs as the trail comes to them, so that neighbours mostly share a gate.
      trail_consumers, trail_partners: once more the consumers and their gates' other inputs, with the inputs in that
        order; of an input's consumers, first those by which the trail leaves it.
      trail_places: where among them the trail takes a gate.
      inputs: how many inputs there are, whether or not a gate reads them.
      most_consumers: of any input.
    """

    a: Int[Array, " gates"]
    b: Int[Array, " gates"]
    consumers: Int[Array, " 2*gates"]
    partners: Int[Array, " 2*gates"]
    offsets: Int[Array, " 2*inputs+1"]
    trail: Int[Array, "3 gates"]
    trail_inputs: Int[Array, " inputs"]
    trail_consumers: Int[Array, " 2*gates"]
    trail_partners: Int[Array, " 2*gates"]
    trail_places: Int[Array, " gates"]
    inputs: int = dataclasses.field(metadata=dict(static=True))
    most_consumers: int = dataclasses.field(metadata=dict(static=True))

    @property
    def gates(self) -> int:
        return self.a.shape[-1]

    @property
    def regular(self) -> bool:
        """Whether all inputs have as many consumers. If that is even, the trail leaves each by half of them."""
        return self.inputs * self.most_consumers == 2 * self.gates

    @property
    def turns(self) -> np.ndarray:
        """`(2, gates)`, on the host: of a gate's a and b, where the gate is among the consumers of that input."""
        consumers, offsets = np.asarray(self.consumers), np.asarray(self.offsets)
        turns = np.empty(consumers.size, np.int64)
        turns[consumers] = np.arange(consumers.size) - np.repeat(offsets[:-1:2], np.diff(offsets[::2]))
        return turns.reshape(-1, 2).T

    @property
    def dtype(self) -> np.dtype:
        """Of all arrays: int32."""
        return self.a.dtype

    @classmethod
    def from_pairs(cls, a: ArrayLike, b: ArrayLike, inputs: int) -> "Wires":
        """Wires as listed: gate g reads a[g] and b[g].

        Raises:
          TypeError: a or b is not of integers.
          ValueError: a and b are empty or not vectors of one length, or not all in [0, inputs).
        """
        inputs = _checks.count("Wires.from_pairs", "inputs", inputs)
        a, b = (_check_indices(name, wires, inputs) for name, wires in (("a", a), ("b", b)))
        if a.shape != b.shape:
            raise ValueError(f"Wires.from_pairs: a has {a.size} wires and b has {b.size}; wants one of each a gate")
        if a.size == 0:
            raise ValueError("Wires.from_pairs: there are no gates; wants at least one")
        reads = np.stack([a, b], axis=1).ravel()  # what consumer 2 g + role reads
        # Sorted by input and role.
        consumers = np.lexsort([np.arange(reads.size) // 2, np.arange(reads.size) % 2, reads])
        counts = np.bincount(2 * reads + np.arange(reads.size) % 2, minlength=2 * inputs)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        left_by, visits = _trails(reads, consumers, offsets[::2])
        trail = left_by // 2
        leaves, visited = np.zeros(reads.size, bool), np.empty(inputs, np.int64)
        leaves[left_by], visited[visits] = True, np.arange(inputs)
        along = consumers[np.lexsort([~leaves[consumers], visited[reads[consumers]]])]
        places = np.empty(reads.size, np.int64)
        places[along] = np.arange(reads.size)
        arrays = dict(
            a=a,
            b=b,
            consumers=consumers,
            partners=reads[consumers ^ 1],
            offsets=offsets,
            trail=np.stack([trail, a[trail], b[trail]]),
            trail_inputs=visits,
            trail_consumers=along,
            trail_partners=reads[along ^ 1],
            trail_places=places[left_by[np.argsort(trail)]],
        )
        with jax.ensure_compile_time_eval():  # made within jit, they are still the same arrays outside
            arrays = {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}
        return cls(**arrays, inputs=inputs, most_consumers=int(np.diff(offsets[::2]).max()))

    @classmethod
    def random(cls, inputs: int, gates: int, seed: int) -> "Wires":
        """Random wires: every input is read as often as any other, give or take one. A gate may read one input twice.

        Raises:
          ValueError: no inputs or no gates.
        """
        inputs, gates = _checks.count("Wires.random", "inputs", inputs), _checks.count("Wires.random", "gates", gates)
        random = np.random.default_rng(seed)
        a, b = random.permutation(inputs)[random.permutation(2 * gates) % inputs].reshape(2, gates)
        return cls.from_pairs(a, b, inputs)

    @classmethod
    def unique(cls, inputs: int, gates: int, seed: int) -> "Wires":
        """Random wires of which no two gates have the same pair, in either order. Every input is read; unless the gates
        are more than a quarter of all pairs, as often as any other, give or take one.

        Raises:
          ValueError: too few gates to read every input, or more than there are pairs.

        Source: F. Petersen et al., "Deep differentiable logic gate networks", NeurIPS 2022.
        """
        inputs = _checks.count("Wires.unique", "inputs", inputs, at_least=2)
        gates = _checks.count("Wires.unique", "gates", gates)
        if 2 * gates < inputs:
            raise ValueError(
                f"Wires.unique: {gates} gates read at most {2 * gates} inputs; wants at least {-(-inputs // 2)} gates "
                f"to read all {inputs}"
            )
        if gates > (pairs := inputs * (inputs - 1) // 2):
            raise ValueError(
                f"Wires.unique: {inputs} inputs have {pairs} pairs; wants at most so many gates, not {gates}"
            )
        random = np.random.default_rng(seed)
        if 4 * gates > pairs:  # where drawing them blindly would seldom find a new one
            a, b = np.concatenate([_every_input_once(inputs, random), _every_pair_once(inputs, random)], axis=1)
            kept = np.sort(_first_of_each_pair(a, b))[:gates]
            a, b = a[kept], b[kept]
        else:
            rounds = [random.permutation(inputs) for _ in range(1 + 2 * gates // inputs)]
            a, b = _without_repeats(*np.concatenate(rounds)[: 2 * gates].reshape(gates, 2).T, random)
        order = random.permutation(gates)
        return cls.from_pairs(a[order], b[order], inputs)

    @classmethod
    def moore(cls, seed: int | None = None) -> "Wires":
        """Eight gates on the nine cells of a 3 x 3 neighbourhood in row-major order: each reads a neighbour as its a,
        and the centre as its b.

        Args:
          seed: of the gates' order; None for that of the cells.

        Source: P. Miotti et al., "Differentiable logic cellular automata", 2025.
        """
        neighbours = np.array([0, 1, 2, 3, 5, 6, 7, 8])
        if seed is not None:
            neighbours = np.random.default_rng(seed).permutation(neighbours)
        return cls.from_pairs(neighbours, np.full(8, 4), 9)


def _trails(reads: np.ndarray, consumers: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gates in an order in which neighbours mostly share an input, and the inputs, which mostly share a gate.

    Gates are the edges of a graph of inputs. A walk goes on by any gate not yet taken; where there is none, the next
    one begins at its start again, or at the next input that still has one. Where all inputs have an even number of
    consumers, every walk ends where it began, and so leaves each input as often as it comes to it.

    Returns:
      Of each gate, in this order, 2 g where the walk goes from its a to its b, else 2 g + 1; and the inputs.
    """
    reads, consumers, place, end = reads.tolist(), consumers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist()
    taken, left_by, inputs = set(), [], {}

    def walk(i):
        """Takes gates from input i on, as far as it goes. Returns whether there was one."""
        begun = len(left_by)
        while True:
            inputs.setdefault(i)
            while place[i] < end[i] and consumers[place[i]] // 2 in taken:
                place[i] += 1
            if place[i] == end[i]:
                return len(left_by) > begun
            consumer = consumers[place[i]]
            taken.add(consumer // 2)
            left_by.append(consumer)
            i = reads[consumer ^ 1]

    for start in range(len(place)):
        while walk(start):
            pass
    return np.array(left_by, np.int64), np.array(list(inputs), np.int64)


def _every_input_once(inputs: int, random: np.random.Generator) -> np.ndarray:
    """Pairs in which every input is once; of an odd number, one twice."""
    order = random.permutation(inputs)
    if inputs % 2:
        order = np.append(order, order[0])
    return order.reshape(-1, 2).T


def _first_of_each_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where each pair is, in either order, for the first time."""
    pairs = np.minimum(a, b) * (1 + max(a.max(), b.max())) + np.maximum(a, b)
    return np.unique(pairs, return_index=True)[1]


def _without_repeats(a: np.ndarray, b: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The pairs, with b's exchanged at random until no pair stands twice and no gate reads one input twice."""
    while True:
        wrong = np.ones(a.size, bool)
        wrong[_first_of_each_pair(a, b)] = False
        (wrong,) = np.nonzero(wrong | (a == b))
        if not wrong.size:
            return a, b
        for i, j in zip(wrong, random.integers(a.size, size=wrong.size), strict=True):
            b[i], b[j] = b[j], b[i]


def _every_pair_once(inputs: int, random: np.random.Generator) -> np.ndarray:
    """All pairs, in random order."""
    pairs = np.stack(np.triu_indices(inputs, 1))
    return random.permuted(pairs[:, random.permutation(pairs.shape[1])], axis=0)


def _check_indices(name: str, wires: Any, inputs: int) -> np.ndarray:
    wires = np.asarray(wires)
    if not np.issubdtype(wires.dtype, np.integer):
        raise TypeError(f"Wires.from_pairs: {name} has dtype {wires.dtype}; wants integers")
    if wires.ndim != 1:
        raise ValueError(f"Wires.from_pairs: {name} has shape {wires.shape}; wants (gates,)")
    if (wrong := np.flatnonzero((wires < 0) | (wires >= inputs))).size:
        raise ValueError(
            f"Wires.from_pairs: {name}[{wrong[0]}] is {wires[wrong[0]]}; "
            f"wants at least 0 and below {inputs}, the inputs"
        )
    return wires.astype(np.int64)
