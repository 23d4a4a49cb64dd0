"""Weights of a multi-layer perceptron, streamed through shared memory in the order of use."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.dense.mlp_network_sm90 import EXAMPLES, SLICE, Network


def slice_weights(matrices: Sequence[Array], products: list[tuple[int, int]]) -> list[Array]:
    """Return each weight matrix as a vector of contiguous slices: the weights from 32 inputs to all outputs. They are
    rounded to TF32, and padded to the (inputs, outputs) in `products`."""
    padded_matrices = (
        jnp.pad(w, ((0, outputs - w.shape[0]), (0, inputs - w.shape[1])))
        for w, (inputs, outputs) in zip(matrices, products, strict=True)
    )
    return [
        lax.reduce_precision(w, 8, 10).reshape(w.shape[0], -1, SLICE).swapaxes(0, 1).ravel()  # TF32
        for w in padded_matrices
    ]


def pack(slices: list[Array], biases: Sequence[Array], network: Network) -> Array:
    rows = [jnp.pad(b, (0, width - b.size)) for b, width in zip(biases, network.widths[1:], strict=True)]
    # Bulk copies read tiles of eight rows.
    padding = -sum(network.widths[1:]) % (8 * SLICE)
    return jnp.concatenate([*slices, *rows, jnp.zeros(padding, jnp.float32)])


@dataclasses.dataclass(frozen=True)
class Stream:
    """Copies of weights to shared memory, one slice at a time: see `slice_weights`.

    Attributes:
      products: (inputs, outputs) of each matrix product, in the order of use.
      weights: all slices in device memory.
      stages: buffers in shared memory for one slice each.
      loaded: barriers that the copies signal, one per stage.
    """

    products: list[tuple[int, int]]
    weights: Any
    stages: Any
    loaded: Any

    @functools.cached_property
    def steps(self) -> list[range]:
        """Each product's slices, numbered over all products."""
        ends = list(itertools.accumulate(inputs // SLICE for inputs, _ in self.products))
        return [range(start, end) for start, end in itertools.pairwise([0, *ends])]

    @property
    def end(self) -> int:
        return self.steps[-1].stop

    def ring(self, fetched: range) -> Ring:
        return Ring(self.stages.shape[0], functools.partial(self.copy, fetched), self.loaded)

    def copy(self, fetched: range, step: Any, stage: Any, barrier: Any) -> None:
        row = 0
        for steps, (_, outputs) in zip(self.steps, self.products, strict=True):
            start, stop = max(steps.start, fetched.start), min(steps.stop, fetched.stop)
            rows = pl.ds(row + (step - steps.start) * outputs, outputs)
            copy = functools.partial(self.copy_rows, rows, self.stages.at[stage, pl.ds(0, outputs)], barrier)
            if start < stop:
                pl.when((start <= step) & (step < stop))(copy)
            row += len(steps) * outputs

    def copy_rows(self, rows: Any, stage: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(self.weights.at[rows], stage, barrier)

    def start(self) -> None:
        self.ring(range(self.end)).prefetch(min(self.stages.shape[0], self.end))

    def multiply(self, product: int, operand: Any) -> Array:
        """Return `operand @ w.T`, for `operand` in shared memory and the weights w for `products[product]`. Call this
        once per product, in order."""
        steps, (_, outputs) = self.steps[product], self.products[product]
        # While a slice is multiplied, the previous slice's stage is filled, if there is one.
        ahead = self.stages.shape[0] - 1
        fetched = range(max(steps.start, 1) + ahead, min(steps.stop + ahead, self.end))
        ring = self.ring(fetched)

        def add_slice(k, sums):
            step = steps.start + k
            ring.wait(step)
            weights = self.stages.at[ring.stage(step), pl.ds(0, outputs)]
            plgpu.wgmma(sums, operand.at[:, pl.ds(k * SLICE, SLICE)], weights.transpose((1, 0)))
            if fetched:
                # Every warp has now multiplied the previous slice.
                plgpu.wgmma_wait(1)
                plgpu.commit_smem()
                ring.fetch(step + ahead)

        def add_slices(sums):
            lax.fori_loop(0, len(steps), lambda k, _: add_slice(k, sums), None)
            plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(add_slices, plgpu.ACC((EXAMPLES, outputs)))
