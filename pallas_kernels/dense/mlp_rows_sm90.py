"""Loads, stores, and softmax for the 64 examples that a CTA computes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.layouts import largest_divisor, load, rounded_to_tf32, store
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.dense.mlp_network_sm90 import EXAMPLES, SLICE


def read(ref: Any, examples: Any, layout: Any) -> Array:
    return load(ref.at[examples], layout, optimized=False)


def _turned() -> Any:
    """Return the register layout in which `read_columns` transposes x. A warp copies 4 inputs of 8 examples at a time.
    It reads one sector per input, and writes without bank conflicts."""
    tiling = plgpu.Tiling(((EXAMPLES, SLICE), (16, SLICE), (8, 4), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


def read_columns(x: Any, examples: Any, operand: Any, loads: int) -> None:
    """Copy columns of x to rows of `operand` in shared memory, at most `loads` slices of 32 inputs at once."""
    count = operand.shape[1] // SLICE
    loads = largest_divisor(count, loads)

    def read_group(group, _):
        columns = [pl.ds((group * loads + i) * SLICE, SLICE) for i in range(loads)]
        slices = [load(x.at[c, examples].transpose((1, 0)), _turned(), optimized=False) for c in columns]
        for c, values in zip(columns, slices, strict=True):
            store(operand.at[:, c], rounded_to_tf32(values))

    lax.fori_loop(0, count // loads, read_group, None)
    plgpu.commit_smem()


def put(rows: Array, operand: Any, ref: Any, *, bulk: bool) -> None:
    """Store `rows` to `operand` in shared memory, and to `ref` in device memory. With `bulk`, the TMA copy to `ref` may
    still run on return."""
    operand[...] = rows
    plgpu.commit_smem()
    if bulk:
        plgpu.copy_smem_to_gmem(operand, ref)
    else:
        store(ref, rows)


def store_columns(rows: Array, columns: Any, examples: Any, first: int = 0) -> None:
    for k in range(0, rows.shape[1], SLICE):
        values = plgpu.layout_cast(rows[:, k : k + SLICE], plgpu.Layout.WGMMA_TRANSPOSED)
        store(columns.at[pl.ds(first + k, SLICE), examples].transpose((1, 0)), values)


def mask_padding(rows: Array, count: int, *, one: bool = False) -> Array:
    """Return `rows` with 0 in all columns from `count` on. Otherwise, this padding could become NaN, and reach the next
    layer. With `one`, column `count` is 1, for the next layer's db."""
    column = plgpu.broadcasted_iota(jnp.int32, rows.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(column < count, rows, jnp.where(column == count, 1.0, 0.0) if one else 0.0)


class Softmax(NamedTuple):
    shifted_logits: Array
    exponentials: Array
    total: Array
    label_mask: Array

    @classmethod
    def from_logits(cls, z: Array, labels: Array, classes: int) -> "Softmax":
        column = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
        z = jnp.where(column < classes, z, -jnp.inf)
        shifted_logits = z - spread(jnp.max(z, axis=1), z)
        exponentials = jnp.exp(shifted_logits)
        return cls(shifted_logits, exponentials, jnp.sum(exponentials, axis=1), column == spread(labels, z))

    def loss(self) -> Array:
        return jnp.log(self.total) - jnp.sum(jnp.where(self.label_mask, self.shifted_logits, 0.0), axis=1)

    def gradient(self) -> Array:
        return self.exponentials / spread(self.total, self.exponentials) - jnp.where(self.label_mask, 1.0, 0.0)


def valid_labels(labels: Array, classes: int) -> Array:
    return (labels >= 0) & (labels < classes)


def spread(values: Array, block: Array) -> Array:
    return lax.broadcast_in_dim(values, block.shape, [0])
