"""The ops of layers of gates and of wires, and checks of their arguments."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

from jaxbp.common import checks
from jaxbp.common.numerics import upcast
from jaxbp.pairing import DefaultImplementation, Op, Pair, cast_once, per_implementation


def layer_ops(
    name: str,
    definition: Callable,
    coefficients: Callable,
    parameter_gradient: Callable,
    forward: Mapping[str, Callable],
    gradients: Mapping[str, Callable],
    default: DefaultImplementation | None = None,
) -> tuple[Op, Op]:
    """Return the op of a layer, `(parameters, wires, x) -> y`, and its backward `(dy, parameters, wires, x)`.

    Args:
      definition: the op, for autodiff.
      coefficients: `(parameters, wires, implementation) -> c`. Without a gradient, the implementation is "xla".
      parameter_gradient: the backward of `coefficients`, `(dc, parameters, implementation) -> dparameters`.
      forward: `(c, wires, x) -> y` by implementation. This function and `gradients` get only the option `groups`.
      gradients: `(dy, c, wires, x) -> (dc, dx)` by implementation.
    """

    def of_layer(options):
        return {key: value for key, value in options.items() if key == "groups"}

    def wide_layer(parameters, wires, x, *, implementation, **options):
        c = coefficients(parameters, wires, "xla", **options)
        return forward[implementation](c, wires, x, **of_layer(options))

    def save(parameters, wires, x, *, implementation, **options):
        c = coefficients(parameters, wires, implementation, **options)
        return forward[implementation](c, wires, x, **of_layer(options)), (parameters, c, wires, x)

    def wide_gradients(dy, parameters, c, wires, x, *, implementation, **options):
        dc, dx = gradients[implementation](dy, c, wires, x, **of_layer(options))
        return parameter_gradient(dc, parameters, implementation, **options), None, dx

    forwards, saves, backwards = map(per_implementation, (wide_layer, save, wide_gradients))
    layers = {key: Pair(f, {key: backwards[key]}, save=saves[key], name=name) for key, f in forwards.items()}

    # Parameters of half precision are cast to float32 first, because the sum of dc over the batch could overflow.
    def layer(parameters, wires, x, *, implementation, **options):
        return layers[implementation](upcast(parameters), wires, x, implementation=implementation, **options)

    def layer_backward(dy, parameters, wires, x, *, implementation, **options):
        wide = upcast(parameters)
        arrays = dy, wide, coefficients(wide, wires, "xla", **options), wires, x
        dwide, _, dx = wide_gradients(*arrays, implementation=implementation, **options)
        return dwide.astype(parameters.dtype), dx

    def definition_backward(dy, parameters, wires, x, **options):
        return jax.vjp(lambda p, x: definition(p, wires, x, **options), parameters, x)[1](dy)

    public_op = functools.partial(Op, unsupported=checks.unsupported_dtype, default=default, partitioned=True, jit=True)
    layer_backwards = cast_once(per_implementation(layer_backward))
    return (
        public_op(name, {"autodiff": definition, **per_implementation(layer)}),
        public_op(f"{name}_backward", {"autodiff": definition_backward, **layer_backwards}),
    )


def checked_inputs(op: str, wires: Any, kind: type, x: Any) -> Array:
    """Return x as an array. Raise an error unless `wires` are of this kind, and x has their inputs."""
    if not isinstance(wires, kind):
        raise TypeError(f"{op}: wires is a {type(wires).__name__}; wants a jaxbp.{kind.__name__}")
    (x,) = checks.only_floating(op, x=x)
    if x.ndim == 0 or x.shape[-1] != wires.inputs:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., {wires.inputs}), the number of inputs of wires")
    return x
