"""Layers of gates with fixed functions, evaluated with bitwise operations on words of 32 samples."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt8, UInt32

from jaxbp.logic.circuits.netlist import BitCircuit, GateList, Netlist
from jaxbp.logic.gates import COEFFICIENTS, GATES
from jaxbp.logic.wires.wires import Wires, require_chain

_MASKS = np.where(COEFFICIENTS % 2, np.uint32(2**32 - 1), np.uint32(0)).astype(np.uint32)


def bitwise_gate_layer(gates: UInt8[Array, "gates"], wires: Wires, x: UInt32[Array, "inputs words"]) -> Array:
    """Evaluate a layer of gates, `(inputs, words) -> (gates, words)`. If x is a NumPy array, so is the result."""
    masks = _MASKS if isinstance(x, np.ndarray) else jnp.asarray(_MASKS)
    # A gate's function is c0 + c1 * a + c2 * b + c3 * a * b, modulo 2.
    c0, c1, c2, c3 = masks.T[:, gates].reshape(4, -1, *[1] * (x.ndim - 1))
    a, b = x[wires.a], x[wires.b]
    return c0 ^ (c1 & a) ^ ((c2 ^ (c3 & a)) & b)


def as_pairs(name: str, layers: Any) -> tuple[Any, ...]:
    if not isinstance(layers, Iterable):
        raise TypeError(f"{name} is {layers!r}; wants a list of pairs (gates, wires)")
    return tuple(layers)


def gates_and_wires(name: str, layer: Any, kind: type) -> Sequence[Any]:
    """Return a layer, a list or tuple of its gates, its wires of this kind, and options."""
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
        raise ValueError(f"{layer} has gates of shape {gates.shape}{came}; wants shape {shape} and values from 0 to 15")
    return gates.astype(np.uint8)


def _layer(name: str, layer: Any) -> tuple[np.ndarray, Wires]:
    gates, wires, *_ = gates_and_wires(name, layer, Wires)
    return gate_numbers(name, gates, wires.gates), wires


@dataclasses.dataclass(frozen=True, eq=False)
class Circuit(BitCircuit):
    """Layers of hardened gates. Each layer is a pair: the numbers of its gates' functions, and its wires."""

    layers: Sequence[tuple[UInt8[np.ndarray, "gates"], Wires]]

    def __post_init__(self):
        pairs = as_pairs("Circuit: layers", self.layers)
        layers = tuple(_layer(f"Circuit: layer {i}", layer) for i, layer in enumerate(pairs))
        if not layers:
            raise ValueError("Circuit: there are no layers; wants at least one layer")
        require_chain("Circuit", "layer {}", [wires for _, wires in layers])
        object.__setattr__(self, "layers", layers)

    @classmethod
    def of(cls, layers: Iterable[tuple[ArrayLike, Wires]]) -> "Circuit":
        """Make a circuit from one pair `(gates, wires)` per layer, with `gates` as `jaxbp.harden` returns it.

        Raises:
          TypeError: a layer is not such a pair, or its gates are not integers.
          ValueError: there are no layers; a gate's function is not from 0 to 15; or the layers' sizes do not match.
        """
        return cls(layers)

    def __repr__(self) -> str:
        gates = ", ".join(str(wires.gates) for _, wires in self.layers)
        return f"Circuit({self.inputs} inputs, layers of {gates} gates)"

    @property
    def inputs(self) -> int:
        return self.layers[0][1].inputs

    @property
    def outputs(self) -> int:
        return self.layers[-1][1].gates

    def evaluate(self, x: UInt32[np.ndarray, "inputs words"]) -> UInt32[np.ndarray, "outputs words"]:
        """Return the packed outputs for samples that `pack_bits` packed, in NumPy or within `jax.jit`."""
        self.check_words(x)
        for gates, wires in self.layers:
            x = bitwise_gate_layer(gates, wires, x)
        return x

    def histogram(self) -> np.ndarray:
        """Return the number of gates with each function in each layer, `(layers, 16)`."""
        return np.stack([np.bincount(gates, minlength=GATES) for gates, _ in self.layers])

    def netlist(self) -> Netlist:
        listed, sources = GateList(self.inputs), np.arange(self.inputs)
        for gates, wires in self.layers:
            sources = listed.add(gates, sources[np.asarray(wires.a)], sources[np.asarray(wires.b)])
        return listed.netlist(sources)
