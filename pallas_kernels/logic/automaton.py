"""A tick of a logic cellular automaton, and its backward: lanes are gates, and activations stay in shared memory.

A program takes a few cells. Shared memory holds the outputs of their gates as rows, a number a cell: first the
inputs (place in the neighbourhood, channel), then layer after layer the gates, perception's in the order gate, kernel,
channel. Every layer is filled up to whole warpgroups. A thread has a gate, or several: it reads the rows of its two
inputs, which are anywhere, and writes its own. Nothing but states, and in the backward the gradients of what cells have
seen, goes to device memory.

The backward computes the rows again, and goes back through the layers. A gate's gradient is the sum over the consumers
of its row, which a table lists, of what they have written: no two threads add to one number, and sums have an order.
The gradients of the coefficients are a thread's own sums over its cells. They are added to those of the tick before in
device memory, a copy a program.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.gathers import (
    block_layout,
    columns,
    gather_elements,
    gather_rows,
    lane_and_column,
    meet,
    scatter_elements,
    spread,
    sums_of_rows,
    vector_layout,
)
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, load, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel

NEIGHBOURS = 9
"""Cells that a cell sees: those of the 3 x 3 around it, in row-major order."""
CENTRE = 4
"""The place of the cell itself among its `NEIGHBOURS`."""
_CELLS = (4, 2, 1)
"""Cells of a program at a time. A thread's widest access of shared memory is 16 bytes (CUDA C++ Programming Guide),
four float32; fewer cells were slower: docs/lab/2026-11-22-automata.md."""
_CELLS_OF_LATENCY = 2
"""Latency of a group of cells, as the number of cells that could be computed in its time. Chosen by hand; not tuned."""
WARPGROUPS = 2
"""Warpgroups of a program, at most. They share its rows, and each takes a part of every layer. One was slower on large
grids: docs/lab/2026-11-22-automata.md."""
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
    """

    first: int
    lanes: int
    count: int
    max_consumers: int

    @property
    def rows(self) -> Any:
        return pl.ds(self.first, self.lanes)


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
        return Layer(0, padded_lanes(self.neighbourhood), self.neighbourhood, self.neighbour_consumers)

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Perception's, with a row for each gate, kernel and channel, then update's."""
        counts = [gates * self.kernels * self.channels for gates in self.perception] + [*self.update]
        lanes = [padded_lanes(count) for count in counts]
        firsts = itertools.accumulate(lanes, initial=self.inputs.lanes)
        return tuple(map(Layer, firsts, lanes, counts, [*self.output_consumers, 0]))

    @property
    def rows(self) -> int:
        """Of inputs and gates."""
        return self.layers[-1].first + self.layers[-1].lanes

    @property
    def gates(self) -> int:
        """Lanes of all layers."""
        return self.rows - self.inputs.lanes

    @functools.cached_property
    def gradients(self) -> "GradientRows":
        first_update = len(self.perception)
        buffered_layers = [i for i in reversed(range(len(self.layers))) if i != first_update]
        sizes = [0, 0]
        for turn, i in enumerate(buffered_layers):
            sizes[turn % 2] = max(sizes[turn % 2], 2 * self.layers[i].lanes)
        sums_buffer = len(buffered_layers) % 2
        sum_count = 2 * self.perception[0] * self.channels
        sizes[sums_buffer] = max(sizes[sums_buffer], padded_lanes(sum_count))
        buffers = (0, sizes[0])
        firsts = {i: buffers[turn % 2] for turn, i in enumerate(buffered_layers)} | {first_update: sum(sizes)}
        return GradientRows(
            firsts=tuple(firsts[i] for i in range(len(self.layers))),
            kernel_sums=Layer(buffers[sums_buffer], padded_lanes(sum_count), sum_count, self.kernels),
            zeros=sum(sizes) + 2 * self.layers[first_update].lanes,
        )

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
        layer before reads them, and then they are free: layers alternate between two buffers. Update's first layer has
        a third buffer, because the inputs, which come last, read it as well.
      kernel_sums: those of perception's first layer after the sum over kernels: role, gate, channel.
      zeros: a row of zeros, for rows with fewer consumers than others.
    """

    firsts: tuple[int, ...]
    kernel_sums: Layer
    zeros: int

    @property
    def count(self) -> int:
        return self.zeros + WARPGROUPS * LANES


