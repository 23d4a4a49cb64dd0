import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from jaxbp.common.checks import AnyArray
from jaxbp.logic import gates
from jaxbp.logic.circuits.cellular_circuit import CellularCircuit
from jaxbp.logic.circuits.netlist import GateList
from jaxbp.logic.gates import Initialization, Parametrization
from jaxbp.logic.networks.logic_network import initial_parameters
from jaxbp.logic.ops.automaton_rollout import Logits, automaton_rollout
from jaxbp.logic.wires.automaton_wires import CENTER, NEIGHBORHOOD, Automaton
from jaxbp.pairing import Implementation
from jaxbp.training.checkpointing import Memory


class LogicAutomaton(nnx.Module):
    """`jaxbp.automaton_rollout` with its parameters, the logits of each layer, and its fixed wires.

    Args:
      channels, perception_kernels, perception_widths, update_widths, periodic, seed: as in `Automaton.create`, whose
        errors also apply.
      initialization, residual_logit, parametrization: as in `jaxbp.initial_logits`.
      implementation: as in `jaxbp.automaton_rollout`.

    Source: as in `jaxbp.automaton_step`, with a residual logit of 10.
    """

    def __init__(
        self,
        channels: int,
        perception_kernels: int,
        perception_widths: Sequence[int],
        update_widths: Sequence[int],
        periodic: bool,
        *,
        seed: int = 0,
        initialization: Initialization = "residual",
        residual_logit: float | None = None,
        parametrization: Parametrization = "softmax",
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        automaton = Automaton.create(
            channels, perception_kernels, perception_widths, update_widths, periodic, seed=seed
        )

        options = dict(initialization=initialization, parametrization=parametrization, residual_logit=residual_logit)
        initial = functools.partial(initial_parameters, rngs=rngs, **options)
        self.perception = nnx.List(initial(perception_kernels, wires.gates) for wires in automaton.perception)
        self.update = nnx.List(initial(wires.gates) for wires in automaton.update)
        self.automaton = nnx.Variable(automaton)
        self.parametrization, self.implementation = parametrization, implementation

    def __call__(
        self,
        state: Float[AnyArray, "batch height width channels"],
        steps: int = 1,
        *,
        key: PRNGKeyArray | None = None,
        fire_rate: float = 1.0,
        rounding_rate: float | Float[Array, ""] = 0.0,
        memory: Memory = "states",
        hard: bool = False,
    ) -> Float[Array, "batch height width channels"]:
        """Return the state after `steps` ticks. With `hard`, each gate computes its most probable function.

        Other arguments and errors are as in `jaxbp.automaton_rollout`.
        """
        logits = jax.tree.map(self._hard, self.logits) if hard else self.logits
        return automaton_rollout(
            logits,
            self.automaton.get_value(),
            state,
            steps,
            key=key,
            fire_rate=fire_rate,
            rounding_rate=rounding_rate,
            memory=memory,
            parametrization=self.parametrization,
            implementation=self.implementation,
        )

    @property
    def logits(self) -> Logits:
        """The parameters, as `jaxbp.automaton_rollout` takes them."""
        return [layer[...] for layer in self.perception], [layer[...] for layer in self.update]

    def harden(self) -> CellularCircuit:
        """Return the circuit in which each gate computes its most probable function."""
        automaton = self.automaton.get_value()
        channels, kernels = automaton.channels, automaton.kernels
        inputs = np.arange(NEIGHBORHOOD * channels).reshape(NEIGHBORHOOD, channels, 1)
        listed = GateList(inputs.size)

        def layer(logits, wires, sources):
            a, b = sources[np.asarray(wires.a)], sources[np.asarray(wires.b)]
            numbers = np.asarray(gates.harden(logits, self.parametrization)).T
            return listed.add(numbers.reshape(wires.gates, *[1] * (a.ndim - 2), -1), a, b)

        perceived = np.broadcast_to(inputs, (NEIGHBORHOOD, channels, kernels))
        for logits, wires in zip(self.perception, automaton.perception, strict=True):
            perceived = layer(logits[...], wires, perceived)
        sources = np.concatenate([inputs[CENTER].ravel(), perceived.swapaxes(0, 1).ravel()])[:, None]
        for logits, wires in zip(self.update, automaton.update, strict=True):
            sources = layer(logits[...], wires, sources)
        return CellularCircuit(listed.netlist(sources.ravel()), channels, automaton.periodic)

    def _hard(self, logits):
        return gates.hard_logits(gates.harden(logits, self.parametrization), self.parametrization, logits.dtype)
