"""Transfers between device and shared memory: the neighborhoods and next states of cells, and the gradients of both."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.core.gathers import gather_elements, lane_and_column, scatter_elements
from pallas_kernels.core.layouts import quotient, remainder, zeros_like
from pallas_kernels.logic.automaton.plan import NEIGHBOURS, Plan
from pallas_kernels.logic.automaton.schedule import Team


class _StateElements(NamedTuple):
    """Locations of state elements, each one channel of one cell.

    Attributes:
      row, column: the element's position among the last layer's rows of shared memory: its channel, and its cell's
        index in the slice.
      place: the element's index in the state in device memory.
      valid: False for padding.
    """

    row: Array
    column: Array
    place: Array
    cell: Array
    valid: Array


@dataclasses.dataclass(frozen=True)
class Cells:
    """A slice: `count` cells, at most four. A CTA computes a group of one or more slices at a time.

    Attributes:
      first_of_group: the index of the group's first cell.
      slices: the group's shared memory, `(slices, rows, count)`. A row has the values of one input or gate.
      number: the slice's index in the group.
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
        return self.plan.state_elements(self.count)

    def state_elements(self, part):
        C = self.plan.channels
        lane = lane_and_column(part.lanes, 1)[0] + part.offset
        column, channel = quotient(lane, C), remainder(lane, C)
        is_element, cell = lane < C * self.count, column + self.first
        valid = is_element & (cell < self.plan.cells)
        # Padding lanes use an unused row after the last channel's row.
        row, column = jnp.where(is_element, channel, C), jnp.where(is_element, column, 0)
        return _StateElements(row, column, jnp.where(valid, cell, self.plan.cells) * C + channel, cell, valid)

    def neighbour(self, cell, row_offset, column_offset):
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
        C = self.plan.channels
        lane, column = lane_and_column(part.lanes, self.count)
        lane = lane + part.offset
        place = quotient(lane, C)
        row_offset, column_offset = quotient(place, 3) - 1, remainder(place, 3) - 1
        cell, valid = self.neighbour(column + self.first, row_offset, column_offset)
        return cell * C + remainder(lane, C), valid & (lane < self.plan.neighbourhood)

    def scatter_gradients(self, part, gradients, dseen_out):
        neighbourhood = self.plan.neighbourhood
        lane, column = lane_and_column(part.lanes, self.count)
        lane, cell = lane + part.offset, column + self.first
        valid = (lane < neighbourhood) & (cell < self.plan.cells)
        place = jnp.where(valid, cell * neighbourhood + lane, lane + self.plan.cells * neighbourhood)
        scatter_elements(dseen_out, gradients, place)


def _wrap(i, n):
    return jnp.where(i < 0, i + n, jnp.where(i >= n, i - n, i))


@dataclasses.dataclass(frozen=True)
class Inputs:
    team: Team
    state: Any

    def load(self, slices):
        return [
            [_gather(self.state, *cells.seen_elements(part)) for cells in self.team.own(part, slices)]
            for part in self.team.parts(slices[0].plan.inputs)
        ]

    def write(self, slices, loaded):
        for part, blocks in zip(self.team.parts(slices[0].plan.inputs), loaded, strict=True):
            self.team.divide(part, slices, functools.partial(self.write_slices, part, blocks))

    def write_slices(self, part, blocks, slices):
        for cells, block in zip(slices, blocks, strict=True):
            valid = cells.seen_elements(part)[1]
            cells.rows[part.rows] = jnp.where(valid, block.astype(jnp.float32), 0.0)


def write_next_state(new_state, state, fires, last_layer, part, slices):
    for cells in slices:
        elements = cells.state_elements(part)
        outputs = jnp.clip(gather_elements(cells.rows, last_layer.first + elements.row, elements.column), 0.0, 1.0)
        outputs = outputs.astype(new_state.dtype)
        if fires is not None:
            fired = _gather(fires, elements.cell, elements.valid) != 0
            outputs = jnp.where(fired, outputs, gather_elements(state, elements.place))
        scatter_elements(new_state, outputs, elements.place)


@dataclasses.dataclass(frozen=True)
class OutputGradients:
    """The gradients with respect to the next states of cells. `load` reads their terms, and `write` adds these terms.
    If a cell fires (updates), `write` stores its sums in shared memory. If not, it stores them in `dkept_out`."""

    team: Team
    fires: Any
    dseen: Any
    dkept: Any
    dkept_out: Any

    def load(self, slices):
        return [
            [self.terms(part, cells) for cells in self.team.own(part, slices)]
            for part in self.team.parts(slices[0].elements)
        ]

    def terms(self, part, cells):
        elements = cells.state_elements(part)
        dseen = [_gather(self.dseen, *seen) for seen in self.seen(cells, elements)]
        fires = None if self.fires is None else _gather(self.fires, elements.cell, elements.valid)
        return gather_elements(self.dkept, elements.place), dseen, fires

    def seen(self, cells, elements):
        """Yield nine pairs of arrays (index, valid), one per position in a neighborhood.

        `self.dseen[index]` has the gradients of the cells that see `elements` at this position. `valid` is False for
        padding, and for seeing cells outside of the grid.
        """
        plan = cells.plan
        channel = elements.place - elements.cell * plan.channels
        for p in range(NEIGHBOURS):
            # The cell at the offset opposite to position p sees this cell at position p.
            cell, valid = cells.neighbour(elements.cell, 1 - p // 3, 1 - p % 3)
            yield cell * plan.neighbourhood + p * plan.channels + channel, valid & elements.valid

    def write(self, slices, loaded):
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
            scatter_elements(self.dkept_out, dkept, elements.place)
            scatter_elements(cells.rows, dy, cells.plan.gradients.outputs.first + elements.row, elements.column)


def _gather(ref, places, valid):
    return gather_elements(ref, jnp.where(valid, places, 0))
