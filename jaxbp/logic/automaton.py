"""The wires of a logic cellular automaton: one circuit of gates that every cell of a grid runs."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxbp.logic.wires import Wires
from jaxbp.ops import _checks
from pallas_kernels.logic import banks

NEIGHBOURHOOD = 9
"""Cells that a cell sees: itself, the fifth, and those around it, in row-major order."""
CENTRE = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """The wires of the circuit that all cells of a grid run at every tick.

    A cell has `channels` numbers in [0, 1], bits when hardened. At a tick it sees the 3 x 3 cells around and at its
    place, outside of a grid that is not periodic zeros. Perception: `kernels` circuits with the same wires and gates of
    their own read one channel of the nine cells, and give `bits` each; every one of them reads every channel. Update:
    one more circuit reads the cell's own channels and then the perceived bits, in the order channel, bit, kernel, and
    gives the cell's next channels.

    Made by `create` or `from_wires`. A pytree: an argument of jitted functions, or a constant in them.

    Attributes:
      perception: the wires of each layer; the first reads the nine cells, in row-major order.
      update: the wires of each layer.
      order: update's gates, layer after layer, in an order in which kernels read different banks of shared memory: the
        gate of each place in a layer, and the place of each gate. Made on the host, once, as the wires are.
      channels: of a cell.
      kernels: of the perception.
      periodic: whether the grid's borders meet.

    Source: P. Miotti et al., "Differentiable logic cellular automata", 2025.
    """

    perception: tuple[Wires, ...]
    update: tuple[Wires, ...]
    order: Int[Array, "2 gates"]
    channels: int = dataclasses.field(metadata=dict(static=True))
    kernels: int = dataclasses.field(metadata=dict(static=True))
    periodic: bool = dataclasses.field(metadata=dict(static=True))

    @property
    def bits(self) -> int:
        """What a perception kernel gives for each channel."""
        return self.perception[-1].gates

    @property
    def orders(self) -> list[Int[Array, "2 gates"]]:
        """`order` by layers."""
        ends = list(itertools.accumulate((w.gates for w in self.update), initial=0))
        return [self.order[:, first:end] for first, end in itertools.pairwise(ends)]

    @property
    def gates(self) -> int:
        """Of the whole circuit: those that have parameters. Perception's are counted once and run for every channel."""
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
        """Random wires, as published: perception begins with `Wires.moore`, all other layers are `Wires.unique`.

        Args:
          channels: of a cell.
          perception_kernels: how many.
          perception_widths: gates of each layer of a kernel; the first has 8, a neighbour and the centre each.
          update_widths: gates of each layer; the last has `channels`.
          periodic: whether the grid's borders meet.
          seed: of the wires.

        Raises:
          ValueError: sizes below 1 or that do not fit, or a layer that `Wires.unique` cannot have.

        Example:
          >>> checkerboard = Automaton.create(8, 16, [8, 4, 2], [256] * 10 + [128, 64, 32, 16, 8, 8], False, seed=0)
          >>> checkerboard.gates
          3040
        """
        op = "Automaton.create"
        _checks.count(op, "channels", channels)
        _checks.count(op, "perception_kernels", perception_kernels)
        if not perception_widths or perception_widths[0] != 8:
            raise ValueError(f"{op}: perception_widths is {perception_widths!r}; wants 8 first, a gate a neighbour")
        if not update_widths or update_widths[-1] != channels:
            raise ValueError(f"{op}: update_widths is {update_widths!r}; wants {channels} last, the channels")
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
        """An automaton of these wires; the inputs of the first update layer say how many perception kernels there are.

        Raises:
          TypeError: a layer that is no `Wires`.
          ValueError: no layers, or layers that do not fit.
        """
        op = "Automaton.from_wires"
        _checks.count(op, "channels", channels)
        for name, layers in (("perception", perception), ("update", update)):
            if not layers:
                raise ValueError(f"{op}: {name} is empty; wants at least one layer")
            for i, wires in enumerate(layers):
                if not isinstance(wires, Wires):
                    raise TypeError(f"{op}: {name}[{i}] is a {type(wires).__name__}; wants a jaxbp.Wires")
            for i, (before, wires) in enumerate(itertools.pairwise(layers), 1):
                if wires.inputs != before.gates:
                    raise ValueError(
                        f"{op}: {name}[{i}] reads {wires.inputs} inputs; wants {before.gates}, the gates before"
                    )
        if perception[0].inputs != NEIGHBOURHOOD:
            raise ValueError(f"{op}: perception[0] reads {perception[0].inputs} inputs; wants the 9 cells around")
        if update[-1].gates != channels:
            raise ValueError(f"{op}: update[-1] has {update[-1].gates} gates; wants {channels}, the channels")
        of_a_kernel = channels * perception[-1].gates
        kernels, rest = divmod(update[0].inputs - channels, of_a_kernel)
        if kernels < 1 or rest:
            raise ValueError(
                f"{op}: update[0] reads {update[0].inputs} inputs; wants {channels}, the channels, and a multiple of "
                f"{of_a_kernel}, what a perception kernel gives"
            )
        order = _order(update, channels, kernels, perception[-1].gates)
        return cls(tuple(perception), tuple(update), order, channels, kernels, bool(periodic))


def perceived_rows(channels: int, kernels: int, bits: int) -> np.ndarray:
    """Of the perceived bits, as update reads them, the place in the order bit, kernel, channel, in which they come."""
    return np.arange(bits * kernels * channels).reshape(bits, kernels, channels).transpose(2, 0, 1).ravel()


def _order(update: Sequence[Wires], channels: int, kernels: int, bits: int) -> Array:
    """`Automaton.order`. Wires that are traced keep theirs."""
    if any(isinstance(wires.a, jax.core.Tracer) for wires in update):
        orders = [np.arange(wires.gates) for wires in update]
    else:
        centre = CENTRE * channels + np.arange(channels)
        # As in `Plan`, where all layers begin at multiples of more than an octet: perception's last behind the inputs.
        first = -(-NEIGHBOURHOOD * channels // banks.OCTET) * banks.OCTET
        rows = np.concatenate([centre, first + perceived_rows(channels, kernels, bits)])
        layers = [(np.asarray(wires.a), np.asarray(wires.b)) for wires in update]
        orders = banks.orders(layers, [wires.turns for wires in update], rows)
    with jax.ensure_compile_time_eval():  # made within jit, it is still the same array outside
        both = [np.concatenate(orders), np.concatenate([np.argsort(order) for order in orders])]
        return jnp.asarray(np.stack(both), jnp.int32)


def _unique(op: str, name: str, inputs: int, gates: int, seed: int) -> Wires:
    try:
        return Wires.unique(inputs, gates, seed)
    except ValueError as error:
        raise ValueError(f"{op}: {name} has {gates} gates behind {inputs} inputs: {error}") from None
