"""The rows of shared memory in which an automaton's tick and its backward keep inputs, gates, and gradients.

A row holds one float32 for each cell that a CTA computes at a time. The inputs come first, in the order (position in
the neighborhood, channel), then the gates layer by layer. Perception's gates are in the order gate, kernel, channel.
Every layer is padded to whole warpgroups. `Plan` derives the first row of each layer from the sizes of an automaton.

The forward reuses the rows of a layer as soon as nothing reads them any more. In the backward, the gradients reuse the
rows of layers that are finished. Each consumer of a row writes a gradient to a row, and tables list these rows for each
row whose gradient is their sum.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

from pallas_kernels.core.layouts import LANES

NEIGHBOURS = 9
"""Number of cells that a cell sees: the 3 x 3 around it, in row-major order."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Rows of shared memory for one layer.

    Attributes:
      first: the first row.
      lanes: number of rows, a multiple of a warpgroup's threads.
      count: number of rows that have a gate or an input.
      max_consumers: most consumers of a row.
      copies: number of consecutive lanes that share their coefficients.
    """

    first: int
    lanes: int
    count: int
    max_consumers: int
    copies: int = 1

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.first + self.lanes

    @property
    def coefficients(self) -> int:
        """Number of coefficient rows, including lanes without a gate."""
        return -(-self.lanes // self.copies)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of an automaton on a grid, which determine its rows of shared memory.

    Attributes:
      batch, height, width, channels, periodic: sizes of the grid, and whether it is periodic.
      kernels: number of perception's kernels.
      perception, update: number of gates in each layer.
      output_consumers: most consumers of an output, for each of perception's layers, then for each of update's layers
        but the last, whose outputs are the next state.
      neighbour_consumers: most consumers of one of the nine cells, in perception's first layer.
      centre_consumers: most consumers of the center, in update's first layer.
    """

    batch: int
    height: int
    width: int
    channels: int
    periodic: bool
    kernels: int
    perception: tuple[int, ...]
    update: tuple[int, ...]
    output_consumers: tuple[int, ...]
    neighbour_consumers: int
    centre_consumers: int

    @property
    def cells(self) -> int:
        return self.batch * self.height * self.width

    @property
    def neighbourhood(self) -> int:
        """Number of elements that a cell sees."""
        return NEIGHBOURS * self.channels

    @functools.cached_property
    def inputs(self) -> Layer:
        """Rows of the inputs. At least one lane has no input; its row is 0."""
        return Layer(0, padded_lanes(self.neighbourhood + 1), self.neighbourhood, self.neighbour_consumers)

    @property
    def zeros(self) -> int:
        """Index of a row of zeros, for rows with fewer consumers than others."""
        return self.neighbourhood

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Perception's layers, with a row for each gate, kernel, and channel, then update's layers."""
        counts = [gates * self.kernels * self.channels for gates in self.perception] + [*self.update]
        copies = [self.channels] * len(self.perception) + [1] * len(self.update)
        lanes = [padded_lanes(count) for count in counts]
        firsts = itertools.accumulate(lanes, initial=self.inputs.lanes)
        return tuple(map(Layer, firsts, lanes, counts, [*self.output_consumers, 0], copies))

    @functools.cached_property
    def coefficient_firsts(self) -> tuple[int, ...]:
        """First coefficient row of each layer, and the end of the last layer."""
        return tuple(itertools.accumulate((layer.coefficients for layer in self.layers), initial=0))

    @functools.cached_property
    def gate_firsts(self) -> tuple[int, ...]:
        """First gate of each layer among the lanes of all layers, and the end of the last layer."""
        return tuple(itertools.accumulate((layer.lanes for layer in self.layers), initial=0))

    @property
    def rows(self) -> int:
        """Number of rows for the inputs and `layers`."""
        return self.layers[-1].end

    def state_elements(self, cells: int) -> Layer:
        """Return a layer with one lane for each channel of `cells` cells."""
        count = cells * self.channels
        return Layer(0, padded_lanes(count), count, 0)

    @property
    def gates(self) -> int:
        """Number of lanes of all layers."""
        return self.rows - self.inputs.lanes

    @functools.cached_property
    def forward_layers(self) -> tuple[Layer, ...]:
        """The layers of the forward, which reuses the rows of a layer as soon as nothing reads them any more."""
        layers = []
        for layer in self.layers:
            taken = [(0, self.inputs.lanes)] + [(before.first, before.end) for before in layers[-1:]]
            layers.append(dataclasses.replace(layer, first=_gap(taken, layer.lanes)))
        return tuple(layers)

    @property
    def forward_rows(self) -> int:
        """Number of rows for the inputs and `forward_layers`."""
        return max(layer.end for layer in self.forward_layers)

    @functools.cached_property
    def gradients(self) -> "GradientRows":
        """Rows of the gradients, which reuse the rows of finished layers, and a few more after the last layer's
        rows."""
        first_update, firsts, ends = len(self.perception), {}, {}
        for i in reversed(range(len(self.layers))):
            layer = self.layers[i]
            # While these rows are written, the gates' inputs and the gradients of their consumers are still read.
            taken = [(0, layer.first)] + [(firsts[k], ends[k]) for k in (i + 1, first_update) if k in firsts]
            firsts[i] = _gap(taken, 2 * layer.lanes)
            ends[i] = firsts[i] + 2 * layer.lanes
        sum_count = 2 * self.perception[0] * self.channels
        taken = [(0, self.inputs.lanes)] + [(firsts[k], ends[k]) for k in (0, first_update)]
        sums_first = _gap(taken, padded_lanes(sum_count))
        sums = Layer(sums_first, padded_lanes(sum_count), sum_count, self.kernels)
        # The outputs' gradients for the next cells are written while the gradients of these cells' inputs are summed.
        outputs = dataclasses.replace(self.layers[-1], first=max(self.layers[-1].first, *ends.values(), sums.end))
        return GradientRows(tuple(firsts[i] for i in range(len(self.layers))), sums, outputs)

    @functools.cached_property
    def consumers(self) -> "ConsumerTables":
        """The tables, which lie in one array, in the order of the fields of `ConsumerTables`."""
        sizes = [(layer.max_consumers, layer.lanes) for layer in self.layers]
        sizes.append((self.neighbour_consumers + self.centre_consumers, self.inputs.lanes))
        sizes.append((1, self.gradients.kernel_sums.lanes))
        tables, first = [], 0
        for size in sizes:
            tables.append(Table(first, *size))
            first += tables[-1].pairs * tables[-1].lanes
        *layers, inputs, kernel_sums = tables
        return ConsumerTables(tuple(layers), inputs, kernel_sums)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of rows of shared memory, `consumers` per lane and two packed into each integer.

    It takes `(pairs, lanes)` integers of a longer array, from `first` on.
    """

    first: int
    consumers: int
    lanes: int

    @property
    def pairs(self) -> int:
        return -(-self.consumers // 2)


class ConsumerTables(NamedTuple):
    """Tables of the rows to which consumers write gradients.

    Attributes:
      layers: one table for each layer's rows.
      inputs: table for the inputs' rows.
      kernel_sums: table for the sums over perception's kernels, with the row of the first kernel. The other kernels'
        rows follow at a distance of `channels` rows each.
    """

    layers: tuple[Table, ...]
    inputs: Table
    kernel_sums: Table


@dataclasses.dataclass(frozen=True)
class GradientRows:
    """Rows of shared memory that hold gradients.

    Attributes:
      firsts: first row that each layer writes: the gradients of its gates' a, then of their b. The layer before reads
        these rows, and then they are free. The rows of update's first layer stay, because the inputs, which come last,
        read them as well.
      kernel_sums: gradients of perception's first layer after the sum over kernels, in the order role, gate, channel.
      outputs: gradients of the last layer's rows.
    """

    firsts: tuple[int, ...]
    kernel_sums: Layer
    outputs: Layer

    @property
    def count(self) -> int:
        """Number of rows of the whole backward."""
        return self.outputs.end


def _gap(taken, size):
    """Return the first of `size` consecutive rows, none of which lies in a `(first, end)` range of `taken`."""
    gap = 0
    for first, end in sorted(taken):
        if gap + size <= first:
            break
        gap = max(gap, end)
    return gap


def padded_lanes(count: int) -> int:
    """Return the number of lanes for `count` gates or inputs, a multiple of `LANES`."""
    return -(-count // LANES) * LANES
