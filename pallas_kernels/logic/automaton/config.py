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
"""Cells per slice, and float32 per row. Four are a thread's widest access. Longer rows would begin in fewer banks."""
_CELLS = (2 * _SLICE, _SLICE, 2, 1)
"""Candidates for `Config.cells`. Three slices exceed shared memory. Fewer than four cells were slower:
docs/lab/2026-11-22-automata.md."""
_CELLS_OF_LATENCY = 2
"""Estimated latency per group, as a multiple of the time per cell. Not tuned."""
WARPGROUPS = 2
"""Maximum warpgroups per CTA. One was slower on large grids: docs/lab/2026-11-22-automata.md."""
_TOTAL_REGISTERS = 96
"""Maximum registers per thread for sums of the coefficients' gradients. Not tuned."""
_FORWARD_PROGRAMS = 2
"""Maximum CTAs of the forward per multiprocessor. More were no faster: docs/lab/2026-11-23-automata-kernels.md."""
_RESERVED_BYTES = 2048
"""Bytes of shared memory for Mosaic GPU's barrier, which takes fewer. Not tuned."""
_MAX_CONSUMERS = 32
"""Maximum gates that read one input or output. Unrolled code sums their gradients. Not tuned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Division of a tick (time step) of an automaton among CTAs and warpgroups.

    Attributes:
      cells: cells that a CTA computes at a time (a group): one, two, or a multiple of four.
      programs: number of CTAs.
      lanes: maximum number of gates that a warpgroup computes per step.
      lookahead: how many steps ahead a warpgroup fetches wires and coefficients.
      totals_in_registers: whether registers, not device memory, sum the coefficients' gradients.
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
        return plgpu.SMEM((self.slices, count, self.cells // self.slices), jnp.float32)


def unsupported(*arrays: Array, plan: Plan) -> str | None:
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
    multiprocessors = device.target().multiprocessors

    def groups(cells):
        return -(-plan.cells // (cells * multiprocessors))

    candidates = [cells for cells in _CELLS if _shared_bytes(plan, cells) <= _shared_limit()]
    cells = min(candidates, key=lambda cells: groups(cells) * (cells + _CELLS_OF_LATENCY))
    programs = -(-plan.cells // (cells * groups(cells)))
    if groups(cells) == 1:
        # A CTA with one group cannot fetch wires during an earlier group. These lanes and lookahead were the fastest:
        # docs/lab/2026-11-22-automata.md.
        return _simulable(Config(cells, programs, lanes=128, lookahead=4))
    # 128 lanes and a lookahead of four were slower: docs/lab/2026-11-23-automata-kernels.md.
    registers = sum(4 * -(-layer.lanes // (WARPGROUPS * LANES)) for layer in plan.layers)
    in_registers = registers <= _TOTAL_REGISTERS
    return _simulable(Config(cells, programs, lanes=256, lookahead=2, totals_in_registers=in_registers))


def forward_heuristic(*arrays: Array, plan: Plan) -> Config | None:
    config, multiprocessors = heuristic(plan=plan), device.target().multiprocessors
    groups = -(-plan.cells // config.cells)
    if groups <= multiprocessors:
        return config
    resident = min(_FORWARD_PROGRAMS, _shared_limit() // (plan.forward_rows * config.cells * 4))
    turns = -(-groups // (resident * multiprocessors))
    return _simulable(Config(config.cells, -(-groups // turns), lanes=128, lookahead=2))


def _simulable(config: Config) -> Config:
    # The simulator treats a gather or scatter as an access to all rows, and would report false data races.
    return config if simulating() is None else dataclasses.replace(config, programs=1, warpgroups=1)


def _shared_limit() -> int:
    return device.target().shared_bytes - _RESERVED_BYTES


def _shared_bytes(plan: Plan, cells: int) -> int:
    return plan.gradients.count * cells * 4
