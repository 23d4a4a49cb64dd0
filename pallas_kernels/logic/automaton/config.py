"""How a tick of an automaton is divided among CTAs and warpgroups.

A CTA computes a group of cells at a time. The group is as large as fits in shared memory and keeps all multiprocessors
busy. If the rows for one cell do not fit, the automaton is unsupported.
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
"""Cells per slice, whose elements of a row are adjacent. A thread's widest access to shared memory is 16 bytes (CUDA
C++ Programming Guide), or four float32. Longer rows would begin in fewer different banks."""
_CELLS = (2 * _SLICE, _SLICE, 2, 1)
"""Candidates for the number of cells that a CTA computes at a time. A second slice uses the same wires and coefficients
as the first, and a third would not fit in shared memory. Fewer than four cells were slower:
docs/lab/2026-11-22-automata.md."""
_CELLS_OF_LATENCY = 2
"""Latency of a group of cells, expressed as the number of cells that could be computed in this time. Chosen by hand;
not tuned."""
WARPGROUPS = 2
"""Most warpgroups per CTA. They share the CTA's rows, and each computes a part of every layer. One warpgroup was slower
on large grids: docs/lab/2026-11-22-automata.md."""
_TOTAL_REGISTERS = 96
"""Most registers of a thread for the gradients of coefficients. Together with the values of a step, they fit in 255
registers. Chosen by hand; not tuned."""
_FORWARD_PROGRAMS = 2
"""CTAs of the forward per multiprocessor, if the grid is large enough. Three and four CTAs were no faster:
docs/lab/2026-11-23-automata-kernels.md."""
_RESERVED_BYTES = 2048
"""Bytes of shared memory that are left to Mosaic GPU. Chosen by hand: more than its barrier takes."""
_MAX_CONSUMERS = 32
"""Most consumers per row, because the sum of the consumers' gradients is unrolled. Chosen by hand; not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a tick is divided among CTAs and warpgroups.

    Attributes:
      cells: cells that a CTA computes at a time: one, two, or a multiple of four.
      programs: number of CTAs.
      lanes: number of lanes of a layer that one warpgroup computes at a time. Their values must fit in registers.
      lookahead: number of steps by which the fetch of wires and coefficients precedes their use. A step computes
        `lanes` lanes.
      warpgroups: warpgroups per CTA, at most `WARPGROUPS`.
      totals_in_registers: whether a CTA sums the gradients of the coefficients over all its cells in registers, rather
        than in device memory.
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
        """Return shared memory for `count` rows per slice."""
        return plgpu.SMEM((self.slices, count, self.cells // self.slices), jnp.float32)


def unsupported(*arrays: Array, plan: Plan) -> str | None:
    """Return the reason why the kernels do not support an automaton, or None."""
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
        # With a single group, a CTA waits for its first wires. These values were fastest in
        # docs/lab/2026-11-22-automata.md.
        return _simulable(Config(cells, programs, lanes=128, lookahead=4))
    # 256 lanes and a lookahead of two were faster than 128 lanes and a lookahead of four:
    # docs/lab/2026-11-23-automata-kernels.md.
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
    """Return the config, which in the simulator has one CTA with one warpgroup.

    The simulator treats gathers and scatters as accesses to all rows. With other threads, it would therefore report
    data races that do not exist.
    """
    return config if simulating() is None else dataclasses.replace(config, programs=1, warpgroups=1)


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


def _shared_bytes(plan: Plan, cells: int) -> int:
    return plan.gradients.count * cells * 4
