"""Layers of gates with fixed functions, evaluated with bitwise operations on words of 32 samples."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, UInt8, UInt32

from jaxbp.common import checks
from jaxbp.common.content import ByContent
from jaxbp.logic.circuits.sources import EXPRESSIONS, Table, c_of_tables, check_c, check_verilog, verilog_of
from jaxbp.logic.gates import COEFFICIENTS, GATES
from jaxbp.logic.wires.wires import Wires

WORD_BITS = 32


def pack_bits(bits: Bool[np.ndarray, "samples features"]) -> UInt32[np.ndarray, "features words"]:
    """Pack the samples of each feature into words: bit k of word w is sample `32 * w + k`. Unused bits are 0.

    Raises:
      ValueError: `bits` is not a matrix, or contains other numbers than 0 and 1.
    """
    bits = booleans("pack_bits", bits)
    if bits.ndim != 2:
        raise ValueError(f"pack_bits: bits has shape {bits.shape}; wants (samples, features)")
    words = -(-len(bits) // WORD_BITS)
    filled = np.zeros((bits.shape[1], words * WORD_BITS), bool)
    filled[:, : len(bits)] = bits.T
    packed = np.packbits(filled, axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)


def unpack_bits(words: UInt32[np.ndarray, "features words"], samples: int) -> Bool[np.ndarray, "samples features"]:
    """Return the first `samples` samples that `pack_bits` packed into `words`.

    Raises:
      ValueError: `words` is not a matrix, or has fewer than `samples` samples.
    """
    if np.ndim(words) != 2:
        raise ValueError(f"unpack_bits: words has shape {np.shape(words)}; wants (features, words)")
    most = np.shape(words)[1] * WORD_BITS
    if not checks.is_int(samples) or not 0 <= samples <= most:
        raise ValueError(
            f"unpack_bits: samples is {samples!r}; wants an int in [0, {most}], because words has {most} bits per row"
        )
    packed = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    return np.unpackbits(packed, axis=1, count=samples, bitorder="little").T.astype(bool)


def booleans(op: str, bits: ArrayLike) -> Bool[np.ndarray, "..."]:
    bits = np.asarray(bits)
    if bits.dtype != bool and (wrong := bits[(bits != 0) & (bits != 1)]).size:
        raise ValueError(f"{op}: bits contains {wrong[0]}; wants only 0 and 1, as jaxbp.nn.thermometer returns")
    return bits.astype(bool)


def outputs_of_samples(circuit: Any, bits: Bool[np.ndarray, "samples inputs"]) -> Bool[np.ndarray, "samples outputs"]:
    op, bits = type(circuit).__name__, np.asarray(bits)
    if bits.shape[1:] != (circuit.inputs,):
        raise ValueError(f"{op}: bits has shape {bits.shape}; wants (samples, {circuit.inputs})")
    bits = booleans(op, bits)
    return unpack_bits(circuit.evaluate(pack_bits(bits)), len(bits))


def bitwise_gate_layer(gates: UInt8[Array, "gates"], wires: Wires, x: UInt32[Array, "inputs words"]) -> Array:
    """Evaluate a layer of gates, `(inputs, words) -> (gates, words)`. If x is a NumPy array, so is the result."""
    return bitwise_gates(gates, x[wires.a], x[wires.b])


def bitwise_gates(gates: UInt8[Array, "*gates"], a: UInt32[Array, "..."], b: UInt32[Array, "..."]) -> Array:
    """Apply each gate's function, `c0 + c1 * a + c2 * b + c3 * a * b` modulo 2, to each bit of a and b.

    `gates` has the functions' numbers, which determine c0 to c3. Its axes are the leading axes of a and b.
    """
    masks = _MASKS if isinstance(a, np.ndarray) else jnp.asarray(_MASKS)
    c0, c1, c2, c3 = masks.T[:, gates].reshape(4, *gates.shape, *[1] * (a.ndim - gates.ndim))
    return c0 ^ (c1 & a) ^ ((c2 ^ (c3 & a)) & b)


_MASKS = np.where(COEFFICIENTS % 2, np.uint32(2**32 - 1), np.uint32(0)).astype(np.uint32)


def gate_numbers(layer: str, gates: ArrayLike, *shape: int) -> UInt8[np.ndarray, "*shape"]:
    gates = np.asarray(gates)
    if gates.shape != shape or (gates.size and not 0 <= gates.min() <= gates.max() < GATES):
        came = f" with values from {gates.min()} to {gates.max()}" if gates.size else ""
        raise ValueError(f"{layer} has gates of shape {gates.shape}{came}; wants shape {shape} and values from 0 to 15")
    return gates.astype(np.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class Circuit(ByContent):
    """Layers of hardened gates. Each layer is a pair: the numbers of its gates' functions, and its wires."""

    layers: Sequence[tuple[UInt8[np.ndarray, "gates"], Wires]]

    @classmethod
    def of(cls, layers: Iterable[tuple[ArrayLike, Wires]]) -> "Circuit":
        """Make a circuit from one pair `(gates, wires)` per layer, with `gates` as `jaxbp.harden` returns it.

        Raises:
          ValueError: there are no layers; a gate's function is not from 0 to 15; or the layers' sizes do not match.
        """
        host = []
        for i, (gates, wires) in enumerate(layers):
            gates = gate_numbers(f"Circuit: layer {i}", gates, wires.gates)
            if host and wires.inputs != host[-1][1].gates:
                before = host[-1][1].gates
                raise ValueError(
                    f"Circuit: layer {i} reads {wires.inputs} inputs; wants {before}, the number of gates of "
                    f"layer {i - 1}"
                )
            host.append((gates, wires))
        if not host:
            raise ValueError("Circuit: there are no layers; wants at least one layer")
        return cls(tuple(host))

    def __repr__(self) -> str:
        gates = ", ".join(str(wires.gates) for _, wires in self.layers)
        return f"Circuit({self.inputs} inputs, layers of {gates} gates)"

    @property
    def inputs(self) -> int:
        return self.layers[0][1].inputs

    @property
    def outputs(self) -> int:
        return self.layers[-1][1].gates

    def __call__(self, bits: Bool[np.ndarray, "samples inputs"]) -> Bool[np.ndarray, "samples outputs"]:
        return outputs_of_samples(self, bits)

    def evaluate(self, x: UInt32[np.ndarray, "inputs words"]) -> UInt32[np.ndarray, "outputs words"]:
        """Return the packed outputs for samples that `pack_bits` packed, in NumPy or within `jax.jit`."""
        if x.shape[0] != self.inputs:
            raise ValueError(f"Circuit: x has shape {x.shape}; wants ({self.inputs}, words)")
        for gates, wires in self.layers:
            x = bitwise_gate_layer(gates, wires, x)
        return x

    def histogram(self) -> np.ndarray:
        """Return the number of gates with each function in each layer, `(layers, 16)`."""
        return np.stack([np.bincount(gates, minlength=GATES) for gates, _ in self.layers])

    def to_c(self, name: str = "circuit", classes: int | None = None) -> str:
        """Return C99 source of `int name(size_t words, const uint32_t *x, uint32_t *y)`, which computes `evaluate`.

        Bit k of `x[i * words + w]` is input i of sample `32 * w + k`, and y has the same layout. The function returns
        0, or 1 if an allocation fails. Fewer than 16 words take as long as 16.

        Args:
          classes: number of classes. The outputs form one group of equal size per class, and a sample's class is the
            first group with the most ones. If given, the source has two more functions.
            `int name_classify_words(size_t words, const uint32_t *x, int *classes)` computes the class of each sample.
            `int name_classify(const uint8_t *bits)` returns the class of one sample, or -1 if an allocation fails.
        """
        check_c("Circuit", name, classes, self.outputs)
        tables, rows, source, target = [], max(self.inputs, *(wires.gates for _, wires in self.layers)), 0, 1
        for gates, wires in self.layers:
            numbers = np.stack([np.arange(wires.gates), wires.a, wires.b], axis=1)
            for gate in np.unique(gates).tolist():
                tables.append(Table(gate, source * rows, target * rows, numbers[gates == gate]))
            source, target = target, source
        return c_of_tables(name, self.inputs, 2 * rows, tables, range(self.outputs), source * rows, classes)

    def to_verilog(self, name: str = "circuit") -> str:
        """Return a combinational Verilog module with the ports `input [inputs-1:0] x` and `output [outputs-1:0] y`."""
        check_verilog("Circuit", name)
        lines, source = [], "x"
        for i, (gates, wires) in enumerate(self.layers):
            target = f"layer{i}"
            lines.append(f"wire [{wires.gates - 1}:0] {target};")
            for g, (gate, a, b) in enumerate(zip(gates, wires.a.tolist(), wires.b.tolist(), strict=True)):
                operands = dict(a=f"{source}[{a}]", b=f"{source}[{b}]", zero="1'b0", one="1'b1")
                lines.append(f"assign {target}[{g}] = {EXPRESSIONS[gate].format(**operands)};")
            source = target
        return verilog_of(name, self.inputs, self.outputs, [*lines, f"assign y = {source};"])
