"""Gathers: each thread reads rows of a few numbers at its own places in shared or device memory.

Pallas has no indexed read of a reference by a vector in registers, so these are written in Mosaic's own operations. The
simulator reads the whole reference instead.

A block is `(lanes, width)`: a lane, a thread's or one of its several, has a row of `width` numbers side by side, at
most 16 bytes. Vectors are `(lanes,)`. Lanes are a multiple of `LANES`.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.mosaic import mgpu, plgpu
from pallas_kernels.core.simulator import simulating


def block_layout(lanes: int, width: int) -> Any:
    """A lane's row in one register vector."""
    return plgpu.Layout.WG_STRIDED((lanes, width), vec_size=width)


def vector_layout(lanes: int) -> Any:
    """A number a lane, in the lanes of `block_layout`."""
    return plgpu.Layout.WG_STRIDED((lanes,), vec_size=1)


def lane_and_column(lanes: int, width: int) -> tuple[Array, Array]:
    """Of every element of a block its lane and its column, int32."""
    if simulating() is not None:
        return tuple(lax.broadcasted_iota(jnp.int32, (lanes, width), axis) for axis in (0, 1))

    block = _block(lanes, width, jnp.int32)

    @plgpu.inline_mgpu(arg_types=(), return_type=(block, block))
    def iotas(_):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(LANES, i32))
        lane_registers = np.empty((lanes // LANES,), dtype=object)
        column_registers = np.empty_like(lane_registers)
        for i in range(lane_registers.size):
            lane = arith.addi(thread, mgpu.utils.c(i * LANES, i32))
            lane_registers[i] = _row([lane] * width)
            column_registers[i] = _row([mgpu.utils.c(k, i32) for k in range(width)])
        layout = block_layout(lanes, width)
        return _fragmented(lane_registers, layout, signed=True), _fragmented(column_registers, layout, signed=True)

    return iotas()


def lane_numbers(lanes: int) -> Array:
    """The vector of all lanes' numbers, int32."""
    return columns(lane_and_column(lanes, 1)[0])[0]


def gather_rows(ref: Any, rows: Array) -> Array:
    """`ref[rows]`: of `(n, width)` in shared or device memory, the block of these rows; rows is a vector of int32."""
    (lanes,), width = rows.shape, ref.shape[1]
    if simulating() is not None:
        return ref[...][rows]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), vector_layout(lanes)), return_type=_block(lanes, width, ref.dtype))
    def gather(_, ref, rows):
        element = ir.MemRefType(ref.type).element_type
        pointer, type_ = mgpu.utils.memref_ptr(ref), ir.VectorType.get((width,), element)
        registers = np.empty_like(rows.registers)
        for index, register in np.ndenumerate(rows.registers):
            place = arith.muli(vector.extract(register, [], [0]), mgpu.utils.c(width, ir.IntegerType.get_signless(32)))
            address = mgpu.utils.getelementptr(pointer, [place], element)
            registers[index] = llvm.load(type_, address, alignment=width * mgpu.utils.bytewidth(element))
        return _fragmented(registers, block_layout(lanes, width))

    return gather(ref, rows)


def gather_elements(ref: Any, *places: Array) -> Array:
    """`ref[places]`: of device memory, the block of the elements at blocks of places, one for each axis."""
    if simulating() is not None:
        return ref[...][places]
    layout, shape = block_layout(*places[0].shape), places[0].shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(layout,) * len(places)), return_type=_block(*shape, ref.dtype))
    def gather(_, ref, *places):
        registers = np.empty_like(places[0].registers)
        for index in np.ndindex(registers.shape):
            rows = [place.registers[index] for place in places]
            registers[index] = _row([memref.load(ref, [_index(row, k) for row in rows]) for k in range(shape[1])])
        return _fragmented(registers, layout, signed=_signedness(ref))

    return gather(ref, *places)


def scatter_elements(ref: Any, places: Array, values: Array) -> None:
    """`ref[places] = values`, a block to `(n,)` in device memory. Of two values for one place either may stay."""
    if simulating() is not None:
        ref[...] = ref[...].at[places].set(values)
        return
    layout = block_layout(*places.shape)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def scatter(_, ref, places, values):
        for index, register in np.ndenumerate(places.registers):
            for k in range(places.shape[1]):
                memref.store(vector.extract(values.registers[index], [], [k]), ref, [_index(register, k)])

    scatter(ref, places, values)


