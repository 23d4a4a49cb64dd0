"""Hardened cellular automata."""

import string
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, UInt64

from jaxbp.common import checks
from jaxbp.logic.circuits.bits import GRID_WORD_BITS, pack_grid, unpack_grid
from jaxbp.logic.circuits.circuit import Circuit
from jaxbp.logic.circuits.netlist import BitCircuit, Netlist
from jaxbp.logic.circuits.sources import C_WORDS, VERILOG_WORDS, check_name
from jaxbp.logic.wires.automaton_wires import CENTER, NEIGHBORHOOD

# In the C source, a border word follows each row of a grid. Its bit 63 is the left neighbor of the next row's cell 0.
_C_SOURCE = string.Template(r"""#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ${name}_channels = $channels, ${name}_periodic = $periodic, ${name}_block = 8 };

/* The next state of the cells of a block of words, from their neighborhoods, with 64 cells per word. */
static void ${name}_cells(uint64_t (*restrict x)[${name}_block], uint64_t (*restrict y)[${name}_block]) {
  for (size_t k = 0; k < ${name}_block; k++) {
$lines
  }
  (void)x;
}

/* One tick of the words from begin to end of a plane, block by block. */
static void ${name}_tick(size_t stride, size_t plane, size_t begin, size_t end, const uint64_t *x, uint64_t *y) {
  enum { channels = ${name}_channels, block = ${name}_block };
  uint64_t neighborhood[9 * channels][block], next[channels][block];
  for (size_t i = begin; i < end; i += block) {
    for (size_t c = 0; c < channels; c++)
      for (size_t row = 0; row < 3; row++) {
        const uint64_t *at = x + c * plane + i + row * stride - stride;
        for (size_t k = 0; k < block; k++) {
          neighborhood[3 * row * channels + c][k] = at[k] << 1 | (at - 1)[k] >> 63;
          neighborhood[(3 * row + 1) * channels + c][k] = at[k];
          neighborhood[(3 * row + 2) * channels + c][k] = at[k] >> 1 | at[k + 1] << 63;
        }
      }
    ${name}_cells(neighborhood, next);
    for (size_t c = 0; c < channels; c++) memcpy(y + c * plane + i, next[c], sizeof next[c]);
  }
}

/* Clears the bits after each row, and fills the border. */
static void ${name}_border(size_t height, size_t width, size_t plane, uint64_t *x) {
  const size_t words = (width + 63) / 64, stride = words + 1, last = (width - 1) % 64;
  for (uint64_t *top = x + 1; top < x + ${name}_channels * plane; top += plane) {
    uint64_t *bottom = top + (height + 1) * stride;
    for (size_t r = 1; r <= height; r++) top[r * stride + words - 1] &= ~(uint64_t)0 >> (63 - last);
    for (size_t w = 0; w < words; w++) {
      top[w] = ${name}_periodic ? top[height * stride + w] : 0;
      bottom[w] = ${name}_periodic ? top[stride + w] : 0;
    }
    for (uint64_t *row = top; row <= bottom; row += stride) {
      const uint64_t before = ${name}_periodic ? row[words - 1] >> last & 1 : 0;
      const uint64_t behind = ${name}_periodic ? row[0] & 1 : 0;
      row[-1] = (row[-1] & 1) | before << 63;
      row[words] = 0;
      row[width / 64] |= behind << (width % 64);
    }
  }
}

/* The number of words of a plane: one channel of the grid with its border. */
static size_t ${name}_plane(size_t height, size_t width) {
  return (height + 2) * ((width + 63) / 64 + 1) + 2 + ${name}_block;
}

/* The number of words of the memory of $name. */
size_t ${name}_memory(size_t height, size_t width) {
  return 2 * ${name}_channels * ${name}_plane(height, width);
}

/* Advances state[$channels][height][(width + 63) / 64] by ticks: bit j of word w of a row is its cell 64 w + j.
   memory[${name}_memory(height, width)] may contain anything. */
void $name(size_t height, size_t width, size_t ticks, uint64_t *state, uint64_t *memory) {
  if (!height || !width) return;
  const size_t words = (width + 63) / 64, stride = words + 1, plane = ${name}_plane(height, width);
  uint64_t *x = memory, *y = memory + ${name}_channels * plane;
  memset(memory, 0, ${name}_memory(height, width) * sizeof *memory);
  for (size_t row = 0; row < ${name}_channels * height; row++)
    memcpy(x + row / height * plane + 1 + (1 + row % height) * stride, state + row * words, words * sizeof *x);
  ${name}_border(height, width, plane, x);
  for (size_t tick = 0; tick < ticks; tick++) {
    ${name}_tick(stride, plane, 1 + stride, 1 + (1 + height) * stride, x, y);
    ${name}_border(height, width, plane, y);
    uint64_t *const z = x;
    x = y;
    y = z;
  }
  for (size_t row = 0; row < ${name}_channels * height; row++) {
    uint64_t *const to = state + row * words;
    memcpy(to, x + row / height * plane + 1 + (1 + row % height) * stride, words * sizeof *x);
    to[words - 1] &= ~(uint64_t)0 >> (63 - (width - 1) % 64);
  }
}
""")

