"""Computation of an automaton's gates by a CTA, and its backward.

A gate with inputs a and b and coefficients c0 to c3 computes `y = c0 + c1 a + c2 b + c3 ab`. Each of a, b, and y is a
row of shared memory with one value per cell. The backward computes

    da = dy (c1 + c3 b),    db = dy (c2 + c3 a),    dc = sum over cells of dy (1, a, b, ab)

from dy, the sum of the gradients from the gates that read y.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.gathers import (
    block_layout,
    columns,
    computed_here,
    gather_rows,
    lane_numbers,
    spread,
    sums_of_rows,
    vector_layout,
)
from pallas_kernels.core.layouts import load, quotient
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.logic.automaton.cells import Cells
from pallas_kernels.logic.automaton.config import WARPGROUPS
from pallas_kernels.logic.automaton.plan import Plan
from pallas_kernels.logic.automaton.schedule import Step, Team


class _Gates(NamedTuple):
    wires: Array
    coefficients: Array


@dataclasses.dataclass(frozen=True)
class Circuit:
    plan: Plan
    team: Team
    coefficients: Any
    wires: Any
    slices: list[Cells]

    def fetch(self, i, part):
        wires = load(self.wires.at[_gates_of(self.plan, i, part)], vector_layout(part.lanes), optimized=False)
        return _Gates(wires, self.fetch_coefficients(i, part))

    def fetch_coefficients(self, i, part):
        first, copies = self.plan.coefficient_firsts[i], self.plan.layers[i].copies
        if copies == 1:
            return load(self.coefficients.at[pl.ds(first + part.offset, part.lanes)], block_layout(part.lanes, 4))
        return gather_rows(self.coefficients, first + quotient(lane_numbers(part.lanes) + part.offset, copies))

    def steps(self, layers):
        for i, layer in enumerate(layers):
            for part in self.team.parts(layer):
                fetch, compute = functools.partial(self.fetch, i, part), functools.partial(self.compute, part)
                yield Step(fetch, compute, part.is_last)

    def compute(self, part, gates):
        self.team.divide(part, self.slices, functools.partial(self.compute_slices, part, gates))

    def compute_slices(self, part, gates, slices):
        outputs = []
        for cells in slices:
            a, b = (gather_rows(cells.rows, row) for row in _unpack(gates.wires))
            c0, c1, c2, c3 = (spread(c, cells.count) for c in columns(gates.coefficients))
            outputs.append(c0 + c1 * a + (c2 + c3 * a) * b)
        # The compiler does not know that reads and writes access different rows, so it keeps their order.
        for cells, y in zip(slices, outputs, strict=True):
            cells.rows[part.rows] = y


class _GatesBackward(NamedTuple):
    """Operands from device memory for the backward of one `Part`.

    Attributes:
      total: the sums of the coefficients' gradients so far, or None if they are in registers.
      consumers: the rows of shared memory whose sum is dy. Each int32 packs the indices of two rows.
    """

    gates: _Gates
    total: Array | None
    consumers: list[Array]


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward of all layers for one group of cells. It adds the group's terms to the sums of the coefficients'
    gradients over all cells.

    Attributes:
      sums: these sums in registers, one array per `Part` (consecutive gates of one layer), or None.
      previous_total, total: if `sums` is None, the sums in device memory before and after this group.
    """

    circuit: Circuit
    consumers: Any
    sums: list[Array] | None
    previous_total: Any
    total: Any
    dseen: Any

    def steps(self):
        plan, team = self.circuit.plan, self.circuit.team
        for number, (i, part) in sorted(enumerate(_parts(plan, team)), key=lambda numbered: -numbered[1][0]):
            fetch, compute = functools.partial(self.fetch, i, part), functools.partial(self.compute, number, i, part)
            # The last layer has no `read`, because the previous step writes its inputs.
            read = functools.partial(self.read, part) if i + 1 < len(plan.layers) else None
            yield Step(fetch, compute, part.is_last, read)
        table = plan.consumers.kernel_sums
        for part in team.parts(plan.gradients.kernel_sums):
            fetch = functools.partial(self.fetch_consumers, table, part)
            yield Step(fetch, functools.partial(self.sum_kernels, part), part.is_last)
        table = plan.consumers.inputs
        for part in team.parts(plan.inputs):
            fetch = functools.partial(self.fetch_consumers, table, part)
            yield Step(fetch, functools.partial(self.write_inputs, table, part), is_last=False)

    def fetch(self, i, part):
        plan = self.circuit.plan
        total = None
        if self.sums is None:
            total = load(self.previous_total.at[_gates_of(plan, i, part)], block_layout(part.lanes, 4))
        consumers = self.fetch_consumers(plan.consumers.layers[i], part)
        return _GatesBackward(self.circuit.fetch(i, part), total, consumers)

    def fetch_consumers(self, table, part):
        places = [pl.ds(table.first + pair * table.lanes + part.offset, part.lanes) for pair in range(table.pairs)]
        return [load(self.consumers.at[place], vector_layout(part.lanes), optimized=False) for place in places]

    def slices(self, part):
        # Warpgroups divide the cells only if each sums the coefficients' gradients in registers.
        slices = self.circuit.slices
        return slices if self.sums is None else self.circuit.team.own(part, slices)

    def read(self, part, fetched):
        return [[gather_rows(cells.rows, row) for row in _unpack(fetched.gates.wires)] for cells in self.slices(part)]

    def compute(self, number, i, part, fetched, inputs=None):
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
        plan = self.circuit.plan
        if i + 1 == len(plan.layers):
            return _load_rows(cells.rows, plan.gradients.outputs.first + part.offset, part.lanes)
        return _sum_consumers(cells, plan.consumers.layers[i], consumers)

    def sum_kernels(self, part, firsts):
        plan = self.circuit.plan

        def sum_slices(slices):
            for cells in slices:
                rows = (firsts[0] + k * plan.channels for k in range(plan.kernels))
                cells.rows[part.rows] = functools.reduce(operator.add, (gather_rows(cells.rows, row) for row in rows))

        self.circuit.team.divide(part, self.circuit.slices, sum_slices)

    def write_inputs(self, table, part, consumers):

        def write_slices(slices):
            for cells in slices:
                cells.scatter_gradients(part, _sum_consumers(cells, table, consumers), self.dseen)

        self.circuit.team.divide(part, self.circuit.slices, write_slices)


