"""The wires of a layer of two-input gates as a graph, whose nodes are the inputs and whose edges are the gates."""

import dataclasses

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A pytree with each gate's inputs and each input's consumers, both also in the order of an Euler trail.

    Gate g is a consumer of an input in one of two roles. Its number is 2 g if it reads the input as its a, 2 g + 1 if
    as its b. All arrays are int32.

    Attributes:
      a, b: `(gates,)`, the inputs of each gate.
      consumers: `(2 gates,)`. The consumers of input i are at `offsets[2 i] : offsets[2 i + 2]`; those up to
        `offsets[2 i + 1]` read it as their a.
      partners: `(2 gates,)`, for each consumer the other input of its gate.
      offsets: `(2 inputs + 1,)`.
      trail: `(3, gates)`: the gates in the order of the trail, in which neighbors usually share an input, with their a
        and b.
      trail_inputs: `(inputs,)`, in the order of the trail, in which neighbors usually share a gate.
      trail_consumers, trail_partners: `(2 gates,)`, consumers and partners with the inputs in that order. For each
        input, the consumers by which the trail leaves it come first.
      trail_places: `(gates,)`, index among `trail_consumers` at which the trail takes a gate.
      regular: whether all inputs have the same number of consumers.
      max_fan_out: largest number of consumers of an input.
    """

    a: Array
    b: Array
    consumers: Array
    partners: Array
    offsets: Array
    trail: Array
    trail_inputs: Array
    trail_consumers: Array
    trail_partners: Array
    trail_places: Array
    regular: bool = dataclasses.field(metadata=dict(static=True))
    max_fan_out: int = dataclasses.field(metadata=dict(static=True))

    @property
    def gates(self) -> int:
        """Number of gates."""
        return self.a.shape[0]
