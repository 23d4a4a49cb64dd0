"""Sizes of the layers of a multi-layer perceptron, and of the shared memory of its kernels.

Rows are padded to widths that the tensor cores support. A layer's outputs are padded to the next multiple of 32 above
their number, which leaves room for a one after them. With this one, the next layer's weight gradient contains its bias
gradient as well.

A kernel takes rows through a list of products, one after another. `Network` lists the products of each kernel, and
divides the shared memory between the rows of the layers and slices of the weights.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core import device
from pallas_kernels.core.layouts import OPERAND_BYTES, operand
from pallas_kernels.core.mosaic import plgpu

EXAMPLES = 64
"""Examples per CTA: the 64 rows of a wgmma (PTX ISA). The batch is a multiple of it."""

_ITEM_BYTES = 4
"""Bytes of a float32."""
SLICE = OPERAND_BYTES // _ITEM_BYTES
"""Inputs of a layer in a slice of its weights: the number of float32 values that fills an operand's row."""
PIECE_COLUMNS = 128
"""Columns of the gradient with respect to x that are computed at once where the layers' outputs stay in shared memory
as well. Chosen by hand; not tuned."""
_MAX_STAGES = 8
"""Most slices in the ring. Chosen by hand: latency bounds the kernels, and more slices gain nothing
(docs/lab/2026-11-21-dense.md)."""
_RESERVED_BYTES = 11 * 1024
"""Bytes of shared memory that the ring and the operands leave free: Mosaic takes 2 KiB for sums across warps, barriers
need less than 1. The rest is chosen so that LeNet's layers keep the numbers of stages with which
docs/lab/2026-11-21-dense.md was measured."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How weights are streamed.

    Attributes:
      stages: slices in flight; one in `weighed_gradients`, where each CTA has a single step.
    """

    stages: int


def row_widths(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row widths of the inputs, of each hidden layer's outputs followed by a one, and of the logits."""
    inputs, *hidden, classes = sizes
    return tuple(-(-n // SLICE) * SLICE for n in (inputs, *(n + 1 for n in hidden), classes))


@dataclasses.dataclass(frozen=True)
class Network:
    """The layers, and (inputs, outputs) of the products that take rows through them.

    Attributes:
      sizes: numbers of inputs and of each layer's outputs.
    """

    sizes: tuple[int, ...]

    @classmethod
    def from_weights(cls, weights: Sequence[Any]) -> "Network":
        return cls((weights[0].shape[1], *(w.shape[0] for w in weights)))

    @property
    def layers(self) -> int:
        return len(self.sizes) - 1

    @property
    def classes(self) -> int:
        return self.sizes[-1]

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        return row_widths(self.sizes)

    @property
    def forward_products(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.widths))

    @property
    def backward_products(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(reversed(self.widths)))

    @property
    def pieces(self) -> list[int]:
        """Widths of the pieces in which the gradient with respect to x is computed."""
        return [min(PIECE_COLUMNS, self.widths[0] - n) for n in range(0, self.widths[0], PIECE_COLUMNS)]

    @property
    def all_products(self) -> list[tuple[int, int]]:
        return [*self.forward_products, *self.backward_products[:-1], *((self.widths[1], n) for n in self.pieces)]

    def stages(self, products: list[tuple[int, int]], operands: tuple[int, ...]) -> int:
        """Return the number of slices of the weights of `products` that fit shared memory together with these
        operands."""
        available_bytes = device.target().shared_bytes - _RESERVED_BYTES - EXAMPLES * _ITEM_BYTES * sum(operands)
        return min(_MAX_STAGES, available_bytes // (OPERAND_BYTES * max(outputs for _, outputs in products)))

    @property
    def forward_stages(self) -> int:
        return self.stages(self.forward_products, self.widths[:-1])

    @property
    def backward_stages(self) -> int:
        return self.stages(self.backward_products, self.widths[1:])

    @property
    def all_stages(self) -> int:
        return self.stages(self.all_products, self.widths)

    def scratch(self, products: list[tuple[int, int]], operands: tuple[int, ...], stages: int) -> list[Any]:
        """Return the ring's stages, their barriers, and the operands."""
        return [
            operand((stages, max(outputs for _, outputs in products), SLICE), jnp.float32),
            plgpu.Barrier(num_barriers=stages),
            tuple(operand((EXAMPLES, n), jnp.float32) for n in operands),
        ]


def float32_struct(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
