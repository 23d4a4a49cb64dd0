"""Peers: other libraries that the bench times on the same arrays."""

import dataclasses
import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

PEERS = {
    "PyTorch": "experiments.bench.peers.torch",
    "causal-conv1d": "experiments.bench.peers.causal_conv1d",
    "Liger-Kernel": "experiments.bench.peers.liger",
    "QuACK": "experiments.bench.peers.quack",
    "cuDNN": "experiments.bench.peers.cudnn",
    "tokamax": "experiments.bench.peers.tokamax",
    "torchlogix": "experiments.bench.peers.torchlogix",
    "published automaton": "experiments.bench.peers.published_automaton",
}
"""Each module defines `VERSION` and `variants(task)`, an iterator of `Variant`s."""

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
"""A way to compute a task: its name, the precision of its products or None, and a function that measures it.

The function returns fields of `measure.MEASURED`, and `results`: the floating results for `Task.small`, or None if they
cannot be compared. If results should differ from jaxbp's, `reference` has them in float64.
"""


def is_asked_for(peer: str, variant: str, choice: VariantChoice) -> bool:
    return choice == "all" or fnmatch.fnmatchcase(variant, FASTEST.get(peer, "*"))


def installed() -> dict[str, ModuleType]:
    peers = {}
    for name, module in PEERS.items():
        try:
            peers[name] = importlib.import_module(module)
        except Exception as error:  # a broken installation can raise anything
            print(f"the peer {name} is left out, because its import failed: {error}")
    return peers
