import dataclasses
import functools
import itertools
import math
import operator
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int, UInt8, UInt32

from jaxbp.common import checks
from jaxbp.common.content import ByContent
from jaxbp.common.windows import output_size, window_padding
from jaxbp.logic.circuits.circuit import Circuit, as_pairs, gate_numbers, gates_and_wires
from jaxbp.logic.circuits.netlist import BitCircuit, GateList, Netlist
from jaxbp.logic.circuits.sources import VERILOG_WORDS, CSource, check_name
from jaxbp.logic.circuits.verilog import circuit_module
from jaxbp.logic.gates import GATES, PASS_THROUGH
from jaxbp.logic.wires.tree_wires import TreeWires
from jaxbp.logic.wires.wires import Wires

OR = 7

_C_CONVOLUTION = string.Template(r"""
/* A kernel of convolution $i in $rows x $columns pools. */
#define ${name}_CONVOLUTION$i(kernel, tree) \
  static void kernel(const uint32_t *restrict x, uint32_t *restrict y) { \
    enum { block = ${name}_block }; \
    for (size_t r = 0; r < $rows; r++) \
      for (size_t c = 0; c < $columns; c++) { \
        const uint32_t *from = x + block * ($down * r + $right * c); \
        uint32_t *to = y + block * ($width * r + c); \
        for (size_t k = 0; k < block; k++) to[k] = $pool; \
      } \
  }
$kernels
static void ${name}_convolution$i(const uint32_t *x, uint32_t *y) {
  enum { block = ${name}_block };
$calls
}
""")

