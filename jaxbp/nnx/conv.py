import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import Array, lax

from jaxbp.nnx._layer import Layer
from jaxbp.ops.conv._conv_transpose2d import CONV_TRANSPOSE2D
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
        strides, dilations = (_per_axis(value, axes) for value in (self.strides, self.kernel_dilation))
        options = dict(stride=strides, padding=padding, dilation=dilations, groups=self.feature_group_count)
        options |= dict(precision=self.precision, implementation=self.implementation)
        y = op(x, kernel, bias, **options, dimension_numbers=layouts)
        return y.reshape(*batch, *y.shape[1:])

    def _padded(self, x: Array) -> tuple[Array, Any]:
        padding = canonicalize_padding(self.padding, len(self.kernel_size))
        if padding not in ("CIRCULAR", "REFLECT"):
            return x, padding
        dilations = _per_axis(self.kernel_dilation, len(self.kernel_size))
        reach = [(size - 1) * dilation for size, dilation in zip(self.kernel_size, dilations, strict=True)]
        pads = [(0, 0), *((r // 2, (r + 1) // 2) for r in reach), (0, 0)]
        return jnp.pad(x, pads, mode="wrap" if padding == "CIRCULAR" else "reflect"), "VALID"


class ConvTranspose(Layer, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` for images `(..., height, width, in_features)` or sequences `(..., width, in_features)`.

    The forward is `jaxbp.conv2d_backward_input`, and the backward is `jaxbp.conv2d`.
    """

    flax_only = (("preferred_element_type", None),)

    def _only_in_flax(self) -> dict[str, bool]:
        axes, padding = len(self.kernel_size), self.padding
        named = isinstance(padding, str) and padding not in ("SAME", "VALID")
        unsupported = {f"padding={padding!r}": named, f"{axes} spatial axes": axes not in (1, 2)}
        return super()._only_in_flax() | unsupported

    def __call__(self, inputs: Any) -> Array:
        kernel = self.kernel[...]
        # If the shape of the mask is wrong, Flax raises an error.
        is_masked = self.mask is not None and self.mask.shape == kernel.shape
        kernel = kernel * self.mask if is_masked else kernel
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        if self._needs_flax(x, kernel, bias) or is_masked != (self.mask is not None):
            return super().__call__(inputs)
        axes = len(self.kernel_size)
        batch, row = x.shape[: -axes - 1], (1,) * (2 - axes)  # a sequence is an image with one row
        x = jnp.moveaxis(x.reshape(-1, *row, *x.shape[-axes - 1 :]), -1, 1)
        kernel = kernel.reshape(*row, *kernel.shape)
        w = kernel.transpose(3, 2, 0, 1) if self.transpose_kernel else jnp.flip(kernel, (0, 1)).transpose(2, 3, 0, 1)
        stride = (*row, *_per_axis(self.strides, axes))
        dilation = (*row, *_per_axis(self.kernel_dilation, axes))
        padding = canonicalize_padding(self.padding, axes)
        padding = (padding,) * axes if isinstance(padding, str) else padding
        extent = [(size - 1) * d + 1 for size, d in zip(w.shape[2:], dilation, strict=True)]
        pads = list(map(_pads_of_transpose, extent, stride, (*((0, 0) for _ in row), *padding)))
        padding, added = zip(*pads, strict=True)
        sizes = zip(x.shape[2:], stride, extent, padding, strict=True)
        y = CONV_TRANSPOSE2D(
            x,
            w,
            bias,
            output_size=tuple((n - 1) * s + reach - sum(cropped) for n, s, reach, cropped in sizes),
            added=added,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=1,
            precision=self.precision,
            implementation=self.implementation,
        )
        return jnp.moveaxis(y, 1, -1).reshape(*batch, *y.shape[4 - axes :], y.shape[1])


def _pads_of_transpose(extent: int, stride: int, padding: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many positions of the full result are cropped at both sides, and how many zeros are added.

    `padding` is as in `jax.lax.conv_transpose`. The full result has every position that an input reaches.
    """
    if isinstance(padding, str):
        total = extent + stride - 2 + (max(extent - stride, 0) if padding == "VALID" else 0)
        before = extent - 1 if padding == "VALID" or stride > extent - 1 else math.ceil(total / 2)
        padding = before, total - before
    cropped = [extent - 1 - pad for pad in padding]
    return tuple(max(n, 0) for n in cropped), tuple(max(-n, 0) for n in cropped)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (1 if value is None else value,) * axes if value is None or isinstance(value, int) else tuple(value)
