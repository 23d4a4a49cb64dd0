"""Element-wise ops with their backwards."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxbp.common import barriers, checks
from jaxbp.common.numerics import cast_like, upcast
from jaxbp.ops._defaults import XLA_ON_GPU
from jaxbp.pairing import Axes, DefaultImplementation, Implementation, Pair, given_arguments, in_dtypes_of
from pallas_kernels.pointwise.elementwise import elementwise
from pallas_kernels.pointwise.reductions import sum_over


class Elementwise(Pair):
    """An element-wise op and its backward, with NumPy's broadcasting.

    Args:
      gradient: `gradient(dy, *arrays, **options)` returns one gradient per array.
      in_kernels: replaces `gradient` in kernels, if they do not support its operations.
      keeps_result: whether the forward saves y instead of x. `gradient(dy, y)` must equal `gradient(dy, x)`.
    """

    def __init__(
        self,
        name: str,
        forward: Callable,
        gradient: Callable,
        *,
        in_kernels: Callable | None = None,
        keeps_result: bool = False,
        default: DefaultImplementation = XLA_ON_GPU,
        default_vjp: DefaultImplementation = XLA_ON_GPU,
    ):
        def in_dtype(*arrays, **options):
            return cast_like(forward(*map(upcast, arrays), **options), arrays[0])

        def formula(dy, *arrays, **options):
            wide_dy, *values = map(upcast, (dy, *arrays))
            if not keeps_result:
                # An array that is broadcast would need one launch for its product with 1.
                whole = [i for i, a in enumerate(arrays) if a.shape == dy.shape] or range(len(arrays))
                values = [barriers.recomputed(a) if i in whole else a for i, a in enumerate(values)]
            return _in_shapes_of(arrays, _summed(dy.shape, gradient(wide_dy, *values, **options), arrays))

        def kernel(dy, *arrays, **options):
            in_kernel = functools.partial(in_kernels or gradient, **options)
            return _in_shapes_of(arrays, _gradient_kernels(f"{name}_backward", in_kernel, dy, arrays))

        def save_result(x, **options):
            y = barriers.stored(in_dtype(x, **options))
            return y, (y,)

        super().__init__(
            in_dtype,
            {"xla": formula, "pallas": kernel},
            save=save_result if keeps_result else None,
            residuals=given_arguments if keeps_result else None,
            name=name,
            batch_axes=_axes,
            unsupported=checks.unsupported,
            default=default,
            default_vjp=default_vjp,
            jit=True,
        )

    def of(self, implementation: Implementation, arrays: dict[str, Any], **options: Any) -> Array:
        values = checks.numeric(self.name, **arrays)
        checks.broadcast(self.name, **dict(zip(arrays, values, strict=True)))
        try:
            return self(*values, implementation=implementation, **options)
        except TypeError:  # JAX has some functions only for floating dtypes
            for name, a in zip(arrays, values, strict=True):
                checks.require_floating(self.name, name, a)
            raise

    def backward_of(self, implementation: Implementation, dy: Any, arrays: dict[str, Any], **options: Any) -> Any:
        op = self.vjp.name
        dy, *values = checks.floating(op, dy=dy, **arrays)
        checks.shape(op, "dy", dy, *checks.broadcast(op, **dict(zip(arrays, values, strict=True))))
        return _in_dtypes_of(arrays, self.vjp(dy, *values, implementation=implementation, **options))


class WithNumber:
    """An element-wise op with one more parameter, which is a static number or a differentiable array of shape ().

    Args:
      number: the name of this parameter.
      gradient: `gradient(dy, *arrays, value)` returns a tuple with one gradient per array.
      number_gradient: `number_gradient(dy, *arrays, value)` returns each element's term of the parameter's gradient.
    """

    def __init__(self, name: str, number: str, forward: Callable, gradient: Callable, number_gradient: Callable):
        self.number = number
        self.of_array = Elementwise(
            name, forward, lambda dy, *arrays: (*gradient(dy, *arrays), number_gradient(dy, *arrays))
        )
        self.static = Elementwise(
            name,
            lambda *arrays, **options: forward(*arrays, options[number]),
            lambda dy, *arrays, **options: gradient(dy, *arrays, options[number]),
        )

    def of(self, implementation: Implementation, arrays: dict[str, Any], value: Any, low: float = -math.inf) -> Array:
        value = checks.number_or_array(self.static.name, self.number, value, low)
        if isinstance(value, float):
            return self.static.of(implementation, arrays, **{self.number: value})
        return self.of_array(*checks.floating(self.static.name, **arrays), value, implementation=implementation)

    def backward_of(
        self, implementation: Implementation, dy: Any, arrays: dict[str, Any], value: Any, low: float = -math.inf
    ) -> Any:
        op = self.static.vjp.name
        value = checks.number_or_array(op, self.number, value, low)
        if isinstance(value, float):
            return self.static.backward_of(implementation, dy, arrays, **{self.number: value})
        dy, *values = checks.floating(op, dy=dy, **arrays)
        checks.shape(op, "dy", dy, *checks.broadcast(op, **dict(zip(arrays, values, strict=True))))
        *gradients, _ = self.of_array.vjp(dy, *values, value, implementation=implementation)
        return _in_dtypes_of(arrays, tuple(gradients) if len(gradients) > 1 else gradients[0])


def _in_dtypes_of(arrays, gradients):
    arguments = tuple(arrays.values())
    return in_dtypes_of(arguments if len(arguments) > 1 else arguments[0], gradients)


def _axes(dy, *arrays):
    def of(axis):
        aligned = (axis - dy.ndim if axis >= dy.ndim - a.ndim else None for a in arrays)
        pairs = zip(arrays, aligned, strict=True)
        divided = [None if i is None or a.shape[i] != dy.shape[i] else i + a.ndim for a, i in pairs]
        return {"dy": axis, "arrays": divided}

    return Axes(of(0), others=[Axes(of(axis)) for axis in range(1, dy.ndim)]) if dy.ndim else Axes({})


def _in_shapes_of(arrays, gradients):
    results = tuple(g.reshape(a.shape).astype(a.dtype) for g, a in zip(gradients, arrays, strict=True))
    return results if len(results) > 1 else results[0]


def _broadcast_axes(shape, a):
    missing = len(shape) - a.ndim
    aligned = (1,) * missing + a.shape
    return tuple(axis for axis, size in enumerate(shape) if aligned[axis] != size or axis < missing)


def _summed(shape, gradients, arrays):
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [
        jnp.sum(jnp.broadcast_to(g, shape), axis=_broadcast_axes(shape, a)) if a.shape != shape else g
        for g, a in zip(gradients, arrays, strict=True)
    ]


def _gradient_kernels(name, gradient, dy, arrays):
    def select(wanted):
        def formula(*values):
            gradients = gradient(*values)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            return tuple(gradients[i] for i in wanted)

        formula.__name__ = name
        return formula

    results = [None] * len(arrays)
    if whole := [i for i, a in enumerate(arrays) if a.shape == dy.shape]:
        for i, g in zip(whole, elementwise(select(whole), dy, *arrays), strict=True):
            results[i] = g
    for i, a in enumerate(arrays):
        if results[i] is None:
            (results[i],) = sum_over(select([i]), dy, *arrays, axes=_broadcast_axes(dy.shape, a))
    return results
