"""One tick (time step) of a logic cellular automaton, and its backward. Lanes are gates, and activations stay in shared
memory.

A CTA computes a few cells at a time. It gathers their neighborhoods from the state in device memory into shared memory.
Shared memory holds one row per input or gate, with one float32 per cell. The inputs come first, in the order (position
in the neighborhood, channel), then the gates layer by layer. Perception's gates are in the order gate, kernel, channel.
Every layer is padded to whole warpgroups. A thread computes one or several gates: it reads the rows of their two
inputs, which may be anywhere, and writes the gates' rows. The forward writes only the new state to device memory. The
backward writes the gradients with respect to seen cells, kept cells, and coefficients.

The backward recomputes the rows, and then goes through the layers in reverse. Each consumer of a gate's row writes a
gradient to a row of shared memory. A gate's gradient is the sum of these rows, which a table lists. No two threads add
to one element, and the order of every sum is fixed. Gradients reuse the rows of layers that are finished. A thread sums
the gradients of its gates' coefficients over its cells. The sums are added to the sums of the tick computed before, in
device memory, where each CTA has a copy. A CTA with many groups of cells keeps them in registers in between.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.gathers import (
    block_layout,
    columns,
    computed_here,
    gather_elements,
    gather_rows,
    lane_and_column,
    lane_numbers,
    meet,
    scatter_elements,
    spread,
    sums_of_rows,
    vector_layout,
)
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, load, quotient, remainder, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

NEIGHBOURS = 9
"""Number of cells that a cell sees: the 3 x 3 around it, in row-major order."""
CENTRE = 4
"""Index of the cell itself among its `NEIGHBOURS`."""
_SLICE = 4
"""Cells whose elements of a row are adjacent: a thread's widest access of shared memory is 16 bytes (CUDA C++
Programming Guide), four float32. Rows of more cells would lie further apart and meet in fewer of the banks."""
_CELLS = (2 * _SLICE, _SLICE, 2, 1)
"""Cells that a CTA computes at a time. A second slice needs no further wires and coefficients, and a third would not
fit into shared memory. Fewer than four were slower: docs/lab/2026-11-22-automata.md."""
_CELLS_OF_LATENCY = 2
"""Latency of a group of cells, as the number of cells that could be computed in that time. Chosen by hand; not
tuned."""
WARPGROUPS = 2
"""Most warpgroups per CTA. They share its rows, and each computes a part of every layer. One was slower on large grids:
docs/lab/2026-11-22-automata.md."""
_TOTAL_REGISTERS = 96
"""Most registers of a thread for gradients of coefficients: together with a step's values, all fit into 255. Chosen by
hand; not tuned."""
_FORWARD_PROGRAMS = 2
"""CTAs of the forward per multiprocessor, if the grid is large enough. Three and four were no faster:
docs/lab/2026-11-23-automata-kernels.md."""
_RESERVED_BYTES = 2048
"""Bytes of shared memory for Mosaic GPU itself. Chosen by hand: more than the barrier takes."""
_MAX_CONSUMERS = 32
"""Most consumers of a row whose gradient is an unrolled sum. Chosen by hand; not tuned."""


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


# -------------------------------------------------------------------------------------------------------- the kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """How a tick is divided among CTAs and warpgroups.

    Attributes:
      cells: cells that a CTA computes at a time: one, two, or a multiple of four.
      programs: number of CTAs.
      lanes: lanes of a layer that one warpgroup computes at a time; they must fit into registers.
      lookahead: steps between the fetch of wires and coefficients and their use; a step has `lanes` lanes.
      warpgroups: warpgroups per CTA, at most `WARPGROUPS`.
      totals_in_registers: whether a CTA keeps the gradients of the coefficients in registers from its first cells to
        its last, rather than in device memory.
    """

    cells: int
    programs: int
    lanes: int
    lookahead: int
    warpgroups: int = WARPGROUPS
    totals_in_registers: bool = False

    @property
    def slices(self) -> int:
        return -(-self.cells // _SLICE)

    def rows(self, count: int) -> Any:
        """Return shared memory for `count` rows of each slice."""
        return plgpu.SMEM((self.slices, count, self.cells // self.slices), jnp.float32)


def _unsupported(*arrays: Array, plan: Plan) -> str | None:
    consumers = max(*plan.output_consumers, plan.neighbour_consumers, plan.centre_consumers)
    if consumers > _MAX_CONSUMERS:
        return f"an input with {consumers} consumers, at most {_MAX_CONSUMERS}"
    if not plan.cells:
        return "a batch of 0"
    if plan.cells * plan.neighbourhood >= 2**31 - plan.inputs.lanes:
        return "2^31 or more elements in all neighborhoods"
    if _shared_bytes(plan, 1) > _shared_limit():
        return f"{plan.rows} inputs and gates, whose values for one cell do not fit into shared memory"
    return None


def _heuristic(*arrays: Array, plan: Plan) -> Config | None:
    multiprocessors = device.target().multiprocessors

    def groups(cells):
        return -(-plan.cells // (cells * multiprocessors))

    candidates = [cells for cells in _CELLS if _shared_bytes(plan, cells) <= _shared_limit()]
    cells = min(candidates, key=lambda cells: groups(cells) * (cells + _CELLS_OF_LATENCY))
    programs = -(-plan.cells // (cells * groups(cells)))
    if groups(cells) == 1:
        # One group of cells waits for its first wires. These values were fastest in docs/lab/2026-11-22-automata.md.
        return _simulable(Config(cells, programs, lanes=128, lookahead=4))
    # Faster than 128 lanes and a lookahead of four: docs/lab/2026-11-23-automata-kernels.md.
    registers = sum(4 * -(-layer.lanes // (WARPGROUPS * LANES)) for layer in plan.layers)
    in_registers = registers <= _TOTAL_REGISTERS
    return _simulable(Config(cells, programs, lanes=256, lookahead=2, totals_in_registers=in_registers))


def _forward_heuristic(*arrays: Array, plan: Plan) -> Config | None:
    config, multiprocessors = _heuristic(plan=plan), device.target().multiprocessors
    groups = -(-plan.cells // config.cells)
    if groups <= multiprocessors:
        return config
    # The forward's rows are few enough for several CTAs per multiprocessor.
    resident = min(_FORWARD_PROGRAMS, _shared_limit() // (plan.forward_rows * config.cells * 4))
    turns = -(-groups // (resident * multiprocessors))
    return _simulable(Config(config.cells, -(-groups // turns), lanes=128, lookahead=2))


def _simulable(config: Config) -> Config:
    """Return a config with one CTA of one warpgroup in the simulator.

    The simulator treats gathers and scatters as accesses of all rows, and would report races where other threads access
    some.
    """
    return config if simulating() is None else dataclasses.replace(config, programs=1, warpgroups=1)


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


def _shared_bytes(plan: Plan, cells: int) -> int:
    return plan.gradients.count * cells * 4


class _TickRefs(NamedTuple):
    """References of `tick`; `fires` is None where all cells fire."""

    coefficients: Any
    wires: Any
    state: Any
    fires: Any
    new_state: Any
    rows: Any
    barrier: Any


@kernel(unsupported=_unsupported, heuristic=_forward_heuristic)
def tick(coefficients: Array, wires: Array, state: Array, fires: Array | None, *, plan: Plan, config: Config) -> Array:
    """Return the next state, clipped to [0, 1] where rounding exceeds it.

    Args:
      coefficients: `(plan.coefficient_firsts[-1], 4)` float32, for every lane of every layer, 0 where there is no gate;
        once for lanes that share them.
      wires: `(plan.gates,)` int32, the rows of `plan.forward_layers` that each lane reads, `a + (b << 16)`; arbitrary
        where there is no gate.
      state: `(cells channels + padded_lanes(channels),)`, cell by cell, followed by unused elements.
      fires: `(cells,)` int32, 0 where a cell keeps its state; None if every cell fires.
    """
    return launch(
        functools.partial(_tick, plan=plan, config=config),
        coefficients,
        wires,
        state,
        fires,
        out=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid={"program": config.programs},
        warpgroups=config.warpgroups,
        scratch=[config.rows(plan.forward_rows), plgpu.Barrier(num_arrivals=config.warpgroups)],
        name="automaton_tick",
        barriers=False,
        sums_across_warps=False,
    )


def _tick(*refs, program, warpgroup, plan, config):
    """The kernel's body: the cells of a CTA, one group after the other."""
    refs, layers = _TickRefs(*refs), plan.forward_layers
    team = _Team(config, warpgroup, refs.barrier)

    def steps(slices, _):
        yield from _Circuit(plan, team, refs.coefficients, refs.wires, slices).steps(layers)
        for part in team.parts(slices[0].elements):
            write = functools.partial(_write_next_state, refs, layers[-1], part)
            yield _Step(tuple, lambda _, part=part, write=write: team.divide(part, slices, write))

    _visit_groups(plan, config, program, team, refs.rows, [_Inputs(team, refs.state)], steps)


