import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import UInt32

from jaxbp.common import checks
from jaxbp.logic.circuits.circuit import Circuit
from jaxbp.logic.circuits.convolution import Convolution, sizes_text
from jaxbp.logic.circuits.netlist import BitCircuit, GateList, Netlist
from jaxbp.logic.circuits.sources import VERILOG_WORDS, CSource, check_name, verilog_module
from jaxbp.logic.gates import GATES, PASS_THROUGH
from jaxbp.logic.wires.tree_wires import TreeWires
from jaxbp.logic.wires.wires import Wires


@dataclasses.dataclass(frozen=True, eq=False)
class ConvolutionalCircuit(BitCircuit):
    """Convolutions of hardened gates, followed by the circuit `head`, unless it is None.

    Images `(channels, height, width)` are flattened in row-major order.
    """

    convolutions: Sequence[Convolution]
    head: Circuit | None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        convolutions: Iterable[tuple[ArrayLike, TreeWires] | tuple[ArrayLike, TreeWires, Mapping[str, Any]]],
        layers: Iterable[tuple[ArrayLike, Wires]] = (),
    ) -> "ConvolutionalCircuit":
        """Make a circuit from the gates and the wires of each convolution and each layer.

        Args:
          shape: channels, height, and width of an input.
          convolutions: for each convolution, the gates `(kernels, gates)` as `jaxbp.harden` returns them, the wires,
            and optionally a dict with the options `stride`, `padding`, and `pool` of `jaxbp.logic_conv2d_or_pool2d`.
            Without the option `pool`, there is no pool.
          layers: as in `jaxbp.Circuit.of`.

        Raises:
          TypeError: an option is unknown.
          ValueError: there are no convolutions; a shape, an option, or a gate's function is wrong; the layers' sizes do
            not match; or a window is larger than its input.
        """
        shape = tuple(shape)
        if len(shape) != 3 or not all(checks.is_int(n) and n >= 1 for n in shape):
            raise ValueError(
                f"ConvolutionalCircuit: shape is {shape}; wants (channels, height, width), each at least 1"
            )
        host = []
        for i, (gates, wires, *options) in enumerate(convolutions):
            host.append(Convolution.of(f"ConvolutionalCircuit: convolution {i}", shape, gates, wires, dict(*options)))
            shape = host[-1].output_shape
        if not host:
            raise ValueError("ConvolutionalCircuit: there are no convolutions; wants at least one convolution")
        layers = tuple(layers)
        if layers and layers[0][1].inputs != math.prod(shape):
            raise ValueError(
                f"ConvolutionalCircuit: the first layer reads {layers[0][1].inputs} inputs; "
                f"wants {math.prod(shape)}, the number of outputs of the convolutions, {sizes_text(shape)}"
            )
        return cls(tuple(host), Circuit.of(layers) if layers else None)

    def __repr__(self) -> str:
        shapes = [self.shape, *(convolution.output_shape for convolution in self.convolutions)]
        sizes = " -> ".join(map(sizes_text, shapes))
        if self.head:
            sizes += f", layers of {', '.join(str(wires.gates) for _, wires in self.head.layers)} gates"
        return f"ConvolutionalCircuit({sizes})"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.convolutions[0].shape

    @property
    def inputs(self) -> int:
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        return self.head.outputs if self.head else math.prod(self.convolutions[-1].output_shape)

    @property
    def gates(self) -> int:
        """The number of gates. A kernel's gates count once."""
        return int(self.histogram().sum())

    @property
    def placed_gates(self) -> int:
        """The number of gates if every position has a copy of each kernel. Gates of pools count, too."""
        convolutions = sum(convolution.placed_gates for convolution in self.convolutions)
        return convolutions + sum(wires.gates for _, wires in (self.head.layers if self.head else ()))

    def histogram(self) -> np.ndarray:
        """Return the number of gates with each function in each convolution and layer, `(layers, 16)`."""
        kernels = [np.bincount(c.gates.ravel(), minlength=GATES) for c in self.convolutions]
        return np.stack([*kernels, *(self.head.histogram() if self.head else ())])

    def evaluate(self, x: UInt32[np.ndarray, "inputs words"]) -> UInt32[np.ndarray, "outputs words"]:
        """Return the packed outputs of packed samples, as in `Circuit.evaluate`."""
        self.check_words(x)
        images = x.reshape(*self.shape, -1)
        for convolution in self.convolutions:
            images = convolution.evaluate(images)
        x = images.reshape(math.prod(images.shape[:3]), -1)
        return self.head.evaluate(x) if self.head else x

    @functools.cached_property
    def _head(self) -> Netlist:
        outputs = range(self.outputs)
        return self.head.netlist().simplify() if self.head else Netlist.from_gates(len(outputs), [], [], [], outputs)

    def netlist(self) -> Netlist:
        """Return one netlist: the simplified kernels, copied to each position, the pools, and the simplified layers.

        `Netlist.simplify` simplifies it further, but takes long for many gates.
        """
        gates = GateList(self.inputs)
        x = np.arange(self.inputs).reshape(self.shape)
        for convolution in self.convolutions:
            x = convolution.place(x, gates)
        return gates.netlist(gates.place(self._head, x.ravel()))

    def add_to(self, source: CSource, first: int = 0) -> tuple[list[int], int]:
        # The images of the convolutions lie in the memory with their padding, one after the other. If the first image
        # has padding, it is a copy of the input. A kernel is a loop over the windows of the pool.
        begin = self.inputs if any(map(any, self.convolutions[0].padding)) else 0
        firsts = list(itertools.accumulate((math.prod(c.padded_shape) for c in self.convolutions), initial=begin))
        images = [convolution.rows(row) for convolution, row in zip(self.convolutions, firsts[:-1], strict=True)]
        last = self.convolutions[-1].output_shape
        images.append(firsts[-1] + np.arange(math.prod(last)).reshape(last))
        if begin:
            sources = np.arange(self.inputs)
            source.add_gates(PASS_THROUGH, 0, begin, np.stack([images[0].ravel() - begin, sources, sources], axis=1))
        for i, convolution in enumerate(self.convolutions):
            convolution.add_to(source, i, firsts[i], images[i + 1])
        return self._head.add_to(source, firsts[-1])

    def to_verilog(self, name: str = "circuit", pipelined: bool = False) -> str:
        """Return Verilog, with the ports `input [inputs-1:0] x` and `output [outputs-1:0] y` of the module `{name}`.

        Args:
          pipelined: whether to put registers after each convolution's pool and after each layer. The module then has an
            `input clock` and takes a new x at each rising edge. A comment in the source has the number of edges after
            which y appears.
        """
        check_name("ConvolutionalCircuit", name, VERILOG_WORDS)
        modules, parts = [], []
        for i, convolution in enumerate(self.convolutions):
            parts.append((f"{name}_convolution{i}", math.prod(convolution.output_shape)))
            modules.append(convolution.to_verilog(name, i))
        if self.head:
            layers = [self._head]
            if pipelined:
                layers = [Netlist.of(Circuit.of([layer])).simplify() for layer in self.head.layers]
            for i, layer in enumerate(layers):
                parts.append((f"{name}_layer{i}", layer.outputs))
                modules.append(layer.to_verilog(parts[-1][0]))
        lines, source = [], "x"
        for i, (module, outputs) in enumerate(parts):
            lines += [f"wire [{outputs - 1}:0] y{i};", f"{module} part{i} (.x({source}), .y(y{i}));"]
            source = f"y{i}"
            if pipelined:
                lines += [f"reg [{outputs - 1}:0] held{i};", f"always @(posedge clock) held{i} <= y{i};"]
                source = f"held{i}"
        lines.append(f"assign y = {source};")
        if pipelined:
            modules.append(f"// y is the result of the x that was taken {len(parts)} rising edges of the clock ago.\n")
        modules.append(verilog_module(name, self.inputs, self.outputs, lines, clocked=pipelined))
        return "\n".join(modules)