_VERILOG_SOURCE = string.Template(r"""
// A grid of cells, each with registers. Bit (row * $width + column) * $channels + channel of a state is one channel of
// one cell. With load, the cells take the state `loaded`. Otherwise, with enable, they tick.
module $name (
  input wire clock,
  input wire load,
  input wire enable,
  input wire [$last:0] loaded,
  output wire [$last:0] state
);
  localparam HEIGHT = $height, WIDTH = $width, CHANNELS = $channels, PERIODIC = $periodic;
  // The grid has a border of one cell on every side.
  wire [CHANNELS - 1:0] cells [0:(HEIGHT + 2) * (WIDTH + 2) - 1];
  genvar r, c;
  generate
    for (r = 0; r < HEIGHT + 2; r = r + 1) begin : rows
      for (c = 0; c < WIDTH + 2; c = c + 1) begin : columns
        if (r > 0 && r <= HEIGHT && c > 0 && c <= WIDTH) begin : interior
          localparam BELOW = (r + 1) * (WIDTH + 2) + c, HERE = BELOW - WIDTH - 2, ABOVE = HERE - WIDTH - 2;
          localparam BIT = ((r - 1) * WIDTH + c - 1) * CHANNELS;
          wire [CHANNELS - 1:0] next;
          reg [CHANNELS - 1:0] held;
          ${name}_cell circuit (
            .x({cells[BELOW + 1], cells[BELOW], cells[BELOW - 1],
                cells[HERE + 1], cells[HERE], cells[HERE - 1],
                cells[ABOVE + 1], cells[ABOVE], cells[ABOVE - 1]}),
            .y(next)
          );
          always @(posedge clock)
            if (load) held <= loaded[BIT +: CHANNELS];
            else if (enable) held <= next;
          assign cells[HERE] = held;
          assign state[BIT +: CHANNELS] = held;
        end else if (PERIODIC) begin : wrapped
          localparam OPPOSITE = (1 + (r + HEIGHT - 1) % HEIGHT) * (WIDTH + 2) + 1 + (c + WIDTH - 1) % WIDTH;
          assign cells[r * (WIDTH + 2) + c] = cells[OPPOSITE];
        end else begin : exterior
          assign cells[r * (WIDTH + 2) + c] = {CHANNELS{1'b0}};
        end
      end
    end
  endgenerate
endmodule
""")


