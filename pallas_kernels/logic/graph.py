"""The wires of a layer of two-input gates as a graph: inputs are its nodes, gates its edges."""

import dataclasses

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Which inputs each gate reads, which gates read each input, and both once more along an Euler trail. A pytree.

    Gate g is a consumer of an input in one of two roles: 2 g where it reads the input as its a, 2 g + 1 where as its b.

    Attributes:
      a, b: `(gates,)`, the inputs of each gate; int32, as all arrays.
      consumers: `(2 gates,)`, those of input i at `offsets[2 i] : offsets[2 i + 2]`, first those that read it as their
        a, up to `offsets[2 i + 1]`.
      partners: `(2 gates,)`, for each consumer the other input of its gate.
      offsets: `(2 inputs + 1,)`.
      trail: `(3, gates)`: the gates along the trail, so that neighbours mostly share an input, and their a and b.
      trail_inputs: `(inputs,)`, along the trail, so that neighbours mostly share a gate.
      trail_consumers, trail_partners: `(2 gates,)`, consumers and partners with the inputs in that order; of an input's
        consumers, first those by which the trail leaves it.
      trail_places: `(gates,)`, where among `trail_consumers` the trail takes a gate.
      regular: whether all inputs have as many consumers.
      most_consumers: of any input.
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
    most_consumers: int = dataclasses.field(metadata=dict(static=True))

    @property
    def gates(self) -> int:
        """How many there are."""
        return self.a.shape[0]