_VERILOG_CONVOLUTION = string.Template(r"""
// Bit (channel * height + row) * width + column of an image is the pixel in that row and column of the channel.
module ${name}_convolution$i (
  input wire [$channels * $height * $width - 1:0] x,
  output wire [$kernels * $rows * $columns - 1:0] y
);
  localparam CHANNELS = $channels, HEIGHT = $height, WIDTH = $width, TOP = $top, LEFT = $left;
  localparam PADDED_HEIGHT = $padded_height, PADDED_WIDTH = $padded_width;
  localparam WINDOW_HEIGHT = $window_height, WINDOW_WIDTH = $window_width, KERNELS = $kernels;
  localparam ROWS = $rows, COLUMNS = $columns, POOL_ROWS = $pool_rows, POOL_COLUMNS = $pool_columns;
  genvar channel, row, column, r, c, u, v;
  wire [CHANNELS * PADDED_HEIGHT * PADDED_WIDTH - 1:0] padded;
  generate
    for (channel = 0; channel < CHANNELS; channel = channel + 1) begin : channels
      for (row = 0; row < PADDED_HEIGHT; row = row + 1) begin : image_rows
        for (column = 0; column < PADDED_WIDTH; column = column + 1) begin : image_columns
          localparam BIT = (channel * PADDED_HEIGHT + row) * PADDED_WIDTH + column;
          if (row >= TOP && row < TOP + HEIGHT && column >= LEFT && column < LEFT + WIDTH) begin : interior
            assign padded[BIT] = x[(channel * HEIGHT + row - TOP) * WIDTH + column - LEFT];
          end else begin : exterior
            assign padded[BIT] = 1'b0;
          end
        end
      end
    end
    for (r = 0; r < ROWS; r = r + 1) begin : rows
      for (c = 0; c < COLUMNS; c = c + 1) begin : columns
        wire [POOL_ROWS * POOL_COLUMNS * KERNELS - 1:0] found;
        for (u = 0; u < POOL_ROWS; u = u + 1) begin : pool_rows
          for (v = 0; v < POOL_COLUMNS; v = v + 1) begin : pool_columns
            localparam ROW = (r * POOL_ROWS + u) * $row_stride, COLUMN = (c * POOL_COLUMNS + v) * $column_stride;
            wire [CHANNELS * WINDOW_HEIGHT * WINDOW_WIDTH - 1:0] window;
            for (channel = 0; channel < CHANNELS; channel = channel + 1) begin : window_channels
              for (row = 0; row < WINDOW_HEIGHT; row = row + 1) begin : window_rows
                assign window[(channel * WINDOW_HEIGHT + row) * WINDOW_WIDTH +: WINDOW_WIDTH] =
                  padded[(channel * PADDED_HEIGHT + ROW + row) * PADDED_WIDTH + COLUMN +: WINDOW_WIDTH];
              end
            end
            ${name}_kernels$i kernels (.x(window), .y(found[(u * POOL_COLUMNS + v) * KERNELS +: KERNELS]));
          end
        end
        for (channel = 0; channel < KERNELS; channel = channel + 1) begin : pools
          assign y[(channel * ROWS + r) * COLUMNS + c] = $pool;
        end
      end
    end
  endgenerate
endmodule
""")


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution(ByContent):
    """A convolution whose kernels are trees of hardened gates, followed by an or-pool.

    Attributes:
      shape: channels, height, and width of the images.
      padding: zeros before and after the rows, and before and after the columns.
      pool: the size of the or-pool's windows, which do not overlap. Incomplete windows are dropped.
    """

    gates: UInt8[np.ndarray, "kernels gates"]
    wires: TreeWires
    shape: tuple[int, int, int]
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    pool: tuple[int, int]

    @classmethod
    def of(
        cls, op: str, shape: tuple[int, int, int], gates: ArrayLike, wires: TreeWires, options: Mapping[str, Any]
    ) -> "Convolution":
        gates = gate_numbers(op, gates, wires.kernels, wires.gates)
        if wires.channels != shape[0]:
            wanted = f"{shape[0]}, the number of channels of its input"
            raise ValueError(f"{op} reads {wires.channels} channels; wants {wanted}")
        if unknown := options.keys() - {"stride", "padding", "pool"}:
            wanted = "only the options stride, padding, and pool"
            raise TypeError(f"{op} has the options {', '.join(unknown)}; wants {wanted}")
        stride, pool = (checks.pair(op, name, options.get(name, 1)) for name in ("stride", "pool"))
        padding = window_padding(op, options.get("padding", 0), shape[1:], wires.window, stride)
        places = output_size(shape[1:], wires.window, stride=stride, padding=padding)
        if any(n < p for n, p in zip(places, pool, strict=True)):
            found, least = _sizes(np.maximum(places, 0)), _sizes(pool)
            raise ValueError(
                f"{op} has an output of {found} positions; wants at least {least}, the size of the pool's window"
            )
        return cls(gates, wires, shape, stride, padding, pool)

    @property
    def padded_shape(self) -> tuple[int, int, int]:
        channels, *size = self.shape
        return (channels, *(n + sum(p) for n, p in zip(size, self.padding, strict=True)))

    @property
    def output_shape(self) -> tuple[int, int, int]:
        places = output_size(self.shape[1:], self.wires.window, stride=self.stride, padding=self.padding)
        return (self.wires.kernels, *(n // p for n, p in zip(places, self.pool, strict=True)))

    @property
    def steps(self) -> tuple[int, int]:
        """The distance between neighboring pool windows, in rows and columns of the image."""
        return tuple(s * p for s, p in zip(self.stride, self.pool, strict=True))

    @property
    def pooled(self) -> list[tuple[int, int]]:
        """For each convolution window in a pool window, its distance `(rows, columns)`, in pixels, from the first."""
        return [(i * self.stride[0], j * self.stride[1]) for i, j in itertools.product(*map(range, self.pool))]

    @property
    def placed_gates(self) -> int:
        pool = math.prod(self.pool)
        return math.prod(self.output_shape) * (pool * self.wires.gates + pool - 1)

    @functools.cached_property
    def kernels(self) -> Netlist:
        """One netlist of all kernels. Its inputs are the bits of one convolution window, in row-major order."""
        size = (self.shape[0], *self.wires.window)
        listed, first = GateList(math.prod(size)), 0
        values = np.ravel_multi_index(tuple(np.moveaxis(np.asarray(self.wires.leaves), -1, 0)), size)
        while (count := values.shape[1] // 2) > 0:
            values = listed.add(self.gates[:, first : first + count], values[:, ::2], values[:, 1::2])
            first += count
        return listed.netlist(values[:, 0])

    @functools.cached_property
    def simplified(self) -> Netlist:
        return self.kernels.simplify()

    @property
    def _window(self) -> tuple[np.ndarray, ...]:
        return tuple(np.indices((self.shape[0], *self.wires.window)).reshape(3, -1))

    def evaluate(self, x: UInt32[Array, "channels height width words"]) -> UInt32[Array, "kernels rows columns words"]:
        return self._applied(x, self.kernels.evaluate, operator.or_)

    def place(self, x: Int[np.ndarray, "channels height width"], gates: GateList) -> Int[np.ndarray, "kernels ..."]:
        """Add to `gates` one copy of the simplified kernels per convolution window, and the gates of the or-pool.

        x has the source of each bit of the image (see `Netlist`). Return the sources of the pooled image's bits.
        """
        outside = gates.add(0, 0, 0) if any(map(any, self.padding)) else 0
        copies = lambda windows: self.simplified.applied(windows, gates.add)  # noqa: E731
        return self._applied(x, copies, functools.partial(gates.add, OR), outside)

    def _applied(self, x: Array, kernels: Callable, either: Callable, outside: ArrayLike = 0) -> Array:
        """Apply `kernels`, which maps windows `(inputs, rows, columns, ...)` to `(kernels, rows, columns, ...)`, to the
        image, padded with `outside`, for each convolution window of every pool window. Combine these results by
        `either`."""
        pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
        x = pad(x, ((0, 0), *self.padding, *[(0, 0)] * (x.ndim - 3)), constant_values=outside)
        channel, row, column = (position[:, None, None] for position in self._window)
        (_, rows, columns), (down, right) = self.output_shape, self.steps
        row, column = row + down * np.arange(rows)[:, None], column + right * np.arange(columns)
        return functools.reduce(either, (kernels(x[channel, row + u, column + v]) for u, v in self.pooled))

    def rows(self, first: int) -> Int[np.ndarray, "channels height width"]:
        """Return the row of the C function's memory for each pixel, if the padded image begins in row `first`."""
        (_, height, width), ((top, _), (left, _)) = self.shape, self.padding
        padded = first + np.arange(math.prod(self.padded_shape)).reshape(self.padded_shape)
        return padded[:, top : top + height, left : left + width]

    def add_to(self, source: CSource, i: int, first: int, writes: Int[np.ndarray, "kernels rows columns"]) -> None:
        """Add convolution i, which reads the padded image from row `first` on, and writes the rows `writes`."""
        name = f"{source.name}_convolution{i}"
        reads = np.ravel_multi_index(self._window, self.padded_shape).tolist()
        pixels = [f"x[{source.name}_block * {row}]" for row in reads]
        gates, results = self.simplified.statements("const uint32_t", pixels, "0", "~(uint32_t)0")
        functions, calls = [], []
        for k, (cone, result) in enumerate(zip(self.simplified.cones(), results, strict=True)):
            lines = [*(gates[g] for g in cone), "(void)x;", f"return {result};"]
            body = "\n".join(f"  {line}" for line in lines)
            functions.append(f"static inline uint32_t {name}_tree{k}(const uint32_t *x) {{\n{body}\n}}")
            functions.append(f"{source.name}_CONVOLUTION{i}({name}_kernel{k}, {name}_tree{k})")
            calls.append(f"  {name}_kernel{k}(x, y + block * {writes[k, 0, 0]});")
        (_, rows, columns), (down, right), width = self.output_shape, self.steps, self.padded_shape[2]
        definition = _C_CONVOLUTION.substitute(
            name=source.name,
            i=i,
            rows=rows,
            columns=columns,
            down=down * width,
            right=right,
            width=np.diff(writes[0, :2, 0]).sum(),
            pool=" | ".join(f"tree(from + k + block * {u * width + v})" for u, v in self.pooled),
            kernels="\n".join(functions),
            calls="\n".join(calls),
        )
        source.add_call(definition, name, reads=first, writes=0)

    def to_verilog(self, name: str, i: int) -> str:
        """Return the modules `{name}_kernels{i}` and `{name}_convolution{i}`, which has an instance of the kernels per
        convolution window."""
        (channels, height, width), (kernels, rows, columns) = self.shape, self.output_shape
        (top, _), (left, _) = self.padding
        _, padded_height, padded_width = self.padded_shape
        window_height, window_width = self.wires.window
        (row_stride, column_stride), (pool_rows, pool_columns) = self.stride, self.pool
        pool = " | ".join(f"found[{place} * KERNELS + channel]" for place in range(pool_rows * pool_columns))
        # The template uses the names of the local variables.
        return self.simplified.to_verilog(f"{name}_kernels{i}") + _VERILOG_CONVOLUTION.substitute(locals())


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
          TypeError: an option is unknown, a convolution or a layer has another form, or its gates are not integers.
          ValueError: there are no convolutions; a shape, an option, or a gate's function is wrong; the layers' sizes do
            not match; or a window is larger than its input.
        """
        shape = image_shape("ConvolutionalCircuit", shape)
        host = []
        for i, convolution in enumerate(as_pairs("ConvolutionalCircuit: convolutions", convolutions)):
            op = f"ConvolutionalCircuit: convolution {i}"
            gates, wires, *options = gates_and_wires(op, convolution, TreeWires)
            host.append(Convolution.of(op, shape, gates, wires, dict(*options)))
            shape = host[-1].output_shape
        if not host:
            raise ValueError("ConvolutionalCircuit: there are no convolutions; wants at least one convolution")
        layers = as_pairs("Circuit: layers", layers)
        head = Circuit.of(layers) if layers else None
        if head and head.inputs != math.prod(shape):
            raise ValueError(
                f"ConvolutionalCircuit: the first layer reads {head.inputs} inputs; "
                f"wants {math.prod(shape)}, the number of outputs of the convolutions, {_sizes(shape)}"
            )
        return cls(tuple(host), head)

    def __repr__(self) -> str:
        shapes = [self.shape, *(convolution.output_shape for convolution in self.convolutions)]
        sizes = " -> ".join(map(_sizes, shapes))
        if self.head:
            sizes += f", layers of {', '.join(str(len(gates)) for gates, _ in self.head.layers)} gates"
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
        return convolutions + sum(len(gates) for gates, _ in (self.head.layers if self.head else ()))

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
        return gates.netlist(self._head.applied(x.ravel(), gates.add))

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

    def to_verilog(
        self, name: str = "circuit", pipelined: bool = False, *, classes: int | None = None, table_inputs: int = 6
    ) -> str:
        """Return Verilog, with the ports `input [inputs-1:0] x` and `output [outputs-1:0] y` of the module `{name}`.

        Args:
          pipelined: whether to put registers after each convolution's pool, each layer, and, with `classes`, each
            counter of votes and each comparison of classes. The module then has an `input clock` and takes a new x at
            each rising edge. The module's parameter LATENCY is the number of rising edges from x to y. With `classes`,
            it is the number of edges from x to `label`, and there is no port y.
          classes, table_inputs: as in `jaxbp.Circuit.to_verilog`.
        """
        check_name("ConvolutionalCircuit", name, VERILOG_WORDS)
        self.check_classes(classes)
        table_inputs = checks.count("ConvolutionalCircuit", "table_inputs", table_inputs, 3)
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
        latency, registers = (len(parts), 1) if pipelined else (None, None)
        sizes = self.inputs, self.outputs
        modules.append(circuit_module(name, *sizes, lines, latency, classes, registers, table_inputs))
        return "\n".join(modules)


def image_shape(op: str, shape: Iterable[int]) -> tuple[int, int, int]:
    shape = tuple(shape) if np.iterable(shape) else shape
    if not isinstance(shape, tuple) or len(shape) != 3 or not all(checks.is_int(n) and n >= 1 for n in shape):
        raise ValueError(f"{op}: shape is {shape!r}; wants (channels, height, width), each at least 1")
    return shape


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
