import dataclasses
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int, PRNGKeyArray

from jaxbp.common import checks
from jaxbp.common.cases import FixedArgument
from jaxbp.common.content import ByContent
from jaxbp.logic.wires.wires import Wires, bounded_count, constants, require_below

Relaxation = Literal["straight_through", "softmax"]
GATES_PER_GROUP = 8
"""With 16 candidates, the kernels read as many rows as with fixed wires: docs/lab/2026-11-29-learned-wires.md."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LearnedWires(ByContent):
    """The learned wires of a layer of two-input gates. Each input of a gate chooses one of K candidates by K logits.

    Gate g reads the wires `2 * g` and `2 * g + 1` as its inputs a and b. The wires are divided into groups of
    neighboring wires, and all wires of a group have the same candidates. Training learns the logits `(2 * gates, K)`,
    from which `harden` makes ordinary `Wires`. Make learned wires once, on the host, by the class methods. The
    constructor checks nothing.

    Attributes:
      candidates: the inputs of the layer among which the wires of each group choose.
      readers: the positions in `candidates.ravel()`, sorted by the input there.
      reader_offsets: for each input, the index in `readers` of its first position, followed by the length of `readers`.
      gate_wires: the wires between the learned wires and the gates.
      inputs: the number of inputs of the layer, including inputs that are no candidates.
      max_fan_out: the largest number of groups that have an input as a candidate.
      relaxation: the value of a wire in training. With "softmax", it is the mean of the candidates, weighted with the
        softmax of the logits. With "straight_through", it is the candidate with the largest logit, and the gradient
        with respect to the logits is the gradient of the mean.

    Source: K. Fojcik et al., "LILogicNet: Compact logic gate networks with learnable connectivity for efficient
    hardware deployment", 2025; "straight_through": as in `jaxbp.logic.gates.straight_through`.
    """

    candidates: Int[Array, "groups K"]
    readers: Int[Array, " groups*K"]
    reader_offsets: Int[Array, " inputs+1"]
    gate_wires: Wires
    inputs: int = dataclasses.field(metadata=dict(static=True))
    max_fan_out: int = dataclasses.field(metadata=dict(static=True))
    relaxation: Relaxation = dataclasses.field(metadata=dict(static=True))

    @property
    def gates(self) -> int:
        return self.gate_wires.gates

    @property
    def groups(self) -> int:
        return self.candidates.shape[-2]

    @property
    def choices(self) -> int:
        """The number K of candidates per wire."""
        return self.candidates.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        return self.candidates.dtype

    @classmethod
    def from_candidates(
        cls, candidates: ArrayLike, gates: int, inputs: int, relaxation: Relaxation = "straight_through"
    ) -> "LearnedWires":
        """Make wires whose group q chooses among the inputs `candidates[q]`.

        The groups together have at most as many candidates as there are wires, or if there are more inputs than wires,
        as there are inputs. More candidates would need too much memory for their gradients.

        Raises:
          TypeError: the candidates are not integers.
          ValueError: the candidates are not a matrix, or not in [0, inputs); the number of groups does not divide the
            number of wires, `2 * gates`; there are too many candidates; or the relaxation is unknown.
        """
        op = "LearnedWires.from_candidates"
        gates, inputs = bounded_count(op, "gates", gates), bounded_count(op, "inputs", inputs)
        candidates = np.asarray(candidates)
        if not np.issubdtype(candidates.dtype, np.integer):
            raise TypeError(f"{op}: candidates has dtype {candidates.dtype}; wants integers")
        if candidates.ndim != 2 or not candidates.size or 2 * gates % candidates.shape[0]:
            wanted = f"(groups, K), where groups divides {2 * gates}, the number of wires"
            raise ValueError(f"{op}: candidates has shape {candidates.shape}; wants {wanted}")
        if candidates.size > (most := max(2 * gates, inputs)):
            wanted = f"at most {most} candidates in all groups, the larger of the numbers of wires and inputs"
            raise ValueError(f"{op}: candidates has shape {candidates.shape}; wants {wanted}")
        if relaxation not in get_args(Relaxation):
            raise ValueError(f"{op}: relaxation is {relaxation!r}; wants one of {', '.join(get_args(Relaxation))}")
        require_below(op, "candidates", candidates, inputs, "the number of inputs")
        read = candidates.ravel()
        readers = np.argsort(read, kind="stable")
        offsets = np.searchsorted(read, np.arange(inputs + 1), sorter=readers)
        wires = np.arange(2 * gates).reshape(gates, 2)
        return cls(
            **constants(candidates=candidates, readers=readers, reader_offsets=offsets),
            gate_wires=Wires.from_pairs(*wires.T, 2 * gates),
            inputs=inputs,
            max_fan_out=int(np.diff(offsets).max()),
            relaxation=relaxation,
        )

    @classmethod
    def random(
        cls,
        inputs: int,
        gates: int,
        seed: int,
        *,
        candidates: int | Literal["all"] = 16,
        gates_per_group: int | None = None,
        relaxation: Relaxation = "straight_through",
    ) -> "LearnedWires":
        """Make wires with random candidates. Each input is a candidate in n or n + 1 groups.

        Args:
          candidates: the number K of candidates per wire, or "all": each wire chooses among all inputs. Wires to the
            pixels of images need all, or they are much less accurate: docs/lab/2026-11-29-learned-wires.md.
          gates_per_group: a divisor of `gates` that is at least `candidates / 2`. None: the one nearest to 8. With
            "all" candidates, all gates are one group.

        Raises:
          ValueError: a count is below 1; `gates_per_group` does not divide `gates`, or is less than half of
            `candidates`; or there are fewer inputs than candidates.
        """
        op = "LearnedWires.random"
        inputs, gates = bounded_count(op, "inputs", inputs), bounded_count(op, "gates", gates)
        if candidates == "all":
            if gates_per_group not in (None, gates):
                wanted = f"None or {gates}, the number of gates, because candidates is 'all'"
                raise ValueError(f"{op}: gates_per_group is {gates_per_group!r}; wants {wanted}")
            return cls.from_candidates(np.arange(inputs)[None], gates, inputs, relaxation)
        candidates = checks.count(op, "candidates", candidates)
        if candidates > min(inputs, 2 * gates):
            wanted = f"at most {min(inputs, 2 * gates)}, for {inputs} inputs and {2 * gates} wires"
            raise ValueError(f"{op}: candidates is {candidates}; wants {wanted}")
        sizes = [n for n in range(-(-candidates // 2), gates + 1) if gates % n == 0]
        if gates_per_group is None:
            gates_per_group = min(sizes, key=lambda n: abs(n - GATES_PER_GROUP))
        elif gates_per_group not in sizes:
            wanted = f"a divisor of {gates}, the number of gates, that is at least {sizes[0]}"
            raise ValueError(f"{op}: gates_per_group is {gates_per_group!r}; wants {wanted}")
        random, count = np.random.default_rng(seed), gates // gates_per_group * candidates
        rounds = [random.permutation(inputs) for _ in range(-(-count // inputs))]
        found = np.concatenate(rounds)[:count].reshape(-1, candidates)
        return cls.from_candidates(found, gates, inputs, relaxation)

    def initial_logits(self, key: PRNGKeyArray, dtype: DTypeLike = "float32") -> Float[Array, "2*gates K"]:
        """Return standard normal logits to start training from."""
        return jax.random.normal(key, (2 * self.gates, self.choices), dtype)

    def harden(self, logits: Float[Array, "2*gates K"]) -> Wires:
        """Return the wires from each gate to the candidates with the largest logits; in a tie, the first.

        Raises:
          TypeError: the logits are not floating.
          ValueError: the logits have a wrong shape, or contain NaN.
        """
        logits = np.asarray(self.checked_logits("LearnedWires.harden", logits))
        if count := int(np.isnan(logits).any(axis=-1).sum()):
            raise ValueError(f"LearnedWires.harden: the logits of {count} wires contain NaN; wants logits without NaN")
        candidates = np.repeat(np.asarray(self.candidates), 2 * self.gates // self.groups, axis=0)
        chosen = np.take_along_axis(candidates, np.argmax(logits, axis=-1)[:, None], axis=1)
        return Wires.from_pairs(*chosen.reshape(self.gates, 2).T, self.inputs)

    def checked_logits(self, op: str, logits: Any, name: str = "logits") -> Array:
        """Return the logits as an array. Raise an error that names `op` if they do not fit the wires."""
        (logits,) = checks.only_floating(op, **{name: logits})
        checks.shape(op, name, logits, 2 * self.gates, self.choices)
        return logits


@dataclasses.dataclass(frozen=True)
class LearnedWiresArgument(FixedArgument):
    create = LearnedWires.random
    inputs: int
    gates: int
    candidates: int
    gates_per_group: int | None = None
    relaxation: Relaxation = "softmax"
