from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import Array, lax

from jaxbp.nnx._layer import Layer
from jaxbp.ops.conv.conv1d import conv1d
from jaxbp.ops.conv.conv2d import conv2d


class Conv(Layer, nnx.Conv):
    """`flax.nnx.Conv`, computed by `jaxbp.conv1d` or `jaxbp.conv2d`. Images are `(..., height, width, in_features)`."""

    flax_only = (("conv_general_dilated", lax.conv_general_dilated), ("preferred_element_type", None))

    def _only_in_flax(self) -> dict[str, bool]:
        axes = len(self.kernel_size)
        return super()._only_in_flax() | {
            "input_dilation": _per_axis(self.input_dilation, axes) != (1,) * axes,
            f"{axes} spatial axes": axes not in (1, 2),
        }

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        kernel = self.kernel[...]
        kernel = kernel if self.mask is None else kernel * self.mask
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        if self._needs_flax(x, kernel, bias, out_sharding=out_sharding is not None):
            return super().__call__(inputs, out_sharding)
        axes = len(self.kernel_size)
        batch = x.shape[: -axes - 1]
        x, padding = self._padded(x.reshape(-1, *x.shape[-axes - 1 :]))
        op, layouts = (conv1d, ("NWC", "WIO", "NWC")) if axes == 1 else (conv2d, ("NHWC", "HWIO", "NHWC"))
        y = op(
            x,
            kernel,
            bias,
            stride=_per_axis(self.strides, axes),
            padding=padding,
            dilation=_per_axis(self.kernel_dilation, axes),
            groups=self.feature_group_count,
            dimension_numbers=layouts,
            precision=self.precision,
            implementation=self.implementation,
        )
        return y.reshape(*batch, *y.shape[1:])

    def _padded(self, x: Array) -> tuple[Array, Any]:
        padding = canonicalize_padding(self.padding, len(self.kernel_size))
        if padding not in ("CIRCULAR", "REFLECT"):
            return x, padding
        dilations = _per_axis(self.kernel_dilation, len(self.kernel_size))
        reach = [(size - 1) * dilation for size, dilation in zip(self.kernel_size, dilations, strict=True)]
        pads = [(0, 0), *((r // 2, (r + 1) // 2) for r in reach), (0, 0)]
        return jnp.pad(x, pads, mode="wrap" if padding == "CIRCULAR" else "reflect"), "VALID"


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (1 if value is None else value,) * axes if value is None or isinstance(value, int) else tuple(value)