class _TickBackwardRefs(NamedTuple):
    """References of `tick_backward`; `fires` is None where all cells fire."""

    coefficients: Any
    wires: Any
    consumers: Any
    state: Any
    fires: Any
    dseen: Any
    dkept: Any
    total: Any
    dseen_out: Any
    dkept_out: Any
    total_out: Any
    rows: Any
    barrier: Any


@kernel(unsupported=_unsupported, heuristic=_heuristic)
def tick_backward(
    coefficients: Array,
    wires: Array,
    consumers: Array,
    state: Array,
    fires: Array | None,
    dseen: Array,
    dkept: Array,
    total: Array,
    *,
    plan: Plan,
    config: Config,
) -> tuple[Array, Array, Array]:
    """Return (dseen, dkept, total): the gradients with respect to seen cells, kept cells, and coefficients.

    The gradient of the next state arrives as the dseen and dkept that the next tick's backward returned. A cell's
    gradient is the sum of what its neighbors' dseen hold for it, and of its dkept.

    Args:
      coefficients, state, fires: the arguments of `tick`.
      wires: the wires of `tick`, but with rows of `plan.layers`.
      consumers: int32, the rows to which the consumers of a row write its gradient. Two rows are packed into one
        integer, the later one in the upper half, as `Plan.consumers` lays out.
      dseen: `(cells neighborhood + plan.inputs.lanes,)` float32, cell by cell, followed by unused elements.
      dkept: float32 of the state's shape.
      total: `(programs, plan.gates, 4)` float32, to which the gradients of the coefficients are added, lane by lane.
    """
    return launch(
        functools.partial(_tick_backward, plan=plan, config=config),
        coefficients,
        wires,
        consumers,
        state,
        fires,
        dseen,
        dkept,
        total,
        out=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (dseen, dkept, total)),
        grid={"program": config.programs},
        warpgroups=config.warpgroups,
        scratch=[config.rows(plan.gradients.count), plgpu.Barrier(num_arrivals=config.warpgroups)],
        name="automaton_tick_backward",
        barriers=False,
        sums_across_warps=False,
    )


