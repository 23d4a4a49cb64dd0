"""Division of an automaton's layers among the warpgroups of a CTA. In a `Step`, a warpgroup computes one `Part` of a
layer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.core.gathers import meet
from pallas_kernels.core.layouts import LANES
from pallas_kernels.logic.automaton.config import WARPGROUPS, Config


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive rows of a layer that a warpgroup computes in one step.

    Attributes:
      first, offset: the first row's index in shared memory, and in the layer.
      lanes: the number of rows.
      is_alone: whether these last rows are too few to divide them among warpgroups. Then all warpgroups have this part,
        and divide its cells by slices (`Cells`), or warpgroup 0 computes all cells.
      is_last: whether the part completes the layer.
    """

    first: Any
    offset: Any
    lanes: int
    is_alone: bool
    is_last: bool

    @property
    def rows(self) -> Any:
        return pl.ds(self.first, self.lanes)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a warpgroup, such as computing a `Part`. It calls `compute(fetched)`, or
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


@dataclasses.dataclass(frozen=True)
class Team:
    config: Config
    warpgroup: Any
    barrier: Any

    def parts(self, layer):
        warpgroups, done = self.config.warpgroups, 0
        # With the mask, the compiler encodes constant offsets in addresses, which halves the registers.
        warpgroup = self.warpgroup & (WARPGROUPS - 1)
        while done < layer.lanes:
            shares = (layer.lanes - done) // (warpgroups * LANES)
            lanes = min(self.config.lanes, max(shares, 1) * LANES)
            offset = done + warpgroup * lanes if shares else done
            done += lanes * (warpgroups if shares else 1)
            yield Part(layer.first + offset, offset, lanes, is_alone=not shares, is_last=done == layer.lanes)

    def shares_slices(self, part, slices):
        return part.is_alone and 1 < slices == self.config.warpgroups

    def own(self, part, slices):
        if self.shares_slices(part, len(slices)):
            return [dataclasses.replace(slices[0], number=self.warpgroup & (WARPGROUPS - 1))]
        return slices

    def divide(self, part, slices, function):
        if part.is_alone and not self.shares_slices(part, len(slices)):
            pl.when(self.warpgroup == 0)(functools.partial(function, slices))
        else:
            function(self.own(part, slices))

    def once(self, part, function, otherwise):
        return lax.cond(self.warpgroup == 0, function, lambda: otherwise) if part.is_alone else function()

    def meet(self):
        meet(self.barrier)

    def first_fetches(self, steps):
        return [step.fetch() for step in steps[: self.config.lookahead]]

    def run(self, steps, fetched, is_repeated):
        """Compute the steps in order, and fetch each step's operands `len(fetched)` steps earlier. `fetched` has the
        operands of the first steps. If `is_repeated`, the same steps follow once more: fetch the first steps' operands
        again, and return them."""
        lookahead, fetched = len(fetched), [[a] for a in fetched]
        for i, step in enumerate(steps):
            if i + lookahead < len(steps) or is_repeated:
                fetched.append([steps[(i + lookahead) % len(steps)].fetch()])
            step.compute(*fetched[i])
            if i + 1 < len(steps) and steps[i + 1].read:
                fetched[i + 1].append(steps[i + 1].read(*fetched[i + 1]))
            if step.is_last:
                self.meet()
        return [a for (a,) in fetched[len(steps) :]]
