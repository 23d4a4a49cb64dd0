import dataclasses
import functools
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, UInt32

from jaxbp.common import checks
from jaxbp.common.content import ByContent
from jaxbp.logic.circuits.circuit import WORD_BITS, Circuit, booleans, pack_bits, unpack_bits
from jaxbp.logic.circuits.convolution import Convolution, convolution_of, sizes_text
from jaxbp.logic.circuits.netlist import GateList, Netlist
from jaxbp.logic.circuits.sources import Code, Table, c_of_tables, check_c, check_verilog, verilog_of
from jaxbp.logic.gates import GATES, PASS_THROUGH
from jaxbp.logic.wires.tree_wires import TreeWires
from jaxbp.logic.wires.wires import Wires

WORDS_AT_A_TIME = 32


@dataclasses.dataclass(frozen=True, eq=False)
class ConvolutionalCircuit(ByContent):
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
            host.append(convolution_of(f"ConvolutionalCircuit: convolution {i}", shape, gates, wires, dict(*options)))
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

    def __call__(self, bits: Bool[np.ndarray, "samples channels height width"]) -> Bool[np.ndarray, "samples outputs"]:
        bits = np.asarray(bits)
        if bits.shape[1:] != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"ConvolutionalCircuit: bits has shape {bits.shape}; wants (samples, {wanted})")
        bits = booleans("ConvolutionalCircuit", bits)
        y, at_a_time = np.empty((len(bits), self.outputs), bool), WORDS_AT_A_TIME * WORD_BITS
        for begin in range(0, len(bits), at_a_time):  # limits memory
            some = bits[begin : begin + at_a_time].reshape(-1, self.inputs)
            y[begin : begin + at_a_time] = unpack_bits(self.evaluate(pack_bits(some)), len(some))
        return y

    def evaluate(self, x: UInt32[np.ndarray, "inputs words"]) -> UInt32[np.ndarray, "outputs words"]:
        """Return the packed outputs of packed samples, as in `Circuit.evaluate`."""
        if x.shape[0] != self.inputs:
            raise ValueError(f"ConvolutionalCircuit: x has shape {x.shape}; wants ({self.inputs}, words)")
        words = x.shape[1]
        x = x.reshape(*self.shape, words)
        for convolution in self.convolutions:
            x = convolution.evaluate(x)
        x = x.reshape(math.prod(x.shape[:3]), words)
        return self.head.evaluate(x) if self.head else x

    @functools.cached_property
    def _kernels(self) -> list[Netlist]:
        return [convolution.netlist().simplify() for convolution in self.convolutions]

    @functools.cached_property
    def _head(self) -> Netlist | None:
        return Netlist.of(self.head).simplify() if self.head else None

    def netlist(self) -> Netlist:
        """Return one netlist: the simplified kernels, copied to each position, the pools, and the simplified layers.

        `Netlist.simplify` simplifies it further, but takes long for many gates.
        """
        gates = GateList(self.inputs)
        x = np.arange(self.inputs).reshape(self.shape)
        for convolution, kernels in zip(self.convolutions, self._kernels, strict=True):
            x = convolution.place(x, kernels, gates)
        return gates.netlist(gates.place(self._head, x.ravel()) if self.head else x.ravel())

    def to_c(self, name: str = "circuit", classes: int | None = None) -> str:
        """Return C99 source as described in `Circuit.to_c`, with a loop over the pool's windows for each kernel."""
        check_c("ConvolutionalCircuit", name, classes, self.outputs)
        tables, end = [], 0
        if any(map(any, self.convolutions[0].padding)):
            end = self.inputs  # a padded copy of the input follows the input
        images = []
        for shape, ((top, _), (left, _)) in (
            *((c.padded_shape, c.padding) for c in self.convolutions),
            (self.convolutions[-1].output_shape, ((0, 0), (0, 0))),
        ):
            images.append(_Image(end, shape, (top, left)))
            end += math.prod(shape)
        if images[0].first:
            sources = np.arange(self.inputs)
            numbers = np.stack([images[0].rows(self.shape).ravel(), sources, sources], axis=1)
            tables.append(Table(PASS_THROUGH, 0, images[0].first, numbers))
        for i, (convolution, kernels) in enumerate(zip(self.convolutions, self._kernels, strict=True)):
            tables.append(_c_of_convolution(name, i, convolution, kernels, *images[i : i + 2]))
        first, results, rows = images[-1].first, range(self.outputs), self.outputs
        if self.head:
            layers, results, rows = self._head.tables(first)
            tables += layers
        return c_of_tables(name, self.inputs, first + rows, tables, results, first, classes)

    def to_verilog(self, name: str = "circuit", pipelined: bool = False) -> str:
        """Return Verilog, with the ports `input [inputs-1:0] x` and `output [outputs-1:0] y` of the module `{name}`.

        Args:
          pipelined: whether to put registers after each convolution's pool and after each layer. The module then has an
            `input clock` and takes a new x at each rising edge. A comment in the source has the number of edges after
            which y appears.
        """
        check_verilog("ConvolutionalCircuit", name)
        modules, parts = [], []
        for i, (convolution, kernels) in enumerate(zip(self.convolutions, self._kernels, strict=True)):
            parts.append((f"{name}_convolution{i}", math.prod(convolution.output_shape)))
            modules += [kernels.to_verilog(f"{name}_kernels{i}"), _verilog_of_convolution(name, i, convolution)]
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
        modules.append(verilog_of(name, self.inputs, self.outputs, lines, clocked=pipelined))
        return "\n".join(modules)


