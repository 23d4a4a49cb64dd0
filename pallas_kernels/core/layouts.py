"""Vectors and tiles in registers and shared memory."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import interpreting, simulating, without_registers

LANES = 128
"""Threads in a warpgroup (PTX ISA, wgmma). Vector lengths are multiples of `LANES`."""

OPERAND_BYTES = 128
"""Bytes per row of a tensor-core operand's tile: the widest swizzle of a matrix descriptor (PTX ISA)."""


def load(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    """Load `ref` into registers. `optimized=False` also permits register layouts with slower accesses."""
    if simulating() is not None:
        return ref[...]
    # Older simulators lack `plgpu.load`, and older JAX requires an index.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needs_index = index is not None and index.default is index.empty
    return plgpu.load(ref, *([()] if needs_index else []), layout=layout, optimized=optimized)


def store(ref: Any, value: Array) -> None:
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


SUMMED_ROWS = 32
"""Rows that `sums_over_lanes` sums at once. Not tuned."""


def sums_over_lanes(rows: Any, totals: Any) -> None:
    """Write the sum of each row of `rows (n, lanes)` in shared memory to `totals (n,)` in device memory. n is
    16 or a multiple of 32."""
    if interpreting.value:
        totals[...] = jnp.sum(rows[...], axis=1)
        return
    # A warp reads four rows, eight threads per row, without bank conflicts.
    tiling = plgpu.Tiling(((16, 32), (4, 32), (4,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    plgpu.commit_smem()
    count = min(rows.shape[0], SUMMED_ROWS)
    for first in range(0, rows.shape[0], count):
        tile = pl.ds(first, count)
        store(totals.at[tile], jnp.sum(load(rows.at[tile], layout), axis=1))


def value_a_row() -> Any:
    """Return the layout of one value per row of a `wgmma` accumulator."""
    return plgpu.Layout.WGMMA.reduce(1)


def value_a_column() -> Any:
    """Return the layout of one value per column of a `wgmma` accumulator."""
    return plgpu.Layout.WGMMA.reduce(0)


def operand(shape: tuple[int, ...], dtype: Any, row_bytes: int = OPERAND_BYTES) -> Any:
    """Return a `plgpu.SMEM` for a tensor-core operand, swizzled in tiles of eight rows of `row_bytes` bytes."""
    transforms = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(row_bytes)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a swizzled `plgpu.SMEM` for bulk copies, with rows of at most `OPERAND_BYTES` bytes. Threads store a
    `wgmma` accumulator to it without bank conflicts."""
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(row_bytes),))


def operand_and_box(shape: tuple[int, ...], box: tuple[int, ...], dtype: Any, row_bytes: int) -> Any:
    """Return shared memory with two views: `operand(shape, dtype, row_bytes)` for matrix products, and `swizzled(box,
    dtype)` for bulk copies from any position in device memory. A bulk copy to the first view could begin only at a
    multiple of its tile."""
    tiled_ref = operand(shape, dtype, row_bytes)
    return tiled_ref if simulating() is not None else plgpu.RefUnion(tiled_ref, swizzled(box, dtype))


def as_operand(ref: Any) -> Any:
    return ref if simulating() is not None else ref[0]


def as_box(ref: Any) -> Any:
    return ref[1]


def multiply_registers(sums: Any, left: Array, right: Any, scratch: Any) -> None:
    """Add `left @ right` to `sums`, with `left` in registers. The simulator needs `scratch`, shared memory of `left`'s
    shape."""
    if simulating() is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch[...] = left
        plgpu.commit_smem()
        left = scratch
    plgpu.wgmma(sums, left, right)
    if simulating() is not None:
        plgpu.wgmma_wait(0)


def with_products(sums: Sequence[Array], add: Callable[..., None]) -> list[Array]:
    """Return `sums` after adding matrix products to them. `add(*accumulators)` gets one accumulator per sum, to which
    it adds products with `wgmma`."""
    if simulating() is None:
        return list(pl.run_state(lambda accumulators: add(*accumulators))(tuple(map(plgpu.ACC.init, sums))))

    def products(*accumulators):
        add(*accumulators)
        return [accumulator[...] for accumulator in accumulators]

    zeros = (plgpu.ACC(a.shape, a.dtype) for a in sums)
    return [a + product for a, product in zip(sums, pl.run_scoped(products, *zeros), strict=True)]


def rounded_to_tf32(x: Array, layout: Any) -> Array:
    """Round float32 to TF32, because the tensor cores would truncate it. Return other dtypes unchanged. `layout` is the
    register layout of x."""
    if x.dtype != jnp.float32:
        return x
    if without_registers():
        return lax.reduce_precision(x, 8, 10)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def rounded(_, x):
        return x._pointwise(_register_rounded_to_tf32)

    return rounded(x)


def _register_rounded_to_tf32(register):
    # One instruction per element. Integer operations would take four, one of them for NaN. The result is a .b32
    # register, because ptxas refuses .f32.
    bits = ir.IntegerType.get_signless(32)
    numbers = [vector.extract(register, [], [i]) for i in range(register.type.shape[0])]
    rounded = [llvm.inline_asm(bits, [n], "cvt.rn.tf32.f32 $0, $1;", "=r,f") for n in numbers]
    return vector.from_elements(register.type, [llvm.bitcast(register.type.element_type, n) for n in rounded])


def zeros_like(vector: Array) -> Array:
    """Return float32 zeros in `vector`'s register layout. A loop's carry must keep its layout."""
    return jnp.where(vector != vector, jnp.float32(0), jnp.float32(0))


def multiply_add(total: Array, a: Array, b: Array) -> Array:
    """Return `total + a * b`. These operations of `lax` take a third of the time of `+` and `*` to trace, which matters
    in bodies with hundreds of products."""
    return lax.add(total, lax.mul(a, b))


def vector_length(*arrays: Array) -> int:
    """Return the length of the vectors that 128 threads load: 512, 256, or 128, the largest that divides the arrays'
    last axis. If the dtypes differ, it is at most 256. A thread loads at most 8 bytes at once in Mosaic's default
    layout, so with four elements per thread, the distribution over threads would depend on the dtype."""
    lanes = arrays[0].shape[-1]
    longest = 4 if len({a.dtype for a in arrays}) == 1 else 2
    return max(LANES * elements for elements in (1, 2, 4) if elements <= longest and lanes % (LANES * elements) == 0)


def quotient(number: Any, divisor: Any) -> Any:
    """Return `number // divisor` for a nonnegative number. For traced integers, `//` adds ten operations for
    signs, and JAX 0.11 runs ptxas to lower some."""
    return number // divisor if isinstance(number, (int, np.ndarray)) else lax.div(number, _like(number, divisor))


def remainder(number: Any, divisor: Any) -> Any:
    return number % divisor if isinstance(number, (int, np.ndarray)) else lax.rem(number, _like(number, divisor))


def _like(number, divisor):
    # Without this cast, JAX would convert an integer to 64 bits in 64-bit mode.
    return number.dtype.type(divisor) if isinstance(divisor, int) else divisor


def largest_divisor(n: int, limit: int, accepts: Callable[[int], bool] = lambda d: True) -> int:
    """Return the largest divisor d of `n` with `d <= limit` and `accepts(d)`, else 1."""
    return next((d for d in range(min(n, limit), 1, -1) if n % d == 0 and accepts(d)), 1)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
