"""The loop of a persistent CTA over groups of rows, which stream through a ring of stages in shared memory.

A CTA processes groups of rows at a fixed stride. Bulk copies bring a group into a stage while other groups are
computed. A step overwrites the rows in the stage with the results, and a bulk copy writes these to device memory. Past
the last row, such a copy reads zeros and writes nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import quotient
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.norm.row_block import Block


@dataclasses.dataclass(frozen=True)
class Config:
    """How CTAs process rows.

    Attributes:
      rows: rows per group, which fills a stage; a multiple of the rows of a block.
      stages: stages of the ring.
      programs: resident CTAs per multiprocessor.
    """

    rows: int
    stages: int
    programs: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """A persistent CTA's loop over groups of rows."""

    block: Block
    config: Config
    programs: int

    def stream(
        self,
        step: Callable,
        carry: Any,
        sources: Sequence,
        targets: Sequence,
        stages: Sequence,
        loaded: Any,
        program: Any,
    ) -> Any:
        """Bring the groups through shared memory, and compute `carry = step(first row, stages, wait, carry)` for each.

        After a step calls `wait`, the stages hold its rows of each of `sources`. The results that it leaves in the
        first of these stages are copied to `targets`.
        """
        rows = self.config.rows
        groups = -(-sources[0].shape[0] // rows)
        steps = quotient(groups - program + self.programs - 1, self.programs)

        def group_rows(i):
            return pl.ds((program + i * self.programs) * rows, rows)

        def copy(i, stage, barrier):
            for source, stage_buffer in zip(sources, stages, strict=True):
                plgpu.copy_gmem_to_smem(source.at[group_rows(i)], stage_buffer.at[stage], barrier)

        ring = Ring(self.config.stages, copy, loaded, steps)
        ring.prefetch(self.config.stages - 1)

        def turn(i, carry):
            stage = ring.stage(i)
            wait = functools.partial(ring.wait, i)
            carry = step(group_rows(i).start, [stage_buffer.at[stage] for stage_buffer in stages], wait, carry)
            plgpu.commit_smem()
            for target, stage_buffer in zip(targets, stages, strict=False):
                plgpu.copy_smem_to_gmem(stage_buffer.at[stage], target.at[group_rows(i)], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            # The stage that is filled next held the previous group's results, which a bulk copy must have read.
            ring.fetch(
                i + self.config.stages - 1, prepare=functools.partial(plgpu.wait_smem_to_gmem, 1, wait_read_only=True)
            )
            return carry

        carry = lax.fori_loop(0, steps, turn, carry)
        plgpu.wait_smem_to_gmem(0)
        return carry
