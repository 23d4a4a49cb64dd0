from typing import Any

from flax import nnx
from jax import Array

from jaxbp.nnx._layer import Layer
from jaxbp.ops.norm.batch_norm import batch_norm
from jaxbp.ops.norm.group_norm import group_norm
from jaxbp.ops.norm.layer_norm import layer_norm, rms_norm


class _Norm(Layer):
    axis_name: Any
    axis_index_groups: Any

    def _only_in_flax(self) -> dict[str, bool]:
        return {
            "axis_name": self.axis_name is not None,
            "axis_index_groups": self.axis_index_groups is not None,
        }

    def _parameter(self, name: str) -> Array | None:
        parameter = getattr(self, name)
        return None if parameter is None else parameter[...]


class _OverLastAxis(_Norm):
    reduction_axes: Any
    feature_axes: Any

    def _over_others(self, ndim: int) -> dict[str, bool]:
        names, ndim = ("reduction_axes", "feature_axes"), max(ndim, 1)  # the op refuses a number
        return {name: _axes(getattr(self, name), ndim) != {ndim - 1} for name in names}


class LayerNorm(_OverLastAxis, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, computed by `jaxbp.layer_norm`. `use_fast_variance` has no effect."""

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        arrays = self.promote_dtype((x, self._parameter("scale"), self._parameter("bias")), dtype=self.dtype)
        if self._needs_flax(*arrays, mask=mask is not None, **self._over_others(arrays[0].ndim)):
            return super().__call__(x, mask=mask)
        return layer_norm(*arrays, self.epsilon, implementation=self.implementation)


class RMSNorm(_OverLastAxis, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, computed by `jaxbp.rms_norm`. `use_fast_variance` has no effect."""

    def __call__(self, x: Any, mask: Any = None) -> Array:
        arrays = self.promote_dtype((x, self._parameter("scale")), dtype=self.dtype)
        if self._needs_flax(*arrays, mask=mask is not None, **self._over_others(arrays[0].ndim)):
            return super().__call__(x, mask)
        return rms_norm(*arrays, self.epsilon, implementation=self.implementation)


class GroupNorm(_Norm, nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, computed by `jaxbp.group_norm`. `use_fast_variance` has no effect."""

    def _only_in_flax(self) -> dict[str, bool]:
        return super()._only_in_flax() | {"reduction_axes": self.reduction_axes is not None}

    def __call__(self, x: Any, *, mask: Any = None) -> Array:
        arrays = self.promote_dtype((x, self._parameter("scale"), self._parameter("bias")), dtype=self.dtype)
        if self._needs_flax(*arrays, mask=mask is not None):
            return super().__call__(x, mask=mask)
        x, scale, bias = arrays
        return group_norm(
            x,
            scale,
            bias,
            self.num_groups,
            epsilon=self.epsilon,
            channel_axis=-1,
            implementation=self.implementation,
        )


class BatchNorm(_Norm, nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, computed by `jaxbp.batch_norm`. The running averages keep their initial dtype."""

    def _only_in_flax(self) -> dict[str, bool]:
        several = isinstance(self.axis, tuple | list) and len(self.axis) > 1
        return {"axis_index_groups": self.axis_index_groups is not None, "several axes": several}

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Array:
        given = self.use_running_average if use_running_average is None else use_running_average
        variables = self.mean[...], self.var[...]
        arrays = (x, *variables, self._parameter("scale"), self._parameter("bias"))
        x_, _, _, scale, bias = self.promote_dtype(arrays, dtype=self.dtype)
        lacking = {"mask": mask is not None, "an input without a batch axis": x_.ndim == 1}
        # If `use_running_average` is missing, Flax raises an error.
        if self._needs_flax(x_, scale, bias, **lacking) or given is None:
            return super().__call__(x, use_running_average, mask=mask)
        y, mean, var = batch_norm(
            x_,
            scale,
            bias,
            variables,
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
