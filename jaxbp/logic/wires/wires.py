import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxbp.common import checks
from jaxbp.common.cases import FixedArgument
from jaxbp.common.content import ByContent
from pallas_kernels.logic.graph import Graph

MAX_SIZE = 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Wires(ByContent, Graph):
    """The wires of a layer of two-input gates: gate g reads the inputs `a[g]` and `b[g]`.

    Make wires once, on the host, by the class methods. The constructor checks nothing. Wires are a pytree, and jitted
    functions may close over them.

    The gates that read an input are its consumers (see `pallas_kernels.logic.graph.Graph`).

    Attributes:
      inputs: the number of inputs, including inputs that no gate reads.
      max_fan_out: the largest number of consumers of an input.
    """

    @property
    def turns(self) -> np.ndarray:
        """Each gate's position among the consumers of its input a (row 0), and of its input b (row 1): `(2, gates)`."""
        consumers, offsets = np.asarray(self.consumers), np.asarray(self.offsets)
        turns = np.empty(consumers.size, np.int64)
        turns[consumers] = np.arange(consumers.size) - np.repeat(offsets[:-1:2], np.diff(offsets[::2]))
        return turns.reshape(-1, 2).T

    @property
    def dtype(self) -> np.dtype:
        return self.a.dtype

    @classmethod
    def from_pairs(cls, a: ArrayLike, b: ArrayLike, inputs: int) -> "Wires":
        """Make wires from the inputs a[g] and b[g] of each gate g.

        Raises:
          TypeError: a or b does not contain integers.
          ValueError: a and b are empty, are not vectors of one length, or are not in [0, inputs); or there are 2^30
            inputs or more.
        """
        inputs = bounded_count("Wires.from_pairs", "inputs", inputs)
        a, b = (_check_indices(name, wires, inputs) for name, wires in (("a", a), ("b", b)))
        if a.shape != b.shape:
            raise ValueError(
                f"Wires.from_pairs: a has {a.size} wires and b has {b.size}; wants one wire a and one wire b per gate"
            )
        if a.size == 0:
            raise ValueError("Wires.from_pairs: there are no gates; wants at least one gate")
        reads = np.stack([a, b], axis=1).ravel()  # the input of each consumer
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
        return cls(**constants(**arrays), inputs=inputs, max_fan_out=int(np.diff(offsets[::2]).max()))

    @classmethod
    def random(cls, inputs: int, gates: int, seed: int) -> "Wires":
        """Make random wires. The number of reads per input varies by at most one. A gate may read one input twice.

        Raises:
          ValueError: there are no inputs or no gates.
        """
        inputs, gates = bounded_count("Wires.random", "inputs", inputs), bounded_count("Wires.random", "gates", gates)
        random = np.random.default_rng(seed)
        a, b = random.permutation(inputs)[random.permutation(2 * gates) % inputs].reshape(2, gates)
        return cls.from_pairs(a, b, inputs)

    @classmethod
    def unique(cls, inputs: int, gates: int, seed: int) -> "Wires":
        """Make random wires in which no two gates have the same pair of inputs, in either order.

        Gates read every input. If there are at least four times as many pairs as gates, the number of reads per input
        varies by at most one.

        Raises:
          ValueError: there are too few gates to read every input, or more gates than pairs.
        """
        inputs, gates = (
            bounded_count("Wires.unique", "inputs", inputs, at_least=2),
            bounded_count("Wires.unique", "gates", gates),
        )
        if 2 * gates < inputs:
            raise ValueError(
                f"Wires.unique: {gates} gates read at most {2 * gates} inputs; wants at least {-(-inputs // 2)} gates "
                f"to read all {inputs}"
            )
        if gates > (pairs := inputs * (inputs - 1) // 2):
            raise ValueError(
                f"Wires.unique: {inputs} inputs have {pairs} pairs; wants at most {pairs} gates, not {gates}"
            )
        random = np.random.default_rng(seed)
        if 4 * gates > pairs:  # a random draw would seldom give a new pair
            order = random.permutation(inputs)
            every_input = np.append(order, order[: inputs % 2]).reshape(-1, 2).T
            every_pair = np.stack(np.triu_indices(inputs, 1))[:, random.permutation(pairs)]
            a, b = np.concatenate([every_input, random.permuted(every_pair, axis=0)], axis=1)
            kept = np.sort(_first_of_each_pair(a, b))[:gates]
            a, b = a[kept], b[kept]
        else:
            rounds = [random.permutation(inputs) for _ in range(1 + 2 * gates // inputs)]
            a, b = _without_repeats(*np.concatenate(rounds)[: 2 * gates].reshape(gates, 2).T, random)
        order = random.permutation(gates)
        return cls.from_pairs(a[order], b[order], inputs)

    @classmethod
    def moore(cls, seed: int | None = None) -> "Wires":
        """Make eight gates on the nine cells of a 3 x 3 neighborhood in row-major order.

        Each gate reads one neighbor as input a, and the center as input b. A seed shuffles the gates.
        """
        neighbors = np.array([0, 1, 2, 3, 5, 6, 7, 8])
        if seed is not None:
            neighbors = np.random.default_rng(seed).permutation(neighbors)
        return cls.from_pairs(neighbors, np.full(8, 4), 9)


def _trails(reads: np.ndarray, consumers: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gates in the order of Euler trails (see `Graph`), and the inputs in the order of first visit. Gate g
    is encoded as `2 * g` if the trail enters it from its input a, `reads[2 * g]`, and as `2 * g + 1` if from b."""
    reads, consumers, place, end = reads.tolist(), consumers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist()
    taken, left_by, inputs = set(), [], {}

    def walk(i):
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


def _first_of_each_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    pairs = np.minimum(a, b) * (1 + max(a.max(), b.max())) + np.maximum(a, b)
    return np.unique(pairs, return_index=True)[1]


def _without_repeats(a: np.ndarray, b: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    while True:
        wrong = np.ones(a.size, bool)
        wrong[_first_of_each_pair(a, b)] = False
        (wrong,) = np.nonzero(wrong | (a == b))
        if not wrong.size:
            return a, b
        for i, j in zip(wrong, random.integers(a.size, size=wrong.size), strict=True):
            b[i], b[j] = b[j], b[i]


def _check_indices(name: str, wires: Any, inputs: int) -> np.ndarray:
    wires = np.asarray(wires)
    if not np.issubdtype(wires.dtype, np.integer):
        raise TypeError(f"Wires.from_pairs: {name} has dtype {wires.dtype}; wants integers")
    if wires.ndim != 1:
        raise ValueError(f"Wires.from_pairs: {name} has shape {wires.shape}; wants (gates,)")
    require_below("Wires.from_pairs", name, wires, inputs, "the number of inputs")
    return wires.astype(np.int64)


def bounded_count(op: str, name: str, value: Any, at_least: int = 1) -> int:
    """Return `value`, a number of inputs or gates. It must be below `MAX_SIZE`, because wires have 32 bits."""
    value = checks.count(op, name, value, at_least)
    if value >= MAX_SIZE:
        raise ValueError(f"{op}: {name} is {value}; wants an int below {MAX_SIZE}, because wires have 32 bits")
    return value


def require_below(op: str, name: str, values: np.ndarray, bounds: ArrayLike, *meanings: str) -> None:
    """Require nonnegative values below `bounds`. `meanings` describes all bounds, or each bound along the last axis."""
    bounds = np.broadcast_to(bounds, values.shape)
    if (wrong := np.argwhere((values < 0) | (values >= bounds))).size:
        at = tuple(wrong[0].tolist())
        wanted = f"at least 0 and below {bounds[at]}, {meanings[at[-1] if len(meanings) > 1 else 0]}"
        raise ValueError(f"{op}: {name}[{', '.join(map(str, at))}] is {values[at]}; wants {wanted}")


def require_chain(op: str, layer: str, sizes: Sequence[tuple[int, int]]) -> None:
    """Require that each layer reads the gates of the previous layer. `sizes` has each layer's numbers of inputs and of
    gates, and `layer.format(i)` is the name of layer i."""
    for i, ((_, gates), (inputs, _)) in enumerate(itertools.pairwise(sizes), 1):
        if inputs != gates:
            wanted = f"{gates}, the number of gates of {layer.format(i - 1)}"
            raise ValueError(f"{op}: {layer.format(i)} reads {inputs} inputs; wants {wanted}")


def constants(**arrays: ArrayLike) -> dict[str, Array]:
    """Return int32 arrays. If they are made within `jax.jit`, they are also usable outside."""
    with jax.ensure_compile_time_eval():  # jnp.asarray would compile a program per shape
        return {name: jax.device_put(np.asarray(array, np.int32)) for name, array in arrays.items()}


@dataclasses.dataclass(frozen=True)
class WiresArgument(FixedArgument):
    create = Wires.random
    inputs: int
    gates: int
