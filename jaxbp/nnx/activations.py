"""Activation functions of Flax that are no ops of jaxbp."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxbp.common import checks
from jaxbp.nnx._layer import Layer, falls_back
from jaxbp.ops.pointwise import reductions
from jaxbp.ops.pointwise.activations import prelu
from jaxbp.ops.pointwise.gated_linear_unit import gated_linear_unit
from jaxbp.pairing import Implementation


def glu(x: Any, axis: int = -1, *, implementation: Implementation = None) -> Array:
    """`flax.nnx.glu`, computed by `jaxbp.gated_linear_unit`: `y = a σ(b)`, where a and b are the halves of x along
    the axis.

    Raises:
      TypeError: x is not floating.
      ValueError: x has no such axis, or its size is odd.
    """
    x = checks.array("glu", "x", x)
    axis = checks.one_axis("glu", "axis", axis, x.ndim)
    if x.shape[axis] % 2:
        raise ValueError(f"glu: x has shape {x.shape}; wants an even size along axis {axis}")
    up, gate = jnp.split(x, 2, axis)
    return gated_linear_unit(gate, up, "sigmoid", implementation=implementation)


def logsumexp(
    a: Any,
    axis: Any = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: Any = None,
    *,
    implementation: Implementation = None,
) -> Any:
    """`flax.nnx.logsumexp`, computed by `jaxbp.logsumexp`. If `b` or `return_sign` is given, JAX computes the call.

    Raises:
      NotImplementedError: JAX would compute the call, but the implementation is "pallas" or "xla".
    """
    if falls_back("logsumexp", implementation, b=b is not None, return_sign=return_sign):
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    return reductions.logsumexp(a, axis, keepdims, where=where, implementation=implementation)


class PReLU(Layer, nnx.PReLU):
    """`flax.nnx.PReLU`, computed by `jaxbp.prelu`."""

    def __call__(self, inputs: Any) -> Array:
        slope = self.negative_slope[...]
        if self.dtype is None:
            x, slope = inputs, jnp.asarray(slope, inputs.dtype)
        else:
            x, slope = self.promote_dtype((inputs, slope), dtype=self.dtype)
        if self._needs_flax(x, slope):
            return super().__call__(inputs)
        return prelu(x, slope, implementation=self.implementation)
