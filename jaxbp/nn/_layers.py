"""The layers of LeNet and the MLP-Mixer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxbp.common.checks import AnyArray
from jaxbp.ops.conv.conv2d import Padding, Size, conv2d
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.norm.layer_norm import layer_norm
from jaxbp.ops.norm.layer_norm_linear import layer_norm_linear
from jaxbp.pairing import Implementation


def _uniform(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -(fan_in**-0.5), fan_in**-0.5))


class Conv2d(nnx.Module):
    """`jaxbp.conv2d` with its parameters, `weight (out_channels, in_channels, *filter_size)` and `bias`.

    The initial parameters are uniform within ±1/sqrt(number of inputs per output).

    Args:
      dtype: the dtype of the computation, to which inputs and parameters are cast.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        filter_size: tuple[int, int],
        *,
        stride: Size = 1,
        padding: Padding = 0,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        fan_in = in_channels * filter_size[0] * filter_size[1]
        self.weight = _uniform(rngs, (out_channels, in_channels, *filter_size), fan_in, param_dtype)
        self.bias = _uniform(rngs, (out_channels,), fan_in, param_dtype)
        self.stride, self.padding, self.precision = stride, padding, precision
        self.implementation, self.dtype = implementation, dtype

    def parameters(self) -> tuple[Array, Array]:
        return self.weight[...].astype(self.dtype), self.bias[...].astype(self.dtype)

    def __call__(self, x: Float[AnyArray, "batch in_channels height width"]) -> Float[Array, "batch out_channels h w"]:
        return conv2d(
            x.astype(self.dtype),
            *self.parameters(),
            stride=self.stride,
            padding=self.padding,
            precision=self.precision,
            implementation=self.implementation,
        )


class Linear(nnx.Module):
    """`jaxbp.linear` with its parameters, `weight (out_features, in_features)` and `bias`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.weight = _uniform(rngs, (out_features, in_features), in_features, param_dtype)
        self.bias = _uniform(rngs, (out_features,), in_features, param_dtype)
        self.precision, self.implementation, self.dtype = precision, implementation, dtype

    def parameters(self) -> tuple[Array, Array]:
        return self.weight[...].astype(self.dtype), self.bias[...].astype(self.dtype)

    def __call__(self, x: Float[AnyArray, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        w, b = self.parameters()
        return linear(x.astype(self.dtype), w, b, precision=self.precision, implementation=self.implementation)


class LayerNorm(nnx.Module):
    """`jaxbp.layer_norm` with its parameters. `rngs` is unused."""

    def __init__(
        self,
        hidden: int,
        *,
        epsilon: float = 1e-5,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.scale = nnx.Param(jnp.ones(hidden, param_dtype))
        self.bias = nnx.Param(jnp.zeros(hidden, param_dtype))
        self.epsilon, self.implementation, self.dtype = epsilon, implementation, dtype

    def __call__(self, x: Float[AnyArray, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        scale, bias = (a[...].astype(self.dtype) for a in (self.scale, self.bias))
        return layer_norm(x.astype(self.dtype), scale, bias, self.epsilon, implementation=self.implementation)


class LayerNormLinear(nnx.Module):
    """`jaxbp.layer_norm_linear` with its parameters, in a `LayerNorm` and a `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        epsilon: float = 1e-5,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.norm = LayerNorm(in_features, epsilon=epsilon, param_dtype=param_dtype)
        self.linear = Linear(in_features, out_features, param_dtype=param_dtype, rngs=rngs)
        self.precision, self.implementation, self.dtype = precision, implementation, dtype

    def __call__(self, x: Float[AnyArray, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        parameters = self.norm.scale, self.norm.bias, self.linear.weight, self.linear.bias
        return layer_norm_linear(
            x.astype(self.dtype),
            *(a[...].astype(self.dtype) for a in parameters),
            self.norm.epsilon,
            precision=self.precision,
            implementation=self.implementation,
        )