def padded_lanes(count: int) -> int:
    """Lanes for `count` gates or inputs, a multiple of `LANES` for every warpgroup of a program."""
    return -(-count // (WARPGROUPS * LANES)) * WARPGROUPS * LANES


# -------------------------------------------------------------------------------------------------------- the kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """How a tick is shared out.

    Attributes:
      cells: of a program at a time.
      programs: how many.
      lanes: of a layer at a time, of one warpgroup: they are to fit into registers.
      lookahead: steps between the fetch of wires and coefficients and their use; a step has `lanes` lanes.
      warpgroups: of a program, at most `WARPGROUPS`.
    """

    cells: int
    programs: int
    lanes: int
    lookahead: int
    warpgroups: int = WARPGROUPS


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
    # A program with one group waits for its first wires, one with several for the L2 cache's bandwidth. The numbers are
    # those that were fastest in docs/lab/2026-11-22-automata.md.
    lanes, lookahead = (128, 4) if groups(cells) == 1 else (256, 2)
    return Config(cells, programs, lanes, lookahead)


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


def _shared_bytes(plan: Plan, cells: int) -> int:
    return (plan.rows + plan.gradients.count) * cells * 4


class _TickRefs(NamedTuple):
    """References of `tick`; `fires` is None where all cells fire."""

    coefficients: Any
    wires: Any
    state: Any
    fires: Any
    new_state: Any
    rows: Any
    barrier: Any


@kernel(supports=_supports, heuristic=_heuristic)
def tick(coefficients: Array, wires: Array, state: Array, fires: Array | None, *, plan: Plan, config: Config) -> Array:
    """The next state.

    Args:
      coefficients: `(plan.gates, 4)` float32, of every lane of every layer, 0 where there is no gate.
      wires: `(plan.gates,)` int32, the rows that each reads, `a + (b << 16)`; any where there is none.
      state: `(cells channels + padded_lanes(channels),)`, cell by cell; the rest is spare.
      fires: `(cells,)` int32, 0 where a cell keeps its state; None if none does.
    """
    return launch(
        functools.partial(_tick, plan=plan, config=config),
        *_without_none(coefficients, wires, state, fires),
        out=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid={"program": config.programs},
        warpgroups=config.warpgroups,
        scratch=[plgpu.SMEM((plan.rows, config.cells), jnp.float32), plgpu.Barrier(num_arrivals=config.warpgroups)],
        name="automaton_tick",
        barriers=False,
        sums_across_warps=False,
    )


def _tick(*refs, program, warpgroup, plan, config):
    """The body: the cells of a program, one group after the other."""
    refs, last = _named(_TickRefs, refs), plan.layers[-1]
    team = _Team(config, warpgroup, refs.barrier)
    circuit = _Circuit(plan, team, refs.coefficients, refs.wires, refs.rows)

    def group(cells):
        team.run(circuit.steps(plan.layers), prologue=lambda: cells.load_neighbourhoods(refs.state, refs.rows))
        for part, _ in team.parts(last):
            channel = part.first - last.first
            elements = cells.state_elements(channel, part.lanes)
            new_state = _load_rows(refs.rows, part.first, part.lanes)
            if refs.fires is not None:
                old_state = _load_rows(refs.rows, CENTRE * plan.channels + channel, part.lanes)
                new_state = jnp.where(_gather(refs.fires, elements.cell, elements.valid) != 0, new_state, old_state)
            scatter_elements(refs.new_state, elements.place, new_state.astype(refs.new_state.dtype))

    _visit_groups(plan, config, program, team, group)


class _TickBackwardRefs(NamedTuple):
    """References of `tick_backward`; `fires` is None where all cells fire. `sums` are the rows of gradients."""

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
    sums: Any
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
      coefficients, wires, state, fires: as in `tick`.
      consumers: int32, the rows to which the consumers of a row write its gradient, two in one number, the later in
        the upper half; `Plan.consumers` says where.
      dseen: `(cells neighbourhood + padded_lanes(neighbourhood),)` float32, cell by cell; the rest is spare.
      dkept: as the state, float32.
      total: `(programs, plan.gates, 4)` float32, to which the gradients of the coefficients are added.
    """
    return launch(
        functools.partial(_tick_backward, plan=plan, config=config),
        *_without_none(coefficients, wires, consumers, state, fires, dseen, dkept, total),
        out=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (dseen, dkept, total)),
        grid={"program": config.programs},
        warpgroups=config.warpgroups,
        scratch=[
            plgpu.SMEM((plan.rows, config.cells), jnp.float32),
            plgpu.SMEM((plan.gradients.count, config.cells), jnp.float32),
            plgpu.Barrier(num_arrivals=config.warpgroups),
        ],
        name="automaton_tick_backward",
        barriers=False,
        sums_across_warps=False,
    )


