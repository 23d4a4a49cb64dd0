"""Vectors and tiles in registers and shared memory: their shapes and layouts, and how they are moved and summed."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating

LANES = 128
"""Threads of a warpgroup, four warps of 32 (PTX ISA, wgmma). A warpgroup runs a program: vectors are a multiple of
it."""

OPERAND_BYTES = 128
"""Bytes of a row of shared memory from which the tensor cores read operands: the widest swizzle of PTX ISA's matrix
descriptors, 128 bytes."""


def load(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    """What `ref` holds, in registers of `layout`; `optimized=False` allows slower accesses.

    The simulator has no layouts, and in older versions no such load.
    """
    if simulating() is not None:
        return ref[...]
    # Older versions of JAX need an index as well.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needs_index = index is not None and index.default is index.empty
    return plgpu.load(ref, *([()] if needs_index else []), layout=layout, optimized=optimized)


def store(ref: Any, value: Array) -> None:
    """Writes `value` to device memory, whatever its layout in registers."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


SUMMED_ROWS = 32
"""Rows that `sums_over_lanes` takes at a time, or half of them: one or two tiles of its layout, which have 16 rows. Two
is chosen by hand; not tuned."""


def sums_over_lanes(rows: Any, totals: Any) -> None:
    """Writes the sum of each of `rows (n, lanes)` in shared memory to `totals (n,)` in device memory.

    Sums of single vectors would need a barrier each. These need one, before any thread reads a row. n is half of
    `SUMMED_ROWS`, or a multiple of `SUMMED_ROWS`; lanes are a multiple of `LANES`.
    """
    # A warp reads four rows, eight threads a row, without bank conflicts.
    tiling = plgpu.Tiling(((16, 32), (4, 32), (4,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    plgpu.commit_smem()
    count = min(rows.shape[0], SUMMED_ROWS)
    for first in range(0, rows.shape[0], count):
        tile = pl.ds(first, count)
        store(totals.at[tile], jnp.sum(load(rows.at[tile], layout), axis=1))


def value_a_row() -> Any:
    """The layout of a number for each row of a product's sums."""
    return plgpu.Layout.WGMMA.reduce(1)


def value_a_column() -> Any:
    """The layout of a number for each column of a product's sums."""
    return plgpu.Layout.WGMMA.reduce(0)


def operand(shape: tuple[int, ...], dtype: Any, row_bytes: int = OPERAND_BYTES) -> Any:
    """Shared memory as the tensor cores read it: in tiles of eight rows of `row_bytes`, the same for both operands."""
    transforms = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(row_bytes)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for bulk copies of any number of axes, whose last axis is a row of at most `OPERAND_BYTES`.

    Rows are swizzled, so that no bank is met twice where threads store a product's sums.
    """
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(row_bytes),))


def operand_and_box(shape: tuple[int, ...], box: tuple[int, ...], dtype: Any, row_bytes: int) -> Any:
    """An `operand` that is also `swizzled` memory of shape `box`, in which its tiles' rows lie one after the other.

    Bulk copies into tiles begin where tiles of the array in device memory do; those into a box begin anywhere.
    `as_operand` and `as_box` are the two faces. The simulator, which has no such memory, has the operand alone.
    """
    tiled_ref = operand(shape, dtype, row_bytes)
    return tiled_ref if simulating() is not None else plgpu.RefUnion(tiled_ref, swizzled(box, dtype))


def as_operand(ref: Any) -> Any:
    """What `operand_and_box` made, for products, loads and stores."""
    return ref if simulating() is not None else ref[0]


def as_box(ref: Any) -> Any:
    """What `operand_and_box` made, for bulk copies."""
    return ref[1]


def multiply_registers(sums: Any, left: Array, right: Any, scratch: Any) -> None:
    """`plgpu.wgmma` of registers and shared memory.

    The simulator multiplies shared memory alone: it stores `left` in `scratch`, once bulk copies have read that.
    """
    if simulating() is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch[...] = left
        plgpu.commit_smem()
        left = scratch
    plgpu.wgmma(sums, left, right)
    if simulating() is not None:
        plgpu.wgmma_wait(0)


def with_products(sums: Sequence[Array], add: Callable[..., None]) -> list[Array]:
    """`sums` once `add(*accumulators)` has added products to them by `plgpu.wgmma`.

    The simulator's accumulators begin at zero only: there the sums are added afterwards.
    """
    if simulating() is None:
        return list(pl.run_state(lambda accumulators: add(*accumulators))(tuple(map(plgpu.ACC.init, sums))))

    def products(*accumulators):
        add(*accumulators)
        return [accumulator[...] for accumulator in accumulators]

    zeros = (plgpu.ACC(a.shape, a.dtype) for a in sums)
    return [a + product for a, product in zip(sums, pl.run_scoped(products, *zeros), strict=True)]


def rounded_to_tf32(x: Array) -> Array:
    """float32 rounded to TF32, where the tensor cores would cut it off; other dtypes as they are."""
    if x.dtype != jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # A GPU's NaN has all bits set: adding to them would overflow, so NaN is passed through.
    return jnp.where(x != x, x, lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32))


def zeros_like(vector: Array) -> Array:
    """Float32 zeros in the register layout of `vector`, which a loop's carry must have from its first turn."""
    return jnp.where(vector != vector, jnp.float32(0), jnp.float32(0))


def vector_length(*arrays: Array) -> int:
    """The longest vector, of at most 4 elements a thread, that divides the last axis of `batch_last` arrays.

    At most 2 where dtypes are mixed: a thread loads up to 8 bytes at once, and only vectors that are spread over the
    threads alike can be combined.
    """
    lanes = arrays[0].shape[-1]
    longest = 4 if len({a.dtype for a in arrays}) == 1 else 2
    return max(LANES * elements for elements in (1, 2, 4) if elements <= longest and lanes % (LANES * elements) == 0)


def quotient(number: Any, divisor: Any) -> Any:
    """`number // divisor` of what is not negative.

    `//` and `%` round down, for which they look at signs. In a kernel each is ten operations more, and among these are
    conversions of booleans, for each of which JAX 0.11 starts a process.
    """
    return number // divisor if isinstance(number, int) else lax.div(number, _like(number, divisor))


def remainder(number: Any, divisor: Any) -> Any:
    """`number % divisor` of what is not negative, as `quotient`."""
    return number % divisor if isinstance(number, int) else lax.rem(number, _like(number, divisor))


def _like(number, divisor):
    """A Python integer in the dtype of `number`: in 64-bit mode JAX would take it for 64 bits."""
    return number.dtype.type(divisor) if isinstance(divisor, int) else divisor


def largest_divisor(n: int, limit: int, accepts: Callable[[int], bool] = lambda d: True) -> int:
    """The largest divisor of `n`, not above `limit`, that `accepts`; else 1."""
    return next((d for d in range(min(n, limit), 1, -1) if n % d == 0 and accepts(d)), 1)


def divisors(n: int) -> list[int]:
    """The divisors of `n`, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]