def zero_totals(plan, team):
    lanes = [part.lanes for _, part in _parts(plan, team)]
    return [plgpu.layout_cast(jnp.zeros((n, 4), jnp.float32), block_layout(n, 4)) for n in lanes]


def copy_totals(plan, team, source, destination):
    for i, part in _parts(plan, team):
        gates = _gates_of(plan, i, part)

        def copy(gates=gates, lanes=part.lanes):
            destination[gates] = load(source.at[gates], block_layout(lanes, 4))

        team.once(part, copy, None)


def add_totals(plan, team, rows, sums, before, after):
    # If two warpgroups sum over different cells, the second passes its sums to the first through shared memory.
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


def _gates_of(plan, i, part):
    return pl.ds(plan.gate_firsts[i] + part.offset, part.lanes)


def _parts(plan, team):
    return [(i, part) for i, layer in enumerate(plan.layers) for part in team.parts(layer)]


def _load_rows(ref, first, lanes):
    return load(ref.at[pl.ds(first, lanes)], block_layout(lanes, ref.shape[1]))


def _sum_consumers(cells, table, pairs):
    rows = [row for pair in pairs for row in _unpack(pair)][: table.consumers]
    return functools.reduce(operator.add, (gather_rows(cells.rows, row) for row in rows))


def _unpack(packed):
    return packed & 0xFFFF, lax.shift_right_logical(packed, np.int32(16))
