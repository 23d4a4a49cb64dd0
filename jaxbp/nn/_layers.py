"""The layers of LeNet."""

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
