from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from jaxbp.nnx._layer import Layer
from jaxbp.ops.norm.batch_norm import batch_norm
from jaxbp.ops.norm.group_norm import group_norm
from jaxbp.ops.norm.layer_norm import layer_norm, rms_norm


class _OverLastAxis(Layer):
    flax_only = (("axis_name", None), ("axis_index_groups", None))

    def _normalized(self, op: Callable, x: Any, mask: Any, *parameters: str) -> Array:
        arrays = self._promoted(x, *parameters)
        ndim = max(arrays[0].ndim, 1)  # the op refuses a number
        others = {name: _axes(getattr(self, name), ndim) != {ndim - 1} for name in ("reduction_axes", "feature_axes")}
        if self._needs_flax(*arrays, mask=mask is not None, **others):
            return super().__call__(x, mask=mask)
        return op(*arrays, self.epsilon, implementation=self.implementation)


class LayerNorm(_OverLastAxis, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, computed by `jaxbp.layer_norm`. `use_fast_variance` has no effect."""

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        return self._normalized(layer_norm, x, mask, "scale", "bias")


class RMSNorm(_OverLastAxis, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, computed by `jaxbp.rms_norm`. `use_fast_variance` has no effect."""

    def __call__(self, x: Any, mask: Any = None) -> Array:
        return self._normalized(rms_norm, x, mask, "scale")


class GroupNorm(Layer, nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, computed by `jaxbp.group_norm`. `use_fast_variance` has no effect."""

    flax_only = (("axis_name", None), ("axis_index_groups", None), ("reduction_axes", None))

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        arrays = self._promoted(x, "scale", "bias")
        if self._needs_flax(*arrays, mask=mask is not None):
            return super().__call__(x, mask=mask)
        options = dict(epsilon=self.epsilon, channel_axis=-1, implementation=self.implementation)
        return group_norm(*arrays, self.num_groups, **options)


class BatchNorm(Layer, nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, computed by `jaxbp.batch_norm`. The running averages keep their initial dtype."""

    flax_only = (("axis_index_groups", None),)

    def _only_in_flax(self) -> dict[str, bool]:
        several = isinstance(self.axis, tuple | list) and len(self.axis) > 1
        return super()._only_in_flax() | {"several axes": several}

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Array:
        given = self.use_running_average if use_running_average is None else use_running_average
        x_, _, _, scale, bias = self._promoted(x, "mean", "var", "scale", "bias")
        lacking = {"mask": mask is not None, "an input without a batch axis": x_.ndim == 1}
        # If `use_running_average` is missing, Flax raises an error.
        if self._needs_flax(x_, scale, bias, **lacking) or given is None:
            return super().__call__(x, use_running_average, mask=mask)
        y, mean, var = batch_norm(
            x_,
            scale,
            bias,
            (self.mean[...], self.var[...]),
            use_running_average=given,
            momentum=self.momentum,
            epsilon=self.epsilon,
            channel_axis=self.axis if isinstance(self.axis, int) else self.axis[0],
            axis_name=self.axis_name,
            use_fast_variance=self.use_fast_variance,
            implementation=self.implementation,
        )
        if not given:
            self.mean[...], self.var[...] = mean, var
        return y


def _axes(axes: Any, ndim: int) -> set[int]:
    return {axis % ndim for axis in (axes if isinstance(axes, tuple | list) else (axes,))}
