"""A tick of a logic cellular automaton, and its backward: lanes are gates, and activations stay in shared memory.

A program takes a few cells. Shared memory holds the outputs of their gates as rows, a number a cell: first the
inputs (place in the neighbourhood, channel), then layer after layer the gates, perception's in the order gate, kernel,
channel. Every layer is filled up to whole warpgroups. A thread has a gate, or several: it reads the rows of its two
inputs, which are anywhere, and writes its own. Nothing but states, and in the backward the gradients of what cells have
seen, goes to device memory.

The backward computes the rows again, and goes back through the layers. A gate's gradient is the sum over the consumers
of its row, which a table lists, of what they have written: no two threads add to one number, and sums have an order.
What they write takes the rows of layers that have been gone back through. The gradients of the coefficients are a
thread's own sums over its cells. They are added to those of the tick before in device memory, a copy a program; a
program with many cells has them in registers meanwhile.
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
"""Cells that a cell sees: those of the 3 x 3 around it, in row-major order."""
CENTRE = 4
"""The place of the cell itself among its `NEIGHBOURS`."""
_SLICE = 4
"""Cells that have their rows side by side: a thread's widest access of shared memory is 16 bytes (CUDA C++ Programming
Guide), four float32. Rows of more cells would lie further apart and meet in fewer of the banks."""
_CELLS = (2 * _SLICE, _SLICE, 2, 1)
"""Cells of a program at a time. Those of a second slice need no wires and coefficients of their own, and the third
would not fit into shared memory. Fewer than four were slower: docs/lab/2026-11-22-automata.md."""
_CELLS_OF_LATENCY = 2
"""Latency of a group of cells, as the number of cells that could be computed in its time. Chosen by hand; not tuned."""
WARPGROUPS = 2
"""Warpgroups of a program, at most. They share its rows, and each takes a part of every layer. One was slower on large
grids: docs/lab/2026-11-22-automata.md."""
_TOTAL_REGISTERS = 96
"""Registers of a thread for gradients of coefficients, at most: with what a step takes, all fit into 255. Chosen by
hand; not tuned."""
_FORWARD_PROGRAMS = 2
"""Programs of the forward that a multiprocessor runs at once, where there are so many. Three and four were no faster:
docs/lab/2026-11-23-automata-kernels.md."""
_RESERVED_BYTES = 2048
"""Bytes of shared memory for what Mosaic GPU itself needs. Chosen by hand: more than the barrier takes."""
_MAX_CONSUMERS = 32
"""Consumers of a row up to which its gradient is an unrolled sum. Chosen by hand; not tuned."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Rows of shared memory.

    Attributes:
      first: where they begin.
      lanes: how many there are, whole warpgroups.
      count: how many of them have a gate or an input.
      max_consumers: of a row.
      copies: how many lanes that follow each other have the same coefficients.
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
        """How many the lanes have, with those of lanes without a gate."""
        return -(-self.lanes // self.copies)


@dataclasses.dataclass(frozen=True)
class Plan:
    """An automaton's sizes on a grid, from which its rows follow.

    Attributes:
      batch, height, width, channels, periodic: of the grid.
      kernels: of perception.
      perception, update: gates of each layer.
      output_consumers: the most consumers of an output, by perception's layers, then update's but the last, whose
        outputs are the next state.
      neighbour_consumers: the most consumers of one of the nine cells, in perception's first layer.
      centre_consumers: the most consumers of the centre, in update's first layer.
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
        """Numbers that a cell sees."""
        return NEIGHBOURS * self.channels

    @functools.cached_property
    def inputs(self) -> Layer:
        """At least one lane has no input, whose row is 0."""
        return Layer(0, padded_lanes(self.neighbourhood + 1), self.neighbourhood, self.neighbour_consumers)

    @property
    def zeros(self) -> int:
        """A row of zeros, for rows with fewer consumers than others."""
        return self.neighbourhood

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Perception's, with a row for each gate, kernel and channel, then update's."""
        counts = [gates * self.kernels * self.channels for gates in self.perception] + [*self.update]
        copies = [self.channels] * len(self.perception) + [1] * len(self.update)
        lanes = [padded_lanes(count) for count in counts]
        firsts = itertools.accumulate(lanes, initial=self.inputs.lanes)
        return tuple(map(Layer, firsts, lanes, counts, [*self.output_consumers, 0], copies))

    @functools.cached_property
    def coefficient_firsts(self) -> tuple[int, ...]:
        """Where the coefficients of each layer begin, and the end of the last."""
        return tuple(itertools.accumulate((layer.coefficients for layer in self.layers), initial=0))

    @functools.cached_property
    def gate_firsts(self) -> tuple[int, ...]:
        """Where the gates of each layer begin among the lanes of all layers, and the end of the last."""
        return tuple(itertools.accumulate((layer.lanes for layer in self.layers), initial=0))

    @property
    def rows(self) -> int:
        """Of inputs and `layers`."""
        return self.layers[-1].end

    def state_elements(self, cells: int) -> Layer:
        """A lane for each channel of so many cells."""
        count = cells * self.channels
        return Layer(0, padded_lanes(count), count, 0)

    @property
    def gates(self) -> int:
        """Lanes of all layers."""
        return self.rows - self.inputs.lanes

    @functools.cached_property
    def forward_layers(self) -> tuple[Layer, ...]:
        """As `layers`, but the rows of a layer are taken again as soon as nobody reads them any more."""
        layers = []
        for layer in self.layers:
            taken = [(0, self.inputs.lanes)] + [(before.first, before.end) for before in layers[-1:]]
            layers.append(dataclasses.replace(layer, first=_gap(taken, layer.lanes)))
        return tuple(layers)

    @property
    def forward_rows(self) -> int:
        """Of inputs and `forward_layers`."""
        return max(layer.end for layer in self.forward_layers)

    @functools.cached_property
    def gradients(self) -> "GradientRows":
        """They take rows of layers that have been gone back through, and a few more behind those of the last layer."""
        first_update, firsts, ends = len(self.perception), {}, {}
        for i in reversed(range(len(self.layers))):
            layer = self.layers[i]
            # Read while these rows are written: what the gates have read, and the gradients of their consumers.
            taken = [(0, layer.first)] + [(firsts[k], ends[k]) for k in (i + 1, first_update) if k in firsts]
            firsts[i] = _gap(taken, 2 * layer.lanes)
            ends[i] = firsts[i] + 2 * layer.lanes
        sum_count = 2 * self.perception[0] * self.channels
        taken = [(0, self.inputs.lanes)] + [(firsts[k], ends[k]) for k in (0, first_update)]
        sums_first = _gap(taken, padded_lanes(sum_count))
        sums = Layer(sums_first, padded_lanes(sum_count), sum_count, self.kernels)
        # Written for the next cells while the gradients of these cells' inputs are summed.
        outputs = dataclasses.replace(self.layers[-1], first=max(self.layers[-1].first, *ends.values(), sums.end))
        return GradientRows(tuple(firsts[i] for i in range(len(self.layers))), sums, outputs)

    @functools.cached_property
    def consumers(self) -> "ConsumerTables":
        """Tables in one array, in the order of the fields of `ConsumerTables`."""
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
    """Rows of shared memory, `consumers` of them for each lane, two in one number: `(pairs, lanes)` numbers from
    `first` on in a longer array."""

    first: int
    consumers: int
    lanes: int

    @property
    def pairs(self) -> int:
        return -(-self.consumers // 2)


class ConsumerTables(NamedTuple):
    """The rows to which consumers write gradients.

    Attributes:
      layers: of each layer's rows.
      inputs: of the inputs' rows.
      kernel_sums: of the sums over perception's kernels: the row of the first kernel. Those of the others follow every
        `channels` rows.
    """

    layers: tuple[Table, ...]
    inputs: Table
    kernel_sums: Table


@dataclasses.dataclass(frozen=True)
class GradientRows:
    """Rows of shared memory through which the gradients of rows go.

    Attributes:
      firsts: the first row that each layer writes: first the gradients of its gates' a, then those of their b. The
        layer before reads them, and then they are free. Those of update's first layer stay, because the inputs, which
        come last, read them as well.
      kernel_sums: those of perception's first layer after the sum over kernels: role, gate, channel.
      outputs: the gradients of the last layer's rows.
    """

    firsts: tuple[int, ...]
    kernel_sums: Layer
    outputs: Layer

    @property
    def count(self) -> int:
        """Rows of the whole backward."""
        return self.outputs.end


def _gap(taken, size):
    """The first of `size` rows that follow each other, none of them between a `(first, end)` of `taken`."""
    gap = 0
    for first, end in sorted(taken):
        if gap + size <= first:
            break
        gap = max(gap, end)
    return gap


def padded_lanes(count: int) -> int:
    """Lanes for `count` gates or inputs, a multiple of `LANES`."""
    return -(-count // LANES) * LANES


# -------------------------------------------------------------------------------------------------------- the kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """How a tick is shared out.

    Attributes:
      cells: of a program at a time: one, two, or a multiple of four.
      programs: how many.
      lanes: of a layer at a time, of one warpgroup: they are to fit into registers.
      lookahead: steps between the fetch of wires and coefficients and their use; a step has `lanes` lanes.
      warpgroups: of a program, at most `WARPGROUPS`.
      totals_in_registers: whether a program has the gradients of the coefficients in registers from its first cells
        to its last, rather than in device memory.
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
        """Shared memory: `count` rows of each slice."""
        return plgpu.SMEM((self.slices, count, self.cells // self.slices), jnp.float32)


def _supports(*arrays: Array, plan: Plan) -> str | None:
    consumers = max(*plan.output_consumers, plan.neighbour_consumers, plan.centre_consumers)
    if consumers > _MAX_CONSUMERS:
        return f"an input with {consumers} consumers, at most {_MAX_CONSUMERS}"
    if not plan.cells:
        return "a batch of 0"
    if plan.cells * plan.neighbourhood >= 2**31 - plan.inputs.lanes:
        return "2^31 or more numbers that are seen"
    if _shared_bytes(plan, 1) > _shared_limit():
        return f"{plan.rows} inputs and gates, of which those of one cell do not fit into shared memory"
    return None


def _heuristic(*arrays: Array, plan: Plan) -> Config | None:
    multiprocessors = device.target().multiprocessors

    def groups(cells):
        return -(-plan.cells // (cells * multiprocessors))

    candidates = [cells for cells in _CELLS if _shared_bytes(plan, cells) <= _shared_limit()]
    cells = min(candidates, key=lambda cells: groups(cells) * (cells + _CELLS_OF_LATENCY))
    programs = -(-plan.cells // (cells * groups(cells)))
    if groups(cells) == 1:
        # It waits for its first wires. The numbers are those that were fastest in docs/lab/2026-11-22-automata.md.
        return _simulable(Config(cells, programs, lanes=128, lookahead=4))
    # Faster than 128 lanes and four steps ahead: docs/lab/2026-11-23-automata-kernels.md.
    registers = sum(4 * -(-layer.lanes // (WARPGROUPS * LANES)) for layer in plan.layers)
    in_registers = registers <= _TOTAL_REGISTERS
    return _simulable(Config(cells, programs, lanes=256, lookahead=2, totals_in_registers=in_registers))


def _forward_heuristic(*arrays: Array, plan: Plan) -> Config | None:
    config, multiprocessors = _heuristic(plan=plan), device.target().multiprocessors
    groups = -(-plan.cells // config.cells)
    if groups <= multiprocessors:
        return config
    # Its rows are few enough for several programs a multiprocessor.
    resident = min(_FORWARD_PROGRAMS, _shared_limit() // (plan.forward_rows * config.cells * 4))
    turns = -(-groups // (resident * multiprocessors))
    return _simulable(Config(config.cells, -(-groups // turns), lanes=128, lookahead=2))


def _simulable(config: Config) -> Config:
    """In the simulator one program, of one warpgroup: it takes gathers and scatters for accesses of all rows, and sees
    races where others access some."""
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


@kernel(supports=_supports, heuristic=_forward_heuristic)
def tick(coefficients: Array, wires: Array, state: Array, fires: Array | None, *, plan: Plan, config: Config) -> Array:
    """The next state, in [0, 1] where rounding leaves that.

    Args:
      coefficients: `(plan.coefficient_firsts[-1], 4)` float32, of every lane of every layer, 0 where there is no gate;
        once for the lanes that share them.
      wires: `(plan.gates,)` int32, the rows of `plan.forward_layers` that each lane reads, `a + (b << 16)`; any where
        there is no gate.
      state: `(cells channels + padded_lanes(channels),)`, cell by cell; the rest is spare.
      fires: `(cells,)` int32, 0 where a cell keeps its state; None if none does.
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
    """The body: the cells of a program, one group after the other."""
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


@kernel(supports=_supports, heuristic=_heuristic)
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
    """(dseen, dkept, total): the gradients of what cells have seen and of what they have kept, and of coefficients.

    The gradient of the next state comes as the two results of the next tick's backward: a cell's is the sum of the
    gradients that the cells around it have of seeing it, and of its own of being kept.

    Args:
      coefficients, state, fires: as in `tick`.
      wires: as in `tick`, but rows of `plan.layers`.
      consumers: int32, the rows to which the consumers of a row write its gradient, two in one number, the later in
        the upper half; `Plan.consumers` says where.
      dseen: `(cells neighbourhood + plan.inputs.lanes,)` float32, cell by cell; the rest is spare.
      dkept: as the state, float32.
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
    """The body: the cells of a program, one group after the other."""
    refs = _TickBackwardRefs(*refs)
    team = _Team(config, warpgroup, refs.barrier)
    total_in, total_out = refs.total.at[program], refs.total_out.at[program]
    # With several groups of cells, each adds to what the one before has written: sums so far are copied to the result.
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
    """Computes `steps(slices, carry)` for all cells of a program, which change the list `carry`. Gives the last one.

    What `loads` bring for the next group arrives while the last steps of this one are computed.
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


# ------------------------------------------------------------------------------------------ the warpgroups of a program


@dataclasses.dataclass(frozen=True)
class _Part:
    """A warpgroup's lanes of a layer, as many as fit into registers.

    Attributes:
      first: its first row.
      offset: its first lane's, in the layer.
      lanes: how many.
      is_alone: there are lanes for one warpgroup only. All have the same part, and one of them computes it.
      is_last: of its layer.
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
    """The computation of some lanes of a layer, and the fetch of what it reads of device memory.

    Attributes:
      fetch: gives what is fetched.
      compute: of what was fetched, and, if there is `read`, of what that gave.
      is_last: of its layer, whose rows the next one reads.
      read: of what was fetched, the rows that the step before does not write. The step before ends with it, so that
        they arrive while it waits.
    """

    fetch: Callable[[], Any]
    compute: Callable[..., None]
    is_last: bool = False
    read: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Team:
    """The warpgroups of a program, seen by one of them."""

    config: Config
    warpgroup: Any
    barrier: Any

    def parts(self, layer):
        """This warpgroup's parts of a layer."""
        warpgroups, done = self.config.warpgroups, 0
        # Known to be small, it leaves constants to the addresses of instructions: half the registers.
        warpgroup = self.warpgroup & (WARPGROUPS - 1)
        while done < layer.lanes:
            shares = (layer.lanes - done) // (warpgroups * LANES)
            lanes = min(self.config.lanes, max(shares, 1) * LANES)
            offset = done + warpgroup * lanes if shares else done
            done += lanes * (warpgroups if shares else 1)
            yield _Part(layer.first + offset, offset, lanes, is_alone=not shares, is_last=done == layer.lanes)

    def shares_slices(self, part, slices):
        """Whether each warpgroup has one of so many slices of a part that is alone."""
        return part.is_alone and 1 < slices == self.config.warpgroups

    def own(self, part, slices):
        """This warpgroup's of the slices of a part."""
        if self.shares_slices(part, len(slices)):
            return [dataclasses.replace(slices[0], number=self.warpgroup & (WARPGROUPS - 1))]
        return slices

    def divide(self, part, slices, function):
        """`function(slices)` of a part: of one that is alone, each warpgroup has a slice, or the first the only one."""
        if part.is_alone and not self.shares_slices(part, len(slices)):
            pl.when(self.warpgroup == 0)(functools.partial(function, slices))
        else:
            function(self.own(part, slices))

    def once(self, part, function, otherwise):
        """`function()` of a part, and `otherwise` in warpgroups that leave it to another."""
        return lax.cond(self.warpgroup == 0, function, lambda: otherwise) if part.is_alone else function()

    def meet(self):
        """Waits until all have written their rows."""
        meet(self.barrier)

    def first_fetches(self, steps):
        """What the first steps have fetched before any is computed."""
        return [step.fetch() for step in steps[: self.config.lookahead]]

    def run(self, steps, fetched, is_repeated):
        """Computes the steps in order, and fetches for later ones: if they are repeated, in the end for the first ones.

        `fetched` is what the first ones have fetched. Gives what they have fetched for their repetition.
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
    """Rows that follow each other."""
    return load(ref.at[pl.ds(first, lanes)], block_layout(lanes, ref.shape[1]))


def _gather(ref, places, valid):
    """Elements of device memory, any where they are not valid."""
    return gather_elements(ref, jnp.where(valid, places, 0))


class _StateElements(NamedTuple):
    """Of each element of a block the place of its number in the layer of a state's gates, `row` and `column`, and in
    the state, `place`; its cell; and whether there is one. Elsewhere, these are places that nobody reads."""

    row: Array
    column: Array
    place: Array
    cell: Array
    valid: Array


@dataclasses.dataclass(frozen=True)
class _Cells:
    """A slice: `count` cells of a grid, a column each of its rows. Cells past the grid are masked.

    Attributes:
      first_of_group: the first cell of the slices that a program has at a time.
      slices: the rows of all of these.
      number: of the slice.
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
        """A lane for each of the numbers of their state."""
        return self.plan.state_elements(self.count)

    def state_elements(self, part):
        """Those of a part of `elements`, in blocks with a number a lane."""
        C = self.plan.channels
        lane = lane_and_column(part.lanes, 1)[0] + part.offset
        column, channel = quotient(lane, C), remainder(lane, C)
        is_element, cell = lane < C * self.count, column + self.first
        valid = is_element & (cell < self.plan.cells)
        # Lanes are filled up, so if there are any behind the last channel's element, there is a row behind its row.
        row, column = jnp.where(is_element, channel, C), jnp.where(is_element, column, 0)
        return _StateElements(row, column, jnp.where(valid, cell, self.plan.cells) * C + channel, cell, valid)

    def neighbour(self, cell, row_offset, column_offset):
        """The cell at an offset from another, and whether there is one."""
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
        """Of a part of the inputs, each element's place in a state, and whether there is one."""
        C = self.plan.channels
        lane, column = lane_and_column(part.lanes, self.count)
        lane = lane + part.offset
        place = quotient(lane, C)
        row_offset, column_offset = quotient(place, 3) - 1, remainder(place, 3) - 1
        cell, valid = self.neighbour(column + self.first, row_offset, column_offset)
        return cell * C + remainder(lane, C), valid & (lane < self.plan.neighbourhood)

    def scatter_gradients(self, part, gradients, dseen_out):
        """Writes gradients of inputs."""
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
    """The neighbourhoods of a group of cells, of a state."""

    team: _Team
    state: Any

    def load(self, slices):
        """What `write` takes."""
        return [
            [_gather(self.state, *cells.seen_elements(part)) for cells in self.team.own(part, slices)]
            for part in self.team.parts(slices[0].plan.inputs)
        ]

    def write(self, slices, loaded):
        """Writes the rows of the inputs."""
        for part, blocks in zip(self.team.parts(slices[0].plan.inputs), loaded, strict=True):
            self.team.divide(part, slices, functools.partial(self.write_slices, part, blocks))

    def write_slices(self, part, blocks, slices):
        for cells, block in zip(slices, blocks, strict=True):
            valid = cells.seen_elements(part)[1]
            cells.rows[part.rows] = jnp.where(valid, block.astype(jnp.float32), 0.0)


def _write_next_state(refs, last_layer, part, slices):
    """Writes what the last layer's gates have computed."""
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
    """The gradients of the next state of a group of cells: what the cells around each have of seeing it, and its own of
    being kept."""

    team: _Team
    refs: _TickBackwardRefs

    def load(self, slices):
        """What `write` takes."""
        return [
            [self.terms(part, cells) for cells in self.team.own(part, slices)]
            for part in self.team.parts(slices[0].elements)
        ]

    def terms(self, part, cells):
        """What is summed, and whether a cell fires."""
        refs, elements = self.refs, cells.state_elements(part)
        dseen = [_gather(refs.dseen, *seen) for seen in self.seen(cells, elements)]
        fires = None if refs.fires is None else _gather(refs.fires, elements.cell, elements.valid)
        return gather_elements(refs.dkept, elements.place), dseen, fires

    def seen(self, cells, elements):
        """For each of the nine cells around, the place of what it has of seeing this one, and whether there is one."""
        plan = cells.plan
        channel = elements.place - elements.cell * plan.channels
        for p in range(NEIGHBOURS):
            # The cell on the opposite side sees this one at place p.
            cell, valid = cells.neighbour(elements.cell, 1 - p // 3, 1 - p % 3)
            yield cell * plan.neighbourhood + p * plan.channels + channel, valid & elements.valid

    def write(self, slices, loaded):
        """Writes the gradients of the last layer's rows, and of what cells keep."""
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


# ---------------------------------------------------------------------------------------------------- gates, and back


class _Gates(NamedTuple):
    """What gates read of device memory: their two rows in one number, and their coefficients."""

    wires: Array
    coefficients: Array


@dataclasses.dataclass(frozen=True)
class _Circuit:
    """The gates of all layers, and what a program reads of them in device memory. Slices have their rows."""

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
        """Computes the rows of these layers."""
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
        # All are read before the first is written: compilers do not know that these are other rows.
        for cells, y in zip(slices, outputs, strict=True):
            cells.rows[part.rows] = y


def _gates_of(plan, i, part):
    """The places of the gates of a part of layer i among the lanes of all layers."""
    return pl.ds(plan.gate_firsts[i] + part.offset, part.lanes)


def _parts(plan, team):
    """The parts of all layers, with the numbers of these."""
    return [(i, part) for i, layer in enumerate(plan.layers) for part in team.parts(layer)]


class _GatesBackward(NamedTuple):
    """What the backward of gates reads of device memory.

    Attributes:
      gates: as in the forward.
      total: the gradients of their coefficients so far; None where they are in registers.
      consumers: the rows of their consumers, two in one number.
    """

    gates: _Gates
    total: Array | None
    consumers: list[Array]


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The gradients of what gates read, in rows, and those of coefficients, of which a program has its own.

    Attributes:
      consumers: the array of `Plan.consumers`.
      sums: gradients of the coefficients in registers, a block for each of `_parts`; None where they are in memory.
      previous_total, total: those in memory, as they are read and as they are written.
      dseen: takes the gradients of the inputs.
    """

    circuit: _Circuit
    consumers: Any
    sums: list[Array] | None
    previous_total: Any
    total: Any
    dseen: Any

    def steps(self):
        """Goes back through the layers, from the gradients of the last one's rows, and to the inputs."""
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
        """Of a part's rows of a table, where their consumers leave gradients, two in one number."""
        places = [pl.ds(table.first + pair * table.lanes + part.offset, part.lanes) for pair in range(table.pairs)]
        return [load(self.consumers.at[place], vector_layout(part.lanes), optimized=False) for place in places]

    def slices(self, part):
        """Those of which this warpgroup has the gradients of a part: its own, if its sums are its own."""
        slices = self.circuit.slices
        return slices if self.sums is None else self.circuit.team.own(part, slices)

    def read(self, part, fetched):
        """The rows of a and b, of each slice."""
        return [[gather_rows(cells.rows, row) for row in _unpack(fetched.gates.wires)] for cells in self.slices(part)]

    def compute(self, number, i, part, fetched, inputs=None):
        """The gradients of what a part's gates read, and of their coefficients. `inputs` are what `read` gives."""
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
        """Writes the gradients of a and b, and gives those of the coefficients."""
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
        """Of the rows of a part's gates; those of the last layer are there already."""
        plan = self.circuit.plan
        if i + 1 == len(plan.layers):
            return _load_rows(cells.rows, plan.gradients.outputs.first + part.offset, part.lanes)
        return _sum_consumers(cells, plan.consumers.layers[i], consumers)

    def sum_kernels(self, part, firsts):
        """Writes sums over perception's kernels."""
        plan = self.circuit.plan

        def sum_slices(slices):
            for cells in slices:
                rows = (firsts[0] + k * plan.channels for k in range(plan.kernels))
                cells.rows[part.rows] = functools.reduce(operator.add, (gather_rows(cells.rows, row) for row in rows))

        self.circuit.team.divide(part, self.circuit.slices, sum_slices)

    def write_inputs(self, table, part, consumers):
        """Writes the gradients of inputs."""

        def write_slices(slices):
            for cells in slices:
                cells.scatter_gradients(part, _sum_consumers(cells, table, consumers), self.dseen)

        self.circuit.team.divide(part, self.circuit.slices, write_slices)


def _sum_consumers(cells, table, pairs):
    rows = [row for pair in pairs for row in _unpack(pair)][: table.consumers]
    return functools.reduce(operator.add, (gather_rows(cells.rows, row) for row in rows))


def _zeros(lanes):
    """Gradients of coefficients."""
    return plgpu.layout_cast(jnp.zeros((lanes, 4), jnp.float32), block_layout(lanes, 4))


def _copy_totals(plan, team, source, destination):
    """The gradients of all coefficients."""
    for i, part in _parts(plan, team):
        gates = _gates_of(plan, i, part)

        def copy(gates=gates, lanes=part.lanes):
            destination[gates] = load(source.at[gates], block_layout(lanes, 4))

        team.once(part, copy, None)


def _add_totals(plan, team, rows, sums, before, after):
    """Writes the sum of the gradients of all coefficients before and of those in registers, a block of each part.

    Of a part whose slices the warpgroups share, the second leaves its block to the first, in rows of shared memory.
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
    """The two numbers that `jaxbp` packs into one."""
    return packed & 0xFFFF, lax.shift_right_logical(packed, np.int32(16))
