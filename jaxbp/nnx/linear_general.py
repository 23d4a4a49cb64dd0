import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxbp.nnx._layer import Layer
from jaxbp.ops.dense.linear_algebra import matmul
from jaxbp.ops.pointwise.arithmetic import add
from jaxbp.pairing import Implementation


class LinearGeneral(Layer, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, computed by `jaxbp.matmul`: `y = x kernel + bias`, with sums over the axes `axis`."""

    flax_only = (("dot_general", None), ("dot_general_cls", None), ("preferred_element_type", None))

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        x, kernel, bias = self._promoted(inputs, "kernel", "bias")
        if self._needs_flax(x, kernel, bias, out_sharding=out_sharding is not None):
            return super().__call__(inputs, out_sharding)
        axis, batch_axis = (sorted(i % x.ndim for i in axes) for axes in (self.axis, self.batch_axis))
        batch = range(len(batch_axis))
        contracted = range(len(batch), len(batch) + len(axis))
        dimension_numbers = (axis, contracted), (batch_axis, batch)
        y = dot_general(self.implementation)(x, kernel, dimension_numbers, self.precision)
        if bias is None:
            return y
        sizes = (x.shape[i] if i in batch_axis else 1 for i in range(x.ndim) if i not in axis)
        return add(y, bias.reshape(*sizes, *self.out_features), implementation=self.implementation)


class Einsum(Layer, nnx.Einsum):
    """`flax.nnx.Einsum`, whose product `jaxbp.matmul` computes."""

    flax_only = (("einsum_op", jnp.einsum), ("preferred_element_type", None))

    def __call__(self, inputs: Any, einsum_str: str | None = None, out_sharding: Any = None) -> Array:
        x, kernel, bias = self._promoted(inputs, "kernel", "bias")
        if self._needs_flax(x, kernel, bias, out_sharding=out_sharding is not None):
            return super().__call__(inputs, einsum_str, out_sharding)
        formula = (self.einsum_str if einsum_str is None else einsum_str).replace(" ", "")
        self._einsum_str_check(formula)
        product = dot_general(self.implementation)
        y = jnp.einsum(formula, x, kernel, precision=self.precision, _dot_general=product)
        if bias is None:
            return y
        shape = self._infer_broadcasted_bias_shape(formula, x, kernel)
        return add(y, bias.reshape(shape), implementation=self.implementation)


@functools.cache  # so that JAX finds its traces again
def dot_general(implementation: Implementation) -> Callable[..., Array]:
    """Return `jax.lax.dot_general`, computed by `jaxbp.matmul`."""
    return functools.partial(_dot_general, implementation=implementation)


def _dot_general(a, b, dimension_numbers, precision, preferred_element_type=None, *, implementation):
    jax.eval_shape(functools.partial(lax.dot_general, dimension_numbers=dimension_numbers), a, b)  # checks the shapes
    (contracted_a, contracted_b), (batch_a, batch_b) = dimension_numbers
    rows = [i for i in range(a.ndim) if i not in (*contracted_a, *batch_a)]
    columns = [i for i in range(b.ndim) if i not in (*contracted_b, *batch_b)]
    shape = lambda x, axes: tuple(x.shape[i] for i in axes)  # noqa: E731
    batch, inner = shape(a, batch_a), math.prod(shape(a, contracted_a))
    m = a.transpose(*batch_a, *rows, *contracted_a).reshape(*batch, math.prod(shape(a, rows)), inner)
    n = b.transpose(*batch_b, *contracted_b, *columns).reshape(*batch, inner, math.prod(shape(b, columns)))
    y = matmul(m, n, precision=precision, implementation=implementation)
    return y.reshape(*batch, *shape(a, rows), *shape(b, columns))
