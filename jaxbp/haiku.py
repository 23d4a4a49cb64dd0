"""Layers of Haiku that call the ops of jaxbp. docs/other_libraries.md has an example.

Each layer has the constructor, the name, and the parameters of the layer of the same name in Haiku, and the argument
`implementation`. While Haiku initializes the parameters, Haiku computes the layer.
"""

from typing import Any

import haiku as hk
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike

from jaxbp.nnx._layer import check_implementation, falls_back
from jaxbp.ops.conv.conv1d import conv1d
from jaxbp.ops.conv.conv2d import conv2d
from jaxbp.ops.dense.embedding import embedding
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.norm.group_norm import group_norm
from jaxbp.ops.norm.layer_norm import layer_norm, rms_norm
from jaxbp.pairing import Implementation


class _Layer:
    def __init__(self, *args: Any, implementation: Implementation = None, **options: Any):
        check_implementation(type(self).__name__, implementation)
        super().__init__(*args, **options)
        self.implementation = implementation

    def _needs_haiku(self, **lacking: bool) -> bool:
        name = type(self).__name__
        is_lacking = falls_back(name, self.implementation, "haiku", "Haiku", **lacking)
        return is_lacking or hk.running_init()


class Linear(_Layer, hk.Linear):
    """`haiku.Linear`, computed by `jaxbp.linear`."""

    def __call__(self, inputs: Any, *, precision: PrecisionLike = None) -> Array:
        if self._needs_haiku():
            return super().__call__(inputs, precision=precision)
        x, size = jnp.asarray(inputs), self.output_size
        w = hk.get_parameter("w", (x.shape[-1], size), x.dtype)
        b = hk.get_parameter("b", (size,), x.dtype) if self.with_bias else None
        return linear(x, w.T, b, precision=precision, implementation=self.implementation)


class _Conv(_Layer, hk.ConvND):
    def __call__(self, inputs: Any, *, precision: PrecisionLike = None) -> Array:
        if self._needs_haiku():
            return super().__call__(inputs, precision=precision)
        x, axes, channels = jnp.asarray(inputs), self.num_spatial_dims, self.output_channels
        is_last = self.channel_index == -1
        is_batched = x.ndim == axes + 2
        x = x if is_batched else x[None]
        w_shape = (*self.kernel_shape, x.shape[self.channel_index] // self.feature_group_count, channels)
        w = hk.get_parameter("w", w_shape, x.dtype)
        w = w if self.mask is None else w * self.mask
        b_shape = (channels,) if is_last else (channels, *[1] * axes)
        b = hk.get_parameter("b", b_shape, x.dtype).ravel() if self.with_bias else None
        images = ("NWC" if is_last else "NCW") if axes == 1 else ("NHWC" if is_last else "NCHW")
        options = dict(stride=tuple(self.stride), padding=self.padding, dilation=tuple(self.kernel_dilation))
        options |= dict(groups=self.feature_group_count, precision=precision, implementation=self.implementation)
        layouts = images, "WIO" if axes == 1 else "HWIO", images
        y = {1: conv1d, 2: conv2d}[axes](x, w, b, **options, dimension_numbers=layouts)
        return y if is_batched else y[0]


class Conv1D(_Conv, hk.Conv1D):
    """`haiku.Conv1D`, computed by `jaxbp.conv1d`."""


class Conv2D(_Conv, hk.Conv2D):
    """`haiku.Conv2D`, computed by `jaxbp.conv2d`."""


class Embed(_Layer, hk.Embed):
    """`haiku.Embed`, computed by `jaxbp.embedding`."""

    def __call__(self, ids: Any, lookup_style: Any = None, precision: PrecisionLike = None) -> Array:
        ids, style = jnp.asarray(ids), lookup_style or self.lookup_style
        is_other = style not in (hk.EmbedLookupStyle.ARRAY_INDEX, "ARRAY_INDEX", "array_index")
        if self._needs_haiku(lookup_style=is_other) or not jnp.issubdtype(ids.dtype, jnp.integer):
            return super().__call__(ids, lookup_style, precision)
        return embedding(ids, jnp.asarray(self.embeddings), implementation=self.implementation)


class _OverLastAxis(_Layer):
    def _other_axes(self, x: Array) -> dict[str, bool]:
        """Return whether the axes of the layer are not the last axis."""
        others = {}
        for name in ("axis", "param_axis"):
            axes = getattr(self, name)
            axes = range(x.ndim)[axes] if isinstance(axes, slice) else [axis % x.ndim for axis in axes]
            others[f"other axes than the last in {name}"] = tuple(axes) != (x.ndim - 1,)
        return others

    def _parameter(self, name: str, x: Array) -> Array | None:
        return hk.get_parameter(name, x.shape[-1:], x.dtype) if getattr(self, f"create_{name}") else None


class LayerNorm(_OverLastAxis, hk.LayerNorm):
    """`haiku.LayerNorm`, computed by `jaxbp.layer_norm`. `use_fast_variance` has no effect."""

    def __call__(self, inputs: Any, scale: Any = None, offset: Any = None) -> Array:
        x = jnp.asarray(inputs)
        given = {"scale": scale is not None, "offset": offset is not None}
        if self._needs_haiku(**self._other_axes(x), **given):
            return super().__call__(x, scale, offset)
        parameters = (self._parameter(name, x) for name in ("scale", "offset"))
        return layer_norm(x, *parameters, self.eps, implementation=self.implementation)


class RMSNorm(_OverLastAxis, hk.RMSNorm):
    """`haiku.RMSNorm`, computed by `jaxbp.rms_norm`."""

    def __call__(self, inputs: Any) -> Array:
        x = jnp.asarray(inputs)
        if self._needs_haiku(**self._other_axes(x)):
            return super().__call__(x)
        return rms_norm(x, self._parameter("scale", x), self.eps, implementation=self.implementation)


class GroupNorm(_Layer, hk.GroupNorm):
    """`haiku.GroupNorm`, computed by `jaxbp.group_norm`."""

    def __call__(self, x: Any, scale: Any = None, offset: Any = None) -> Array:
        given = {"axis": self.axis != slice(1, None), "scale": scale is not None, "offset": offset is not None}
        if self._needs_haiku(**given):
            return super().__call__(x, scale, offset)
        channels = x.shape[self.channel_index]
        shape = (channels,) if self.channel_index == -1 else (channels, *[1] * (x.ndim - 2))
        created = (("scale", self.create_scale), ("offset", self.create_offset))
        parameters = (hk.get_parameter(name, shape, x.dtype).ravel() if is_used else None for name, is_used in created)
        options = dict(channel_axis=self.channel_index, implementation=self.implementation)
        return group_norm(x, *parameters, self.groups, epsilon=self.eps, **options)
