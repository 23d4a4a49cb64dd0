"""Gated linear unit."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries
from jaxbp.common.checks import AnyFloats, Floats
from jaxbp.ops.pointwise._elementwise import Elementwise
from jaxbp.ops.pointwise.activations import gelu_gradient, relu_gradient, saturating, sigmoid_gradient, silu_gradient
from jaxbp.pairing import Implementation

_ACTIVATIONS = {
    "silu": (saturating(jax.nn.silu), silu_gradient),
    "gelu": (saturating(jax.nn.gelu), functools.partial(gelu_gradient, approximate=True)),
    "gelu_exact": (
        saturating(functools.partial(jax.nn.gelu, approximate=False)),
        functools.partial(gelu_gradient, approximate=False),
    ),
    "relu": (jax.nn.relu, relu_gradient),
    "sigmoid": (jax.nn.sigmoid, sigmoid_gradient),
}
"""Maps each activation f to the functions `f(x)` and `dy f'(x)`."""

# Mosaic GPU, the kernels' compiler, lacks the `erfc` of `jax.nn.gelu`, and in JAX 0.10 the `custom_jvp` of
# `jax.nn.relu`.
_IN_KERNELS = _ACTIVATIONS | {
    "gelu_exact": (
        saturating(lambda x: 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))),
        functools.partial(gelu_gradient, approximate=False),
    ),
    "relu": (lambda x: jnp.maximum(x, 0.0), relu_gradient),
}

Activation = Literal["silu", "gelu", "gelu_exact", "relu", "sigmoid"]


def _forward(gate, up, *, activation):
    value, _ = _ACTIVATIONS[activation]
    return value(gate) * up


def _gradient(dy, gate, up, *, activation, activations=_ACTIVATIONS):
    value, gradient = activations[activation]
    return gradient(dy * up, gate), dy * value(gate)


_GATED_LINEAR_UNIT = Elementwise(
    "gated_linear_unit", _forward, _gradient, in_kernels=functools.partial(_gradient, activations=_IN_KERNELS)
)


def gated_linear_unit(
    gate: AnyFloats, up: AnyFloats, activation: Activation = "silu", *, implementation: Implementation = None
) -> Floats:
    """Gated linear unit, `y = activation(gate) up`, in the promoted dtype of the arguments.

    Args:
      activation: "silu" for SwiGLU, "gelu" (the tanh approximation) or "gelu_exact" for GEGLU, "relu" for ReGLU, or
        "sigmoid" for GLU.

    Source: N. Shazeer, "GLU variants improve transformer", arXiv:2002.05202.
    """
    activation = _check("gated_linear_unit", gate, up, activation)
    return _GATED_LINEAR_UNIT.of(implementation, {"gate": gate, "up": up}, activation=activation)


def gated_linear_unit_backward(
    dy: AnyFloats,
    gate: AnyFloats,
    up: AnyFloats,
    activation: Activation = "silu",
    *,
    implementation: Implementation = None,
) -> tuple[Floats, Floats]:
    """Gradients of `gated_linear_unit`: `dgate = dy up s`, `dup = dy activation(gate)`, where s is the slope of the
    activation at gate."""
    activation = _check("gated_linear_unit_backward", gate, up, activation)
    return _GATED_LINEAR_UNIT.backward_of(implementation, dy, {"gate": gate, "up": up}, activation=activation)


def _check(op, gate, up, activation):
    checks.require_floating(op, "gate", gate)  # in JAX, `silu` and `sigmoid` refuse integers
    gate, up = checks.floating(op, gate=gate, up=up)
    checks.shape(op, "up", up, *gate.shape)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; wants one of {', '.join(map(repr, _ACTIVATIONS))}")
    return activation


ENTRIES = pair_entries(
    gated_linear_unit,
    case_of((2, 3, 4), (2, 3, 4), (2, 3, 4), activation="gelu"),
    {"hidden": case_of((BATCH, 1024), (BATCH, 1024), (BATCH, 1024))},
    like="divide",
)
