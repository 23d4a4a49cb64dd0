import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import UInt8, UInt32

from jaxbp.common import checks
from jaxbp.common.content import ByContent
from jaxbp.common.windows import output_size, window_padding
from jaxbp.logic.circuits.circuit import bitwise_gates, gate_numbers
from jaxbp.logic.circuits.netlist import GateList, Netlist
from jaxbp.logic.wires.tree_wires import TreeWires

OR = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution(ByContent):
    """A convolution whose kernels are trees of hardened gates, followed by an or-pool.

    Attributes:
      shape: channels, height, and width of the images.
      padding: zeros before and after the rows, and before and after the columns.
      pool: the size of the or-pool's windows, which do not overlap. Incomplete windows are dropped.
    """

    gates: UInt8[np.ndarray, "kernels gates"]
    wires: TreeWires
    shape: tuple[int, int, int]
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    pool: tuple[int, int]

    @property
    def padded_shape(self) -> tuple[int, int, int]:
        channels, *size = self.shape
        return (channels, *(n + sum(p) for n, p in zip(size, self.padding, strict=True)))

    @property
    def output_shape(self) -> tuple[int, int, int]:
        places = output_size(self.shape[1:], self.wires.window, stride=self.stride, padding=self.padding)
        return (self.wires.kernels, *(n // p for n, p in zip(places, self.pool, strict=True)))

    @property
    def steps(self) -> tuple[int, int]:
        """The distance between neighboring pool windows, in rows and columns of the image."""
        return tuple(s * p for s, p in zip(self.stride, self.pool, strict=True))

    @property
    def pooled(self) -> list[tuple[int, int]]:
        """For each convolution window in a pool window, its distance `(rows, columns)`, in pixels, from the first."""
        return [(i * self.stride[0], j * self.stride[1]) for i, j in itertools.product(*map(range, self.pool))]

    @property
    def placed_gates(self) -> int:
        pool = math.prod(self.pool)
        return math.prod(self.output_shape) * (pool * self.wires.gates + pool - 1)

    def netlist(self) -> Netlist:
        """Return one netlist of all kernels. Its inputs are the bits of one convolution window, in row-major order."""
        size = (self.shape[0], *self.wires.window)
        gates = GateList(math.prod(size))
        return gates.netlist(self._roots(np.ravel_multi_index(self._leaves, size), gates.add))

    @property
    def _leaves(self) -> tuple[np.ndarray, ...]:
        return tuple(np.moveaxis(np.asarray(self.wires.leaves), -1, 0))

    def _roots(self, values: Array, of_gates: Callable[[np.ndarray, Array, Array], Array]) -> Array:
        """Evaluate the kernels, which are binary trees of gates, for inputs `values (kernels, inputs, ...)`.

        Return their outputs. `of_gates(gates, a, b)` evaluates one level of the trees.
        """
        first = 0
        while (count := values.shape[1] // 2) > 0:
            values = of_gates(self.gates[:, first : first + count], values[:, ::2], values[:, 1::2])
            first += count
        return values[:, 0]

    def _windows(self, x: Array, places: tuple[np.ndarray, ...]) -> list[Array]:
        """Gather the same elements of every convolution window from x, padded images `(channels, height, width, ...)`.

        `places` are three arrays of one shape `(*axes)`: the channel, row, and column of each element in a convolution
        window. Return a list with one array per entry of `pooled`. Array k has convolution window k of every pool
        window. Its shape is `(*axes, rows, columns, ...)`, with the rows and columns of the pooled image.
        """
        (_, rows, columns), (down, right) = self.output_shape, self.steps
        channel, row, column = (place[..., None, None] for place in places)
        row, column = row + down * np.arange(rows)[:, None], column + right * np.arange(columns)
        return [x[channel, row + u, column + v] for u, v in self.pooled]

    def evaluate(self, x: UInt32[Array, "channels height width words"]) -> Array:
        pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
        leaves = self._windows(pad(x, ((0, 0), *self.padding, (0, 0))), self._leaves)
        return functools.reduce(operator.or_, (self._roots(place, bitwise_gates) for place in leaves))

    def place(self, x: np.ndarray, kernels: Netlist, gates: GateList) -> np.ndarray:
        """Add to `gates` one copy of the netlist `kernels` per convolution window, and the gates of the or-pool.

        x has the source of each bit of the image (see `Netlist`). Return the sources of the pooled image's bits.
        """
        if any(map(any, self.padding)):
            x = np.pad(x, ((0, 0), *self.padding), constant_values=gates.add(0, 0, 0))
        window = tuple(np.indices((self.shape[0], *self.wires.window)).reshape(3, -1))
        places = [gates.place(kernels, np.moveaxis(found, 0, -1)) for found in self._windows(x, window)]
        return np.moveaxis(functools.reduce(functools.partial(gates.add, OR), places), -1, 0)


def convolution_of(
    op: str, shape: tuple[int, int, int], gates: ArrayLike, wires: TreeWires, options: Mapping[str, Any]
) -> Convolution:
    gates = gate_numbers(op, gates, wires.kernels, wires.gates)
    if wires.channels != shape[0]:
        raise ValueError(f"{op} reads {wires.channels} channels; wants {shape[0]}, the number of channels of its input")
    if unknown := options.keys() - {"stride", "padding", "pool"}:
        raise TypeError(f"{op} has the options {', '.join(unknown)}; wants only the options stride, padding, and pool")
    stride, pool = (checks.pair(op, name, options.get(name, 1)) for name in ("stride", "pool"))
    padding = window_padding(op, options.get("padding", 0), shape[1:], wires.window, stride)
    places = output_size(shape[1:], wires.window, stride=stride, padding=padding)
    if any(n < p for n, p in zip(places, pool, strict=True)):
        found, least = sizes_text(np.maximum(places, 0)), sizes_text(pool)
        raise ValueError(
            f"{op} has an output of {found} positions; wants at least {least}, the size of the pool's window"
        )
    return Convolution(gates, wires, shape, stride, padding, pool)


def sizes_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
