"""One tick (time step) of a logic cellular automaton, and its backward: see docs/kernels/logic.md.

A gate with inputs a and b and coefficients c0 to c3 computes `y = c0 + c1 a + c2 b + c3 ab`. Each of a, b, and y is a
row of shared memory with one value per cell. The backward computes

    da = dy (c1 + c3 b),    db = dy (c2 + c3 a),    dc = sum over cells of dy (1, a, b, ab)

from dy, the sum of the gradients from the gates that read y.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

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
from pallas_kernels.logic.automaton_sizes import NEIGHBORS, Sizes

_SLICE = 4
"""Cells per slice, and float32 per row. Four are a thread's widest access. Longer rows would begin in fewer banks."""
_CELLS = (2 * _SLICE, _SLICE, 2, 1)
"""Candidates for `Config.cells`. Three slices exceed shared memory. Fewer than four cells were slower:
docs/lab/2026-11-22-automata.md."""
_CELLS_OF_LATENCY = 2
"""Estimated latency per group, as a multiple of the time per cell. Not tuned."""
_WARPGROUPS = 2
"""Maximum warpgroups per CTA. One was slower on large grids: docs/lab/2026-11-22-automata.md."""
_TOTAL_REGISTERS = 96
"""Maximum registers per thread for sums of the coefficients' gradients. Not tuned."""
_FORWARD_PROGRAMS = 2
"""Maximum CTAs of the forward per multiprocessor. More were no faster: docs/lab/2026-11-23-automata-kernels.md."""
_RESERVED_BYTES = 2048
"""Bytes of shared memory for Mosaic GPU's barrier, which takes fewer. Not tuned."""
_MAX_CONSUMERS = 32
"""Maximum gates that read one input or output. Unrolled code sums their gradients. Not tuned."""


