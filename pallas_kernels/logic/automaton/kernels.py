"""One tick (time step) of a logic cellular automaton, and its backward: see docs/kernels/logic.md."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from pallas_kernels.core.launch import launch
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.automaton.cells import Cells, Inputs, OutputGradients, write_next_state
from pallas_kernels.logic.automaton.config import Config, forward_heuristic, heuristic, unsupported
from pallas_kernels.logic.automaton.gates import Backward, Circuit, add_totals, copy_totals, zero_totals
from pallas_kernels.logic.automaton.plan import Plan
from pallas_kernels.logic.automaton.schedule import Step, Team


class _TickRefs(NamedTuple):
    coefficients: Any
    wires: Any
    state: Any
    fires: Any
    new_state: Any
    rows: Any
    barrier: Any


@kernel(unsupported=unsupported, heuristic=forward_heuristic)
def tick(coefficients: Array, wires: Array, state: Array, fires: Array | None, *, plan: Plan, config: Config) -> Array:
    """Return the next state, clipped to [0, 1].

    Args:
      coefficients: `(plan.coefficient_firsts[-1], 4)` float32, one row per gate, in the order of
        `wires`. Zeros pad each layer.
      wires: `(plan.gates,)` int32, one `a + (b << 16)` per row of shared memory for a gate's outputs. a and b are the
        indices of the rows with the gate's inputs, as in `plan.forward_layers`.
      state: `(cells * channels + padded_lanes(channels),)`, cell by cell, followed by unused elements.
      fires: `(cells,)` int32, 0 for cells that keep their state; None if every cell fires.
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
    refs, layers = _TickRefs(*refs), plan.forward_layers
    team = Team(config, warpgroup, refs.barrier)

    def steps(slices, _):
        yield from Circuit(plan, team, refs.coefficients, refs.wires, slices).steps(layers)
        for part in team.parts(slices[0].elements):
            write = functools.partial(write_next_state, refs.new_state, refs.state, refs.fires, layers[-1], part)
            yield Step(tuple, lambda _, part=part, write=write: team.divide(part, slices, write))

    _visit_groups(plan, config, program, team, refs.rows, [Inputs(team, refs.state)], steps)


class _TickBackwardRefs(NamedTuple):
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


@kernel(unsupported=unsupported, heuristic=heuristic)
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
    """Return the gradients (dseen, dkept, total) for one tick, from the gradients for the next tick.

    - dseen: for each cell, the gradients with respect to the states of the nine cells that it sees.
    - dkept: for each cell that does not fire, the gradient with respect to the state that it keeps. Otherwise 0.
    - total: for each CTA, the gradients with respect to the coefficients, summed over its cells and over ticks.

    The gradient with respect to a cell's next state is its dkept, plus its entries in the dseen of the nine cells that
    see it.

    Args:
      coefficients, state, fires: arguments of `tick`.
      wires: see `tick`, but with indices of rows as in `plan.layers`.
      consumers: int32, the tables of `plan.consumers`.
      dseen: `(cells * plan.neighbourhood + plan.inputs.lanes,)` float32, ending with unused elements.
      dkept: float32 of the state's shape.
      total: `(config.programs, plan.gates, 4)` float32.
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
    refs = _TickBackwardRefs(*refs)
    team = Team(config, warpgroup, refs.barrier)
    total_in, total_out = refs.total.at[program], refs.total_out.at[program]
    is_copied = _groups_of_program(plan, config) > 1 and not config.totals_in_registers
    sums = None
    if config.totals_in_registers:
        sums = zero_totals(plan, team)
    if is_copied:
        copy_totals(plan, team, total_in, total_out)

    def steps(slices, sums=None):
        circuit = Circuit(plan, team, refs.coefficients, refs.wires, slices)
        yield from circuit.steps(plan.layers[:-1])
        previous_total = total_out if is_copied else total_in
        yield from Backward(circuit, refs.consumers, sums, previous_total, total_out, refs.dseen_out).steps()

    loads = [Inputs(team, refs.state), OutputGradients(team, refs.fires, refs.dseen, refs.dkept, refs.dkept_out)]
    sums = _visit_groups(plan, config, program, team, refs.rows, loads, steps, sums)
    if sums is not None:
        add_totals(plan, team, refs.rows, sums, total_in, total_out)


def _groups_of_program(plan, config):
    return -(-plan.cells // (config.cells * config.programs))


def _visit_groups(plan, config, program, team, rows, loads, steps, carry=None):
    """Compute all cells of a CTA, in groups of up to eight cells, and return `carry` after the last group.

    Args:
      loads: objects that load the next group's data after each group, such as `Inputs`.
      steps: `steps(slices, carry)` yields the `Step`s of one group, which update the list `carry`. `slices` lists the
        group's `Cells`.
    """
    groups, width = _groups_of_program(plan, config), rows.shape[-1]

    def slices_of(i):
        first = (program + i * config.programs) * config.cells
        return [Cells(plan, width, first, rows, s) for s in range(config.slices)]

    def visit(i, state):
        carry, fetched = state
        carry, slices, following = carry and list(carry), slices_of(i), slices_of(i + 1)
        of_group = list(steps(slices, carry))
        if groups > 1:
            of_group += [
                Step(functools.partial(a.load, following), functools.partial(a.write, following)) for a in loads
            ]
        fetched = team.run(of_group, fetched, is_repeated=groups > 1)
        team.meet()  # The next group reads this group's writes, and overwrites its reads.
        return carry, fetched

    fetched = team.first_fetches(list(steps(slices_of(0), carry)))
    loaded = [a.load(slices_of(0)) for a in loads]
    for a, arrays in zip(loads, loaded, strict=True):
        a.write(slices_of(0), arrays)
    team.meet()
    state = carry, fetched
    return (visit(0, state) if groups == 1 else lax.fori_loop(np.int32(0), np.int32(groups), visit, state))[0]