def _tick_backward(*refs, program, warpgroup, plan, config):
    """The body: the cells of a program, one group after the other."""
    refs = _named(_TickBackwardRefs, refs)
    team, has_groups = _Team(config, warpgroup, refs.barrier), _groups_of_program(plan, config) > 1
    circuit = _Circuit(plan, team, refs.coefficients, refs.wires, refs.rows)
    total_in, total_out = refs.total.at[program], refs.total_out.at[program]
    # With several groups of cells, each adds to what the one before has written: sums so far are copied to the result.
    previous_totals = total_out if has_groups else total_in
    backward = _Backward(circuit, refs.consumers, refs.sums, previous_totals=previous_totals, totals=total_out)
    if has_groups:
        for gates in (circuit.gates(part) for layer in plan.layers for part, _ in team.parts(layer)):
            total_out[gates] = load(total_in.at[gates], block_layout(gates.size, 4))
    refs.sums[pl.ds(plan.gradients.zeros + warpgroup * LANES, LANES)] = jnp.zeros((LANES, config.cells), jnp.float32)

    def group(cells):
        dlast = [
            _next_state_gradient(refs, cells, part.first - plan.layers[-1].first, part.lanes)
            for part, _ in team.parts(plan.layers[-1])
        ]
        steps = [*circuit.steps(plan.layers[:-1]), *backward.steps(dlast)]
        team.run(steps, prologue=lambda: cells.load_neighbourhoods(refs.state, refs.rows))
        cells.scatter_gradients(backward.input_gradients(), refs.dseen_out)

    _visit_groups(plan, config, program, team, group)


def _without_none(*arrays):
    return [a for a in arrays if a is not None]


def _named(kind, refs):
    """References as a NamedTuple, `fires` None where there is no reference for it."""
    names = [name for name in kind._fields if name != "fires" or len(refs) == len(kind._fields)]
    return kind(**{"fires": None} | dict(zip(names, refs, strict=True)))


