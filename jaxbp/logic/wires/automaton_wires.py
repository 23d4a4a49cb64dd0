import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxbp.common import checks
from jaxbp.common.cases import Argument, FixedArgument
from jaxbp.common.content import ByContent
from jaxbp.logic.wires.wires import Wires, constants, require_chain
from pallas_kernels.logic import banks

NEIGHBORHOOD = 9
CENTER = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Automaton(ByContent):
    """The wires of the circuit that all cells of a grid run at every tick.

    A cell has `channels` numbers in [0, 1]. The circuit has two parts:

    - Perception: `kernels` circuits with the same wires but separate gates. Each circuit runs once per channel. It
      reads the channel in the cell and its eight neighbors, and returns `bits` numbers.
    - Update: one circuit that reads the cell's channels, then the outputs of perception, sorted by channel, bit,
      and kernel. It returns the cell's next channels.

    Attributes:
      perception, update: the wires of each layer. Perception reads the nine cells in row-major order.
      order: row 0 permutes the gates of each update layer so that neighboring threads of a GPU kernel read different
        banks of shared memory. Row 1 is the inverse permutation.
      periodic: whether opposite borders of the grid meet. If not, cells outside the grid are zero.
    """

    perception: tuple[Wires, ...]
    update: tuple[Wires, ...]
    order: Int[Array, "2 gates"]
    channels: int = dataclasses.field(metadata=dict(static=True))
    kernels: int = dataclasses.field(metadata=dict(static=True))
    periodic: bool = dataclasses.field(metadata=dict(static=True))

    @property
    def bits(self) -> int:
        """The number of outputs of a perception circuit per channel."""
        return self.perception[-1].gates

    @property
    def orders(self) -> list[Int[Array, "2 gates"]]:
        ends = list(itertools.accumulate((w.gates for w in self.update), initial=0))
        return [self.order[:, first:end] for first, end in itertools.pairwise(ends)]

    @property
    def gates(self) -> int:
        """The number of gates. A perception gate counts once for all channels."""
        return self.kernels * sum(w.gates for w in self.perception) + sum(w.gates for w in self.update)

    @classmethod
    def create(
        cls,
        channels: int,
        perception_kernels: int,
        perception_widths: Sequence[int],
        update_widths: Sequence[int],
        periodic: bool,
        seed: int,
    ) -> "Automaton":
        """Make an automaton with random wires: `Wires.moore` in perception layer 0, and `Wires.unique` elsewhere.

        Args:
          perception_widths: the number of gates in each layer of a perception circuit, 8 in the first layer.
          update_widths: the number of gates in each update layer, `channels` in the last layer.

        Raises:
          ValueError: an argument is below 1, a width is wrong, or `Wires.unique` cannot make a layer.

        Example:
          >>> checkerboard = Automaton.create(8, 16, [8, 4, 2], [256] * 10 + [128, 64, 32, 16, 8, 8], False, seed=0)
          >>> checkerboard.gates
          3040
        """
        op = "Automaton.create"
        checks.count(op, "channels", channels)
        checks.count(op, "perception_kernels", perception_kernels)
        if not isinstance(perception_widths, Sequence) or not perception_widths or perception_widths[0] != 8:
            wanted = "a list with 8 as the first entry, one gate per neighbor"
            raise ValueError(f"{op}: perception_widths is {perception_widths!r}; wants {wanted}")
        if not isinstance(update_widths, Sequence) or not update_widths or update_widths[-1] != channels:
            wanted = f"a list with {channels} as the last entry, one gate per channel"
            raise ValueError(f"{op}: update_widths is {update_widths!r}; wants {wanted}")
        seeds = iter(np.random.default_rng(seed).integers(2**31, size=len(perception_widths) + len(update_widths)))
        perception = [Wires.moore(seed=int(next(seeds)))]
        for reads, gates in itertools.pairwise(perception_widths):
            perception.append(_unique(op, "perception_widths", reads, gates, int(next(seeds))))
        inputs = channels * (1 + perception_kernels * perception_widths[-1])
        update = [
            _unique(op, "update_widths", reads, gates, int(next(seeds)))
            for reads, gates in zip([inputs, *update_widths], update_widths, strict=False)
        ]
        return cls.from_wires(perception, update, channels, periodic)

    @classmethod
    def from_wires(
        cls, perception: Sequence[Wires], update: Sequence[Wires], channels: int, periodic: bool
    ) -> "Automaton":
        """Make an automaton from the wires of each layer.

        The first update layer's number of inputs determines the number of perception circuits.

        Raises:
          TypeError: a layer is not a `Wires`.
          ValueError: there are no layers, or the layers do not fit together.
        """
        op = "Automaton.from_wires"
        checks.count(op, "channels", channels)
        for name, layers in (("perception", perception), ("update", update)):
            if not layers:
                raise ValueError(f"{op}: {name} is empty; wants at least one layer")
            for i, wires in enumerate(layers):
                if not isinstance(wires, Wires):
                    raise TypeError(f"{op}: {name}[{i}] is a {type(wires).__name__}; wants a jaxbp.Wires")
            require_chain(op, f"{name}[{{}}]", [(wires.inputs, wires.gates) for wires in layers])
        if perception[0].inputs != NEIGHBORHOOD:
            raise ValueError(
                f"{op}: perception[0] reads {perception[0].inputs} inputs; wants 9, one per cell of the neighborhood"
            )
        if update[-1].gates != channels:
            raise ValueError(f"{op}: update[-1] has {update[-1].gates} gates; wants {channels}, one per channel")
        of_a_kernel = channels * perception[-1].gates
        kernels, rest = divmod(update[0].inputs - channels, of_a_kernel)
        if kernels < 1 or rest:
            raise ValueError(
                f"{op}: update[0] reads {update[0].inputs} inputs; wants {channels} + k * {of_a_kernel}, from "
                f"{channels} channels and the {of_a_kernel} outputs of each of k >= 1 perception circuits"
            )
        order = _order(update, channels, kernels, perception[-1].gates)
        return cls(tuple(perception), tuple(update), order, channels, kernels, bool(periodic))