def spread(numbers: Array, width: int) -> Array:
    """The block whose rows are a vector's numbers, `width` times each."""
    (lanes,) = numbers.shape
    if simulating() is not None:
        return jnp.broadcast_to(numbers[:, None], (lanes, width))

    @plgpu.inline_mgpu(arg_types=(vector_layout(lanes),), return_type=_block(lanes, width, numbers.dtype))
    def broadcast(_, numbers):
        registers = np.empty_like(numbers.registers)
        for index, register in np.ndenumerate(numbers.registers):
            number = vector.extract(register, [], [0])
            registers[index] = _row([number] * width)
        return _fragmented(registers, block_layout(lanes, width), signed=numbers.is_signed)

    return broadcast(numbers)


def columns(block: Array) -> tuple[Array, ...]:
    """A block's columns, each a vector."""
    lanes, width = block.shape
    if simulating() is not None:
        return tuple(block[:, k] for k in range(width))
    vectors = plgpu.ShapeDtypeStruct((lanes,), block.dtype, layout=vector_layout(lanes))

    @plgpu.inline_mgpu(arg_types=(block_layout(lanes, width),), return_type=(vectors,) * width)
    def split(_, block):
        return tuple(
            _map_registers(block, lambda row, k=k: _row([vector.extract(row, [], [k])]), vector_layout(lanes))
            for k in range(width)
        )

    return split(block)


def sums_of_rows(*blocks: Array) -> Array:
    """The block whose k-th column has the sums of the rows of the k-th block, added from the left; all float32."""
    (lanes, width), count = blocks[0].shape, len(blocks)
    if simulating() is not None:
        return jnp.stack([jnp.sum(block, axis=1) for block in blocks], axis=1)

    @plgpu.inline_mgpu(
        arg_types=(block_layout(lanes, width),) * count, return_type=_block(lanes, count, blocks[0].dtype)
    )
    def sums(_, *blocks):
        def total(row):
            numbers = [vector.extract(row, [], [k]) for k in range(width)]
            return functools.reduce(arith.addf, numbers)

        registers = np.empty_like(blocks[0].registers)
        for index in np.ndindex(registers.shape):
            registers[index] = _row([total(block.registers[index]) for block in blocks])
        return _fragmented(registers, block_layout(lanes, count))

    return sums(*blocks)


def computed_here(block: Array) -> Array:
    """A block of float32, computed before what follows.

    LLVM moves the last addition to a loop's carry to the end of the loop. Its terms take as many registers meanwhile.
    """
    if simulating() is not None:
        return block

    @plgpu.inline_mgpu(arg_types=(block_layout(*block.shape),), return_type=_block(*block.shape, block.dtype))
    def pin(_, block):
        def pinned(row):
            numbers = [vector.extract(row, [], [k]) for k in range(block.shape[1])]
            return _row(
                [llvm.inline_asm(number.type, [number], "", "=f,0", has_side_effects=True) for number in numbers]
            )

        return _map_registers(block, pinned, block_layout(*block.shape))

    return pin(block)


def compiler_fence() -> None:
    """Of what a thread does in shared memory, all before this is done before all that follows.

    LLVM takes shared memory for an object of no size, and so may believe that an element is not the one which a vector
    of that thread stored. In a program of short loops it then forwards the vector past what was added to it.
    """
    if simulating() is not None:
        return

    @plgpu.inline_mgpu(arg_types=())
    def fence(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "", "~{memory}", has_side_effects=True)

    fence()


def meet(barrier: Any) -> None:
    """Waits until all warpgroups of a program have come here, and sees what they have written to shared memory.

    Args:
      barrier: of as many arrivals as there are warpgroups; for the simulator, which has no instruction for this.
    """
    if simulating() is not None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu(arg_types=())
    def synchronize(_):
        gpu.barrier()

    synchronize()


def _block(lanes, width, dtype):
    return plgpu.ShapeDtypeStruct((lanes, width), jnp.dtype(dtype), layout=block_layout(lanes, width))


def _map_registers(array, function, layout):
    results = np.empty_like(array.registers)
    for index, register in np.ndenumerate(array.registers):
        results[index] = function(register)
    return _fragmented(results, layout, signed=array.is_signed)


def _fragmented(registers, layout, signed=None):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _row(numbers):
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)


def _index(register, k):
    return arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [k]))


def _signedness(ref: Any) -> bool | None:
    return True if isinstance(ir.MemRefType(ref.type).element_type, ir.IntegerType) else None
