"""Linen modules whose layers call the ops of jaxbp. docs/other_libraries.md has an example."""

import contextlib
import dataclasses
import functools
import inspect
import math
import types
from typing import Any

from flax import errors, linen
from flax.core import meta
from jax import Array

from jaxbp import nnx
from jaxbp.nnx._layer import Layer, check_implementation, falls_back
from jaxbp.pairing import Implementation

_LAYERS: dict[type[linen.Module], type[Layer]] = {
    linen.Dense: nnx.Linear,
    linen.DenseGeneral: nnx.LinearGeneral,
    linen.Einsum: nnx.Einsum,
    linen.Conv: nnx.Conv,
    linen.ConvTranspose: nnx.ConvTranspose,
    linen.Embed: nnx.Embed,
    linen.LayerNorm: nnx.LayerNorm,
    linen.RMSNorm: nnx.RMSNorm,
    linen.GroupNorm: nnx.GroupNorm,
    linen.BatchNorm: nnx.BatchNorm,
    linen.Dropout: nnx.Dropout,
    linen.PReLU: nnx.PReLU,
}
_RENAMED = {"features", "batch_dims", "shape", "use_bias"}
"""Attributes of Linen's layers that `_sizes` passes to the layers of NNX."""


def intercept_layers(implementation: Implementation = None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager and decorator in which the layers of Linen call the ops of jaxbp.

    The layers are `Dense`, `DenseGeneral`, `Einsum`, `Conv`, `ConvTranspose`, `Embed`, `LayerNorm`, `RMSNorm`,
    `GroupNorm`, `BatchNorm`, `Dropout`, and `PReLU`, also within other modules of Linen. Their subclasses and functions
    such as `linen.relu` are unchanged. Variables keep their names, initial values, and partitioning, because Linen
    computes `init`.

    Enter the context within the function that `jax.jit` compiles, because `jax.jit` reuses a program that it compiled
    outside of the context.

    Args:
      implementation: as in every op. With None, Flax computes a layer with an option that only Flax has, and a warning
        says so.

    Raises:
      NotImplementedError: Flax would compute a layer, but the implementation is "pallas" or "xla".
      ValueError: the implementation is unknown.
    """
    check_implementation("intercept_layers", implementation)

    def intercept(next_fun, args, kwargs, context):
        module, method = context.module, context.method_name
        is_layer = isinstance(module, tuple(_LAYERS)) and method in ("__call__", "attend")
        if not is_layer or module.is_initializing() or _needs_linen(module, implementation):
            return next_fun(*args, **kwargs)
        if call := _CALLS.get(type(module)):
            return call(module, implementation, *args, **kwargs)
        x = args[0] if args else next(kwargs[name] for name in ("inputs", "x", "query") if name in kwargs)
        return getattr(_layer(module, implementation, x), method)(*args, **kwargs)

    return linen.intercept_methods(intercept)


def _needs_linen(module: linen.Module, implementation: Implementation) -> bool:
    lacking = {f"a subclass of {base.__name__}": True for base in _LAYERS if isinstance(module, base)}
    if kind := _LAYERS.get(type(module)):
        lacking = dict.fromkeys(_changed(module).keys() - _RENAMED - inspect.signature(kind).parameters.keys(), True)
        parameters = _variables(module, "params")
        if any(getattr(module, f"use_{name}", True) and name not in parameters for name in _initialized(kind)):
            return True  # Linen makes the parameter, or raises an error.
    return falls_back(type(module).__name__, implementation, "linen", **lacking)


def _layer(module: linen.Module, implementation: Implementation, x: Array) -> Any:
    """Return the layer of `jaxbp.nnx` that has the options and parameters of `module`, a layer of Linen. x is the input
    of the call. Its shape gives the sizes that Linen's layer does not store."""
    kind, parameters = _LAYERS[type(module)], _variables(module, "params")
    signature = inspect.signature(kind).parameters
    options = {name: value for name, value in _changed(module).items() if name in signature} | _sizes(module, x)
    if promote_dtype := options.pop("promote_dtype", None):
        options["promote_dtype"] = lambda arrays, **options: promote_dtype(*arrays, **options)
    for name in _initialized(kind) & parameters.keys():
        existing = functools.partial(_existing, module, name, parameters[name])
        options[f"{name}_init"] = parameters[name] if kind is nnx.PReLU else existing
    if "rngs" in signature and signature["rngs"].default is inspect.Parameter.empty:
        options["rngs"] = types.SimpleNamespace(params=lambda: None)  # the initializers ignore their keys
    return kind(implementation=implementation, **options)


def _existing(module: linen.Module, name: str, value: Array, key: None, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return `value`, the existing parameter `name`, as an initializer would. Ignore `key` and `dtype`. For
    `DenseGeneral`, `shape` is a matrix or vector of the same size. Otherwise, it must be the shape of `value`."""
    if value.shape != shape and (not isinstance(module, linen.DenseGeneral) or value.size != math.prod(shape)):
        raise errors.ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value


def _sizes(module: linen.Module, x: Array) -> dict[str, Any]:
    match module:
        case linen.DenseGeneral():
            axis, batch_axis = ((a,) if isinstance(a, int) else tuple(a) for a in (module.axis, module.batch_dims))
            in_features = tuple(x.shape[i] for i in sorted(i % x.ndim for i in axis))
            batch_axis = {i % x.ndim: x.shape[i] for i in batch_axis}
            return dict(in_features=in_features, out_features=module.features, batch_axis=batch_axis)
        case linen.Einsum():
            formula = module.einsum_str or "->,"  # the call has another formula
            bias_shape = _variables(module, "params")["bias"].shape if module.use_bias else None
            return dict(einsum_str=formula, kernel_shape=module.shape, bias_shape=bias_shape)
        case linen.Dense() | linen.Conv() | linen.ConvTranspose():
            return dict(in_features=x.shape[-1], out_features=module.features)
        case linen.LayerNorm() | linen.RMSNorm() | linen.GroupNorm() | linen.BatchNorm():
            return dict(num_features=x.shape[-1])
    return {}


def _batch_norm(module, implementation, x, use_running_average=None, *, mask=None):
    uses_average = linen.merge_param("use_running_average", module.use_running_average, use_running_average)
    layer, averages = _layer(module, implementation, x), _variables(module, "batch_stats")
    for name, value in averages.items():
        getattr(layer, name)[...] = value
    y = layer(x, uses_average, mask=mask)
    if not uses_average:
        for name in averages:
            module.variable("batch_stats", name).value = getattr(layer, name)[...]
    return y


def _dropout(module, implementation, inputs, deterministic=None, rng=None):
    deterministic = linen.merge_param("deterministic", module.deterministic, deterministic)
    if rng is None and not deterministic and 0 < module.rate < 1:
        rng = module.make_rng(module.rng_collection)
    return _layer(module, implementation, inputs)(inputs, deterministic=deterministic, rngs=rng)


_CALLS = {linen.BatchNorm: _batch_norm, linen.Dropout: _dropout}


def _variables(module: linen.Module, collection: str) -> dict[str, Array]:
    return {name: meta.unbox(value) for name, value in module.variables.get(collection, {}).items()}


def _changed(module: linen.Module) -> dict[str, Any]:
    """Return the attributes that do not have Linen's default value."""
    fields = (field for field in dataclasses.fields(module) if field.name not in ("parent", "name"))
    return {f.name: value for f in fields if (value := getattr(module, f.name)) is not f.default}


def _initialized(kind: type[Layer]) -> set[str]:
    return {name.removesuffix("_init") for name in inspect.signature(kind).parameters if name.endswith("_init")}