def _groups_of_program(plan, config):
    return -(-plan.cells // (config.cells * config.programs))


def _visit_groups(plan, config, program, team, group):
    """`group` for all cells of a program."""
    groups = _groups_of_program(plan, config)

    def visit(i, carry):
        group(_Cells(plan, team, config.cells, (program + i * config.programs) * config.cells))
        team.meet()  # The next group writes what this one reads.
        return carry

    if groups == 1:
        visit(0, None)
    else:
        lax.fori_loop(0, groups, visit, None)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The computation of some lanes of a layer, and the fetch of what it reads of device memory.

    Attributes:
      is_last: of its layer, whose rows the next one reads.
    """

    fetch: Callable[[], Any]
    compute: Callable[[Any], None]
    is_last: bool


@dataclasses.dataclass(frozen=True)
class _Team:
    """The warpgroups of a program, seen by one of them."""

    config: Config
    warpgroup: Any
    barrier: Any

    def parts(self, layer):
        """This warpgroup's lanes of a layer, in parts that fit into registers; and whether each is the last."""
        end, warpgroups = layer.first + layer.lanes, self.config.warpgroups
        for first in range(layer.first, end, warpgroups * self.config.lanes):
            lanes = min(self.config.lanes, (end - first) // warpgroups)
            part = Layer(first + self.warpgroup * lanes, lanes, lanes, layer.max_consumers)
            yield part, first + warpgroups * lanes == end

    def meet(self):
        """Waits until all have written their rows."""
        meet(self.barrier)

    def run(self, steps, prologue):
        """Computes the steps in order, and fetches for later ones. `prologue` runs during the first fetches."""
        steps, lookahead = list(steps), self.config.lookahead
        fetched = [step.fetch() for step in steps[:lookahead]]
        prologue()
        for i, step in enumerate(steps):
            if i + lookahead < len(steps):
                fetched.append(steps[i + lookahead].fetch())
            step.compute(fetched[i])
            if step.is_last:
                self.meet()


def _load_rows(ref, first, lanes):
    """Rows that follow each other."""
    return load(ref.at[pl.ds(first, lanes)], block_layout(lanes, ref.shape[1]))


def _gather(ref, places, valid):
    """Elements of device memory, 0 where they are not valid."""
    values = gather_elements(ref, jnp.where(valid, places, 0))
    return jnp.where(valid, values, jnp.zeros((), values.dtype))


class _StateElements(NamedTuple):
    """Of each element of a block its cell, its place in a state, and whether the state has it."""

    cell: Array
    place: Array
    valid: Array


@dataclasses.dataclass(frozen=True)
class _Cells:
    """`count` cells of a grid from `first` on, a column each; those past the grid's end are masked."""

    plan: Plan
    team: _Team
    count: int
    first: Any

    def state_elements(self, channel, lanes):
        """A lane a channel, from `channel` on."""
        C = self.plan.channels
        lane, column = lane_and_column(lanes, self.count)
        lane, cell = lane + channel, column + self.first
        valid = (lane < C) & (cell < self.plan.cells)
        return _StateElements(cell, jnp.where(valid, cell * C + lane, lane + self.plan.cells * C), valid)

    def neighbour(self, cell, row_offset, column_offset):
        """The cell at an offset from another, and whether there is one."""
        plan = self.plan
        row = lax.rem(lax.div(cell, plan.width), plan.height) + row_offset
        column = lax.rem(cell, plan.width) + column_offset
        valid = cell < plan.cells
        if plan.periodic:
            row, column = _wrap(row, plan.height), _wrap(column, plan.width)
        else:
            valid &= (row >= 0) & (row < plan.height) & (column >= 0) & (column < plan.width)
        grid = lax.div(cell, plan.height * plan.width)
        return (grid * plan.height + row) * plan.width + column, valid

    def load_neighbourhoods(self, state_ref, rows):
        """Writes the rows of the inputs."""
        C = self.plan.channels
        for part, _ in self.team.parts(self.plan.inputs):
            lane, column = lane_and_column(part.lanes, self.count)
            lane = lane + part.first
            place = lax.div(lane, C)
            row_offset, column_offset = lax.div(place, 3) - 1, lax.rem(place, 3) - 1
            cell, valid = self.neighbour(column + self.first, row_offset, column_offset)
            valid &= lane < self.plan.neighbourhood
            values = _gather(state_ref, cell * C + lax.rem(lane, C), valid)
            rows[part.rows] = values.astype(jnp.float32)
        self.team.meet()

    def scatter_gradients(self, blocks, dseen_out):
        """Writes the gradients of the inputs."""
        neighbourhood = self.plan.neighbourhood
        for part, block in blocks:
            lane, column = lane_and_column(part.lanes, self.count)
            lane, cell = lane + part.first, column + self.first
            valid = (lane < neighbourhood) & (cell < self.plan.cells)
            place = jnp.where(valid, cell * neighbourhood + lane, lane + self.plan.cells * neighbourhood)
            scatter_elements(dseen_out, place, block)


def _wrap(i, n):
    return jnp.where(i < 0, i + n, jnp.where(i >= n, i - n, i))


class _Gates(NamedTuple):
    """What gates read of device memory: their two rows in one number, and their coefficients."""

    wires: Array
    coefficients: Array


@dataclasses.dataclass(frozen=True)
class _Circuit:
    """The gates of all layers, whose rows are in shared memory, and what a program reads of them in device memory."""

    plan: Plan
    team: _Team
    coefficients: Any
    wires: Any
    rows: Any

    def gates(self, part):
        """Their places among the lanes of all layers."""
        return pl.ds(part.first - self.plan.inputs.lanes, part.lanes)

    def fetch(self, part):
        wires = load(self.wires.at[self.gates(part)], vector_layout(part.lanes), optimized=False)
        return _Gates(wires, load(self.coefficients.at[self.gates(part)], block_layout(part.lanes, 4)))

    def inputs(self, wires):
        """The blocks that gates read, a and b."""
        return [gather_rows(self.rows, rows) for rows in _unpack(wires)]

    def steps(self, layers):
        """Computes the rows of these layers."""
        for layer in layers:
            for part, is_last in self.team.parts(layer):
                yield _Step(functools.partial(self.fetch, part), functools.partial(self.compute, part), is_last)

    def compute(self, part, gates):
        a, b = self.inputs(gates.wires)
        c0, c1, c2, c3 = (spread(c, self.rows.shape[1]) for c in columns(gates.coefficients))
        self.rows[part.rows] = c0 + c1 * a + (c2 + c3 * a) * b


class _GatesBackward(NamedTuple):
    """What the backward of gates reads of device memory.

    Attributes:
      gates: as in the forward.
      totals: the gradients of their coefficients so far.
      consumers: the rows of their consumers, two in one number.
    """

    gates: _Gates
    totals: Array
    consumers: list[Array]


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The gradients of what gates read, in shared memory, and those of coefficients, of which a program has its own.

    Attributes:
      consumers: the array of `Plan.consumers`.
      sums: rows of gradients.
      previous_totals, totals: gradients of the coefficients, as they are read and as they are written.
    """

    circuit: _Circuit
    consumers: Any
    sums: Any
    previous_totals: Any
    totals: Any

    def steps(self, dlast):
        """Goes back through the layers, from the gradients of the last one's rows, part by part."""
        for i, layer in reversed(list(enumerate(self.circuit.plan.layers))):
            for k, (part, is_last) in enumerate(self.circuit.team.parts(layer)):
                fetch, compute = (functools.partial(f, i, part) for f in (self.fetch, self.compute))
                yield _Step(fetch, functools.partial(compute, None if layer.max_consumers else dlast[k]), is_last)

    def fetch(self, i, part):
        plan = self.circuit.plan
        first = part.first - plan.layers[i].first
        totals = load(self.previous_totals.at[self.circuit.gates(part)], block_layout(part.lanes, 4))
        gates = self.circuit.fetch(part)
        return _GatesBackward(gates, totals, self.fetch_consumers(plan.consumers.layers[i], first, part.lanes))

    def fetch_consumers(self, table, first, lanes):
        """Of `lanes` rows of a table from `first` on, where their consumers leave gradients, two in one number."""
        places = [pl.ds(table.first + pair * table.lanes + first, lanes) for pair in range(table.pairs)]
        return [load(self.consumers.at[place], vector_layout(lanes), optimized=False) for place in places]

    def sum_consumers(self, table, pairs):
        rows = [row for pair in pairs for row in _unpack(pair)][: table.consumers]
        return _sum(gather_rows(self.sums, row) for row in rows)

    def compute(self, i, part, dlast, fetched):
        plan, width = self.circuit.plan, self.sums.shape[1]
        dy = self.sum_consumers(plan.consumers.layers[i], fetched.consumers) if dlast is None else dlast
        a, b = self.circuit.inputs(fetched.gates.wires)
        _, c1, c2, c3 = (spread(c, width) for c in columns(fetched.gates.coefficients))
        first = plan.gradients.firsts[i] + part.first - plan.layers[i].first
        self.sums[pl.ds(first, part.lanes)] = dy * (c1 + c3 * b)
        self.sums[pl.ds(first + plan.layers[i].lanes, part.lanes)] = dy * (c2 + c3 * a)
        da = dy * a
        self.totals[self.circuit.gates(part)] = fetched.totals + sums_of_rows(dy, da, dy * b, da * b)

    def input_gradients(self):
        """The gradients of the inputs, part by part: summed over perception's kernels, then over its gates."""
        plan = self.circuit.plan
        table, kernel_sums = plan.consumers.kernel_sums, plan.gradients.kernel_sums
        for part, _ in self.circuit.team.parts(kernel_sums):
            places = pl.ds(table.first + part.first - kernel_sums.first, part.lanes)
            first = load(self.consumers.at[places], vector_layout(part.lanes), optimized=False)
            self.sums[part.rows] = _sum(gather_rows(self.sums, first + k * plan.channels) for k in range(plan.kernels))
        self.circuit.team.meet()
        table = plan.consumers.inputs
        for part, _ in self.circuit.team.parts(plan.inputs):
            yield part, self.sum_consumers(table, self.fetch_consumers(table, part.first, part.lanes))


def _unpack(packed):
    """The two numbers that `jaxbp` packs into one."""
    return packed & 0xFFFF, lax.shift_right_logical(packed, 16)


def _sum(terms):
    return functools.reduce(lambda total, term: total + term, terms)


def _next_state_gradient(refs, cells, channel, lanes):
    """The gradient of the last layer's rows, from a channel on. Writes that of what cells keep."""
    plan = cells.plan
    elements = cells.state_elements(channel, lanes)
    lane, _ = lane_and_column(lanes, cells.count)
    dy = _gather(refs.dkept, elements.place, elements.valid)
    for p in range(NEIGHBOURS):
        # The cell on the opposite side sees this one at place p.
        cell, valid = cells.neighbour(elements.cell, 1 - p // 3, 1 - p % 3)
        place = cell * plan.neighbourhood + p * plan.channels + channel + lane
        dy = dy + _gather(refs.dseen, place, valid & elements.valid)
    if refs.fires is None:
        scatter_elements(refs.dkept_out, elements.place, zeros_like(dy))
        return dy
    fired = _gather(refs.fires, elements.cell, elements.valid) != 0
    scatter_elements(refs.dkept_out, elements.place, jnp.where(fired, 0.0, dy))
    return jnp.where(fired, dy, 0.0)
