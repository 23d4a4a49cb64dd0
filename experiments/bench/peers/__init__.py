"""Other libraries, timed on the same arrays in the same run: a module each."""

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
"""Name -> module that times another library: its `VERSION`, and `variants(task)`, the ways in which it does a task."""

FASTEST = {"torchlogix": "light, *", "published automaton": "16 gates"}
"""Peer -> the pattern of its fastest variant's name, for those that have several ways beside modes of running them. It
is the fastest in every run of docs/results/ that has all. Of modes `variants` knows the fastest itself."""

VariantChoice = Literal["best", "all"]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a peer is asked to do.

    Attributes:
      op, options: of the catalogue; "lenet", "logic", "logic-large", "logic-conv" and "automaton" are training steps.
      sets: arguments of each call, as our function takes them; for training steps one set. Empty if only the names of
        the variants are wanted.
      small: arguments for the results that are compared with float64.
      calls: in a program.
      dtype: of the computation.
      precision: of our products of float32: "default" (TF32 on a GPU) or "highest".
      products: whether there are matrix products or convolutions, so that TF32 makes a difference.
      seconds: least time of a round.
      choice: "best" for the library's fastest variant, "all" for every one.
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
"""A way in which a peer does a task: its name, its precision if it has one, and a function that measures it.

The function returns the fields of `measure.MEASURED` that it knows, and `results`: the floating results from the small
arguments, in the order of our function, or None. It may return `reference`, the float64 results to compare them with,
where its arguments are not the task's; and `error_reason`, why there is no error.
"""


def is_asked_for(peer: str, variant: str, choice: VariantChoice) -> bool:
    """Whether a variant of those that a module gives for this choice is timed."""
    return choice == "all" or fnmatch.fnmatchcase(variant, FASTEST.get(peer, "*"))


def installed() -> dict[str, ModuleType]:
    """The modules of the peers whose libraries are installed. Importing one imports its library."""
    peers = {}
    for name, module in PEERS.items():
        try:
            peers[name] = importlib.import_module(module)
        except Exception as error:  # a broken installation can raise anything
            print(f"{name} is left out: {error}")
    return peers