class Config(NamedTuple):
    """Division of a tick (time step) of an automaton among CTAs and warpgroups.

    Attributes:
      cells: cells that a CTA computes at a time (a group): one, two, or a multiple of four. A slice is a part of a
        group with up to four cells.
      programs: number of CTAs.
      lanes: maximum number of gates that a warpgroup computes per step.
      lookahead: how many steps ahead a warpgroup fetches wires and coefficients.
      totals_in_registers: whether registers, not device memory, sum the coefficients' gradients.
    """

    cells: int
    programs: int
    lanes: int
    lookahead: int
    warpgroups: int = _WARPGROUPS
    totals_in_registers: bool = False

    @property
    def slices(self) -> int:
        return -(-self.cells // _SLICE)


def _plan(*arrays, sizes):
    consumers = max(*sizes.output_consumers, sizes.neighbor_consumers, sizes.center_consumers)
    if consumers > _MAX_CONSUMERS:
        return f"an input with {consumers} consumers, at most {_MAX_CONSUMERS}"
    if not sizes.cells:
        return "a batch of 0"
    if sizes.cells * sizes.neighborhood >= 2**31 - sizes.inputs.lanes:
        return "2^31 or more elements in all neighborhoods"
    candidates = [cells for cells in _CELLS if sizes.gradients.count * cells * 4 <= _shared_limit()]
    if not candidates:
        return f"{sizes.rows} inputs and gates, whose values for one cell do not fit into shared memory"

    def groups(cells):
        return -(-sizes.cells // (cells * device.target().multiprocessors))

    cells = min(candidates, key=lambda cells: groups(cells) * (cells + _CELLS_OF_LATENCY))
    programs = -(-sizes.cells // (cells * groups(cells)))
    if groups(cells) == 1:
        # A CTA with one group cannot fetch wires during an earlier group. These lanes and lookahead were the fastest:
        # docs/lab/2026-11-22-automata.md.
        return _simulable(Config(cells, programs, lanes=128, lookahead=4))
    # 128 lanes and a lookahead of four were slower: docs/lab/2026-11-23-automata-kernels.md.
    registers = sum(4 * -(-layer.lanes // (_WARPGROUPS * LANES)) for layer in sizes.layers)
    in_registers = registers <= _TOTAL_REGISTERS
    return _simulable(Config(cells, programs, lanes=256, lookahead=2, totals_in_registers=in_registers))


def _forward_plan(*arrays, sizes):
    config, multiprocessors = _plan(sizes=sizes), device.target().multiprocessors
    if isinstance(config, str) or (groups := -(-sizes.cells // config.cells)) <= multiprocessors:
        return config
    resident = min(_FORWARD_PROGRAMS, _shared_limit() // (sizes.forward_rows * config.cells * 4))
    turns = -(-groups // (resident * multiprocessors))
    return _simulable(Config(config.cells, -(-groups // turns), lanes=128, lookahead=2))


def _simulable(config: Config) -> Config:
    # The simulator treats a gather or scatter as an access to all rows, and would report false data races.
    return config if simulating() is None else config._replace(programs=1, warpgroups=1)


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


@kernel(plan=_forward_plan)
def tick(
    coefficients: Array, wires: Array, state: Array, fires: Array | None, *, sizes: Sizes, config: Config
) -> Array:
    """Return the next state, clipped to [0, 1].

    Args:
      coefficients: `(sizes.coefficient_firsts[-1], 4)` float32. Layer i begins at row `sizes.coefficient_firsts[i]`. It
        has one row per gate, followed by rows of zeros. A gate of perception has one row for all channels.
      wires: `(sizes.gates,)` int32. Layer i begins at `sizes.gate_firsts[i]`, and has one element per row of shared
        memory with outputs of the layer: one per gate, and in perception one per gate and channel. The element is
        `a + (b << 16)`, where a and b are the indices of the rows that the gate reads, as in `sizes.forward_layers`.
      state: `(cells * channels + padded_lanes(channels),)`, cell by cell, followed by unused elements.
      fires: `(cells,)` int32, 0 for cells that keep their state; None if every cell fires.
    """
    return _launch(coefficients, wires, None, state, fires, None, sizes, config, "automaton_tick")[0]


@kernel(plan=_plan)
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
    sizes: Sizes,
    config: Config,
) -> tuple[Array, Array, Array]:
    """Return the gradients (dseen, dkept, total) for one tick, from the gradients for the next tick.

    - dseen: for each cell, the gradients with respect to the states of the nine cells that it sees.
    - dkept: for each cell that does not fire, the gradient with respect to the state that it keeps. Otherwise 0.
    - total: for each CTA, the gradients with respect to the coefficients, summed over its cells and over ticks.

    The gradient with respect to a cell's next state is its dkept, plus its entries in the dseen of the nine cells that
    see it.

    Args:
      coefficients, state, fires: arguments of `tick`.
      wires: see `tick`, but with indices of rows as in `sizes.layers`.
      consumers: int32, the tables of `sizes.consumers`.
      dseen: `(cells * sizes.neighborhood + sizes.inputs.lanes,)` float32, ending with unused elements.
      dkept: float32 of the state's shape.
      total: `(config.programs, sizes.gates, 4)` float32.
    """
    gradients, name = (dseen, dkept, total), "automaton_tick_backward"
    return _launch(coefficients, wires, consumers, state, fires, gradients, sizes, config, name)[1]


class _Part(NamedTuple):
    """Consecutive rows of a layer that a warpgroup computes in one step.

    Attributes:
      first, offset: the first row's index in shared memory, and in the layer.
      lanes: the number of rows.
      is_alone: whether these last rows are too few to divide them among warpgroups. Then all warpgroups have this part.
      is_shared: whether each warpgroup computes one slice of a part with `is_alone`. If not, warpgroup 0 computes all.
      is_last: whether the part completes the layer.
    """

    first: Any
    offset: Any
    lanes: int
    is_alone: bool
    is_shared: bool
    is_last: bool


class _Step(NamedTuple):
    """A step of a warpgroup, such as computing a `_Part`. It calls `compute(fetched)`, or
    `compute(fetched, read(fetched))` if `read` is not None.

    Attributes:
      fetch: returns `fetched`, operands from device memory, some steps earlier.
      is_last: whether a barrier follows, as after the last step of a layer.
      read: returns operands from shared memory. It runs before the barrier that precedes this step, to use the waiting
        time. The previous step must not write these operands.
    """

    fetch: Callable[[], Any]
    compute: Callable[..., None]
    is_last: bool = False
    read: Callable[[Any], Any] | None = None


def _launch(coefficients, wires, consumers, state, fires, gradients, sizes, config, name):
    """Launch `tick`, or `tick_backward` if `consumers` and `gradients` are given. `gradients` is (dseen, dkept, total).

    Return (next state, None) for `tick`, and (None, gradients) for `tick_backward`. `name` is the kernel's name.
    """
    is_backward, channels, width = consumers is not None, sizes.channels, config.cells // config.slices
    groups = -(-sizes.cells // (config.cells * config.programs))
    is_copied = is_backward and groups > 1 and not config.totals_in_registers

    def body(*refs, program, warpgroup):
        c_ref, wires_ref, consumers_ref, state_ref, fires_ref, gradients_in, *written = refs
        new_state_ref, gradients_out, slices_ref, barrier = written
        if is_backward:
            (dseen_ref, dkept_ref, totals_ref), (dseen_out, dkept_out, totals_out) = gradients_in, gradients_out
            total_ref, total_out = totals_ref.at[program], totals_out.at[program]

        # The division of a layer's rows, and of the slices of a group, among the warpgroups.

        def parts(layer):
            # With the mask, the compiler encodes constant offsets in addresses, which halves the registers.
            done, own_warpgroup = 0, warpgroup & (_WARPGROUPS - 1)
            while done < layer.lanes:
                shares = (layer.lanes - done) // (config.warpgroups * LANES)
                lanes = min(config.lanes, max(shares, 1) * LANES)
                offset = done + own_warpgroup * lanes if shares else done
                done += lanes * (config.warpgroups if shares else 1)
                is_shared = not shares and 1 < config.slices == config.warpgroups
                yield _Part(layer.first + offset, offset, lanes, not shares, is_shared, done == layer.lanes)

        def own_slices(part):
            return [warpgroup & (_WARPGROUPS - 1)] if part.is_shared else range(config.slices)

        def divided(part):
            """Run the decorated function with the list of the slices of cells that this warpgroup computes."""
            if part.is_alone and not part.is_shared:
                return lambda function: pl.when(warpgroup == 0)(functools.partial(function, range(config.slices)))
            return lambda function: function(own_slices(part))

        def once(part, function, otherwise=None):
            return lax.cond(warpgroup == 0, function, lambda: otherwise) if part.is_alone else function()

        # Cells, and the elements of their states and neighborhoods. `group` is the index of a group's first cell.

        def neighbor(cell, row_offset, column_offset):
            row = remainder(quotient(cell, sizes.width), sizes.height) + row_offset
            column = remainder(cell, sizes.width) + column_offset
            valid = cell < sizes.cells
            if sizes.periodic:
                row, column = _wrap(row, sizes.height), _wrap(column, sizes.width)
            else:
                valid &= (row >= 0) & (row < sizes.height) & (column >= 0) & (column < sizes.width)
            grid = quotient(cell, sizes.height * sizes.width)
            return (grid * sizes.height + row) * sizes.width + column, valid

        def seen_elements(part, group, s):
            lane, column = lane_and_column(part.lanes, width)
            lane = lane + part.offset
            place = quotient(lane, channels)
            row_offset, column_offset = quotient(place, 3) - 1, remainder(place, 3) - 1
            cell, valid = neighbor(column + (group + s * width), row_offset, column_offset)
            return cell * channels + remainder(lane, channels), valid & (lane < sizes.neighborhood)

        def state_elements(part, group, s):
            """Return (row, column, place, cell, valid), the locations of the state elements of one part of a slice.

            A state element is one channel of one cell. `part` is a `_Part` of `sizes.state_elements(width)`, `group`
            the index of the group's first cell, and s the index of a slice in the group.

            - row, column: the element's channel, and the index of its cell in the slice. In shared memory, the last
              layer has one row per channel, and one column per cell.
            - place: the element's index in the state in device memory.
            - cell: the index of the element's cell.
            - valid: False for padding.
            """
            lane = lane_and_column(part.lanes, 1)[0] + part.offset
            column, channel = quotient(lane, channels), remainder(lane, channels)
            is_element, cell = lane < channels * width, column + (group + s * width)
            valid = is_element & (cell < sizes.cells)
            # Padding lanes use an unused row after the last channel's row.
            row, column = jnp.where(is_element, channel, channels), jnp.where(is_element, column, 0)
            return row, column, jnp.where(valid, cell, sizes.cells) * channels + channel, cell, valid

        # Transfers of data from device to shared memory, each a step per group.

        def transfer_step(layer, load_slice, write_slice, group):
            def fetch():
                return [[load_slice(part, group, s) for s in own_slices(part)] for part in parts(layer)]

            def compute(fetched):
                for part, blocks in zip(parts(layer), fetched, strict=True):

                    @divided(part)
                    def _(slices, part=part, blocks=blocks):
                        for s, block in zip(slices, blocks, strict=True):
                            write_slice(part, group, s, block)

            return _Step(fetch, compute)

        def load_states(part, group, s):
            return _gather(state_ref, *seen_elements(part, group, s))

        def write_states(part, group, s, states):
            valid = seen_elements(part, group, s)[1]
            slices_ref.at[s][pl.ds(part.first, part.lanes)] = jnp.where(valid, states.astype(jnp.float32), 0.0)

        def seen_by(place, cell, valid):
            """Yield a pair of arrays (index, valid) for each of the nine cells that see a state element.

            `dseen_ref[index]` has this cell's term of the gradient with respect to the state element. The yielded
            `valid` is False for padding, and if this cell is outside of the grid. The arguments are results of
            `state_elements`.
            """
            channel = place - cell * channels
            for p in range(NEIGHBORS):
                # The cell at the offset opposite to position p sees this cell at position p.
                seeing_cell, is_cell = neighbor(cell, 1 - p // 3, 1 - p % 3)
                yield seeing_cell * sizes.neighborhood + p * channels + channel, is_cell & valid

        def load_terms(part, group, s):
            _, _, place, cell, valid = state_elements(part, group, s)
            dseen = [_gather(dseen_ref, *seen) for seen in seen_by(place, cell, valid)]
            fires = None if fires_ref is None else _gather(fires_ref, cell, valid)
            return gather_elements(dkept_ref, place), dseen, fires

        def write_sums(part, group, s, terms):
            """Write the gradient with respect to the next state of each state element of slice s.

            This gradient is the sum of `terms`, the result of `load_terms`. If the cell fires (updates), write it to
            shared memory, and 0 to `dkept_out`. Otherwise, write it to `dkept_out`, and 0 to shared memory. `part`,
            `group`, and s are as in `state_elements`.
            """
            (row, column, place, cell, valid), (dy, dseen, fires) = state_elements(part, group, s), terms
            for gradient, (_, is_seen) in zip(dseen, seen_by(place, cell, valid), strict=True):
                dy = dy + jnp.where(is_seen, gradient, 0.0)
            dy, dkept = jnp.where(valid, dy, 0.0), zeros_like(dy)
            if fires is not None:
                dy, dkept = jnp.where(fires != 0, dy, 0.0), jnp.where(fires != 0, 0.0, dy)
            scatter_elements(dkept_out, dkept, place)
            scatter_elements(slices_ref.at[s], dy, sizes.gradients.outputs.first + row, column)

        transfers = [functools.partial(transfer_step, sizes.inputs, load_states, write_states)]
        if is_backward:
            transfers.append(functools.partial(transfer_step, sizes.state_elements(width), load_terms, write_sums))

        # Gates of the forward.

        def gates_of(i, part):
            return pl.ds(sizes.gate_firsts[i] + part.offset, part.lanes)

        def fetch_gates(i, part):
            own_wires = load(wires_ref.at[gates_of(i, part)], vector_layout(part.lanes), optimized=False)
            first, copies = sizes.coefficient_firsts[i], sizes.layers[i].copies
            if copies == 1:
                c = load(c_ref.at[pl.ds(first + part.offset, part.lanes)], block_layout(part.lanes, 4))
            else:
                c = gather_rows(c_ref, first + quotient(lane_numbers(part.lanes) + part.offset, copies))
            return own_wires, c

        def forward_step(i, part):
            def compute(gates):
                @divided(part)
                def _(slices):
                    own_wires, c = gates
                    outputs = []
                    for s in slices:
                        a, b = (gather_rows(slices_ref.at[s], row) for row in _unpack(own_wires))
                        c0, c1, c2, c3 = (spread(c, width) for c in columns(c))
                        outputs.append(c0 + c1 * a + (c2 + c3 * a) * b)
                    # The compiler does not know that reads and writes access different rows, so it keeps their order.
                    for s, y in zip(slices, outputs, strict=True):
                        slices_ref.at[s][pl.ds(part.first, part.lanes)] = y

            return _Step(functools.partial(fetch_gates, i, part), compute, part.is_last)

        def next_state_step(group, part):
            def compute(_):
                @divided(part)
                def _(slices):
                    for s in slices:
                        row, column, place, cell, valid = state_elements(part, group, s)
                        outputs = gather_elements(slices_ref.at[s], sizes.forward_layers[-1].first + row, column)
                        outputs = jnp.clip(outputs, 0.0, 1.0).astype(new_state_ref.dtype)
                        if fires_ref is not None:
                            fired = _gather(fires_ref, cell, valid) != 0
                            outputs = jnp.where(fired, outputs, gather_elements(state_ref, place))
                        scatter_elements(new_state_ref, outputs, place)

            return _Step(tuple, compute)

        # Gates of the backward. `sums` are the sums of the coefficients' gradients in registers, one array per part, or
        # None if the sums are in device memory.

        def load_rows(ref, first, lanes):
            return load(ref.at[pl.ds(first, lanes)], block_layout(lanes, ref.shape[1]))

        def fetch_consumers(table, part):
            places = [pl.ds(table.first + pair * table.lanes + part.offset, part.lanes) for pair in range(table.pairs)]
            return [load(consumers_ref.at[place], vector_layout(part.lanes), optimized=False) for place in places]

        def sum_consumers(s, table, pairs):
            rows = [row for pair in pairs for row in _unpack(pair)][: table.consumers]
            return functools.reduce(operator.add, (gather_rows(slices_ref.at[s], row) for row in rows))

        def backward_step(sums, number, i, part):
            layer, is_output = sizes.layers[i], i + 1 == len(sizes.layers)
            # Warpgroups divide the cells only if each sums the coefficients' gradients in registers.
            slices_of_part = lambda: range(config.slices) if sums is None else own_slices(part)  # noqa: E731

            def fetch():
                total = None
                if sums is None:
                    previous = total_out if is_copied else total_ref
                    total = load(previous.at[gates_of(i, part)], block_layout(part.lanes, 4))
                pairs = fetch_consumers(sizes.consumers.layers[i], part)
                return fetch_gates(i, part), total, pairs

            def read(fetched):
                (own_wires, _), *_ = fetched
                return [[gather_rows(slices_ref.at[s], row) for row in _unpack(own_wires)] for s in slices_of_part()]

            def gate_gradients(fetched, inputs):
                (_, c), _, pairs = fetched
                first, slices = sizes.gradients.firsts[i] + part.offset, slices_of_part()
                gradients, products = [], []
                for s, (a, b) in zip(slices, inputs or read(fetched), strict=True):
                    if is_output:
                        dy = load_rows(slices_ref.at[s], sizes.gradients.outputs.first + part.offset, part.lanes)
                    else:
                        dy = sum_consumers(s, sizes.consumers.layers[i], pairs)
                    _, c1, c2, c3 = (spread(c, width) for c in columns(c))
                    gradients.append((dy * (c1 + c3 * b), dy * (c2 + c3 * a)))
                    da = dy * a
                    products.append((dy, da, dy * b, da * b))
                for s, (da, db) in zip(slices, gradients, strict=True):
                    slices_ref.at[s][pl.ds(first, part.lanes)] = da
                    slices_ref.at[s][pl.ds(first + layer.lanes, part.lanes)] = db
                return sums_of_rows(*(functools.reduce(operator.add, terms) for terms in zip(*products, strict=True)))

            def compute(fetched, inputs=None):
                gates = gates_of(i, part)
                if sums is None:

                    def add():
                        total_out[gates] = fetched[1] + gate_gradients(fetched, inputs)

                    once(part, add)
                else:
                    before = sums[number]
                    add = lambda: before + gate_gradients(fetched, inputs)  # noqa: E731
                    sums[number] = computed_here(add() if part.is_shared else once(part, add, before))

            # The last layer has no `read`, because the previous step writes its inputs.
            return _Step(fetch, compute, part.is_last, None if is_output else read)

        def kernel_sums_step(part):
            def compute(firsts):
                @divided(part)
                def _(slices):
                    for s in slices:
                        rows = (firsts[0] + k * channels for k in range(sizes.kernels))
                        terms = (gather_rows(slices_ref.at[s], row) for row in rows)
                        slices_ref.at[s][pl.ds(part.first, part.lanes)] = functools.reduce(operator.add, terms)

            return _Step(functools.partial(fetch_consumers, sizes.consumers.kernel_sums, part), compute, part.is_last)

        def input_gradients_step(group, part):
            table = sizes.consumers.inputs

            def compute(pairs):
                @divided(part)
                def _(slices):
                    for s in slices:
                        gradients = sum_consumers(s, table, pairs)
                        lane, column = lane_and_column(part.lanes, width)
                        lane, cell = lane + part.offset, column + (group + s * width)
                        valid = (lane < sizes.neighborhood) & (cell < sizes.cells)
                        place, unused = cell * sizes.neighborhood + lane, lane + sizes.cells * sizes.neighborhood
                        place = jnp.where(valid, place, unused)
                        scatter_elements(dseen_out, gradients, place)

            return _Step(functools.partial(fetch_consumers, table, part), compute)

        # Sums of the coefficients' gradients over the groups.

        def all_parts():
            return [(i, part) for i, layer in enumerate(sizes.layers) for part in parts(layer)]

        def add_totals(sums):
            # If two warpgroups sum over different cells, the second passes its sums to the first through shared memory.
            numbered, left = list(enumerate(all_parts())), {}
            for number, (_, part) in numbered:
                if part.is_shared:
                    left[number] = pl.ds(len(left) * part.lanes, part.lanes)

            @pl.when(warpgroup == _WARPGROUPS - 1)
            def _():
                for number, place in left.items():
                    slices_ref[0, place] = sums[number]

            meet(barrier)
            for number, (i, part) in numbered:
                gates = gates_of(i, part)

                def add(number=number, part=part, gates=gates):
                    total = load(total_ref.at[gates], block_layout(part.lanes, 4)) + sums[number]
                    if number in left:
                        total += load_rows(slices_ref.at[0], left[number].start, part.lanes)
                    total_out[gates] = total

                once(part, add)

        # All groups of cells of the CTA, one after the other.

        def steps_of(group, sums):
            layers = sizes.layers[:-1] if is_backward else sizes.forward_layers
            yield from (forward_step(i, part) for i, layer in enumerate(layers) for part in parts(layer))
            if not is_backward:
                yield from (next_state_step(group, part) for part in parts(sizes.state_elements(width)))
                return
            for number, (i, part) in sorted(enumerate(all_parts()), key=lambda numbered: -numbered[1][0]):
                yield backward_step(sums, number, i, part)
            yield from map(kernel_sums_step, parts(sizes.gradients.kernel_sums))
            yield from (input_gradients_step(group, part) for part in parts(sizes.inputs))

        def group_of(i):
            return (program + i * config.programs) * config.cells

        def visit(i, carry):
            """Compute group i, and return the next `carry`.

            `carry` is (sums, fetched): the sums of the coefficients' gradients, and the operands of the group's first
            steps. Each step fetches the operands of the step that follows `config.lookahead` steps later. Near the end
            of a group, it is a step of the next group.
            """
            sums, fetched = carry
            sums, group, next_group = sums and list(sums), group_of(i), group_of(i + 1)
            steps, lookahead, fetched = list(steps_of(group, sums)), len(fetched), [[a] for a in fetched]
            if groups > 1:
                steps += [transfer(next_group) for transfer in transfers]
            for n, step in enumerate(steps):
                if n + lookahead < len(steps) or groups > 1:
                    fetched.append([steps[(n + lookahead) % len(steps)].fetch()])
                step.compute(*fetched[n])
                if n + 1 < len(steps) and steps[n + 1].read:
                    fetched[n + 1].append(steps[n + 1].read(*fetched[n + 1]))
                if step.is_last:
                    meet(barrier)
            meet(barrier)  # The next group reads this group's writes, and overwrites its reads.
            return sums, [a for (a,) in fetched[len(steps) :]]

        sums = None
        if is_backward and config.totals_in_registers:
            lanes = [part.lanes for _, part in all_parts()]
            sums = [plgpu.layout_cast(jnp.zeros((n, 4), jnp.float32), block_layout(n, 4)) for n in lanes]
        for i, part in all_parts() if is_copied else ():
            gates = gates_of(i, part)

            def copy(gates=gates, part=part):
                total_out[gates] = load(total_ref.at[gates], block_layout(part.lanes, 4))

            once(part, copy)
        fetched = [step.fetch() for step in list(steps_of(group_of(0), sums))[: config.lookahead]]
        loaded = [transfer(group_of(0)).fetch() for transfer in transfers]
        for transfer, arrays in zip(transfers, loaded, strict=True):
            transfer(group_of(0)).compute(arrays)
        meet(barrier)
        carry = sums, fetched
        carry = visit(0, carry) if groups == 1 else lax.fori_loop(np.int32(0), np.int32(groups), visit, carry)
        if sums is not None:
            add_totals(carry[0])

    rows = sizes.gradients.count if is_backward else sizes.forward_rows
    return launch(
        body,
        *(coefficients, wires, consumers, state, fires, gradients),
        out=(None if is_backward else state, gradients),
        grid={"program": config.programs},
        warpgroups=config.warpgroups,
        scratch=[plgpu.SMEM((config.slices, rows, width), jnp.float32), plgpu.Barrier(num_arrivals=config.warpgroups)],
        name=name,
        barriers=False,
        sums_across_warps=False,
    )


def _wrap(i, n):
    return jnp.where(i < 0, i + n, jnp.where(i >= n, i - n, i))


def _gather(ref, places, valid):
    return gather_elements(ref, jnp.where(valid, places, 0))


def _unpack(packed):
    return packed & 0xFFFF, lax.shift_right_logical(packed, np.int32(16))
