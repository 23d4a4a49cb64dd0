import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Required, TypedDict, Unpack, get_args

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Shaped

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.logic.circuits.circuit import Circuit
from jaxbp.logic.gates import (
    Arity,
    Initialization,
    Parametrization,
    check_choice,
    check_tau,
    group_sum,
    hard_logits,
    harden,
    initial_logits,
    with_gradient_of,
)
from jaxbp.logic.ops.gate_layer import gate_layer
from jaxbp.logic.ops.lut_layer import lut_layer
from jaxbp.logic.ops.wire_layer import wire_layer
from jaxbp.logic.wires.learned_wires import LearnedWires
from jaxbp.logic.wires.wires import Wires
from jaxbp.pairing import Implementation

Wiring = Callable[[int, int, int], Wires | LearnedWires]


def thermometer(x: Shaped[AnyArray, "*batch features"], thresholds: ArrayLike) -> Shaped[Array, "*batch bits"]:
    """Return the bits `x > t` for each feature and each threshold t, in x's dtype. The bits of a feature are adjacent.

    If x is floating, the thresholds are rounded to x's dtype.
    """
    x = jnp.asarray(x)
    thresholds = jnp.asarray(thresholds, x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else None)
    return (x[..., None] > thresholds).astype(x.dtype).reshape(*x.shape[:-1], -1)


class GateOptions(TypedDict, total=False):
    """The keyword arguments of every layer of gates (see `LogicLayer`)."""

    initialization: Initialization
    parametrization: Parametrization | None
    residual_logit: float | None
    straight_through: bool
    implementation: Implementation
    dtype: DTypeLike
    rngs: Required[nnx.Rngs]


def initial_parameters(*shape: int, rngs: nnx.Rngs, **options: Any) -> nnx.Param:
    """Return the logits of gates of this shape, `(*shape, parameters)`, with the options of `jaxbp.initial_logits`."""
    return nnx.Param(initial_logits(rngs.params(), math.prod(shape), **options).reshape(*shape, -1))


class Gates(nnx.Module):
    """Base class of layers of gates, with logits `(*shape, parameters)`."""

    def __init__(
        self,
        wires: Any,
        shape: tuple[int, ...],
        *,
        arity: Arity = 2,
        parametrization: Parametrization | None = None,
        straight_through: bool = False,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **initial: Any,
    ):
        parametrization = parametrization or ("softmax" if arity == 2 else "input_wise")
        options = initial | dict(arity=arity, parametrization=parametrization)
        self.logits = initial_parameters(*shape, rngs=rngs, **options)
        self.wires = nnx.Variable(wires)
        self.arity, self.parametrization, self.straight_through = arity, parametrization, straight_through
        self.implementation, self.dtype = implementation, dtype

    def harden(self) -> Array:
        """Return the number of each gate's most probable function."""
        return harden(self.logits[...], self.parametrization)

    def _apply(self, op, x, *, hard, wires=None, **options):
        options |= dict(parametrization=self.parametrization, implementation=self.implementation)

        def gates(logits):
            return op(logits, wires or self.wires.get_value(), x.astype(self.dtype), **options)

        if not (hard or self.straight_through):
            return gates(self.logits[...])
        hardened = gates(hard_logits(self.harden(), self.parametrization, arity=self.arity))
        return hardened if hard else with_gradient_of(gates(self.logits[...]), lax.stop_gradient(hardened))


