"""The layers of LeNet and the MLP-Mixer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxbp.common.checks import AnyArray
from jaxbp.ops.conv.conv2d import conv2d
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.norm.layer_norm import layer_norm
from jaxbp.ops.norm.layer_norm_linear import layer_norm_linear
from jaxbp.pairing import Implementation


class _Affine(nnx.Module):
    """Base of layers with the parameters `weight` and `bias`, for which axis 0 is the outputs.

    The initial parameters are uniform within ±1/sqrt(number of inputs per output). Inputs and parameters are cast to
    `dtype`.
    """

    def __init__(
        self,
        *shape: int,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        bound = math.prod(shape[1:]) ** -0.5
        self.weight = nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
        self.bias = nnx.Param(jax.random.uniform(rngs.params(), shape[:1], jnp.float32, -bound, bound))
        self.implementation, self.dtype = implementation, dtype

    def parameters(self) -> tuple[Array, Array]:
        return self.weight[...].astype(self.dtype), self.bias[...].astype(self.dtype)


class Conv2d(_Affine):
    """`jaxbp.conv2d` with its parameters, `weight (out_channels, in_channels, *filter_size)` and `bias`."""

    def __init__(self, in_channels: int, out_channels: int, filter_size: tuple[int, int], **options: Any):
        super().__init__(out_channels, in_channels, *filter_size, **options)

    def __call__(self, x: Float[AnyArray, "batch in_channels height width"]) -> Float[Array, "batch out_channels h w"]:
        return conv2d(x.astype(self.dtype), *self.parameters(), implementation=self.implementation)


class Linear(_Affine):
    """`jaxbp.linear` with its parameters, `weight (out_features, in_features)` and `bias`."""

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(out_features, in_features, **options)

    def __call__(self, x: Float[AnyArray, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        return linear(x.astype(self.dtype), *self.parameters(), implementation=self.implementation)


class LayerNorm(nnx.Module):
    """`jaxbp.layer_norm` with its parameters. `rngs` is unused."""

    def __init__(
        self,
        hidden: int,
        *,
        epsilon: float = 1e-5,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.scale, self.bias = nnx.Param(jnp.ones(hidden)), nnx.Param(jnp.zeros(hidden))
        self.epsilon, self.implementation, self.dtype = epsilon, implementation, dtype

    def parameters(self) -> tuple[Array, Array]:
        return self.scale[...].astype(self.dtype), self.bias[...].astype(self.dtype)

    def __call__(self, x: Float[AnyArray, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        return layer_norm(x.astype(self.dtype), *self.parameters(), self.epsilon, implementation=self.implementation)


class LayerNormLinear(nnx.Module):
    """`jaxbp.layer_norm_linear` with its parameters, in a `LayerNorm` and a `Linear`."""

    def __init__(self, in_features: int, out_features: int, *, epsilon: float = 1e-5, **options: Any):
        self.norm = LayerNorm(in_features, epsilon=epsilon, **options)
        self.linear = Linear(in_features, out_features, **options)

    def __call__(self, x: Float[AnyArray, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        parameters = *self.norm.parameters(), *self.linear.parameters()
        x, options = x.astype(self.linear.dtype), dict(implementation=self.linear.implementation)
        return layer_norm_linear(x, *parameters, self.norm.epsilon, **options)