def _tick_backward(*refs, program, warpgroup, plan, config):
    """The kernel's body: the cells of a CTA, one group after the other."""
    refs = _TickBackwardRefs(*refs)
    team = _Team(config, warpgroup, refs.barrier)
    total_in, total_out = refs.total.at[program], refs.total_out.at[program]
    # With several groups of cells, each adds to the sums of the group before. The sums so far are therefore copied to
    # the result first.
    is_copied = _groups_of_program(plan, config) > 1 and not config.totals_in_registers
    sums = None
    if config.totals_in_registers:
        sums = [_zeros(part.lanes) for _, part in _parts(plan, team)]
    if is_copied:
        _copy_totals(plan, team, total_in, total_out)

    def steps(slices, sums=None):
        circuit = _Circuit(plan, team, refs.coefficients, refs.wires, slices)
        yield from circuit.steps(plan.layers[:-1])
        previous_total = total_out if is_copied else total_in
        yield from _Backward(circuit, refs.consumers, sums, previous_total, total_out, refs.dseen_out).steps()

    loads = [_Inputs(team, refs.state), _OutputGradients(team, refs)]
    sums = _visit_groups(plan, config, program, team, refs.rows, loads, steps, sums)
    if sums is not None:
        _add_totals(plan, team, refs.rows, sums, total_in, total_out)


