"""The order in which the warpgroups of a CTA compute the lanes of all layers.

A layer is divided into parts, each with at most as many lanes as fit in the registers of one warpgroup. A kernel is a
list of steps, one per part. The operands of a step are fetched from device memory a few steps ahead. All warpgroups
meet at a barrier after the last step of a layer, because the next layer reads rows that other warpgroups have written.
"""

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
    """A range of a layer's lanes that one warpgroup computes at a time.

    Attributes:
      first: index of the part's first row.
      offset: index of the part's first lane within the layer.
      lanes: number of lanes.
      is_alone: whether there are too few lanes for several warpgroups. All warpgroups then have the same part, and one
        of them computes it.
      is_last: whether it is the last part of its layer.
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
    """The computation of some lanes of a layer, and the fetch of its operands from device memory.

    Attributes:
      fetch: returns the fetched operands.
      compute: function of the fetched operands and, if there is `read`, of the result of `read`.
      is_last: whether it is the last step of its layer, whose rows the next layer reads.
      read: function of the fetched operands that reads the rows of the step's inputs. The previous step must not write
        these rows. `read` is called at the end of the previous step, so that the rows arrive while the warpgroup waits
        for the others.
    """

    fetch: Callable[[], Any]
    compute: Callable[..., None]
    is_last: bool = False
    read: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Team:
    """The warpgroups of a CTA, from the view of the warpgroup with index `warpgroup`."""

    config: Config
    warpgroup: Any
    barrier: Any

    def parts(self, layer):
        """Yield this warpgroup's parts of a layer."""
        warpgroups, done = self.config.warpgroups, 0
        # The mask tells the compiler that the index is small. Instructions can then encode constant offsets in
        # addresses, which halves the number of registers.
        warpgroup = self.warpgroup & (WARPGROUPS - 1)
        while done < layer.lanes:
            shares = (layer.lanes - done) // (warpgroups * LANES)
            lanes = min(self.config.lanes, max(shares, 1) * LANES)
            offset = done + warpgroup * lanes if shares else done
            done += lanes * (warpgroups if shares else 1)
            yield Part(layer.first + offset, offset, lanes, is_alone=not shares, is_last=done == layer.lanes)

    def shares_slices(self, part, slices):
        """Return whether each warpgroup computes one slice of an `is_alone` part. `slices` is the number of slices."""
        return part.is_alone and 1 < slices == self.config.warpgroups

    def own(self, part, slices):
        """Return the slices of a part that this warpgroup computes."""
        if self.shares_slices(part, len(slices)):
            return [dataclasses.replace(slices[0], number=self.warpgroup & (WARPGROUPS - 1))]
        return slices

    def divide(self, part, slices, function):
        """Call `function(slices)` for a part. If the part `is_alone`, the slices are divided among the warpgroups, or
        the first warpgroup takes the only slice."""
        if part.is_alone and not self.shares_slices(part, len(slices)):
            pl.when(self.warpgroup == 0)(functools.partial(function, slices))
        else:
            function(self.own(part, slices))

    def once(self, part, function, otherwise):
        """Call `function()` for a part. If the part `is_alone`, only the first warpgroup calls it; the others return
        `otherwise`."""
        return lax.cond(self.warpgroup == 0, function, lambda: otherwise) if part.is_alone else function()

    def meet(self):
        """Wait until all warpgroups have written their rows."""
        meet(self.barrier)

    def first_fetches(self, steps):
        """Return the operands of the first steps, which are fetched before any step is computed."""
        return [step.fetch() for step in steps[: self.config.lookahead]]

    def run(self, steps, fetched, is_repeated):
        """Compute the steps in order, and fetch the operands of later steps ahead. With `is_repeated`, the last steps
        fetch operands for the next repetition.

        `fetched` holds the operands of the first steps. Return the operands that were fetched for the next repetition.
        """
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
