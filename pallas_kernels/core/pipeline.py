"""The pipeline of all kernels: a ring of stages of shared memory, which bulk copies fill before the data is needed.

A step is one iteration of a kernel's loop. The copies for step `step` fill stage `step % stages`. A ring has two
uses:

- The same warpgroups fetch and compute. After a `prefetch`, they `wait` for each step, compute, and `fetch` a later
  step. Before each `fetch`, the caller ensures that all threads have read the stage to be filled.
- A producer warpgroup fetches, and consumer warpgroups compute. `produce` refills a stage when all consumers have
  called `release`.

docs/lab/2026-11-22-pipelines.md compares this with `plgpu.emit_pipeline`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import remainder
from pallas_kernels.core.mosaic import plgpu


class Ring(NamedTuple):
    """Stages of shared memory, which a loop fills and reads in turn, one per step (iteration).

    Attributes:
      copy: `copy(step, stage, barrier, *source)` starts a step's bulk copies, which signal `barrier`.
      loaded: barriers that the copies signal, one per stage. In a ping-pong schedule, each consumer has separate
        barriers, because a warpgroup must wait for every phase of a barrier.
      steps: number of steps. `fetch` ignores steps beyond it. None if the caller fetches only existing steps.
      free: one barrier per stage, at which consumers arrive after reading it, or None without a producer.
      fixed_stage: index of the only stage that this ring uses, if each warpgroup has one stage.
      turn: index of the consumer warpgroup in a ping-pong schedule.
    """

    stages: int
    copy: Callable[..., None]
    loaded: Any
    steps: Any = None
    free: Any = None
    fixed_stage: Any = None
    turn: Any = 0

    def stage(self, step: Any) -> Any:
        return remainder(step, self.stages) if self.fixed_stage is None else self.fixed_stage

    def fetch(self, step: Any, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the copies for loop iteration `step`, if the loop has it. Before, `prepare()` waits until the
        iteration's stage of shared memory is free."""

        def start():
            prepare()
            self._copy(step)

        if self.steps is None:
            start()
        else:
            pl.when(step < self.steps)(start)

    def prefetch(self, count: int) -> None:
        for step in range(count):
            self.fetch(step)

    def wait(self, step: Any) -> None:
        plgpu.barrier_wait(self._loaded(step))

    def release(self, step: Any) -> None:
        """Tell the producer warpgroup that this consumer has read the shared memory for loop iteration `step`. If
        threads loaded the memory into registers, call `commit_smem` before `release`."""

        plgpu.barrier_arrive(self.free.at[self.stage(step)])

    def produce(self, step: Any, *source: Any) -> None:
        stage = self.stage(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
        self.copy(step, stage, self._loaded(step), *source)

    def drain(self, steps: Any) -> None:
        """Wait until consumers have released all `steps` loop iterations. A CTA may not end while another CTA arrives
        at its barriers."""

        def wait(step, _):
            plgpu.barrier_wait(self.free.at[self.stage(step)])

        lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)

    def _copy(self, step):
        self.copy(step, self.stage(step), self._loaded(step))

    def _loaded(self, step):
        return self.loaded.at[self.turn * self.stages + self.stage(step)]
