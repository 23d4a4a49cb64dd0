"""Sizes of a multi-layer perceptron's layers, and of the shared memory of its kernels."""

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
"""Examples per CTA: the 64 rows of a wgmma (PTX ISA)."""

_ITEM_BYTES = 4
SLICE = OPERAND_BYTES // _ITEM_BYTES
"""Inputs per slice of the weights: the columns of an operand's tile."""
PIECE_COLUMNS = 128
"""Columns of dx that `forward_and_gradients` computes at once. More would need larger stages. Not tuned."""
_MAX_STAGES = 8
"""More slices of weights bring no speedup: docs/lab/2026-11-21-dense.md."""
_RESERVED_BYTES = 11 * 1024
"""Bytes of shared memory left free. Mosaic's sums across warps and barriers take less than 3 KiB; the rest preserves
the numbers of stages in docs/lab/2026-11-21-dense.md."""


@dataclasses.dataclass(frozen=True)
class Config:
    stages: int


def row_widths(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths of an example's rows, padded to multiples of 32: x, each hidden layer's outputs, and logits.
    A hidden layer's row has a 1 after the outputs, so that the next layer's db is a column of its dw."""
    inputs, *hidden, classes = sizes
    return tuple(-(-n // SLICE) * SLICE for n in (inputs, *(n + 1 for n in hidden), classes))


@dataclasses.dataclass(frozen=True)
class Network:
    """Sizes of a multi-layer perceptron. `sizes` has the number of inputs, then of each layer's outputs. Properties
    describe each matrix product by a pair of padded widths, (inputs, outputs)."""

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
        return [min(PIECE_COLUMNS, self.widths[0] - n) for n in range(0, self.widths[0], PIECE_COLUMNS)]

    @property
    def all_products(self) -> list[tuple[int, int]]:
        return [*self.forward_products, *self.backward_products[:-1], *((self.widths[1], n) for n in self.pieces)]

    def stages(self, products: list[tuple[int, int]], operands: tuple[int, ...]) -> int:
        """Return how many stages, at most `_MAX_STAGES`, fit in shared memory next to 64 rows of each width in
        `operands`. Each stage can hold the weights from 32 inputs to all outputs of any product in `products`."""
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
        return [
            operand((stages, max(outputs for _, outputs in products), SLICE), jnp.float32),
            plgpu.Barrier(num_barriers=stages),
            tuple(operand((EXAMPLES, n), jnp.float32) for n in operands),
        ]


def float32_struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
