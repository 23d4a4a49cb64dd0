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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import device
from pallas_kernels.core.gathers import (
    block_layout,
    gather_elements,
    gather_rows,
    lane_and_column,
    row_sums,
    scatter_elements,
    spread,
    vector_layout,
)
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, load, zeros_like
from pallas_kernels.core.tiles import kernel

NEIGHBOURS = 9
CENTRE = 4
_CELLS = (4, 2, 1)
"""Of a program at a time: a thread's widest access of shared memory has four numbers."""
_CELLS_OF_LATENCY = 2
"""In the time that a turn takes however few its cells are, so many more could be computed."""
_PART_LANES = 256
"""Of a layer at a time, which are to fit into registers."""
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
        firsts = itertools.accumulate((turns * lanes for turns, lanes in sizes), initial=0)
        return tuple(Table(first, *size) for first, size in zip(firsts, sizes, strict=False))


@dataclasses.dataclass(frozen=True)
class Table:
    """`(turns, lanes)` rows of shared memory, from `first` on in a longer array."""

    first: int
    turns: int
    lanes: int


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
        return self.zeros + LANES


def whole(count: int) -> int:
    """Lanes of whole warpgroups for so many."""
    return -(-count // LANES) * LANES


# -------------------------------------------------------------------------------------------------------- the kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """Cells that a program takes at a time, and programs."""

    cells: int
    programs: int


def _supports(*arrays: Array, plan: Plan) -> str | None:
    if (most := max(plan.turns)) > _MOST_TURNS:
        return f"an input with {most} consumers, at most {_MOST_TURNS}"
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
    return Config(cells=cells, programs=-(-plan.cells // (cells * turns(cells))))


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


def _shared_bytes(plan: Plan, cells: int) -> int:
    return (plan.rows + plan.gradients.count) * cells * 4


@kernel(supports=_supports, heuristic=_heuristic)
def tick(coefficients: Array, wires: Array, state: Array, fires: Array | None, *, plan: Plan, config: Config) -> Array:
    """The next state.

    Args:
      coefficients: `(4, plan.gates)`, of every lane of every layer, 0 where there is no gate.
      wires: `(2, plan.gates)`, the rows that each reads, any where there is none.
      state: `(cells channels + whole(channels),)`, cell by cell; the rest is spare.
      fires: `(cells,)` int32, 0 where a cell keeps its state; None if none does.
    """
    last = plan.layers[-1]

    def body(c_ref, w_ref, state_ref, *refs, program):
        *fires_ref, new_ref, rows = refs
        circuit = _Circuit(plan, c_ref, w_ref, rows)

        def group(cells):
            cells.see(state_ref, rows)
            circuit.run(plan.layers)
            cell, place, counts = cells.of_states(last.lanes)
            new = _rows(rows, last.first, last.lanes)
            if fires_ref:
                old = _rows(rows, CENTRE * plan.channels, last.lanes)
                new = jnp.where(_at(fires_ref[0], cell, counts) != 0, new, old)
            scatter_elements(new_ref, place, new.astype(new_ref.dtype))

        _for_groups(plan, config, program, group)

    return launch(
        body,
        *_present(coefficients, wires, state, fires),
        out=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid={"program": config.programs},
        scratch=[plgpu.SMEM((plan.rows, config.cells), jnp.float32)],
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
      consumers: the rows to which the consumers of a row write its gradient, `Plan.consumers` says where.
      dseen: `(cells seen + whole(seen),)` float32, cell by cell; the rest is spare.
      dkept: as the state, float32.
      total: `(programs, 4, plan.gates)` float32, to which the gradients of the coefficients are added.
    """
    several = _turns(plan, config) > 1

    def body(c_ref, w_ref, k_ref, state_ref, *refs, program):
        *fires_ref, dseen_ref, dkept_ref, total_in, dseen_out, dkept_out, total_out, rows, sums = refs
        circuit = _Circuit(plan, c_ref, w_ref, rows)
        # Of several groups of cells only the first would find in the one what the tick before has left.
        totals = _Totals(program, total_out if several else total_in, total_out)
        if several:
            totals.copy(total_in, plan.gates)
        sums[pl.ds(plan.gradients.zeros, LANES)] = jnp.zeros((LANES, config.cells), jnp.float32)

        def group(cells):
            cells.see(state_ref, rows)
            circuit.run(plan.layers[:-1])
            dy = _of_next_state(cells, dseen_ref, dkept_ref, fires_ref, dkept_out)
            circuit.run_backward(dy, k_ref, sums, totals)
            cells.scatter_seen(_of_inputs(plan, k_ref, sums), dseen_out)

        _for_groups(plan, config, program, group)

    return launch(
        body,
        *_present(coefficients, wires, consumers, state, fires, dseen, dkept, total),
        out=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (dseen, dkept, total)),
        grid={"program": config.programs},
        scratch=[plgpu.SMEM((n, config.cells), jnp.float32) for n in (plan.rows, plan.gradients.count)],
        name="automaton_tick_backward",
        barriers=False,
        sums_across_warps=False,
    )


def _present(*arrays):
    return [a for a in arrays if a is not None]


def _turns(plan, config):
    return -(-plan.cells // (config.cells * config.programs))


def _for_groups(plan, config, program, group):
    """`group` for all cells of a program."""
    turns = _turns(plan, config)

    def turn(t, carry):
        group(_Cells(plan, config.cells, (program + t * config.programs) * config.cells))
        plgpu.commit_smem()  # The next group writes what this one reads.
        return carry

    if turns == 1:
        turn(0, None)
    else:
        lax.fori_loop(0, turns, turn, None)


def _parts(layer):
    """A layer in parts that fit into registers."""
    for first in range(layer.first, layer.first + layer.lanes, _PART_LANES):
        lanes = min(_PART_LANES, layer.first + layer.lanes - first)
        yield Layer(first, lanes, lanes, layer.turns)


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
    count: int
    first: Any

    def of_states(self, lanes):
        """A lane a channel: of each element its cell, its place in a state, and whether it is one."""
        C = self.plan.channels
        lane, column = lane_and_column(lanes, self.count)
        cell = column + self.first
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
        for part in _parts(self.plan.inputs):
            lane, column = lane_and_column(part.lanes, self.count)
            lane = lane + part.first
            place = lax.div(lane, C)
            down, right = lax.div(place, 3) - 1, lax.rem(place, 3) - 1
            cell, inside = self.neighbour(column + self.first, down, right)
            inside &= lane < self.plan.seen
            seen = _at(state_ref, cell * C + lax.rem(lane, C), inside)
            rows[part.rows] = seen.astype(jnp.float32)
        plgpu.commit_smem()

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
class _Totals:
    """The gradients of the coefficients, of which a program has its own."""

    program: Any
    source: Any
    target: Any

    def add(self, i, lanes, values):
        before = load(self.source.at[self.program, i, lanes], vector_layout(*values.shape), optimized=False)
        self.target[self.program, i, lanes] = before + values

    def copy(self, source, gates):
        for part in _parts(Layer(0, gates, gates, 0)):
            for i in range(4):
                before = source.at[self.program, i, part.rows]
                self.target[self.program, i, part.rows] = load(before, vector_layout(part.lanes), optimized=False)


@dataclasses.dataclass(frozen=True)
class _Circuit:
    """The gates of all layers, whose rows are in shared memory."""

    plan: Plan
    coefficients: Any
    wires: Any
    rows: Any

    def gates(self, part):
        """Their places among the lanes of all layers."""
        return pl.ds(part.first - self.plan.inputs.lanes, part.lanes)

    def fetch(self, part):
        """(a, b), the rows that the gates read, and their coefficients."""
        gates, layout = self.gates(part), vector_layout(part.lanes)
        a, b = (load(self.wires.at[i, gates], layout, optimized=False) for i in range(2))
        return a, b, [load(self.coefficients.at[i, gates], layout, optimized=False) for i in range(4)]

    def run(self, layers):
        """Computes the rows of these layers."""
        parts = [(part, k == 0) for layer in layers for k, part in enumerate(_parts(layer))]
        width, fetched = self.rows.shape[1], None
        for i, (part, _) in enumerate(parts):
            a, b, c = fetched or self.fetch(part)
            # The next gates come from device memory while these wait for shared memory.
            fetched = self.fetch(parts[i + 1][0]) if i + 1 < len(parts) else None
            c0, c1, c2, c3 = (spread(c_, width) for c_ in c)
            a, b = gather_rows(self.rows, a), gather_rows(self.rows, b)
            self.rows[part.rows] = c0 + c1 * a + (c2 + c3 * a) * b
            if i + 1 == len(parts) or parts[i + 1][1]:
                plgpu.commit_smem()

    def run_backward(self, dlast, consumers, sums, totals):
        """Leaves the gradients of what each gate reads in `sums`, from that of the last layer's rows."""
        plan, width = self.plan, self.rows.shape[1]
        for i, layer in reversed(list(enumerate(plan.layers))):
            for part in _parts(layer):
                a, b, (_, c1, c2, c3) = self.fetch(part)
                if i + 1 == len(plan.layers):
                    dy = dlast
                else:
                    dy = _sum_of_consumers(consumers, plan.consumers[i], part.first - layer.first, part.lanes, sums)
                a, b = gather_rows(self.rows, a), gather_rows(self.rows, b)
                c1, c2, c3 = (spread(c, width) for c in (c1, c2, c3))
                of_a = plan.gradients.firsts[i] + part.first - layer.first
                sums[pl.ds(of_a, part.lanes)] = dy * (c1 + c3 * b)
                sums[pl.ds(of_a + layer.lanes, part.lanes)] = dy * (c2 + c3 * a)
                da = dy * a
                for k, terms in enumerate((dy, da, dy * b, da * b)):
                    totals.add(k, self.gates(part), row_sums(terms))
            plgpu.commit_smem()


def _sum_of_consumers(consumers, table, first, lanes, sums):
    """The gradients of `lanes` rows of a table, from `first` on."""
    total = None
    for turn in range(table.turns):
        places = pl.ds(table.first + turn * table.lanes + first, lanes)
        terms = gather_rows(sums, load(consumers.at[places], vector_layout(lanes), optimized=False))
        total = terms if total is None else total + terms
    return total


def _of_inputs(plan, consumers, sums):
    """The gradients of the inputs, part by part: first over the kernels of perception, then over its gates."""
    *_, inputs, kernels = plan.consumers
    for part in _parts(plan.gradients.summed):
        at = part.first - plan.gradients.summed.first
        first = load(consumers.at[pl.ds(kernels.first + at, part.lanes)], vector_layout(part.lanes), optimized=False)
        terms = [gather_rows(sums, first + k * plan.channels) for k in range(plan.kernels)]
        sums[part.rows] = functools.reduce(lambda total, term: total + term, terms)
    plgpu.commit_smem()
    for part in _parts(plan.inputs):
        yield part, _sum_of_consumers(consumers, inputs, part.first, part.lanes, sums)


def _of_next_state(cells, dseen_ref, dkept_ref, fires_ref, dkept_out):
    """The gradient of the last layer's rows. Writes that of what cells keep."""
    plan = cells.plan
    cell, place, counts = cells.of_states(plan.layers[-1].lanes)
    lane, _ = lane_and_column(plan.layers[-1].lanes, cells.count)
    dy = _at(dkept_ref, place, counts)
    for p in range(NEIGHBOURS):
        # Seen at place p by the cell on the other side.
        seeing, inside = cells.neighbour(cell, 1 - p // 3, 1 - p % 3)
        dy = dy + _at(dseen_ref, seeing * plan.seen + lane + p * plan.channels, inside & counts)
    if not fires_ref:
        scatter_elements(dkept_out, place, zeros_like(dy))
        return dy
    fired = _at(fires_ref[0], cell, counts) != 0
    scatter_elements(dkept_out, place, jnp.where(fired, 0.0, dy))
    return jnp.where(fired, dy, 0.0)
