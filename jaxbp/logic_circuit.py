"""Hardened logic networks: evaluated 32 samples a word with bitwise operations, and written out as C and as Verilog.

Of bits, a gate's `c0 + c1 a + c2 b + c3 ab` is the same formula modulo 2: with exclusive or for the sum, and for the
product.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, UInt8, UInt32

from jaxbp.ops.logic_gates import COEFFICIENTS, GATES
from jaxbp.wires import Wires

WORD_BITS = 32
EXPRESSIONS = (
    "{zero}",
    "{a} & {b}",
    "{a} & ~{b}",
    "{a}",
    "~{a} & {b}",
    "{b}",
    "{a} ^ {b}",
    "{a} | {b}",
    "~({a} | {b})",
    "~({a} ^ {b})",
    "~{b}",
    "{a} | ~{b}",
    "~{a}",
    "~{a} | {b}",
    "~({a} & {b})",
    "{one}",
)
"""The 16 functions in operators that C and Verilog share."""
# C compilers take more than twice as long for twice as long a function.
_LINES_A_FUNCTION = 50


def pack_bits(bits: Bool[np.ndarray, "samples features"]) -> UInt32[np.ndarray, "features words"]:
    """Samples as words: bit k of word w is sample 32 w + k. The last word is filled up with zeros."""
    bits = np.asarray(bits, bool)
    words = -(-len(bits) // WORD_BITS)
    filled = np.zeros((bits.shape[1], words * WORD_BITS), bool)
    filled[:, : len(bits)] = bits.T
    packed = np.packbits(filled, axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)


def unpack_bits(words: UInt32[np.ndarray, "features words"], samples: int) -> Bool[np.ndarray, "samples features"]:
    """The inverse of `pack_bits`."""
    packed = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    return np.unpackbits(packed, axis=1, count=samples, bitorder="little").T.astype(bool)


def bitwise_gate_layer(gates: UInt8[Array, "gates"], wires: Wires, x: UInt32[Array, "inputs words"]) -> Array:
    """A layer of hardened gates on words, `(inputs, words) -> (gates, words)`: JAX's, or NumPy's if x is.

    Args:
      gates: their numbers, as `jaxbp.harden` gives them.
    """
    a, b = x[wires.a], x[wires.b]
    masks = _MASKS if isinstance(x, np.ndarray) else jnp.asarray(_MASKS)
    c0, c1, c2, c3 = masks[gates].T[..., None]
    return c0 ^ (c1 & a) ^ ((c2 ^ (c3 & a)) & b)


# All ones where a coefficient is odd.
_MASKS = np.where(COEFFICIENTS % 2, np.uint32(2**32 - 1), np.uint32(0)).astype(np.uint32)


@dataclasses.dataclass(frozen=True, eq=False)
class Circuit:
    """Layers of hardened gates.

    Attributes:
      layers: of each, the numbers of its gates and its wires, on the host.
    """

    layers: Sequence[tuple[UInt8[np.ndarray, "gates"], Wires]]

    @classmethod
    def of(cls, layers: Iterable[tuple[ArrayLike, Wires]]) -> "Circuit":
        """A circuit of `(gates, wires)`, as from `jaxbp.harden`.

        Raises:
          ValueError: no layers; gates that are not from 0 to 15, or not as many as the wires'; or a layer that reads
            more or fewer inputs than the one before has gates.
        """
        host = []
        for i, (gates, wires) in enumerate(layers):
            gates = np.asarray(gates)
            if gates.shape != (wires.gates,) or (gates.size and not 0 <= gates.min() <= gates.max() < GATES):
                came = f" from {gates.min()} to {gates.max()}" if gates.size else ""
                raise ValueError(
                    f"Circuit: layer {i} has gates of shape {gates.shape}{came}; wants {wires.gates} from 0 to 15"
                )
            if host and wires.inputs != host[-1][1].gates:
                before = host[-1][1].gates
                raise ValueError(f"Circuit: layer {i} reads {wires.inputs} inputs; wants {before}, the gates before")
            host.append((gates.astype(np.uint8), wires))
        if not host:
            raise ValueError("Circuit: there are no layers; wants at least one")
        return cls(tuple(host))

    @property
    def inputs(self) -> int:
        return self.layers[0][1].inputs

    @property
    def outputs(self) -> int:
        return self.layers[-1][1].gates

    def __call__(self, bits: Bool[np.ndarray, "samples inputs"]) -> Bool[np.ndarray, "samples outputs"]:
        """The outputs of each sample."""
        return unpack_bits(self.evaluate(pack_bits(bits)), len(bits))

    def evaluate(self, x: UInt32[np.ndarray, "inputs words"]) -> UInt32[np.ndarray, "outputs words"]:
        """The outputs of packed samples. Also within `jax.jit`, of JAX's arrays."""
        if x.shape[0] != self.inputs:
            raise ValueError(f"Circuit: x has shape {x.shape}; wants ({self.inputs}, words)")
        for gates, wires in self.layers:
            x = bitwise_gate_layer(gates, wires, x)
        return x

    def histogram(self) -> np.ndarray:
        """How many gates of each number every layer has: `(layers, 16)`."""
        return np.stack([np.bincount(gates, minlength=GATES) for gates, _ in self.layers])

    def to_c(self, name: str = "circuit") -> str:
        """C99 source of `void name(size_t words, const word *x, word *y)`, which computes what `evaluate` does.

        A word is a `uint32_t`, or whatever the macro WORD names when it is compiled: any type with bitwise operators.
        """
        _check_name(name)
        widths = [self.inputs, *(wires.gates for _, wires in self.layers)]
        functions, calls = [], []
        for i, (gates, wires) in enumerate(self.layers):
            lines = _assignments(gates, wires, "  y[{}] = {};", "x[{}]", zero="zero", one="~zero")
            source, target = ("u", "v") if i % 2 == 0 else ("v", "u")
            for start in range(0, len(lines), _LINES_A_FUNCTION):
                function = f"layer{i}_{start}"
                body = "\n".join(lines[start : start + _LINES_A_FUNCTION])
                functions.append(
                    f"static void {function}(const word *restrict x, word *restrict y) {{\n"
                    f"  const word zero = {{0}};\n  (void)zero;\n{body}\n}}\n"
                )
                calls.append(f"    {function}({source}, {target});")
        last = "v" if len(self.layers) % 2 else "u"
        return "\n".join(
            [
                "#include <stddef.h>\n#include <stdint.h>\n",
                "#ifndef WORD\n#define WORD uint32_t\n#endif\ntypedef WORD word;\n",
                *functions,
                f"/* x[{self.inputs}][words] to y[{self.outputs}][words]: each bit of a word is a sample. */",
                f"void {name}(size_t words, const word *x, word *y) {{",
                f"  word u[{max(widths)}], v[{max(widths)}];",
                "  for (size_t w = 0; w < words; w++) {",
                f"    for (size_t i = 0; i < {self.inputs}; i++) u[i] = x[i * words + w];",
                *calls,
                f"    for (size_t i = 0; i < {self.outputs}; i++) y[i * words + w] = {last}[i];",
                "  }\n}\n",
            ]
        )

    def to_verilog(self, name: str = "circuit") -> str:
        """A combinational Verilog module, from `input [inputs-1:0] x` to `output [outputs-1:0] y`."""
        _check_name(name)
        lines = [
            f"module {name} (",
            f"  input wire [{self.inputs - 1}:0] x,",
            f"  output wire [{self.outputs - 1}:0] y",
            ");",
        ]
        source = "x"
        for i, (gates, wires) in enumerate(self.layers):
            target = f"layer{i}"
            lines.append(f"  wire [{wires.gates - 1}:0] {target};")
            lines += _assignments(gates, wires, f"  assign {target}[{{}}] = {{}};", f"{source}[{{}}]", "1'b0", "1'b1")
            source = target
        return "\n".join([*lines, f"  assign y = {source};", "endmodule", ""])


def _assignments(gates, wires, line, operand, zero, one):
    """A line of source a gate."""
    return [
        line.format(g, EXPRESSIONS[gate].format(a=operand.format(a), b=operand.format(b), zero=zero, one=one))
        for g, (gate, a, b) in enumerate(zip(gates, np.asarray(wires.a), np.asarray(wires.b), strict=True))
    ]


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"Circuit: name is {name!r}; wants an identifier")