class LogicLayer(Gates):
    """`jaxbp.gate_layer` or `jaxbp.lut_layer` with its parameters, `logits (gates, parameters)`, and its wires.

    With `LearnedWires`, `wire_logits (wires, K)` are parameters as well, else None.

    Args:
      arity: the number of inputs per gate. A gate with 4 inputs reads two neighboring pairs of `wires`.
      initialization, residual_logit: as in `jaxbp.initial_logits`.
      parametrization: as in `jaxbp.initial_logits`. None: "softmax" for gates of 2 inputs, "input_wise" for 4.
      straight_through: in training, compute hardened gates in the forward, and the gradients of relaxed gates.
      implementation: as in `jaxbp.gate_layer`.
      dtype: the dtype of the computation, to which inputs are cast. The logits stay float32.

    Raises:
      TypeError: the wires are neither `Wires` nor `LearnedWires`.
    """

    def __init__(self, wires: Wires | LearnedWires, *, arity: Arity = 2, **options: Unpack[GateOptions]):
        if not isinstance(wires, Wires | LearnedWires):
            raise TypeError(f"LogicLayer: wires is a {type(wires).__name__}; wants a jaxbp.Wires or jaxbp.LearnedWires")
        super().__init__(wires, (2 * wires.gates // arity,), arity=arity, **options)
        is_learned = isinstance(wires, LearnedWires)
        self.wire_logits = nnx.Param(wires.initial_logits(options["rngs"].params())) if is_learned else None

    def __call__(
        self, x: Float[AnyArray, "*batch inputs"], *, hard: bool = False, groups: int | None = None
    ) -> Float[Array, "*batch results"]:
        """Return the gates' outputs, or with `groups` their sums, as in `jaxbp.gate_layer`.

        With `hard`, each gate computes its most probable function, and reads its most probable candidates.
        """
        wires = self.wires.get_value()
        if self.wire_logits is not None:
            learned = dataclasses.replace(wires, relaxation="straight_through") if hard else wires
            wires, x = learned.gate_wires, x.astype(self.dtype)
            x = wire_layer(self.wire_logits[...], learned, x, implementation=self.implementation)
        if self.arity == 2:
            return self._apply(gate_layer, x, hard=hard, wires=wires, groups=groups)
        y = self._apply(lut_layer, x, hard=hard, wires=wires)
        return y if groups is None else group_sum(upcast(y), groups)

    def hard_wires(self) -> Wires:
        """Return the wires, or if they are learned, the wires to each gate's most probable candidates."""
        wires = self.wires.get_value()
        return wires if self.wire_logits is None else wires.harden(self.wire_logits[...])


class LogicNetwork(nnx.Module):
    """Layers of gates. A class score is the sum over a group of outputs of the last layer, divided by tau.

    Args:
      widths: the number of gates in each layer. The last width is a multiple of the number of classes.
      arity: the number of inputs per gate, 2 or 4.
      wiring: a function `wiring(inputs, pairs, seed)` that makes the wires of a layer, such as
        `jaxbp.LearnedWires.random`, one pair per gate of 2 inputs, and two pairs per gate of 4 inputs.
      options: as in `LogicLayer`.

    Raises:
      TypeError: `widths` is not a list of ints, or `wiring` is not a function.
      ValueError: tau is not a number above 0, the last width is not a multiple of `classes`, or `wiring` cannot make
        layers of these widths.

    Source: as in `jaxbp.gate_layer`.
    """

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        classes: int,
        *,
        tau: float = 1.0,
        arity: Arity = 2,
        wiring: Wiring = Wires.unique,
        seed: int = 0,
        **options: Unpack[GateOptions],
    ):
        op = "LogicNetwork"
        check_tau(op, tau)
        check_choice(op, "arity", arity, get_args(Arity))
        checks.count(op, "seed", seed, at_least=0)
        checks.function(op, "wiring", wiring, "jaxbp.Wires.random")
        if not isinstance(widths, Sequence) or not widths or not all(map(checks.is_int, widths)):
            raise TypeError(f"{op}: widths is {widths!r}; wants a list with the number of gates in each layer")
        if widths[-1] % checks.count(op, "classes", classes):
            raise ValueError(f"{op}: widths ends with {widths[-1]}; wants a multiple of the {classes} classes")
        self.layers = nnx.List(
            LogicLayer(wiring(reads, gates * arity // 2, seed + i), arity=arity, **options)
            for i, (reads, gates) in enumerate(zip([inputs, *widths], widths, strict=False))
        )
        self.classes, self.tau = classes, tau

    def __call__(self, x: Float[AnyArray, "*batch inputs"], *, hard: bool = False) -> Float[Array, "*batch classes"]:
        """Return the class scores. With `hard`, x must be 0 or 1, and each gate computes its most probable function."""
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, hard=hard)
        return last(x, hard=hard, groups=self.classes) / self.tau

    def harden(self) -> Circuit:
        """Return a circuit in which each gate computes its most probable function, without the sums of class scores.
        Learned wires lead to the most probable candidates."""
        return Circuit.of((layer.harden(), layer.hard_wires()) for layer in self.layers)
