"""Layers of gates with fixed functions, evaluated with bitwise operations on words of 32 samples."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt, UInt8, UInt32

from jaxbp.common import checks
from jaxbp.logic.circuits.expansion import expanded, gates_of
from jaxbp.logic.circuits.netlist import BitCircuit, GateList, Netlist
from jaxbp.logic.gates import GATES
from jaxbp.logic.wires.wires import Wires, require_chain


def bitwise_gate_layer(gates: UInt[Array, "gates"], wires: Wires, x: UInt32[Array, "inputs words"]) -> Array:
    """Evaluate a layer of gates, `(inputs, words) -> (gates, words)`. If x is a NumPy array, so is the result.

    If there are half as many gates as pairs in `wires`, and their dtype is uint16, gates have four inputs, as in
    `jaxbp.lut_layer`.
    """
    numpy, pairs = np if isinstance(x, np.ndarray) else jnp, 2 if _have_four_inputs(gates, wires) else 1
    checks.shape("bitwise_gate_layer", "gates", gates, wires.gates // pairs)
    a, b = x[wires.a], x[wires.b]
    numbers = numpy.asarray(gates).astype(np.int32)
    # A gate's function is a polynomial modulo 2. Each coefficient is a sum of rows of the truth table.
    for shift in (1, 2, 4, 8)[: 2 * pairs]:
        numbers = numbers ^ (numbers >> shift & (2 ** (4**pairs) - 1) // (2**shift + 1))
    shifts = np.arange(4**pairs)[::-1].reshape(-1, *[1] * x.ndim)
    terms = (-(numbers.reshape(-1, *[1] * (x.ndim - 1)) >> shifts & 1)).astype(x.dtype)  # words of ones or zeros
    for value in (values[pair::pairs] for pair in range(pairs) for values in (a, b)):
        without, factors = numpy.split(terms, 2)
        terms = without ^ (value & factors)
    return terms[0]


def as_pairs(name: str, layers: Any) -> tuple[Any, ...]:
    if not isinstance(layers, Iterable):
        raise TypeError(f"{name} is {layers!r}; wants a list of pairs (gates, wires)")
    return tuple(layers)


def gates_and_wires(name: str, layer: Any, kind: type) -> Sequence[Any]:
    """Return `layer`, a list or tuple of gates, wires of class `kind`, and possibly options. If it has another form,
    raise TypeError, which names it `name`."""
    is_sequence = isinstance(layer, tuple | list)
    if not is_sequence or len(layer) < 2 or not isinstance(layer[1], kind):
        came = f"({', '.join(type(part).__name__ for part in layer)})" if is_sequence else repr(layer)
        raise TypeError(f"{name} is {came}; wants (gates, wires), where wires is a jaxbp.{kind.__name__}")
    return layer


def gate_numbers(layer: str, gates: ArrayLike, *shape: int) -> UInt8[np.ndarray, "*shape"]:
    gates = np.asarray(gates)
    if not np.issubdtype(gates.dtype, np.integer):
        raise TypeError(f"{layer} has gates of dtype {gates.dtype}; wants integers")
    if gates.shape != shape or (gates.size and not 0 <= gates.min() <= gates.max() < GATES):
        came = f" with values from {gates.min()} to {gates.max()}" if gates.size else ""
        wanted = f"shape {shape} and values from 0 to {GATES - 1}"
        raise ValueError(f"{layer} has gates of shape {gates.shape}{came}; wants {wanted}")
    return gates.astype(np.uint8)


def _have_four_inputs(gates: Any, wires: Wires) -> bool:
    return gates.dtype == np.uint16 and gates.shape == (wires.gates / 2,)


def _layer(name: str, layer: Any) -> tuple[np.ndarray, Wires]:
    gates, wires, *_ = gates_and_wires(name, layer, Wires)
    gates = np.asarray(gates)
    if _have_four_inputs(gates, wires):
        return gates, wires
    if np.issubdtype(gates.dtype, np.integer) and gates.shape == (wires.gates / 2,):
        raise ValueError(
            f"{name} has {gates.size} gates of dtype {gates.dtype} and {wires.gates} pairs of wires; wants "
            f"{wires.gates} gates, or dtype uint16 for gates of four inputs"
        )
    return gate_numbers(name, gates, wires.gates), wires


@dataclasses.dataclass(frozen=True, eq=False)
class Circuit(BitCircuit):
    """Layers of hardened gates. Each layer is a pair: the numbers of its gates' functions, and its wires.

    A layer with half as many gates as pairs of wires has gates of four inputs, as in `jaxbp.lut_layer`. Their numbers
    must have the dtype uint16, as from `jaxbp.harden`.
    """

    layers: Sequence[tuple[UInt[np.ndarray, "gates"], Wires]]

    def __post_init__(self):
        pairs = as_pairs("Circuit: layers", self.layers)
        layers = tuple(_layer(f"Circuit: layer {i}", layer) for i, layer in enumerate(pairs))
        if not layers:
            raise ValueError("Circuit: there are no layers; wants at least one layer")
        require_chain("Circuit", "layer {}", [(wires.inputs, len(gates)) for gates, wires in layers])
        object.__setattr__(self, "layers", layers)

    @classmethod
    def of(cls, layers: Iterable[tuple[ArrayLike, Wires]]) -> "Circuit":
        """Make a circuit from one pair `(gates, wires)` per layer, with `gates` as `jaxbp.harden` returns it.

        Raises:
          TypeError: a layer is not such a pair, or its gates are not integers.
          ValueError: there are no layers; a gate's function is not from 0 to 15, except in uint16 for four inputs; or
            the sizes of a layer or of neighboring layers do not match.
        """
        return cls(layers)

    def __repr__(self) -> str:
        gates = ", ".join(str(len(gates)) for gates, _ in self.layers)
        return f"Circuit({self.inputs} inputs, layers of {gates} gates)"

    @property
    def inputs(self) -> int:
        return self.layers[0][1].inputs

    @property
    def outputs(self) -> int:
        return len(self.layers[-1][0])

    def evaluate(self, x: UInt32[np.ndarray, "inputs words"]) -> UInt32[np.ndarray, "outputs words"]:
        """Return the packed outputs for samples that `pack_bits` packed, in NumPy or within `jax.jit`."""
        self.check_words(x)
        for gates, wires in self.layers:
            x = bitwise_gate_layer(gates, wires, x)
        return x

    def histogram(self) -> np.ndarray:
        """Return the number of gates with each function in each layer, `(layers, 16)`. For gates of four inputs, count
        the gates of two inputs that compute the same."""
        return np.stack([np.bincount(_of_two_inputs(*layer), minlength=GATES) for layer in self.layers])

    def netlist(self) -> Netlist:
        """Return a netlist of the circuit. It has up to ten gates for a gate of four inputs."""
        listed, sources = GateList(self.inputs), np.arange(self.inputs)
        for gates, wires in self.layers:
            a, b = sources[np.asarray(wires.a)], sources[np.asarray(wires.b)]
            if len(gates) == wires.gates:
                sources = listed.add(gates, a, b)
            else:
                sources = _expand(listed, gates, [a[::2], b[::2], a[1::2], b[1::2]])
        return listed.netlist(sources)


def _of_two_inputs(gates: np.ndarray, wires: Wires) -> np.ndarray:
    if len(gates) == wires.gates:
        return gates
    return np.array([function for table in gates.tolist() for function, *_ in gates_of(expanded(table))], int)


def _expand(listed: GateList, tables: np.ndarray, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Add gates of two inputs to `listed` that compute tables of four inputs. Return the source of each table's value
    (see `Netlist`). `inputs` has four arrays, one per input, with one source per table."""
    results, order = np.empty(len(tables), int), np.argsort(tables, kind="stable")
    for at in np.split(order, 1 + np.flatnonzero(np.diff(tables[order]))):  # the places of each different table
        expression = expanded(int(tables[at[0]]))
        sources: dict[Any, np.ndarray] = {v: source[at] for v, source in enumerate(inputs)}
        for gate in gates_of(expression):
            function, a, b = gate
            sources[gate] = listed.add(function, sources[a], sources[b])
        results[at] = sources[expression]
    return results
