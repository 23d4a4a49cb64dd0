"""The loop of a persistent CTA over groups of rows, which stream through a ring of stages in shared memory.

With n CTAs, each computes every n-th group. Copies past the last row read zeros and write nothing.
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
    """A stage of the ring in shared memory holds `rows` rows. `programs` counts the CTAs per multiprocessor."""

    rows: int
    stages: int
    programs: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """Base class of kernels that stream rows through shared memory. `programs` counts the CTAs on all
    multiprocessors."""

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
        """For each group of `config.rows` rows of this CTA, call `carry = step(first_row, buffers, wait, carry)`.
        Return the last carry.

        Args:
          step: when `wait()` returns, `buffers[i]` has the group's rows of `sources[i]`. `step` overwrites it with the
            rows of `targets[i]`.
          stages: per source, shared memory for `config.stages` groups.
          loaded: see `Ring`.
          program: this CTA's index.
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
            # The next stage is free when a TMA copy has read the previous group's results from it.
            ring.fetch(
                i + self.config.stages - 1, prepare=functools.partial(plgpu.wait_smem_to_gmem, 1, wait_read_only=True)
            )
            return carry

        carry = lax.fori_loop(0, steps, turn, carry)
        plgpu.wait_smem_to_gmem(0)
        return carry
