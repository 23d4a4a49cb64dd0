"""A tick of a logic cellular automaton, and its backward: lanes are gates, and activations stay in shared memory.

A program takes a few cells. What their gates compute stands in shared memory as rows, a number a cell: first the
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
from typing import Any

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
CENTRE = 4
_CELLS = (4, 2, 1)
"""Of a program at a time: a thread's widest access of shared memory has four numbers."""
_CELLS_OF_LATENCY = 2
"""Latency of a turn, as the number of cells that could be computed in its time."""
WARPGROUPS = 2
"""Of a program at most. They share its rows, and each takes a part of every layer."""
_RESERVED_BYTES = 2048
"""Of shared memory, for what Mosaic itself needs."""
_MOST_TURNS = 32
"""Consumers of a row up to which its gradient is an unrolled sum."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Rows of shared memory.

    Attributes:
      first: where they begin.
      lanes: how many there are, whole warpgroups.
      count: how many of them have a gate or an input.
      turns: the most consumers of a row.
    """

    first: int
    lanes: int
    count: int
    turns: int

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
      turns: the most consumers of an output, by perception's layers, then update's but the last, whose outputs leave;
        then of one of the nine cells in the first layer of perception, and of the centre in update's.
    """

    batch: int
    height: int
    width: int
    channels: int
    periodic: bool
    kernels: int
    perception: tuple[int, ...]
    update: tuple[int, ...]
    turns: tuple[int, ...]

    @property
    def cells(self) -> int:
        return self.batch * self.height * self.width

    @property
    def seen(self) -> int:
        """Numbers that a cell sees."""
        return NEIGHBOURS * self.channels

    @functools.cached_property
    def inputs(self) -> Layer:
        return Layer(0, whole(self.seen), self.seen, self.turns[-2])

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Perception's, with a row for each gate, kernel and channel, then update's."""
        counts = [gates * self.kernels * self.channels for gates in self.perception] + [*self.update]
        lanes = [whole(count) for count in counts]
        firsts = itertools.accumulate(lanes, initial=self.inputs.lanes)
        turns = [*self.turns[: len(counts) - 1], 0]
        return tuple(map(Layer, firsts, lanes, counts, turns))

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
        others = [i for i in reversed(range(len(self.layers))) if i != first_update]
        sizes = [0, 0]
        for turn, i in enumerate(others):
            sizes[turn % 2] = max(sizes[turn % 2], 2 * self.layers[i].lanes)
        after = len(others) % 2
        summed = 2 * self.perception[0] * self.channels
        sizes[after] = max(sizes[after], whole(summed))
        begins = (0, sizes[0])
        firsts = {i: begins[turn % 2] for turn, i in enumerate(others)} | {first_update: sum(sizes)}
        return GradientRows(
            firsts=tuple(firsts[i] for i in range(len(self.layers))),
            summed=Layer(begins[after], whole(summed), summed, self.kernels),
            zeros=sum(sizes) + 2 * self.layers[first_update].lanes,
        )

    @functools.cached_property
    def consumers(self) -> tuple["Table", ...]:
        """Where each layer's consumers stand among those of all, then the inputs', then, instead of those of the sums
        over perception's kernels, where these begin, a kernel after the other every `channels` rows."""
        sizes = [(layer.turns, layer.lanes) for layer in self.layers]
        sizes += [(self.turns[-2] + self.turns[-1], self.inputs.lanes), (1, self.gradients.summed.lanes)]
        tables, first = [], 0
        for size in sizes:
            tables.append(Table(first, *size))
            first += tables[-1].pairs * tables[-1].lanes
        return tuple(tables)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of shared memory, `turns` for each of some lanes, two in one number: `(pairs, lanes)` numbers from `first`
    on in a longer array."""

    first: int
    turns: int
    lanes: int

    @property
    def pairs(self) -> int:
        return -(-self.turns // 2)


@dataclasses.dataclass(frozen=True)
class GradientRows:
    """Rows of shared memory through which the gradients of rows go.

    Attributes:
      firsts: where those begin that each layer writes, for its gates' a, and behind them for their b. The layer before
        reads them, and they are free: two places take turns. Update's first layer has a place of its own, since the
        inputs, which come last, read it, too.
      summed: those of perception's first layer after the sum over kernels: role, gate, channel.
      zeros: a row of zeros, for rows with fewer consumers than others.
    """

    firsts: tuple[int, ...]
    summed: Layer
    zeros: int

    @property
    def count(self) -> int:
        return self.zeros + WARPGROUPS * LANES


def whole(count: int) -> int:
    """Lanes for so many, the same for every warpgroup of a program."""
    return -(-count // (WARPGROUPS * LANES)) * WARPGROUPS * LANES


# -------------------------------------------------------------------------------------------------------- the kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """How a tick is shared out.

    Attributes:
      cells: of a program at a time.
      programs: how many.
      lanes: of a layer at a time, of one warpgroup: they are to fit into registers.
      ahead: steps of so many lanes, for which a program fetches wires and coefficients to come.
      warpgroups: of a program, at most `WARPGROUPS`.
    """

    cells: int
    programs: int
    lanes: int
    ahead: int
    warpgroups: int = WARPGROUPS


def _supports(*arrays: Array, plan: Plan) -> str | None:
    if (most := max(plan.turns)) > _MOST_TURNS:
        return f"an input with {most} consumers, at most {_MOST_TURNS}"
    if not plan.cells:
        return "a batch of 0"
    if plan.cells * plan.seen >= 2**31 - plan.inputs.lanes:
        return "2^31 or more numbers that are seen"
    if _shared_bytes(plan, 1) > _shared_limit():
        return f"{plan.rows} inputs and gates, of which those of one cell do not fit into shared memory"
    return None


def _heuristic(*arrays: Array, plan: Plan) -> Config | None:
    multiprocessors = device.target().multiprocessors

    def turns(cells):
        return -(-plan.cells // (cells * multiprocessors))

    fitting = [cells for cells in _CELLS if _shared_bytes(plan, cells) <= _shared_limit()]
    cells = min(fitting, key=lambda cells: turns(cells) * (cells + _CELLS_OF_LATENCY))
    programs = -(-plan.cells // (cells * turns(cells)))
    # Measured. A program with one group waits for its first wires, one with several for the L2 cache's bandwidth.
    return Config(cells, programs, lanes=128, ahead=4) if turns(cells) == 1 else Config(cells, programs, 256, ahead=2)


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


def _shared_bytes(plan: Plan, cells: int) -> int:
    return (plan.rows + plan.gradients.count) * cells * 4


@kernel(supports=_supports, heuristic=_heuristic)
def tick(coefficients: Array, wires: Array, state: Array, fires: Array | None, *, plan: Plan, config: Config) -> Array:
    """The next state.

    Args:
      coefficients: `(plan.gates, 4)` float32, of every lane of every layer, 0 where there is no gate.
      wires: `(plan.gates,)` int32, the rows that each reads, `a + (b << 16)`; any where there is none.
      state: `(cells channels + whole(channels),)`, cell by cell; the rest is spare.
      fires: `(cells,)` int32, 0 where a cell keeps its state; None if none does.
    """
    last = plan.layers[-1]

    def body(c_ref, w_ref, state_ref, *refs, program, warpgroup):
        *fires_ref, new_ref, rows, met = refs
        team = _Team(config, warpgroup, met)
        circuit = _Circuit(plan, team, c_ref, w_ref, rows)

        def group(cells):
            team.run(circuit.steps(plan.layers), meanwhile=lambda: cells.see(state_ref, rows))
            for part, _ in team.parts(last):
                channel = part.first - last.first
                cell, place, counts = cells.of_states(channel, part.lanes)
                new = _rows(rows, part.first, part.lanes)
                if fires_ref:
                    old = _rows(rows, CENTRE * plan.channels + channel, part.lanes)
                    new = jnp.where(_at(fires_ref[0], cell, counts) != 0, new, old)
                scatter_elements(new_ref, place, new.astype(new_ref.dtype))

        _for_groups(plan, config, program, team, group)

    return launch(
        body,
        *_present(coefficients, wires, state, fires),
        out=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid={"program": config.programs},
        warpgroups=config.warpgroups,
        scratch=[plgpu.SMEM((plan.rows, config.cells), jnp.float32), plgpu.Barrier(num_arrivals=config.warpgroups)],
        name="automaton_tick",
        barriers=False,
        sums_across_warps=False,
    )


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

    The gradient of the next state comes as the two that the next tick's backward has left: a cell's is the sum of what
    the cells around have as the gradient of seeing it, and its kept one.

    Args:
      coefficients, wires, state, fires: as in `tick`.
      consumers: int32, the rows to which the consumers of a row write its gradient, two in one number, the later in
        the upper half; `Plan.consumers` says where.
      dseen: `(cells seen + whole(seen),)` float32, cell by cell; the rest is spare.
      dkept: as the state, float32.
      total: `(programs, plan.gates, 4)` float32, to which the gradients of the coefficients are added.
    """
    return launch(
        functools.partial(_tick_backward, plan=plan, config=config),
        *_present(coefficients, wires, consumers, state, fires, dseen, dkept, total),
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


def _tick_backward(c_ref, w_ref, k_ref, state_ref, *refs, program, warpgroup, plan, config):
    """The body: the cells of a program, one group after the other."""
    *fires_ref, dseen_ref, dkept_ref, total_in, dseen_out, dkept_out, total_out, rows, sums, met = refs
    team, has_turns = _Team(config, warpgroup, met), _turns(plan, config) > 1
    circuit = _Circuit(plan, team, c_ref, w_ref, rows)
    total_in, total_out = total_in.at[program], total_out.at[program]
    # Of several groups of cells only the first would find in the one what the tick before has left.
    backward = _Backward(circuit, k_ref, sums, (total_out if has_turns else total_in, total_out))
    if has_turns:
        for gates in (circuit.gates(part) for layer in plan.layers for part, _ in team.parts(layer)):
            total_out[gates] = load(total_in.at[gates], block_layout(gates.size, 4))
    sums[pl.ds(plan.gradients.zeros + warpgroup * LANES, LANES)] = jnp.zeros((LANES, config.cells), jnp.float32)
    gradient_of_state = functools.partial(_of_next_state, dseen_ref, dkept_ref, fires_ref, dkept_out)

    def group(cells):
        dlast = [
            gradient_of_state(cells, part.first - plan.layers[-1].first, part.lanes)
            for part, _ in team.parts(plan.layers[-1])
        ]
        steps = [*circuit.steps(plan.layers[:-1]), *backward.steps(dlast)]
        team.run(steps, meanwhile=lambda: cells.see(state_ref, rows))
        cells.scatter_seen(backward.of_inputs(), dseen_out)

    _for_groups(plan, config, program, team, group)


def _present(*arrays):
    return [a for a in arrays if a is not None]


def _turns(plan, config):
    return -(-plan.cells // (config.cells * config.programs))


def _for_groups(plan, config, program, team, group):
    """`group` for all cells of a program."""
    turns = _turns(plan, config)

    def turn(t, carry):
        group(_Cells(plan, team, config.cells, (program + t * config.programs) * config.cells))
        team.meet()  # The next group writes what this one reads.
        return carry

    if turns == 1:
        turn(0, None)
    else:
        lax.fori_loop(0, turns, turn, None)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is computed for some lanes of a layer, and what it reads of device memory, where that takes long."""

    fetch: Callable[[], Any]
    compute: Callable[[Any], None]
    is_last: bool
    """Of its layer, whose rows the next one reads."""


@dataclasses.dataclass(frozen=True)
class _Team:
    """The warpgroups of a program, seen by one of them."""

    config: Config
    warpgroup: Any
    met: Any

    def parts(self, layer):
        """This warpgroup's lanes of a layer, in parts that fit into registers; and whether each is the last."""
        end, warpgroups = layer.first + layer.lanes, self.config.warpgroups
        for first in range(layer.first, end, warpgroups * self.config.lanes):
            lanes = min(self.config.lanes, (end - first) // warpgroups)
            part = Layer(first + self.warpgroup * lanes, lanes, lanes, layer.turns)
            yield part, first + warpgroups * lanes == end

    def meet(self):
        """Waits until all have written their rows."""
        meet(self.met)

    def run(self, steps, meanwhile):
        """Computes the steps in turn, and fetches for those to come; for the first of them before `meanwhile`."""
        steps = list(steps)
        fetched = [step.fetch() for step in steps[: self.config.ahead]]
        meanwhile()
        for i, step in enumerate(steps):
            if i + self.config.ahead < len(steps):
                fetched.append(steps[i + self.config.ahead].fetch())
            step.compute(fetched[i])
            if step.is_last:
                self.meet()


def _rows(ref, first, lanes):
    """Rows that follow each other."""
    return load(ref.at[pl.ds(first, lanes)], block_layout(lanes, ref.shape[1]))


def _at(ref, places, counts):
    """Elements of device memory, 0 where they do not count."""
    values = gather_elements(ref, jnp.where(counts, places, 0))
    return jnp.where(counts, values, jnp.zeros((), values.dtype))


@dataclasses.dataclass(frozen=True)
class _Cells:
    """`count` cells of a grid from `first` on, a column each; those beyond the grid are not there."""

    plan: Plan
    team: _Team
    count: int
    first: Any

    def of_states(self, channel, lanes):
        """A lane a channel, from `channel` on: of each element its cell, place in a state, and whether it is one."""
        C = self.plan.channels
        lane, column = lane_and_column(lanes, self.count)
        lane, cell = lane + channel, column + self.first
        counts = (lane < C) & (cell < self.plan.cells)
        return cell, jnp.where(counts, cell * C + lane, lane + self.plan.cells * C), counts

    def neighbour(self, cell, down, right):
        """The cell `down` and `right` of another, and whether there is one."""
        plan = self.plan
        row, column = lax.rem(lax.div(cell, plan.width), plan.height) + down, lax.rem(cell, plan.width) + right
        inside = cell < plan.cells
        if plan.periodic:
            row, column = _wrapped(row, plan.height), _wrapped(column, plan.width)
        else:
            inside &= (row >= 0) & (row < plan.height) & (column >= 0) & (column < plan.width)
        grid = lax.div(cell, plan.height * plan.width)
        return (grid * plan.height + row) * plan.width + column, inside

    def see(self, state_ref, rows):
        """Writes the rows of the inputs."""
        C = self.plan.channels
        for part, _ in self.team.parts(self.plan.inputs):
            lane, column = lane_and_column(part.lanes, self.count)
            lane = lane + part.first
            place = lax.div(lane, C)
            down, right = lax.div(place, 3) - 1, lax.rem(place, 3) - 1
            cell, inside = self.neighbour(column + self.first, down, right)
            inside &= lane < self.plan.seen
            seen = _at(state_ref, cell * C + lax.rem(lane, C), inside)
            rows[part.rows] = seen.astype(jnp.float32)
        self.team.meet()

    def scatter_seen(self, blocks, dseen_out):
        """Writes the gradients of the inputs."""
        seen = self.plan.seen
        for part, block in blocks:
            lane, column = lane_and_column(part.lanes, self.count)
            lane, cell = lane + part.first, column + self.first
            counts = (lane < seen) & (cell < self.plan.cells)
            place = jnp.where(counts, cell * seen + lane, lane + self.plan.cells * seen)
            scatter_elements(dseen_out, place, block)


def _wrapped(i, n):
    return jnp.where(i < 0, i + n, jnp.where(i >= n, i - n, i))


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
        """What a gate reads of device memory: its two rows in one number, and its coefficients."""
        wires = load(self.wires.at[self.gates(part)], vector_layout(part.lanes), optimized=False)
        return wires, load(self.coefficients.at[self.gates(part)], block_layout(part.lanes, 4))

    def inputs(self, wires):
        """The blocks that gates read."""
        return [gather_rows(self.rows, rows) for rows in _halves(wires)]

    def steps(self, layers):
        """Computes the rows of these layers."""
        for layer in layers:
            for part, is_last in self.team.parts(layer):
                yield _Step(functools.partial(self.fetch, part), functools.partial(self.compute, part), is_last)

    def compute(self, part, fetched):
        wires, coefficients = fetched
        a, b = self.inputs(wires)
        c0, c1, c2, c3 = (spread(c, self.rows.shape[1]) for c in columns(coefficients))
        self.rows[part.rows] = c0 + c1 * a + (c2 + c3 * a) * b


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The gradients of what gates read, in shared memory, and those of coefficients, of which a program has its own.

    Attributes:
      totals: those of the coefficients so far, and where they go.
    """

    circuit: _Circuit
    consumers: Any
    sums: Any
    totals: tuple[Any, Any]

    def steps(self, dlast):
        """Goes back through the layers, from the gradients of the last one's rows, part by part."""
        for i, layer in reversed(list(enumerate(self.circuit.plan.layers))):
            for k, (part, is_last) in enumerate(self.circuit.team.parts(layer)):
                fetch, compute = (functools.partial(f, i, part) for f in (self.fetch, self.compute))
                yield _Step(fetch, functools.partial(compute, None if layer.turns else dlast[k]), is_last)

    def fetch(self, i, part):
        plan = self.circuit.plan
        first = part.first - plan.layers[i].first
        before = load(self.totals[0].at[self.circuit.gates(part)], block_layout(part.lanes, 4))
        return self.circuit.fetch(part), before, self.fetch_consumers(plan.consumers[i], first, part.lanes)

    def fetch_consumers(self, table, first, lanes):
        """Of `lanes` rows of a table from `first` on, where their consumers leave gradients, two in one number."""
        places = [pl.ds(table.first + pair * table.lanes + first, lanes) for pair in range(table.pairs)]
        return [load(self.consumers.at[place], vector_layout(lanes), optimized=False) for place in places]

    def sum_of_consumers(self, table, fetched):
        rows = [row for pair in fetched for row in _halves(pair)][: table.turns]
        return _sum(gather_rows(self.sums, row) for row in rows)

    def compute(self, i, part, dlast, fetched):
        plan, width = self.circuit.plan, self.sums.shape[1]
        (wires, coefficients), before, consumers = fetched
        dy = self.sum_of_consumers(plan.consumers[i], consumers) if dlast is None else dlast
        a, b = self.circuit.inputs(wires)
        _, c1, c2, c3 = (spread(c, width) for c in columns(coefficients))
        of_a = plan.gradients.firsts[i] + part.first - plan.layers[i].first
        self.sums[pl.ds(of_a, part.lanes)] = dy * (c1 + c3 * b)
        self.sums[pl.ds(of_a + plan.layers[i].lanes, part.lanes)] = dy * (c2 + c3 * a)
        da = dy * a
        self.totals[1][self.circuit.gates(part)] = before + sums_of_rows(dy, da, dy * b, da * b)

    def of_inputs(self):
        """The gradients of the inputs, part by part: summed over perception's kernels, then over its gates."""
        plan = self.circuit.plan
        *_, inputs, kernels = plan.consumers
        for part, _ in self.circuit.team.parts(plan.gradients.summed):
            at = pl.ds(kernels.first + part.first - plan.gradients.summed.first, part.lanes)
            first = load(self.consumers.at[at], vector_layout(part.lanes), optimized=False)
            self.sums[part.rows] = _sum(gather_rows(self.sums, first + k * plan.channels) for k in range(plan.kernels))
        self.circuit.team.meet()
        for part, _ in self.circuit.team.parts(plan.inputs):
            yield part, self.sum_of_consumers(inputs, self.fetch_consumers(inputs, part.first, part.lanes))


def _halves(packed):
    """The two numbers that `jaxbp` packs into one."""
    return packed & 0xFFFF, lax.shift_right_logical(packed, 16)


def _sum(terms):
    return functools.reduce(lambda total, term: total + term, terms)


def _of_next_state(dseen_ref, dkept_ref, fires_ref, dkept_out, cells, channel, lanes):
    """The gradient of the last layer's rows, from a channel on. Writes that of what cells keep."""
    plan = cells.plan
    cell, place, counts = cells.of_states(channel, lanes)
    lane, _ = lane_and_column(lanes, cells.count)
    dy = _at(dkept_ref, place, counts)
    for p in range(NEIGHBOURS):
        # Seen at place p by the cell on the other side.
        seeing, inside = cells.neighbour(cell, 1 - p // 3, 1 - p % 3)
        dy = dy + _at(dseen_ref, seeing * plan.seen + p * plan.channels + channel + lane, inside & counts)
    if not fires_ref:
        scatter_elements(dkept_out, place, zeros_like(dy))
        return dy
    fired = _at(fires_ref[0], cell, counts) != 0
    scatter_elements(dkept_out, place, jnp.where(fired, 0.0, dy))
    return jnp.where(fired, dy, 0.0)
