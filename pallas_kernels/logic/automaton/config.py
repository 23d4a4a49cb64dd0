"""How a tick of an automaton is divided among CTAs and warpgroups.

A CTA computes a few cells at a time, as many as fit into shared memory and keep all multiprocessors busy. If the rows
of one cell do not fit, the automaton is unsupported.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.core import device
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.logic.automaton.plan import Plan

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


def unsupported(*arrays: Array, plan: Plan) -> str | None:
    """Return why the kernels do not support an automaton, or None."""
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


def heuristic(*arrays: Array, plan: Plan) -> Config | None:
    """Return the config of the backward, from which `forward_heuristic` takes the number of cells."""
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


def forward_heuristic(*arrays: Array, plan: Plan) -> Config | None:
    """Return the config of the forward."""
    config, multiprocessors = heuristic(plan=plan), device.target().multiprocessors
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
