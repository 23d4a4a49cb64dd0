"""Reference functions for ops whose autodiff is not the reference.

For maxima and minima, as in jaxbp, the gradient goes to the first of equal values or NaNs. The gradient of `jnp.max` is
divided among equal values. The gradients of `jax.lax.ragged_dot` cannot be differentiated in reverse mode.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxbp.common.windows import pool_windows


def _first(values: Array, extreme: Array, inside: Any = True) -> Array:
    found = ((values == extreme[..., None]) | jnp.isnan(values)) & inside
    return jnp.take_along_axis(values, jnp.argmax(found, axis=-1)[..., None], axis=-1)[..., 0]


def _reduction(reduce: Callable[..., Array]) -> Callable[..., Array]:
    def reference(a: Array, axis: Any = None, keepdims: bool = False) -> Array:
        shape = jnp.max(a, axis=axis, keepdims=keepdims).shape
        axes = range(a.ndim) if axis is None else np.atleast_1d(np.asarray(axis, int)) % max(a.ndim, 1)
        kept = [i for i in range(a.ndim) if i not in axes]
        rows = a.transpose(*kept, *sorted(axes)).reshape(*(a.shape[i] for i in kept), -1)
        return _first(rows, reduce(rows, axis=-1)).reshape(shape)

    return reference


def _backward(reference: Callable[..., Array]) -> Callable[..., Array]:
    return lambda dy, a, **options: jax.vjp(functools.partial(reference, **options), a)[1](dy)[0]


def _pool(x: Array, window: Any, **options: Any) -> Array:
    windows, _ = pool_windows("reference", x.shape, window, **options)
    places = []
    for size, n, f, s, d, (before, _) in zip(
        x.shape[2:],
        windows.output_size,
        windows.window,
        windows.stride,
        windows.dilation,
        windows.padding,
        strict=True,
    ):
        at = np.arange(n)[:, None] * s - before + np.arange(f) * d
        places.append((np.clip(at, 0, size - 1), (at >= 0) & (at < size)))
    (rows, rows_inside), (columns, columns_inside) = places
    windows_of_x = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    inside = rows_inside[:, None, :, None] & columns_inside[None, :, None, :]
    values, inside = (a.reshape(*a.shape[:-2], -1) for a in (windows_of_x, inside))
    return _first(values, jnp.max(jnp.where(inside, values, -jnp.inf), axis=-1), inside)


def _logic_pool(x: Array, pool: Any = 2, **options: Any) -> Array:
    return _pool(x, pool, **options)


def _grouped_linear(x: Array, w: Array, group_sizes: Array, bias: Array | None = None) -> Array:
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    has_group, group = (group < w.shape[0])[:, None], jnp.minimum(group, w.shape[0] - 1)
    y = jnp.einsum("ri,rio->ro", jnp.where(has_group, x, 0), w[group])
    return jnp.where(has_group, y if bias is None else y + bias[group], 0)


def _grouped_linear_backward(dy: Array, x: Array, w: Array, group_sizes: Array) -> tuple[Array, ...]:
    def forward(x, w, bias):
        return _grouped_linear(x, w, group_sizes, bias)

    return jax.vjp(forward, x, w, jnp.zeros((w.shape[0], w.shape[2]), w.dtype))[1](dy)


REFERENCES: Mapping[str, Callable[..., Array]] = {
    "max": _reduction(jnp.max),
    "min": _reduction(jnp.min),
    "max_backward": _backward(_reduction(jnp.max)),
    "min_backward": _backward(_reduction(jnp.min)),
    "max_pool2d": _pool,
    "max_pool2d_with_indices": _pool,
    "logic_or_pool2d": _logic_pool,
    "grouped_linear": _grouped_linear,
    "grouped_linear_backward": _grouped_linear_backward,
}
