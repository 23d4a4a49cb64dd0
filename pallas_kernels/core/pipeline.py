"""The one pipeline of the kernels: stages of shared memory that bulk copies fill ahead of their use.

A `Ring` has a few stages. The copies of a step go into stage `step % stages`, all of them arrive at the barrier of
that stage, and whoever uses the stage waits for it there. Two ways to keep it full:

- One warpgroup, or all of them, both fetch and compute: `prefetch` some steps, then for each step `wait`, compute,
  and `fetch` a later step into the stage that has just been read. The caller sees to it that it has been read.
- A producer warpgroup does nothing but fetch, and consumer warpgroups compute: with barriers `free`, `produce` waits
  until the consumers have `release`d a stage before it fills it again.

JAX's `plgpu.emit_pipeline` was measured beside a ring (docs/lab/2026-11-22-pipelines.md). It was slightly faster than
the ring, as a copy and in LayerNorm's forward; its warp-specialised form was slower in that forward. The ring stays
because it computes in place. A stage holds its data once, where `emit_pipeline` has separate buffers for inputs and
outputs, and LayerNorm's backward needs that shared memory.
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
    """Stages of shared memory.

    Attributes:
      stages: how many.
      copy: `copy(step, stage, barrier, *source)` starts the bulk copies of a step, which arrive at `barrier`.
      loaded: a barrier a stage, at which a step's copies arrive. Of consumers that take turns with the whole ring, each
        has barriers of its own, the stage's number `turn * stages + stage`, as a warpgroup has to wait for every phase
        of a barrier.
      steps: how many steps there are, or None if no step is ever fetched that does not exist.
      free: a barrier a stage, at which consumers arrive when they have read it; None without a producer.
      fixed_stage: the index of the stage of a ring that has a single one. The rings of several warpgroups, a stage
        each, share memory and barriers in this way.
      turn: of consumers that take turns, the number of the one that uses the ring; the producer's, of the one for whom
        it fetches.
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
        """Starts a step's copies, if there is such a step; before them, `prepare` waits until the stage is free."""

        def start():
            prepare()
            self._copy(step)

        if self.steps is None:
            start()
        else:
            pl.when(step < self.steps)(start)

    def prefetch(self, count: int) -> None:
        """Starts the copies of the first `count` steps."""
        for step in range(count):
            self.fetch(step)

    def wait(self, step: Any) -> None:
        """Waits for a step's copies."""
        plgpu.barrier_wait(self._loaded(step))

    def release(self, step: Any) -> None:
        """Tells the producer that a consumer has read a stage; after reads into registers, `commit_smem` first."""
        plgpu.barrier_arrive(self.free.at[self.stage(step)])

    def produce(self, step: Any, *source: Any) -> None:
        """Starts a step's copies as soon as all consumers have released its stage.

        `source` is handed on to `copy`, where the step's number alone does not say what is copied.
        """
        stage = self.stage(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
        self.copy(step, stage, self._loaded(step), *source)

    def drain(self, steps: Any) -> None:
        """Waits until the last stages are released: a CTA may not end while another arrives at its barriers."""

        def wait(step, _):
            plgpu.barrier_wait(self.free.at[self.stage(step)])

        lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)

    def _copy(self, step):
        self.copy(step, self.stage(step), self._loaded(step))

    def _loaded(self, step):
        return self.loaded.at[self.turn * self.stages + self.stage(step)]
