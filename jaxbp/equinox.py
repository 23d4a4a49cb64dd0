"""Equinox modules whose layers call the ops of jaxbp. docs/other_libraries.md has an example."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.common import checks
from jaxbp.nnx._layer import check_implementation, falls_back
from jaxbp.ops.conv.conv1d import conv1d
from jaxbp.ops.conv.conv2d import conv2d
from jaxbp.ops.dense.embedding import embedding
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.norm.group_norm import group_norm
from jaxbp.ops.norm.layer_norm import layer_norm, rms_norm
from jaxbp.pairing import Implementation

Model = TypeVar("Model")
_NO_STATE = object()


def replace_layers(model: Model, implementation: Implementation = None) -> Model:
    """Return the model with the layers of this module in place of the layers of `equinox.nn` of the same name.

    The layers are `Linear`, `Conv1d`, `Conv2d`, `Embedding`, `LayerNorm`, `RMSNorm`, and `GroupNorm`, anywhere in the
    model, for example in an `MLP`, a `MultiheadAttention`, or a `Sequential`. The new layers are subclasses with the
    same arrays. Subclasses of yours and functions such as `jax.nn.relu` are unchanged.

    Args:
      model: a pytree of Equinox modules. Its layers may already be layers of this module.
      implementation: as in every op, for all replaced layers.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_implementation("replace_layers", implementation)

    def replace(layer):
        if not is_layer(layer):
            return layer
        new = object.__new__(_LAYERS[type(layer)])
        vars(new).update(vars(layer) | {"implementation": implementation})
        return new

    is_layer = lambda node: type(node) in _LAYERS  # noqa: E731
    return jax.tree.map(replace, model, is_leaf=is_layer)


class Linear(eqx.nn.Linear):
    """`equinox.nn.Linear`, computed by `jaxbp.linear`."""

    implementation: Implementation = eqx.field(static=True, default=None)

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        checks.shape("Linear", "x", x, *(() if self.in_features == "scalar" else (self.in_features,)))
        y = linear(jnp.ravel(x), self.weight, self.bias, implementation=self.implementation)
        return y.reshape(()) if self.out_features == "scalar" else y


class _Conv(eqx.nn.Conv):
    implementation: Implementation = eqx.field(static=True, default=None)

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        name, mode = type(self).__name__, self.padding_mode
        unsupported = {f"padding_mode={mode!r}": mode != "ZEROS"}
        if falls_back(name, self.implementation, "equinox", "Equinox", **unsupported):
            return super().__call__(x, key=key)
        checks.shape(name, "x", x, "in_channels", *("width", "height")[: self.num_spatial_dims])
        convolve, bias = {1: conv1d, 2: conv2d}[self.num_spatial_dims], _raveled(self.bias)
        options = dict(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)
        return convolve(x[None], self.weight, bias, **options, implementation=self.implementation)[0]


class Conv1d(_Conv, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`, computed by `jaxbp.conv1d`."""


class Conv2d(_Conv, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`, computed by `jaxbp.conv2d`."""


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding`, computed by `jaxbp.embedding`. An index out of range gives NaN."""

    implementation: Implementation = eqx.field(static=True, default=None)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        x = checks.array("Embedding", "x", x)
        checks.shape("Embedding", "x", x)
        return embedding(x, self.weight, implementation=self.implementation)


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm`, computed by `jaxbp.layer_norm`."""

    implementation: Implementation = eqx.field(static=True, default=None)

    def __call__(self, x: Array, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        checks.shape("LayerNorm", "x", x, *self.shape)
        y = layer_norm(
            x.ravel(), *map(_raveled, (self.weight, self.bias)), self.eps, implementation=self.implementation
        )
        return _with_state(y.reshape(x.shape).astype(x.dtype), state)


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm`, computed by `jaxbp.rms_norm`."""

    implementation: Implementation = eqx.field(static=True, default=None)

    def __call__(self, x: Array, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        checks.shape("RMSNorm", "x", x, *self.shape)
        y = rms_norm(x.ravel(), _raveled(self.weight), self.eps, implementation=self.implementation)
        y = y if self.bias is None else y + self.bias.ravel()
        return _with_state(y.reshape(x.shape).astype(x.dtype), state)


class GroupNorm(eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm`, computed by `jaxbp.group_norm`."""

    implementation: Implementation = eqx.field(static=True, default=None)

    def __call__(self, x: Array, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        options = dict(epsilon=self.eps, implementation=self.implementation)
        y = group_norm(x[None], self.weight, self.bias, self.groups, **options)
        return _with_state(y[0].astype(x.dtype), state)


def _raveled(a: Array | None) -> Array | None:
    return None if a is None else a.ravel()


def _with_state(y: Array, state: Any) -> Any:
    return y if state is _NO_STATE else (y, state)


_REPLACED = (Linear, Conv1d, Conv2d, Embedding, LayerNorm, RMSNorm, GroupNorm)
_LAYERS = {getattr(eqx.nn, layer.__name__): layer for layer in _REPLACED} | {layer: layer for layer in _REPLACED}
