"""The pipeline of all kernels: stages of shared memory that bulk copies fill ahead of their use.

A `Ring` has a few stages. The copies of a step go into stage `step % stages`. All of them arrive at the stage's
barrier, at which every user of the stage waits. There are two ways to keep the ring full:

- One warpgroup, or all of them, both fetch and compute. They `prefetch` some steps. For each step they then `wait`,
  compute, and `fetch` a later step into the stage that has just been read. The caller ensures that it has been read.
- A producer warpgroup only fetches, and consumer warpgroups compute. With barriers `free`, `produce` waits until the
  consumers have `release`d a stage before it fills it again.

JAX's `plgpu.emit_pipeline` was compared with a ring (docs/lab/2026-11-22-pipelines.md). It was slightly faster than the
ring, as a copy and in LayerNorm's forward; its warp-specialized form was slower in that forward. The ring stays because
it computes in place: a stage holds its data once. `emit_pipeline` has separate buffers for inputs and outputs, and
LayerNorm's backward needs that shared memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import remainder
from pallas_kernels.core.mosaic import plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of stages in shared memory.

    Attributes:
      stages: number of stages.
      copy: `copy(step, stage, barrier, *source)` starts the bulk copies of a step, which arrive at `barrier`.
      loaded: barriers at which a step's copies arrive, one per stage. Consumers in a ping-pong schedule each have
        separate barriers, with index `turn * stages + stage`, because a warpgroup has to wait for every phase of a
        barrier.
      steps: number of steps, or None if no step is ever fetched that does not exist.
      free: barriers at which consumers arrive when they have read a stage, one per stage; None without a producer.
      fixed_stage: index of the stage, if the ring has only one. The rings of several warpgroups, with one stage each,
        share memory and barriers in this way.
      turn: in a ping-pong schedule, the number of the consumer that uses the ring, or for which the producer fetches.
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
        """Start a step's copies if the step exists; before them, `prepare` waits until the stage is free."""

        def start():
            prepare()
            self._copy(step)

        if self.steps is None:
            start()
        else:
            pl.when(step < self.steps)(start)

    def prefetch(self, count: int) -> None:
        """Start the copies of the first `count` steps."""
        for step in range(count):
            self.fetch(step)

    def wait(self, step: Any) -> None:
        """Wait for a step's copies."""
        plgpu.barrier_wait(self._loaded(step))

    def release(self, step: Any) -> None:
        """Tell the producer that a consumer has read a stage; after reads into registers, call `commit_smem` first."""
        plgpu.barrier_arrive(self.free.at[self.stage(step)])

    def produce(self, step: Any, *source: Any) -> None:
        """Start a step's copies as soon as all consumers have released its stage.

        `source` is passed to `copy`, for copies that the step's number does not determine.
        """
        stage = self.stage(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
        self.copy(step, stage, self._loaded(step), *source)

    def drain(self, steps: Any) -> None:
        """Wait until the last stages are released: a CTA may not end while another CTA arrives at its barriers."""

        def wait(step, _):
            plgpu.barrier_wait(self.free.at[self.stage(step)])

        lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)

    def _copy(self, step):
        self.copy(step, self.stage(step), self._loaded(step))

    def _loaded(self, step):
        return self.loaded.at[self.turn * self.stages + self.stage(step)]
