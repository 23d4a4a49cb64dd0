"""Sizes of a multi-layer perceptron, and its weights, streamed through shared memory in the order of use.

`products` lists the matrix products of a kernel, each as a pair of padded widths, (inputs, outputs). The weights of a
product are divided into slices: from 32 inputs to all outputs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.layouts import OPERAND_BYTES, load, operand
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring

Products = list[tuple[int, int]]

EXAMPLES = 64
"""Examples per CTA: the 64 rows of a wgmma (PTX ISA)."""
_ITEM_BYTES = 4
SLICE = OPERAND_BYTES // _ITEM_BYTES
"""Inputs per slice of the weights: the columns of an operand's tile."""
_MAX_STAGES = 8
"""More slices of weights bring no speedup: docs/lab/2026-11-21-dense.md."""
_RESERVED_BYTES = 11 * 1024
"""Bytes of shared memory left free. Mosaic's sums across warps and barriers take less than 3 KiB; the rest preserves
the numbers of stages in docs/lab/2026-11-21-dense.md."""


class Config(NamedTuple):
    stages: int


def layer_sizes(weights: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of inputs, then the number of outputs of each layer."""
    return (weights[0].shape[1], *(w.shape[0] for w in weights))


def row_widths(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths of an example's rows, padded to multiples of 32: x, each hidden layer's outputs, and logits.
    A hidden layer's row has a 1 after the outputs, so that the next layer's db is a column of its dw."""
    inputs, *hidden, classes = sizes
    return tuple(-(-n // SLICE) * SLICE for n in (inputs, *(n + 1 for n in hidden), classes))


def count_stages(products: Products, operands: tuple[int, ...]) -> int:
    """Return how many stages, at most `_MAX_STAGES`, fit in shared memory next to 64 rows of each width in `operands`.
    Each stage can hold a slice of the weights of any product."""
    available_bytes = device.target().shared_bytes - _RESERVED_BYTES - EXAMPLES * _ITEM_BYTES * sum(operands)
    return min(_MAX_STAGES, available_bytes // (OPERAND_BYTES * max(outputs for _, outputs in products)))


def shared_memory(products: Products, operands: tuple[int, ...], stages: int) -> list[Any]:
    return [
        operand((stages, max(outputs for _, outputs in products), SLICE), jnp.float32),
        plgpu.Barrier(num_barriers=stages),
        tuple(operand((EXAMPLES, n), jnp.float32) for n in operands),
    ]


def pack(
    matrices: Sequence[Array], products: Products, biases: Sequence[Array] = (), widths: Sequence[int] = ()
) -> Array:
    """Return one vector with the slices of each weight matrix, rounded to TF32, then the biases, padded to `widths`."""

    def slices(w, inputs, outputs):
        w = jnp.pad(w, ((0, outputs - w.shape[0]), (0, inputs - w.shape[1])))
        return lax.reduce_precision(w, 8, 10).reshape(w.shape[0], -1, SLICE).swapaxes(0, 1).ravel()  # TF32

    packed = [slices(w, *product) for w, product in zip(matrices, products, strict=True)]
    packed += [jnp.pad(b, (0, width - b.size)) for b, width in zip(biases, widths, strict=True)]
    # Bulk copies read tiles of eight rows.
    return jnp.concatenate([*packed, jnp.zeros(-sum(widths) % (8 * SLICE), jnp.float32)])


def stream(products: Products, weights: Any, stages: Any, loaded: Any) -> tuple[Callable, Callable]:
    """Return (start, multiply). `start()` starts the first copies of `weights`, all slices in device memory, to
    `stages` in shared memory. Each copy signals a barrier of `loaded`.

    `multiply(operand)` returns `operand @ w.T`, for `operand` in shared memory and the weights w of the next product.
    If the product has more inputs than `operand`, w consists of several matrices, side by side, and `multiply(operand,
    use)` calls `use(i, operand @ w[i].T)` for each matrix.
    """
    ends = list(itertools.accumulate(inputs // SLICE for inputs, _ in products))
    slices = [range(start, end) for start, end in itertools.pairwise([0, *ends])]
    remaining = zip(slices, products, strict=True)
    count = stages.shape[0]

    def copy_rows(rows, stage, barrier):
        plgpu.copy_gmem_to_smem(weights.at[rows], stage, barrier)

    def copy(fetched, step, stage, barrier):
        row = 0
        for steps, (_, outputs) in zip(slices, products, strict=True):
            first, stop = max(steps.start, fetched.start), min(steps.stop, fetched.stop)
            rows = pl.ds(row + (step - steps.start) * outputs, outputs)
            copy_slice = functools.partial(copy_rows, rows, stages.at[stage, pl.ds(0, outputs)], barrier)
            if first < stop:
                pl.when((first <= step) & (step < stop))(copy_slice)
            row += len(steps) * outputs

    def ring(fetched):
        return Ring(count, functools.partial(copy, fetched), loaded)

    def multiply(operand, use=None):
        steps, (_, outputs) = next(remaining)
        # While a slice is multiplied, the previous slice's stage is filled, if there is one.
        ahead, of_matrix = count - 1, operand.shape[1] // SLICE
        fetched = range(max(steps.start, 1) + ahead, min(steps.stop + ahead, ends[-1]))
        slices_ring = ring(fetched)

        def product(first):
            def add_slices(sums):
                def add_slice(k, _):
                    step = first + k
                    slices_ring.wait(step)
                    slice_weights = stages.at[slices_ring.stage(step), pl.ds(0, outputs)]
                    plgpu.wgmma(sums, operand.at[:, pl.ds(k * SLICE, SLICE)], slice_weights.transpose((1, 0)))
                    if fetched:
                        # Every warp has now multiplied the previous slice.
                        plgpu.wgmma_wait(1)
                        plgpu.commit_smem()
                        slices_ring.fetch(step + ahead)

                lax.fori_loop(0, of_matrix, add_slice, None)
                plgpu.wgmma_wait(0)
                return sums[...]

            return pl.run_scoped(add_slices, plgpu.ACC((EXAMPLES, outputs)))

        if use is None:
            return product(steps.start)
        # A loop compiles the code of one product.
        matrices = len(steps) // of_matrix
        lax.fori_loop(0, matrices, lambda i, _: use(i, product(steps.start + i * of_matrix)), None)

    return lambda: ring(range(ends[-1])).prefetch(min(count, ends[-1])), multiply


def read(ref: Any, examples: Any, layout: Any) -> Array:
    return load(ref.at[examples], layout, optimized=False)


def spread(values: Array, block: Array) -> Array:
    return lax.broadcast_in_dim(values, block.shape, [0])


def float32_struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
