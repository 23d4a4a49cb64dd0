"""Convolutions of trees of gates as formulas in jnp, on images `(channels, height, width, N)`.

Here, a kernel is one tree of gates that moves over the image, not a GPU kernel.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxbp.common import barriers
from jaxbp.common.windows import output_size
from jaxbp.logic.wires.tree_wires import TreeWires
from pallas_kernels.logic.tree import gradients_of_tree, levels_of_tree


def forward(coefficients, wires, x, *, stride, pool):
    """Return the maximum of each tree in each pooling window, and its row-major position in the window.

    Both are `(kernels, height, width, N)`. The positions are None for windows of size 1. The coefficients are
    `(kernels, gates, 4)`.
    """
    geometry = _Geometry(wires, x, stride, pool)

    def of_kernel(_, kernel):
        c, leaves = kernel
        largest = place_of_largest = None
        for place, (u, v) in enumerate(geometry.places):
            *_, (value,) = levels_of_tree(c, [geometry.read(x, leaf, u, v) for leaf in leaves])
            if place == 0:
                largest, place_of_largest = value, jnp.zeros(value.shape, geometry.place_dtype)
            else:
                larger = is_larger(value, largest)
                largest = jnp.where(larger, value, largest)
                place_of_largest = jnp.where(larger, jnp.asarray(place, geometry.place_dtype), place_of_largest)
        return None, (largest, place_of_largest if len(geometry.places) > 1 else None)

    return lax.scan(of_kernel, None, (coefficients, wires.leaves))[1]


def gradients(dy, places, coefficients, wires, x, *, stride, pool):
    """Return the gradients of the coefficients and of the padded x, given the positions `places` of the maxima in their
    pooling windows."""
    geometry = _Geometry(wires, x, stride, pool)

    def at_place(places, read):
        if places is None:
            return read(0, 0)
        found = zip(itertools.count(), itertools.starmap(read, geometry.places))
        return functools.reduce(lambda chosen, new: jnp.where(places == new[0], new[1], chosen), found, 0.0)

    def of_kernel(dx, kernel):
        dy, places, c, leaves = kernel
        values = [at_place(places, lambda u, v, leaf=leaf: geometry.read(x, leaf, u, v)) for leaf in leaves]
        # Without the barrier, XLA would recompute the values in each sum below.
        levels = levels_of_tree(c, barriers.optimization_barrier(values))
        dc, dleaves = gradients_of_tree(c, _kept(levels), dy)
        for leaf, dleaf in zip(leaves, dleaves, strict=True):
            dx = geometry.add(dx, leaf, dleaf, places)
        return dx, jnp.stack([jnp.stack([_sum(t) for t in terms]) for terms in dc])

    dx, dc = lax.scan(of_kernel, jnp.zeros_like(x), (dy, places, coefficients, wires.leaves))
    return dc, dx


@jax.custom_jvp
def _kept(arrays):
    return barriers.optimization_barrier(arrays)


@_kept.defjvp
def _(arrays, tangents):
    # JAX cannot differentiate a joint barrier of arrays that depend on the differentiated input and arrays that do not.
    return _kept(*arrays), jax.tree.map(barriers.optimization_barrier, *tangents)


def _sum(a: Array) -> Array:
    # One axis after the other is more accurate. Without the barriers, XLA would merge the sums.
    for _ in range(a.ndim):
        a = barriers.optimization_barrier(jnp.sum(a, axis=-1))
    return a


def is_larger(value: Array, largest: Array) -> Array:
    """Return whether `value` replaces `largest`, so that the first maximum, or first NaN, is kept."""
    return ~(value <= largest) & (largest == largest)


class _Geometry:
    def __init__(self, wires: TreeWires, x: Array, stride: tuple[int, int], pool: tuple[int, int]):
        self.stride, self.pool = stride, pool
        trees = output_size(x.shape[1:3], wires.window, stride=stride, padding=((0, 0), (0, 0)))
        self.size = tuple(n // p for n, p in zip(trees, pool, strict=True))
        self.places = list(itertools.product(*map(range, pool)))
        self.place_dtype = jnp.uint8 if len(self.places) <= 256 else jnp.int32
        self.examples = x.shape[-1]

    def read(self, x: Array, leaf: Array, u: int, v: int) -> Array:
        """Return the pixels that a leaf reads if its tree is at position (u, v) of each pooling window: one per pooling
        window and example, `(height, width, N)`. `leaf` is a channel, and a row and a column in the tree's window."""
        (s, t), (p, q), (rows, columns) = self.stride, self.pool, self.size
        channel, row, column = leaf
        span = (1, (rows - 1) * p * s + 1, (columns - 1) * q * t + 1, self.examples)
        begin = (channel, row + u * s, column + v * t, jnp.zeros_like(channel))
        return lax.dynamic_slice(x, begin, span)[0, :: p * s, :: q * t]

    def add(self, dx: Array, leaf: Array, dleaf: Array, places: Array | None) -> Array:
        (s, t), (p, q), (rows, columns) = self.stride, self.pool, self.size
        if places is not None:
            window = jnp.arange(p * q, dtype=self.place_dtype).reshape(1, p, 1, q, 1)
            chosen = places[:, None, :, None] == window
            dleaf = jnp.where(chosen, dleaf[:, None, :, None], 0).reshape(rows * p, columns * q, self.examples)
        spread = lax.pad(dleaf, jnp.zeros((), dleaf.dtype), [(0, 0, s - 1), (0, 0, t - 1), (0, 0, 0)])[None]
        begin = (*leaf, jnp.zeros_like(leaf[0]))
        return lax.dynamic_update_slice(dx, lax.dynamic_slice(dx, begin, spread.shape) + spread, begin)
