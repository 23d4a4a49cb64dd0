"""Other libraries, timed on the same arrays in the same run. Each library has one module."""

import dataclasses
import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

PEERS = {
    "PyTorch": "experiments.bench.peers.torch",
    "Liger-Kernel": "experiments.bench.peers.liger",
    "QuACK": "experiments.bench.peers.quack",
    "tokamax": "experiments.bench.peers.tokamax",
    "torchlogix": "experiments.bench.peers.torchlogix",
    "published automaton": "experiments.bench.peers.published_automaton",
}
"""Name -> module that times another library. It defines `VERSION`, and `variants(task)`, which yields variants."""

FASTEST = {"torchlogix": "light, *", "published automaton": "16 gates"}
"""Peer -> a pattern that matches the name of its fastest formulation, for peers that have several.

It is the fastest in every run in docs/results/ that timed all of them. `variants` chooses the fastest mode of running.
"""

VariantChoice = Literal["best", "all"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A workload for a peer.

    Attributes:
      op, options: of the catalogue; "lenet", "logic", "logic-large", "logic-conv" and "automaton" are training steps.
      sets: the arguments of each call, in the form that jaxbp's function takes; one set for a training step. Empty if
        only the names of the variants are needed.
      small: the arguments for the results that are compared with float64.
      calls: the number of calls in a program.
      dtype: the dtype of the computation.
      precision: the precision of jaxbp's float32 products: "default" (TF32 on a GPU) or "highest".
      products: whether there are matrix products or convolutions, so that TF32 makes a difference.
      seconds: the least time of a round.
      choice: "best" for the fastest variant of the library, "all" for every variant.
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


Variant = tuple[str, str | None, Callable[[], dict[str, Any]]]
"""A variant of a peer: its name, its precision or None, and a function that measures it.

The function returns the fields of `measure.MEASURED` that it knows, and `results`. These are the floating results for
the small arguments, in the order of jaxbp's function, or None. If its arguments differ from the arguments of the task,
it also returns `reference`, the float64 results to compare with. It may return `error_reason`, which says why there is
no error.
"""


def is_asked_for(peer: str, variant: str, choice: VariantChoice) -> bool:
    return choice == "all" or fnmatch.fnmatchcase(variant, FASTEST.get(peer, "*"))


def installed() -> dict[str, ModuleType]:
    """Return the modules of the peers whose libraries are installed. Importing a module imports its library."""
    peers = {}
    for name, module in PEERS.items():
        try:
            peers[name] = importlib.import_module(module)
        except Exception as error:  # a broken installation can raise anything
            print(f"{name} is left out: {error}")
    return peers
