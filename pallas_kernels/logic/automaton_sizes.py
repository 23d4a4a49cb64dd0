"""The rows of shared memory in which an automaton's tick and its backward keep values and gradients.

At each tick, a cell runs two parts of an automaton, each with layers of gates:

- Perception: several circuits (kernels) with equal wires. Each runs once per channel, and reads it in nine cells.
- Update: one circuit, which reads the cell's channels (the center) and all outputs of perception.

A row has one float32 per cell, for up to four cells (a slice). The rows of the inputs come first, in the order
(position in the neighborhood, channel). The rows of the gates' outputs follow layer by layer. Within a perception
layer, they are in the order (gate, kernel, channel). Gates' rows are reused as soon as no later step reads
them.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

from pallas_kernels.core.layouts import LANES

NEIGHBORS = 9
"""Cells that a cell sees: itself and its eight neighbors, row by row."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Consecutive rows of shared memory, such as the outputs of one layer's gates.

    Attributes:
      lanes: number of rows including padding, a multiple of a warpgroup's 128 threads.
      count: number of rows without padding.
      copies: number of consecutive rows with outputs of one gate, in perception one per channel.
    """

    first: int
    lanes: int
    count: int
    max_consumers: int
    copies: int = 1

    @property
    def end(self) -> int:
        return self.first + self.lanes

    @property
    def coefficients(self) -> int:
        return -(-self.lanes // self.copies)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an automaton's grid and circuits, which determine its rows of shared memory.

    Attributes:
      perception, update: gates in each layer of one perception circuit, and of the update.
      output_consumers: for each layer but the last, the most gates that read one output.
      neighbor_consumers: the most gates of perception's first layer that read one input.
      center_consumers: the most gates of the update's first layer that read one channel of the center cell.
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
    neighbor_consumers: int
    center_consumers: int

    @property
    def cells(self) -> int:
        return self.batch * self.height * self.width

    @property
    def neighborhood(self) -> int:
        return NEIGHBORS * self.channels

    @functools.cached_property
    def inputs(self) -> Layer:
        return Layer(0, padded_lanes(self.neighborhood + 1), self.neighborhood, self.neighbor_consumers)

    @property
    def zeros(self) -> int:
        """Index of a row of zeros. In `ConsumerTables`, it replaces the missing terms of shorter sums."""
        return self.neighborhood

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        counts = [gates * self.kernels * self.channels for gates in self.perception] + [*self.update]
        copies = [self.channels] * len(self.perception) + [1] * len(self.update)
        lanes = [padded_lanes(count) for count in counts]
        firsts = itertools.accumulate(lanes, initial=self.inputs.lanes)
        return tuple(map(Layer, firsts, lanes, counts, [*self.output_consumers, 0], copies))

    @functools.cached_property
    def coefficient_firsts(self) -> tuple[int, ...]:
        """Index of each layer's first row in the array `coefficients` of `tick`, followed by the number of rows."""
        return tuple(itertools.accumulate((layer.coefficients for layer in self.layers), initial=0))

    @functools.cached_property
    def gate_firsts(self) -> tuple[int, ...]:
        """Index of each layer's first gate in the padded array `wires` of `tick`, followed by the array's length."""
        return tuple(itertools.accumulate((layer.lanes for layer in self.layers), initial=0))

    @property
    def rows(self) -> int:
        return self.layers[-1].end

    def state_elements(self, cells: int) -> Layer:
        count = cells * self.channels
        return Layer(0, padded_lanes(count), count, 0)

    @property
    def gates(self) -> int:
        return self.rows - self.inputs.lanes

    @functools.cached_property
    def forward_layers(self) -> tuple[Layer, ...]:
        layers = []
        for layer in self.layers:
            taken = [(0, self.inputs.lanes)] + [(before.first, before.end) for before in layers[-1:]]
            layers.append(dataclasses.replace(layer, first=_gap(taken, layer.lanes)))
        return tuple(layers)

    @property
    def forward_rows(self) -> int:
        return max(layer.end for layer in self.forward_layers)

    @functools.cached_property
    def gradients(self) -> "GradientRows":
        first_update, firsts, ends = len(self.perception), {}, {}
        for i in reversed(range(len(self.layers))):
            layer = self.layers[i]
            # These rows are still needed.
            taken = [(0, layer.first)] + [(firsts[k], ends[k]) for k in (i + 1, first_update) if k in firsts]
            firsts[i] = _gap(taken, 2 * layer.lanes)
            ends[i] = firsts[i] + 2 * layer.lanes
        sum_count = 2 * self.perception[0] * self.channels
        taken = [(0, self.inputs.lanes)] + [(firsts[k], ends[k]) for k in (0, first_update)]
        sums_first = _gap(taken, padded_lanes(sum_count))
        sums = Layer(sums_first, padded_lanes(sum_count), sum_count, self.kernels)
        # The next group's output gradients are written while this group's input gradients are summed.
        outputs = dataclasses.replace(self.layers[-1], first=max(self.layers[-1].first, *ends.values(), sums.end))
        return GradientRows(tuple(firsts[i] for i in range(len(self.layers))), sums, outputs)

    @functools.cached_property
    def consumers(self) -> "ConsumerTables":
        sizes = [(layer.max_consumers, layer.lanes) for layer in self.layers]
        sizes.append((self.neighbor_consumers + self.center_consumers, self.inputs.lanes))
        sizes.append((1, self.gradients.kernel_sums.lanes))
        tables, first = [], 0
        for size in sizes:
            tables.append(Table(first, *size))
            first += tables[-1].pairs * tables[-1].lanes
        *layers, inputs, kernel_sums = tables
        return ConsumerTables(tuple(layers), inputs, kernel_sums)


@dataclasses.dataclass(frozen=True)
class Table:
    """Location of one of the `ConsumerTables` in the array `consumers` of `tick_backward`.

    The table, `(pairs, lanes)`, begins at index `first`. Each column lists the `consumers` rows of one sum. Integers
    pack two row indices, except in `kernel_sums`.
    """

    first: int
    consumers: int
    lanes: int

    @property
    def pairs(self) -> int:
        return -(-self.consumers // 2)


class ConsumerTables(NamedTuple):
    """Tables of the rows of shared memory that the backward adds.

    The gradient of a gate's output (`layers`) or of an input (`inputs`) is a sum. Each gate that reads this output or
    input (a consumer) writes one term to a row.

    `kernel_sums` is for `GradientRows.kernel_sums`. It lists only the first perception circuit's row. The other
    circuits' rows follow, each `channels` rows later.
    """

    layers: tuple[Table, ...]
    inputs: Table
    kernel_sums: Table


@dataclasses.dataclass(frozen=True)
class GradientRows:
    """Rows of shared memory that the backward uses for gradients.

    Attributes:
      firsts: for each layer, the index of its first row. The layer's rows have its gates' gradients with respect to a,
        then b. Layer i - 1 reads the rows of layer i, and layer i - 2 may overwrite them. The rows of the update's
        first layer are kept, because the center cell's gradients are summed last.
      kernel_sums: rows for the gradients of perception's first layer, summed over the circuits (kernels), in the order
        (a or b, gate, channel).
      outputs: rows for the gradients of the last layer's outputs, the next states.
    """

    firsts: tuple[int, ...]
    kernel_sums: Layer
    outputs: Layer

    @property
    def count(self) -> int:
        return self.outputs.end


def _gap(taken, size):
    gap = 0
    for first, end in sorted(taken):
        if gap + size <= first:
            break
        gap = max(gap, end)
    return gap


def padded_lanes(count: int) -> int:
    return -(-count // LANES) * LANES