class _Image(NamedTuple):
    """An image in the memory of the C code. A memory row holds one element of the image.

    Attributes:
      first: the memory row of the first element.
      shape: the shape with padding.
      corner: the padding above and to the left.
    """

    first: int
    shape: tuple[int, int, int]
    corner: tuple[int, int]

    def rows(self, shape: tuple[int, int, int]) -> np.ndarray:
        # Rows are counted from `first`.
        (_, height, width), (top, left) = shape, self.corner
        return np.arange(math.prod(self.shape)).reshape(self.shape)[:, top : top + height, left : left + width]


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


def _c_of_convolution(
    name: str, i: int, convolution: Convolution, kernels: Netlist, source: _Image, target: _Image
) -> Code:
    window = np.indices((source.shape[0], *convolution.wires.window)).reshape(3, -1)
    reads = np.ravel_multi_index(tuple(window), source.shape).tolist()
    names = [f"x[{name}_block * {row}]" for row in reads] + [f"g{g}" for g in range(len(kernels))]
    expressions = kernels.expressions(names, "0", "~(uint32_t)0")
    functions, calls = [], []
    writes = target.rows(convolution.output_shape)[:, 0, 0].tolist()
    for k, (cone, result, to) in enumerate(zip(kernels.cones(), kernels.results.tolist(), writes, strict=True)):
        tree, kernel = (f"{name}_convolution{i}_{part}{k}" for part in ("tree", "kernel"))
        lines = [f"const uint32_t g{g} = {expressions[g]};" for g in cone]
        lines += ["(void)x;", f"return {names[result]};"]
        body = "\n".join(f"  {line}" for line in lines)
        functions.append(f"static inline uint32_t {tree}(const uint32_t *x) {{\n{body}\n}}")
        functions.append(f"{name}_CONVOLUTION{i}({kernel}, {tree})")
        calls.append(f"  {kernel}(x, y + block * {to});")
    _, rows, columns = convolution.output_shape
    down, right = convolution.steps
    values = dict(name=name, i=i, rows=rows, columns=columns, kernels="\n".join(functions), calls="\n".join(calls))
    values |= dict(down=down * source.shape[2], right=right, width=target.shape[2])
    values["pool"] = " | ".join(f"tree(from + k + block * {u * source.shape[2] + v})" for u, v in convolution.pooled)
    return Code(f"{name}_convolution{i}", source.first, target.first, _C_CONVOLUTION.substitute(values))


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


def _verilog_of_convolution(name: str, i: int, convolution: Convolution) -> str:
    (channels, height, width), (kernels, rows, columns) = convolution.shape, convolution.output_shape
    (top, _), (left, _) = convolution.padding
    _, padded_height, padded_width = convolution.padded_shape
    window_height, window_width = convolution.wires.window
    pool_rows, pool_columns = convolution.pool
    row_stride, column_stride = convolution.stride
    pool = " | ".join(f"found[{place} * KERNELS + channel]" for place in range(pool_rows * pool_columns))
    return _VERILOG_CONVOLUTION.substitute(locals())  # the template uses the names of the local variables
