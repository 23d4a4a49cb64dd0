"""Other libraries (peers), which the bench times on the same arrays and in the same run as jaxbp. Each library has one
module."""

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
    "cuDNN": "experiments.bench.peers.cudnn",
    "tokamax": "experiments.bench.peers.tokamax",
    "torchlogix": "experiments.bench.peers.torchlogix",
    "published automaton": "experiments.bench.peers.published_automaton",
}
"""Name of a peer -> the module that times it. The module defines `VERSION`, the version of the library, and
`variants(task)`, which yields each `Variant` in which the peer computes the task."""

FASTEST = {"torchlogix": "light, *", "published automaton": "16 gates"}
"""Peer -> a pattern that matches the name of its fastest formulation, for peers that have several.

A formulation is one of several ways in which a peer can compute a workload. The formulation in this dict is the fastest
one in every run in docs/results/ that timed all formulations. `variants` chooses the fastest mode, such as a CUDA
graph.
"""

VariantChoice = Literal["best", "all"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A workload that a peer computes and times.

    Attributes:
      op, options: the name of an op of the catalogue, and its options. The op may also be a training step: "lenet",
        "logic", "logic-large", "logic-conv", or "automaton".
      sets: one set of arguments per call, in the form that jaxbp's function takes. A training step has only one set. It
        is empty if only the names of the variants are needed.
      small: the arguments at a small batch size. The results for these arguments are compared with float64.
      calls: the number of calls that one timed program makes.
      dtype: the dtype of the computation.
      precision: the precision of jaxbp's float32 products: "default" (TF32 on a GPU) or "highest".
      products: whether the workload has matrix products or convolutions, whose results and times depend on whether TF32
        is allowed.
      seconds: the least duration of a timing round.
      choice: "best" to time only the fastest variant of the library, or "all" to time every variant.
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
"""One way in which a peer computes a workload: the name of the variant, the precision of its products or None, and a
function that measures it.

The function returns the fields of `measure.MEASURED` that it knows, and `results`. `results` are the floating results
for `Task.small`, in the order in which jaxbp's function returns them, or None. If the variant computes with other
arguments than the task has, the function also returns `reference`, the float64 results to compare with. If no error can
be measured, the function may return the reason as `error_reason`.
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
