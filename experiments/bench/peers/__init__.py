"""Peers: other libraries that the bench times on the same arrays."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

FASTEST = {"torchlogix": "light, *", "published automaton": "16 gates"}
"""Patterns for the variants with the fastest formulation."""

VariantChoice = Literal["best", "all"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A workload that another library computes and times.

    Attributes:
      op, options: the name of an op or training step, and its `Workload.options`.
      sets: the arguments of jaxbp, one set per call of an op, or a single set for training steps. Empty if
        `variants(task)` is called only for names, and nothing is measured.
      small: arguments with a small batch, for the comparison with float64.
      calls: the number of calls or training steps in one timed program.
      products: whether the workload has matrix products or convolutions.
      forward: whether an op is timed without its gradients.
      bursts: whether the program is timed in bursts, too.
    """

    op: str
    options: Mapping[str, Any]
    sets: Sequence[tuple]
    small: tuple
    calls: int
    dtype: str
    precision: str
    products: bool
    seconds: float
    choice: VariantChoice
    forward: bool = False
    bursts: bool = False


Variant = tuple[str, str | None, Callable[[], dict[str, Any]]]
"""A way to compute a task: its name, the precision of its products or None, and a function that measures it.

The function returns fields of `measure.MEASURED`, and `results`: the floating results for `Task.small`, or None if they
cannot be compared. If the results should differ from the results of jaxbp, `reference` has the expected results in
float64.
"""


def is_asked_for(peer: str, variant: str, choice: VariantChoice) -> bool:
    return choice == "all" or fnmatch.fnmatchcase(variant, FASTEST.get(peer, "*"))