class CellularCircuit:
    """A grid of any size, whose cells all run one circuit.

    Input `p * channels + c` of the circuit is channel c at position p of the 3 x 3 neighborhood, in row-major order.
    Output c is channel c of the cell's next state.

    Args:
      periodic: whether opposite edges are neighbors. If not, cells outside the grid are 0.

    Raises:
      TypeError: the circuit is not a `Circuit` or a `Netlist`.
      ValueError: the circuit does not have `9 * channels` inputs and `channels` outputs, or `channels` is below 1.
    """

    def __init__(self, circuit: Circuit | Netlist, channels: int, periodic: bool = False):
        channels = checks.count("CellularCircuit", "channels", channels)
        periodic = checks.boolean("CellularCircuit", "periodic", periodic)
        if not isinstance(circuit, BitCircuit):
            raise TypeError(f"CellularCircuit: circuit is a {type(circuit).__name__}; wants a Circuit or a Netlist")
        if (circuit.inputs, circuit.outputs) != (NEIGHBORHOOD * channels, channels):
            raise ValueError(
                f"CellularCircuit: circuit has {circuit.inputs} inputs and {circuit.outputs} outputs; "
                f"wants {NEIGHBORHOOD * channels} inputs (nine per channel) and {channels} outputs (one per channel)"
            )
        self.netlist = circuit.netlist().simplify()
        self.channels, self.periodic = channels, periodic

    @property
    def gates(self) -> int:
        """The number of gates per cell after simplification."""
        return len(self.netlist)

    def seen(self, visible: int) -> "CellularCircuit":
        """Return an automaton with only the gates that affect the first `visible` channels at any tick.

        A channel without effect on the visible channels keeps its state.

        Raises:
          ValueError: `visible` is not from 1 to the number of channels.
        """
        if not checks.is_int(visible) or not 1 <= visible <= self.channels:
            wanted = f"an int from 1 to {self.channels}, the number of channels"
            raise ValueError(f"CellularCircuit: visible is {visible!r}; wants {wanted}")
        netlist = self.netlist
        sources = [{i % self.channels} for i in range(netlist.inputs)]  # source -> the channels on which it depends
        for a, b in zip(netlist.a.tolist(), netlist.b.tolist(), strict=True):
            sources.append(sources[a] | sources[b])
        results = netlist.results.tolist()
        needed, found = set(), set(range(visible))
        while found:
            needed |= found
            found = set().union(*(sources[results[channel]] for channel in found)) - needed
        results = [results[c] if c in needed else CENTER * self.channels + c for c in range(self.channels)]
        gates = Netlist.from_gates(netlist.inputs, netlist.gates, netlist.a, netlist.b, results)
        return CellularCircuit(gates, self.channels, self.periodic)

    def step(
        self,
        state: Bool[np.ndarray, "batch height width channels"],
        fires: Bool[np.ndarray, "batch height width"] | None = None,
    ) -> Bool[np.ndarray, "batch height width channels"]:
        """Return the state after one tick. Only cells where `fires` is true update; None updates all cells.

        Raises:
          ValueError: an array is not boolean or has a wrong shape.
        """
        self._check(state)
        if fires is not None and (fires.dtype != bool or fires.shape != state.shape[:3]):
            raise ValueError(
                f"CellularCircuit: fires has shape {fires.shape} and dtype {fires.dtype}; "
                f"wants booleans of shape {state.shape[:3]}"
            )
        firing = None if fires is None else pack_grid(fires[..., None])
        return unpack_grid(self._tick(pack_grid(state), state.shape[2], firing), state.shape[2])

    def run(
        self,
        state: Bool[np.ndarray, "batch height width channels"],
        ticks: int,
        *,
        fire_rate: float = 1.0,
        seed: int | None = None,
    ) -> Bool[np.ndarray, "batch height width channels"]:
        """Return the state after `ticks` ticks. At each tick, each cell updates with probability `fire_rate`.

        Raises:
          ValueError: the state is not boolean or has a wrong shape; `ticks` is below 0; `fire_rate` is not in [0, 1];
            or `fire_rate` is below 1, but there is no seed.
        """
        for words in self._run(state, ticks, fire_rate, seed):
            last = words
        return unpack_grid(last, state.shape[2])

    def states(
        self,
        state: Bool[np.ndarray, "batch height width channels"],
        ticks: int,
        *,
        fire_rate: float = 1.0,
        seed: int | None = None,
    ) -> Bool[np.ndarray, "ticks+1 batch height width channels"]:
        """Return the initial state and the state after each tick, with the arguments and errors of `run`."""
        return np.stack([unpack_grid(words, state.shape[2]) for words in self._run(state, ticks, fire_rate, seed)])

    def _run(self, state, ticks, fire_rate, seed) -> Iterator[np.ndarray]:
        self._check(state)
        checks.count("CellularCircuit", "ticks", ticks, at_least=0)
        if not 0 <= fire_rate <= 1 or (fire_rate < 1 and seed is None):
            raise ValueError(
                f"CellularCircuit: fire_rate is {fire_rate} and seed is {seed}; "
                "wants a fire_rate in [0, 1], and a seed if fire_rate is below 1"
            )
        random = np.random.default_rng(seed)
        yield (words := pack_grid(state))
        for _ in range(ticks):
            fires = pack_grid(random.random((*state.shape[:3], 1)) < fire_rate) if fire_rate < 1 else None
            yield (words := self._tick(words, state.shape[2], fires))

    def _tick(self, x: UInt64[np.ndarray, "channels batch height words"], width: int, fires: np.ndarray | None):
        y = self.netlist.evaluate(_neighborhoods(x, width, self.periodic))
        if fires is None:
            fires = pack_grid(np.ones((1, 1, width, 1), bool))
        return x ^ ((x ^ y) & fires)

    def _check(self, state):
        if state.dtype != bool or state.ndim != 4 or state.shape[-1] != self.channels or 0 in state.shape[1:3]:
            raise ValueError(
                f"CellularCircuit: state has shape {state.shape} and dtype {state.dtype}; "
                f"wants booleans of shape (batch, height, width, {self.channels})"
            )

    def to_c(self, name: str = "automaton") -> str:
        """Return C99 source of a function that runs the automaton.

        `void name(size_t height, size_t width, size_t ticks, uint64_t *state, uint64_t *memory)` advances
        `state[channels][height][(width + 63) / 64]` in place. `pack_grid(states)[:, i]` is grid i of a batch in this
        layout. The caller provides memory of `size_t name_memory(size_t height, size_t width)` words, for example a
        static array. The function has no other state, so that threads may call it at the same time.
        """
        check_name("CellularCircuit", name, C_WORDS)
        inputs = [f"x[{i}][k]" for i in range(self.netlist.inputs)]
        lines, results = self.netlist.statements("const uint64_t", inputs, "0", "~(uint64_t)0")
        lines += [f"y[{c}][k] = {result};" for c, result in enumerate(results)]
        return _C_SOURCE.substitute(
            name=name,
            channels=self.channels,
            periodic=int(self.periodic),
            lines="\n".join(f"    {line}" for line in lines),
        )

    def to_verilog(self, height: int, width: int, name: str = "automaton") -> str:
        """Return two Verilog modules: the circuit of one cell, `{name}_cell`, and the grid with registers, `{name}`.

        A Verilog comment describes the ports of `{name}`.

        Raises:
          ValueError: height or width is not an int of at least 1, or the name is reserved or not ASCII.
        """
        height = checks.count("CellularCircuit", "height", height)
        width = checks.count("CellularCircuit", "width", width)
        check_name("CellularCircuit", name, VERILOG_WORDS)
        return self.netlist.to_verilog(f"{name}_cell") + _VERILOG_SOURCE.substitute(
            name=name,
            height=height,
            width=width,
            channels=self.channels,
            periodic=int(self.periodic),
            last=height * width * self.channels - 1,
        )


def _neighborhoods(x: np.ndarray, width: int, periodic: bool) -> np.ndarray:
    """Return each cell's 3 x 3 neighborhood, `(9 * channels, batch, height, words)`, with 64 cells per word."""
    one, top, last = (np.uint64(bit) for bit in (1, GRID_WORD_BITS - 1, (width - 1) % GRID_WORD_BITS))
    edge, height = np.uint64(periodic), x.shape[2]
    rows = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)), mode="wrap" if periodic else "constant")
    before = np.concatenate([(rows[..., -1:] >> last & edge) << top, rows[..., :-1]], axis=-1)
    behind = np.concatenate([rows[..., 1:], np.zeros_like(rows[..., :1])], axis=-1)
    west = rows << one | before >> top
    east = rows >> one | behind << top
    east[..., -1] |= (rows[..., 0] & edge) << last
    return np.concatenate([column[:, :, r : r + height] for r in range(3) for column in (west, rows, east)])
