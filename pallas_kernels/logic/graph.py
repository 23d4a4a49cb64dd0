import dataclasses

from jax import Array


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The wires of a layer of two-input gates, as a graph whose nodes are the inputs and whose edges are the gates.

    The arrays a and b, `(gates,)`, have each gate's inputs. The consumers of an input are the gates that read it: the
    integer `2 * g` if gate g reads the input as its a, and `2 * g + 1` if as its b. An Euler trail is a walk from input
    to input that passes through each gate once. All arrays are int32.

    Attributes:
      consumers, offsets: `(2 * gates,)` and `(2 * inputs + 1,)`. Input i has the consumers from `offsets[2 * i]` to
        `offsets[2 * i + 2] - 1`. From `offsets[2 * i + 1]` on, they read it as their b.
      partners: `(2 * gates,)`, the other input of each consumer.
      trail: `(3, gates)`, the gates in the order of the trail, their inputs a, and their inputs b.
      trail_inputs: `(inputs,)`, the inputs in the order of the trail.
      trail_consumers, trail_partners: `consumers` and `partners` in the order of `trail_inputs`. For each input, the
        gates through which the trail leaves the input come first.
      trail_places: `(gates,)`, each gate's index in `trail_consumers`. A gate is there twice, once per input. The index
        is for the input that the trail leaves through the gate.
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
    inputs: int = dataclasses.field(metadata=dict(static=True))
    max_fan_out: int = dataclasses.field(metadata=dict(static=True))

    @property
    def gates(self) -> int:
        return self.a.shape[-1]

    @property
    def regular(self) -> bool:
        """Whether gates read all inputs equally often."""
        return self.inputs * self.max_fan_out == 2 * self.gates