def perceived_rows(channels: int, kernels: int, bits: int) -> np.ndarray:
    """Return each perception output's row of shared memory, counted from the first row of perception's outputs.

    The result is in the order (channel, bit, kernel), and rows are in the order (bit, kernel, channel). A bit is one of
    a perception circuit's outputs.
    """
    return np.arange(bits * kernels * channels).reshape(bits, kernels, channels).transpose(2, 0, 1).ravel()


def _order(update: Sequence[Wires], channels: int, kernels: int, bits: int) -> Array:
    if any(isinstance(wires.a, jax.core.Tracer) for wires in update):
        orders = [np.arange(wires.gates) for wires in update]
    else:
        center = CENTER * channels + np.arange(channels)
        # The last perception layer begins at a multiple of `OCTET`.
        first = -(-NEIGHBORHOOD * channels // banks.OCTET) * banks.OCTET
        rows = np.concatenate([center, first + perceived_rows(channels, kernels, bits)])
        layers = [(np.asarray(wires.a), np.asarray(wires.b)) for wires in update]
        orders = banks.orders(layers, [wires.turns for wires in update], rows)
    inverses = [np.argsort(order) for order in orders]
    return constants(order=np.stack([np.concatenate(orders), np.concatenate(inverses)]))["order"]


def _unique(op: str, name: str, inputs: int, gates: int, seed: int) -> Wires:
    try:
        return Wires.unique(inputs, gates, seed)
    except ValueError as error:
        raise ValueError(f"{op}: {name} has a layer of {gates} gates that reads {inputs} inputs: {error}") from None


@dataclasses.dataclass(frozen=True)
class AutomatonArgument(FixedArgument):
    create = Automaton.create
    channels: int
    perception_kernels: int
    perception_widths: tuple[int, ...]
    update_widths: tuple[int, ...]
    periodic: bool = True

    @property
    def gates_a_cell(self) -> int:
        return self.channels * self.perception_kernels * sum(self.perception_widths) + sum(self.update_widths)

    def logits(self, parameters: int = 16, offset: tuple[float, ...] = ()) -> list[list[Argument]]:
        kernels = self.perception_kernels
        perception = [Argument((kernels, width, parameters), offset=offset) for width in self.perception_widths]
        return [perception, [Argument((width, parameters), offset=offset) for width in self.update_widths]]

    def state(self, *grid: int | str) -> Argument:
        return Argument((*grid, self.channels), weights=True)