def _groups_of_program(plan, config):
    return -(-plan.cells // (config.cells * config.programs))


def _visit_groups(plan, config, program, team, rows, loads, steps, carry=None):
    """Compute `steps(slices, carry)` for all cells of a CTA, and return the last carry, a list that the steps change.

    The data that `loads` load for the next group arrive while the last steps of this group are computed.
    """
    groups, width = _groups_of_program(plan, config), rows.shape[-1]

    def slices_of(i):
        first = (program + i * config.programs) * config.cells
        return [_Cells(plan, width, first, rows, s) for s in range(config.slices)]

    def visit(i, state):
        carry, fetched = state
        carry, slices, following = carry and list(carry), slices_of(i), slices_of(i + 1)
        of_group = list(steps(slices, carry))
        if groups > 1:
            of_group += [
                _Step(functools.partial(a.load, following), functools.partial(a.write, following)) for a in loads
            ]
        fetched = team.run(of_group, fetched, is_repeated=groups > 1)
        team.meet()  # The next group reads what this one has written, and writes what it has read.
        return carry, fetched

    fetched = team.first_fetches(list(steps(slices_of(0), carry)))
    loaded = [a.load(slices_of(0)) for a in loads]
    for a, arrays in zip(loads, loaded, strict=True):
        a.write(slices_of(0), arrays)
    team.meet()
    state = carry, fetched
    return (visit(0, state) if groups == 1 else lax.fori_loop(np.int32(0), np.int32(groups), visit, state))[0]


# ---------------------------------------------------------------------------------------------- the warpgroups of a CTA


@dataclasses.dataclass(frozen=True)
class _Part:
    """A warpgroup's lanes of a layer, limited to the number that fits into registers.

    Attributes:
      first: its first row.
      offset: its first lane within the layer.
      lanes: number of lanes.
      is_alone: whether there are lanes for one warpgroup only. All warpgroups then have the same part, and one of them
        computes it.
      is_last: whether it is the last part of its layer.
    """

    first: Any
    offset: Any
    lanes: int
    is_alone: bool
    is_last: bool

    @property
    def rows(self) -> Any:
        return pl.ds(self.first, self.lanes)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The computation of some lanes of a layer, and the fetch of its operands from device memory.

    Attributes:
      fetch: returns the fetched operands.
      compute: function of the fetched operands and, if there is `read`, of the result of `read`.
      is_last: whether it is the last step of its layer, whose rows the next layer reads.
      read: function of the fetched operands that reads the rows which the previous step does not write. The previous
        step ends with it, so that these rows arrive while that step waits.
    """

    fetch: Callable[[], Any]
    compute: Callable[..., None]
    is_last: bool = False
    read: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Team:
    """The warpgroups of a CTA, seen by one of them."""

    config: Config
    warpgroup: Any
    barrier: Any

    def parts(self, layer):
        """Yield this warpgroup's parts of a layer."""
        warpgroups, done = self.config.warpgroups, 0
        # If the number is known to be small, instructions encode constant offsets in addresses, which halves the
        # registers.
        warpgroup = self.warpgroup & (WARPGROUPS - 1)
        while done < layer.lanes:
            shares = (layer.lanes - done) // (warpgroups * LANES)
            lanes = min(self.config.lanes, max(shares, 1) * LANES)
            offset = done + warpgroup * lanes if shares else done
            done += lanes * (warpgroups if shares else 1)
            yield _Part(layer.first + offset, offset, lanes, is_alone=not shares, is_last=done == layer.lanes)

    def shares_slices(self, part, slices):
        """Whether each warpgroup computes one of the `slices` slices of an `is_alone` part."""
        return part.is_alone and 1 < slices == self.config.warpgroups

    def own(self, part, slices):
        """Return the slices of a part that this warpgroup computes."""
        if self.shares_slices(part, len(slices)):
            return [dataclasses.replace(slices[0], number=self.warpgroup & (WARPGROUPS - 1))]
        return slices

    def divide(self, part, slices, function):
        """Call `function(slices)` for a part. If it `is_alone`, each warpgroup takes one slice, or the first takes the
        only one."""
        if part.is_alone and not self.shares_slices(part, len(slices)):
            pl.when(self.warpgroup == 0)(functools.partial(function, slices))
        else:
            function(self.own(part, slices))

    def once(self, part, function, otherwise):
        """Call `function()` for a part; return `otherwise` in warpgroups that leave the part to another."""
        return lax.cond(self.warpgroup == 0, function, lambda: otherwise) if part.is_alone else function()

    def meet(self):
        """Wait until all warpgroups have written their rows."""
        meet(self.barrier)

    def first_fetches(self, steps):
        """Return what the first steps fetch before any step is computed."""
        return [step.fetch() for step in steps[: self.config.lookahead]]

    def run(self, steps, fetched, is_repeated):
        """Compute the steps in order, and fetch ahead for later ones. Repeated steps fetch at the end for their next
        repetition.

        `fetched` holds the operands that the first steps have fetched. Returns the operands fetched for the repetition.
        """
        lookahead, fetched = len(fetched), [[a] for a in fetched]
        for i, step in enumerate(steps):
            if i + lookahead < len(steps) or is_repeated:
                fetched.append([steps[(i + lookahead) % len(steps)].fetch()])
            step.compute(*fetched[i])
            if i + 1 < len(steps) and steps[i + 1].read:
                fetched[i + 1].append(steps[i + 1].read(*fetched[i + 1]))
            if step.is_last:
                self.meet()
        return [a for (a,) in fetched[len(steps) :]]


# ------------------------------------------------------------------------------------------------------ cells of a grid


def _load_rows(ref, first, lanes):
    """Load consecutive rows."""
    return load(ref.at[pl.ds(first, lanes)], block_layout(lanes, ref.shape[1]))


def _gather(ref, places, valid):
    """Gather elements of device memory; elements that are not valid are arbitrary."""
    return gather_elements(ref, jnp.where(valid, places, 0))


class _StateElements(NamedTuple):
    """Indices of each element of a block, one lane per element of a state.

    `row` and `column` index the layer of a state's gates, `place` the state. `cell` is the element's cell, and `valid`
    says whether it exists. Elsewhere the indices point to elements that nothing reads.
    """

    row: Array
    column: Array
    place: Array
    cell: Array
    valid: Array


@dataclasses.dataclass(frozen=True)
class _Cells:
    """A slice: `count` cells of a grid, one column of its rows per cell. Cells past the grid are masked.

    Attributes:
      first_of_group: first cell of the slices that a CTA computes at a time.
      slices: the rows of all these slices.
      number: index of this slice.
    """

    plan: Plan
    count: int
    first_of_group: Any
    slices: Any
    number: Any

    @property
    def first(self):
        return self.first_of_group + self.number * self.count

    @property
    def rows(self):
        return self.slices.at[self.number]

    @property
    def elements(self):
        """A lane for each element of the cells' state."""
        return self.plan.state_elements(self.count)

    def state_elements(self, part):
        """Return the indices of a part of `elements`, in blocks with one element per lane."""
        C = self.plan.channels
        lane = lane_and_column(part.lanes, 1)[0] + part.offset
        column, channel = quotient(lane, C), remainder(lane, C)
        is_element, cell = lane < C * self.count, column + self.first
        valid = is_element & (cell < self.plan.cells)
        # Lanes are padded, so if any lane follows the last channel's element, a row follows its row.
        row, column = jnp.where(is_element, channel, C), jnp.where(is_element, column, 0)
        return _StateElements(row, column, jnp.where(valid, cell, self.plan.cells) * C + channel, cell, valid)

    def neighbour(self, cell, row_offset, column_offset):
        """Return the cell at an offset from another cell, and whether it exists."""
        plan = self.plan
        row = remainder(quotient(cell, plan.width), plan.height) + row_offset
        column = remainder(cell, plan.width) + column_offset
        valid = cell < plan.cells
        if plan.periodic:
            row, column = _wrap(row, plan.height), _wrap(column, plan.width)
        else:
            valid &= (row >= 0) & (row < plan.height) & (column >= 0) & (column < plan.width)
        grid = quotient(cell, plan.height * plan.width)
        return (grid * plan.height + row) * plan.width + column, valid

    def seen_elements(self, part):
        """Return, for a part of the inputs, each element's index in a state, and whether it exists."""
        C = self.plan.channels
        lane, column = lane_and_column(part.lanes, self.count)
        lane = lane + part.offset
        place = quotient(lane, C)
        row_offset, column_offset = quotient(place, 3) - 1, remainder(place, 3) - 1
        cell, valid = self.neighbour(column + self.first, row_offset, column_offset)
        return cell * C + remainder(lane, C), valid & (lane < self.plan.neighbourhood)

    def scatter_gradients(self, part, gradients, dseen_out):
        """Write gradients of inputs."""
        neighbourhood = self.plan.neighbourhood
        lane, column = lane_and_column(part.lanes, self.count)
        lane, cell = lane + part.offset, column + self.first
        valid = (lane < neighbourhood) & (cell < self.plan.cells)
        place = jnp.where(valid, cell * neighbourhood + lane, lane + self.plan.cells * neighbourhood)
        scatter_elements(dseen_out, gradients, place)


def _wrap(i, n):
    return jnp.where(i < 0, i + n, jnp.where(i >= n, i - n, i))


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The neighborhoods of a group of cells in a state."""

    team: _Team
    state: Any

    def load(self, slices):
        """Load the argument of `write`."""
        return [
            [_gather(self.state, *cells.seen_elements(part)) for cells in self.team.own(part, slices)]
            for part in self.team.parts(slices[0].plan.inputs)
        ]

    def write(self, slices, loaded):
        """Write the rows of the inputs."""
        for part, blocks in zip(self.team.parts(slices[0].plan.inputs), loaded, strict=True):
            self.team.divide(part, slices, functools.partial(self.write_slices, part, blocks))

    def write_slices(self, part, blocks, slices):
        for cells, block in zip(slices, blocks, strict=True):
            valid = cells.seen_elements(part)[1]
            cells.rows[part.rows] = jnp.where(valid, block.astype(jnp.float32), 0.0)


def _write_next_state(refs, last_layer, part, slices):
    """Write the outputs of the last layer's gates."""
    for cells in slices:
        elements = cells.state_elements(part)
        new_state = jnp.clip(gather_elements(cells.rows, last_layer.first + elements.row, elements.column), 0.0, 1.0)
        new_state = new_state.astype(refs.new_state.dtype)
        if refs.fires is not None:
            fired = _gather(refs.fires, elements.cell, elements.valid) != 0
            new_state = jnp.where(fired, new_state, gather_elements(refs.state, elements.place))
        scatter_elements(refs.new_state, new_state, elements.place)


@dataclasses.dataclass(frozen=True)
class _OutputGradients:
    """The gradients of the next state of a group of cells: the sum of the neighbors' dseen and of the cell's dkept."""

    team: _Team
    refs: _TickBackwardRefs

    def load(self, slices):
        """Load the argument of `write`."""
        return [
            [self.terms(part, cells) for cells in self.team.own(part, slices)]
            for part in self.team.parts(slices[0].elements)
        ]

    def terms(self, part, cells):
        """Load the terms of the sum, and whether a cell fires."""
        refs, elements = self.refs, cells.state_elements(part)
        dseen = [_gather(refs.dseen, *seen) for seen in self.seen(cells, elements)]
        fires = None if refs.fires is None else _gather(refs.fires, elements.cell, elements.valid)
        return gather_elements(refs.dkept, elements.place), dseen, fires

    def seen(self, cells, elements):
        """Yield, for each of the nine neighbors, the index of its gradient with respect to this cell, and whether it
        exists."""
        plan = cells.plan
        channel = elements.place - elements.cell * plan.channels
        for p in range(NEIGHBOURS):
            # The cell on the opposite side sees this one at position p.
            cell, valid = cells.neighbour(elements.cell, 1 - p // 3, 1 - p % 3)
            yield cell * plan.neighbourhood + p * plan.channels + channel, valid & elements.valid

    def write(self, slices, loaded):
        """Write the gradients of the last layer's rows and of the kept states."""
        for part, terms in zip(self.team.parts(slices[0].elements), loaded, strict=True):
            self.team.divide(part, slices, functools.partial(self.write_slices, part, terms))

    def write_slices(self, part, terms, slices):
        for cells, (dy, dseen, fires) in zip(slices, terms, strict=True):
            elements = cells.state_elements(part)
            for gradient, (_, valid) in zip(dseen, self.seen(cells, elements), strict=True):
                dy = dy + jnp.where(valid, gradient, 0.0)
            dy, dkept = jnp.where(elements.valid, dy, 0.0), zeros_like(dy)
            if fires is not None:
                dy, dkept = jnp.where(fires != 0, dy, 0.0), jnp.where(fires != 0, 0.0, dy)
            scatter_elements(self.refs.dkept_out, dkept, elements.place)
            scatter_elements(cells.rows, dy, cells.plan.gradients.outputs.first + elements.row, elements.column)


# --------------------------------------------------------------------------------------------- gates and their backward


class _Gates(NamedTuple):
    """Operands of gates in device memory: their two rows, packed into one integer, and their coefficients."""

    wires: Array
    coefficients: Array


@dataclasses.dataclass(frozen=True)
class _Circuit:
    """The gates of all layers, and their operands in device memory. Slices hold the rows."""

    plan: Plan
    team: _Team
    coefficients: Any
    wires: Any
    slices: list[_Cells]

    def fetch(self, i, part):
        wires = load(self.wires.at[_gates_of(self.plan, i, part)], vector_layout(part.lanes), optimized=False)
        return _Gates(wires, self.fetch_coefficients(i, part))

    def fetch_coefficients(self, i, part):
        first, copies = self.plan.coefficient_firsts[i], self.plan.layers[i].copies
        if copies == 1:
            return load(self.coefficients.at[pl.ds(first + part.offset, part.lanes)], block_layout(part.lanes, 4))
        return gather_rows(self.coefficients, first + quotient(lane_numbers(part.lanes) + part.offset, copies))

    def steps(self, layers):
        """Yield the steps that compute the rows of these layers."""
        for i, layer in enumerate(layers):
            for part in self.team.parts(layer):
                fetch, compute = functools.partial(self.fetch, i, part), functools.partial(self.compute, part)
                yield _Step(fetch, compute, part.is_last)

    def compute(self, part, gates):
        self.team.divide(part, self.slices, functools.partial(self.compute_slices, part, gates))

    def compute_slices(self, part, gates, slices):
        outputs = []
        for cells in slices:
            a, b = (gather_rows(cells.rows, row) for row in _unpack(gates.wires))
            c0, c1, c2, c3 = (spread(c, cells.count) for c in columns(gates.coefficients))
            outputs.append(c0 + c1 * a + (c2 + c3 * a) * b)
        # All inputs are read before the first output is written: compilers do not know that these are different rows.
        for cells, y in zip(slices, outputs, strict=True):
            cells.rows[part.rows] = y


def _gates_of(plan, i, part):
    """Return the range of the gates of a part of layer i among the lanes of all layers."""
    return pl.ds(plan.gate_firsts[i] + part.offset, part.lanes)


def _parts(plan, team):
    """Return the parts of all layers, each with its layer's index."""
    return [(i, part) for i, layer in enumerate(plan.layers) for part in team.parts(layer)]


class _GatesBackward(NamedTuple):
    """Operands of the gates' backward in device memory.

    Attributes:
      gates: as in the forward.
      total: gradients of their coefficients so far; None where they are in registers.
      consumers: rows of their consumers, two packed into one integer.
    """

    gates: _Gates
    total: Array | None
    consumers: list[Array]


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The gradients with respect to the gates' inputs, in rows, and with respect to the coefficients, with one copy per
    CTA.

    Attributes:
      consumers: array with the tables of `Plan.consumers`.
      sums: gradients of the coefficients in registers, a block for each of `_parts`; None where they are in memory.
      previous_total, total: the gradients in memory, for reading and for writing.
      dseen: receives the gradients of the inputs.
    """

    circuit: _Circuit
    consumers: Any
    sums: list[Array] | None
    previous_total: Any
    total: Any
    dseen: Any

    def steps(self):
        """Yield the steps from the gradients of the last layer's rows back to the inputs."""
        plan, team = self.circuit.plan, self.circuit.team
        for number, (i, part) in sorted(enumerate(_parts(plan, team)), key=lambda numbered: -numbered[1][0]):
            fetch, compute = functools.partial(self.fetch, i, part), functools.partial(self.compute, number, i, part)
            # The last layer's inputs are written by the step before.
            read = functools.partial(self.read, part) if i + 1 < len(plan.layers) else None
            yield _Step(fetch, compute, part.is_last, read)
        table = plan.consumers.kernel_sums
        for part in team.parts(plan.gradients.kernel_sums):
            fetch = functools.partial(self.fetch_consumers, table, part)
            yield _Step(fetch, functools.partial(self.sum_kernels, part), part.is_last)
        table = plan.consumers.inputs
        for part in team.parts(plan.inputs):
            fetch = functools.partial(self.fetch_consumers, table, part)
            yield _Step(fetch, functools.partial(self.write_inputs, table, part), is_last=False)

    def fetch(self, i, part):
        plan = self.circuit.plan
        total = None
        if self.sums is None:
            total = load(self.previous_total.at[_gates_of(plan, i, part)], block_layout(part.lanes, 4))
        consumers = self.fetch_consumers(plan.consumers.layers[i], part)
        return _GatesBackward(self.circuit.fetch(i, part), total, consumers)

    def fetch_consumers(self, table, part):
        """Load, for a part of a table, the rows to which consumers write gradients, two packed into one integer."""
        places = [pl.ds(table.first + pair * table.lanes + part.offset, part.lanes) for pair in range(table.pairs)]
        return [load(self.consumers.at[place], vector_layout(part.lanes), optimized=False) for place in places]

    def slices(self, part):
        """Return the slices whose gradients this warpgroup computes for a part: its slices only, if it keeps sums in
        registers."""
        slices = self.circuit.slices
        return slices if self.sums is None else self.circuit.team.own(part, slices)

    def read(self, part, fetched):
        """Read the rows of a and b for each slice."""
        return [[gather_rows(cells.rows, row) for row in _unpack(fetched.gates.wires)] for cells in self.slices(part)]

    def compute(self, number, i, part, fetched, inputs=None):
        """Compute the gradients with respect to a part's inputs and coefficients. `inputs` is the result of `read`."""
        team, gates = self.circuit.team, _gates_of(self.circuit.plan, i, part)
        if self.sums is not None:
            before, function = self.sums[number], functools.partial(self.gate_gradients, i, part, fetched, inputs)
            is_shared = team.shares_slices(part, len(self.circuit.slices))
            sum_ = before + function() if is_shared else team.once(part, lambda: before + function(), before)
            self.sums[number] = computed_here(sum_)
            return

        def add():
            self.total[gates] = fetched.total + self.gate_gradients(i, part, fetched, inputs)

        team.once(part, add, None)

    def gate_gradients(self, i, part, fetched, inputs):
        """Write the gradients of a and b, and return the gradients of the coefficients."""
        layer, first = self.circuit.plan.layers[i], self.circuit.plan.gradients.firsts[i] + part.offset
        gradients, products, slices = [], [], self.slices(part)
        for cells, (a, b) in zip(slices, inputs or self.read(part, fetched), strict=True):
            dy = self.output_gradient(cells, i, part, fetched.consumers)
            _, c1, c2, c3 = (spread(c, cells.count) for c in columns(fetched.gates.coefficients))
            gradients.append((dy * (c1 + c3 * b), dy * (c2 + c3 * a)))
            da = dy * a
            products.append((dy, da, dy * b, da * b))
        for cells, (da, db) in zip(slices, gradients, strict=True):
            cells.rows[pl.ds(first, part.lanes)] = da
            cells.rows[pl.ds(first + layer.lanes, part.lanes)] = db
        return sums_of_rows(*(functools.reduce(operator.add, terms) for terms in zip(*products, strict=True)))

    def output_gradient(self, cells, i, part, consumers):
        """Return the gradients of a part's rows. The last layer's are already in shared memory."""
        plan = self.circuit.plan
        if i + 1 == len(plan.layers):
            return _load_rows(cells.rows, plan.gradients.outputs.first + part.offset, part.lanes)
        return _sum_consumers(cells, plan.consumers.layers[i], consumers)

    def sum_kernels(self, part, firsts):
        """Write sums over perception's kernels."""
        plan = self.circuit.plan

        def sum_slices(slices):
            for cells in slices:
                rows = (firsts[0] + k * plan.channels for k in range(plan.kernels))
                cells.rows[part.rows] = functools.reduce(operator.add, (gather_rows(cells.rows, row) for row in rows))

        self.circuit.team.divide(part, self.circuit.slices, sum_slices)

    def write_inputs(self, table, part, consumers):
        """Write the gradients of inputs."""

        def write_slices(slices):
            for cells in slices:
                cells.scatter_gradients(part, _sum_consumers(cells, table, consumers), self.dseen)

        self.circuit.team.divide(part, self.circuit.slices, write_slices)


def _sum_consumers(cells, table, pairs):
    rows = [row for pair in pairs for row in _unpack(pair)][: table.consumers]
    return functools.reduce(operator.add, (gather_rows(cells.rows, row) for row in rows))


def _zeros(lanes):
    """Return zeros for the gradients of coefficients."""
    return plgpu.layout_cast(jnp.zeros((lanes, 4), jnp.float32), block_layout(lanes, 4))


def _copy_totals(plan, team, source, destination):
    """Copy the gradients of all coefficients."""
    for i, part in _parts(plan, team):
        gates = _gates_of(plan, i, part)

        def copy(gates=gates, lanes=part.lanes):
            destination[gates] = load(source.at[gates], block_layout(lanes, 4))

        team.once(part, copy, None)


def _add_totals(plan, team, rows, sums, before, after):
    """Add the gradients in registers, one block per part, to the previous gradients of all coefficients, and write the
    sum.

    If the warpgroups share a part's slices, the second passes its block to the first in rows of shared memory.
    """
    parts, left = _parts(plan, team), {}
    for number, (_, part) in enumerate(parts):
        if team.shares_slices(part, rows.shape[0]):
            left[number] = pl.ds(len(left) * part.lanes, part.lanes)

    @pl.when(team.warpgroup == WARPGROUPS - 1)
    def _leave():
        for number, place in left.items():
            rows[0, place] = sums[number]

    team.meet()
    for number, (i, part) in enumerate(parts):
        gates = _gates_of(plan, i, part)

        def add(number=number, part=part, gates=gates):
            total = load(before.at[gates], block_layout(part.lanes, 4)) + sums[number]
            if number in left:
                total += _load_rows(rows.at[0], left[number].start, part.lanes)
            after[gates] = total

        team.once(part, add, None)


def _unpack(packed):
    """Return the two integers that `jaxbp` packs into one."""
    return packed & 0xFFFF, lax.shift_right_logical(packed, np.int32(16))
