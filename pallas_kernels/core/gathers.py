"""Gathers: each thread reads rows of a few elements at separate positions in shared or device memory. Pallas cannot
index a reference by a vector in registers, so these functions use Mosaic's operations.

A block is an array `(lanes, width)` in registers. Its number of rows, `lanes`, is a multiple of 128. Thread `i % 128`
of the warpgroup holds row i, which has at most 16 bytes or a multiple of 16 bytes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf, vector

from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.mosaic import mgpu, plgpu
from pallas_kernels.core.simulator import without_registers


def block_layout(lanes: int, width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((lanes, width), vec_size=width)


def vector_layout(lanes: int) -> Any:
    """Return the layout of a vector `(lanes,)`: the thread with row i of a `block_layout` array has element i."""
    return plgpu.Layout.WG_STRIDED((lanes,), vec_size=1)


def lane_and_column(lanes: int, width: int) -> tuple[Array, Array]:
    if without_registers():
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
    return columns(lane_and_column(lanes, 1)[0])[0]


def gather_rows(ref: Any, rows: Array) -> Array:
    """Return `ref[rows]`, `(lanes, width)` in registers, for `ref (n, width)` and int32 `rows (lanes,)`."""
    (lanes,), width, signed = rows.shape, ref.shape[1], _is_signed(ref.dtype)
    if without_registers():
        return ref[...][rows]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), vector_layout(lanes)), return_type=_block(lanes, width, ref.dtype))
    def gather(_, ref, rows):
        element = ir.MemRefType(ref.type).element_type
        pointer, type_ = mgpu.utils.memref_ptr(ref), ir.VectorType.get((width,), element)
        place = lambda row: arith.muli(vector.extract(row, [], [0]), _i32(width))  # noqa: E731
        load = lambda row: _load(pointer, element, type_, place(row))  # noqa: E731
        return _map_registers(load, block_layout(lanes, width), rows, signed=signed)

    return gather(ref, rows)


def scatter_rows(ref: Any, block: Array, rows: Array) -> None:
    """Set `ref[rows] = block`, for `ref (n, width)` and int32 `rows (lanes,)`. Equal rows must have equal values."""
    lanes, width = block.shape
    if without_registers():
        ref[...] = ref[...].at[rows].set(block)
        return
    # A vector's size is a power of two, and its address a multiple of its size.
    size = width & -width

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), block_layout(lanes, width), vector_layout(lanes)))
    def scatter(_, ref, block, rows):
        pointer = mgpu.utils.memref_ptr(ref)
        for register, row in zip(block.registers.flat, rows.registers.flat, strict=True):
            numbers = [vector.extract(register, [], [k]) for k in range(width)]
            place = arith.muli(vector.extract(row, [], [0]), _i32(width))
            for k in range(0, width, size):
                _store(pointer, _row(numbers[k : k + size]), arith.addi(place, _i32(k)))

    scatter(ref, block, rows)


def gather_elements(ref: Any, *places: Array) -> Array:
    """Return `ref[places]` for integer arrays `places`, one per axis of `ref`, all `(lanes, width)` in registers."""
    if without_registers():
        return ref[...][places]
    layout, shape, dtype = block_layout(*places[0].shape), places[0].shape, ref.dtype

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(layout,) * len(places)), return_type=_block(*shape, dtype))
    def gather(_, ref, *places):
        def load(*rows):
            return _row([memref.load(ref, [_index(row, k) for row in rows]) for k in range(shape[1])])

        return _map_registers(load, layout, *places, signed=_is_signed(dtype))

    return gather(ref, *places)


def scatter_elements(ref: Any, values: Array, *places: Array) -> None:
    """Set `ref[places] = values`, with indices as in `gather_elements`. If indices repeat, any of their values may
    remain."""
    if without_registers():
        ref[...] = ref[...].at[places].set(values)
        return
    layout = block_layout(*values.shape)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *(layout,) * len(places)))
    def scatter(_, ref, values, *places):
        for index, register in np.ndenumerate(values.registers):
            rows = [place.registers[index] for place in places]
            for k in range(values.shape[1]):
                memref.store(vector.extract(register, [], [k]), ref, [_index(row, k) for row in rows])

    scatter(ref, values, *places)


def spread(numbers: Array, width: int) -> Array:
    (lanes,) = numbers.shape
    if without_registers():
        return jnp.broadcast_to(numbers[:, None], (lanes, width))

    @plgpu.inline_mgpu(arg_types=(vector_layout(lanes),), return_type=_block(lanes, width, numbers.dtype))
    def broadcast(_, numbers):
        repeat = lambda register: _row([vector.extract(register, [], [0])] * width)  # noqa: E731
        return _map_registers(repeat, block_layout(lanes, width), numbers, signed=numbers.is_signed)

    return broadcast(numbers)


def columns(block: Array) -> tuple[Array, ...]:
    lanes, width = block.shape
    if without_registers():
        return tuple(block[:, k] for k in range(width))
    vectors = plgpu.ShapeDtypeStruct((lanes,), block.dtype, layout=vector_layout(lanes))

    @plgpu.inline_mgpu(arg_types=(block_layout(lanes, width),), return_type=(vectors,) * width)
    def split(_, block):
        def column(k):
            number = lambda row: _row([vector.extract(row, [], [k])])  # noqa: E731
            return _map_registers(number, vector_layout(lanes), block, signed=block.is_signed)

        return tuple(map(column, range(width)))

    return split(block)


def block_of(columns: Sequence[Array]) -> Array:
    (lanes,), width = columns[0].shape, len(columns)
    if without_registers():
        return jnp.stack(columns, axis=1)

    @plgpu.inline_mgpu(arg_types=(vector_layout(lanes),) * width, return_type=_block(lanes, width, columns[0].dtype))
    def join(_, *columns):
        row = lambda *columns: _row([vector.extract(column, [], [0]) for column in columns])  # noqa: E731
        return _map_registers(row, block_layout(lanes, width), *columns, signed=columns[0].is_signed)

    return join(*columns)


def sums_of_rows(*blocks: Array) -> Array:
    """Sum each row of each block, from left to right. Return float32 `(lanes, len(blocks))`."""
    (lanes, width), count = blocks[0].shape, len(blocks)
    if without_registers():
        return jnp.stack([jnp.sum(block, axis=1) for block in blocks], axis=1)

    @plgpu.inline_mgpu(
        arg_types=(block_layout(lanes, width),) * count, return_type=_block(lanes, count, blocks[0].dtype)
    )
    def sums(_, *blocks):
        def total(row):
            numbers = [vector.extract(row, [], [k]) for k in range(width)]
            return functools.reduce(arith.addf, numbers)

        return _map_registers(lambda *rows: _row(list(map(total, rows))), block_layout(lanes, count), *blocks)

    return sums(*blocks)


def computed_here(block: Array) -> Array:
    """Return the float32 array, but make LLVM compute it before the code that follows. LLVM could otherwise keep all
    terms of a sum in registers, and add them at the end of the loop's body."""
    if without_registers():
        return block

    @plgpu.inline_mgpu(arg_types=(block_layout(*block.shape),), return_type=_block(*block.shape, block.dtype))
    def pin(_, block):
        def pinned(row):
            numbers = [vector.extract(row, [], [k]) for k in range(block.shape[1])]
            return _row(
                [llvm.inline_asm(number.type, [number], "", "=f,0", has_side_effects=True) for number in numbers]
            )

        return _map_registers(pinned, block_layout(*block.shape), block)

    return pin(block)


def compiler_fence() -> None:
    """Keep the compiler from moving accesses to shared memory across this call. LLVM may assume that accesses to
    elements and to vectors do not overlap, and reuse a vector whose elements have changed."""
    if without_registers():
        return

    @plgpu.inline_mgpu(arg_types=())
    def fence(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "", "~{memory}", has_side_effects=True)

    fence()


def meet(barrier: Any) -> None:
    """Wait until all warpgroups of the CTA call this function. Their earlier writes to shared memory are then visible.
    Only the simulator uses `barrier`, with one arrival per warpgroup."""
    if without_registers():
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu(arg_types=())
    def synchronize(_):
        gpu.barrier()

    synchronize()


def load_of(lists: Any, array: Any, start: Any, shape: tuple[int, int]) -> list[Array]:
    """For each list of references, load a block of shape `shape` from the reference with index `array`, beginning at
    element `start`. Elements beyond the reference's end are copies of its last element.

    Args:
      lists: lists of references `(n,)` to device memory, of one dtype per list. References with the same index have
        the same length. Each is aligned to the bytes in a block's row.
      array, start: equal in all threads. `start` is a multiple of the block's size.
    """
    lanes, width = shape
    if without_registers():
        return [_switch(refs, array, lambda ref: _simulated_load(ref, start, shape)) for refs in lists]
    blocks = tuple(_block(lanes, width, refs[0].dtype) for refs in lists)

    @plgpu.inline_mgpu(arg_types=(_ref_types(lists), _number(), _number()), return_type=blocks)
    def load(_, lists, array, start):
        pointers, size = _chosen(lists, array)
        types = [ir.MemRefType(refs[0].type).element_type for refs in lists]
        registers = [np.empty((lanes // LANES,), dtype=object) for _ in lists]
        for k in range(lanes // LANES):
            place = _place(start, k, width)
            rows = [ir.VectorType.get((width,), type_) for type_ in types]
            is_whole = _below(arith.addi(place, _i32(width - 1)), size)
            branch = scf.IfOp(is_whole, rows, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_([_load(*a, place) for a in zip(pointers, types, rows, strict=True)])
            with ir.InsertionPoint(branch.else_block):
                last = arith.subi(size, _i32(1))
                places = [arith.minsi(arith.addi(place, _i32(c)), last) for c in range(width)]
                scf.yield_([_row([_load(p, t, t, at) for at in places]) for p, t in zip(pointers, types, strict=True)])
            for n, row in enumerate(branch.results):
                registers[n][k] = row
        return tuple(_fragmented(of_list, block_layout(lanes, width)) for of_list in registers)

    return list(load(tuple(map(tuple, lists)), array, start))


def store_to(lists: Any, array: Any, start: Any, blocks: Any) -> None:
    """For each list of references, write one of `blocks` to the reference with index `array`, beginning at element
    `start`. Drop elements beyond the reference's end."""
    lanes, width = blocks[0].shape
    if without_registers():
        for refs, block in zip(lists, blocks, strict=True):
            _switch(refs, array, lambda ref, block=block: _simulated_store(ref, start, block))
        return
    layouts = (block_layout(lanes, width),) * len(blocks)

    @plgpu.inline_mgpu(arg_types=(_ref_types(lists), _number(), _number(), layouts))
    def store(_, lists, array, start, blocks):
        pointers, size = _chosen(lists, array)
        for k in range(lanes // LANES):
            place = _place(start, k, width)
            pairs = [(p, block.registers[k]) for p, block in zip(pointers, blocks, strict=True)]
            branch = scf.IfOp(_below(arith.addi(place, _i32(width - 1)), size), has_else=True)
            with ir.InsertionPoint(branch.then_block):
                for pointer, row in pairs:
                    _store(pointer, row, place)
                scf.yield_([])
            with ir.InsertionPoint(branch.else_block):
                for c in range(width - 1):
                    at = arith.addi(place, _i32(c))
                    inside = scf.IfOp(_below(at, size))
                    with ir.InsertionPoint(inside.then_block):
                        for pointer, row in pairs:
                            _store(pointer, vector.extract(row, [], [c]), at)
                        scf.yield_([])
                scf.yield_([])

    store(tuple(map(tuple, lists)), array, start, tuple(blocks))


def _switch(refs, array, function):
    return lax.switch(array, [functools.partial(function, ref) for ref in refs])


def _simulated_load(ref, start, shape):
    size, length = ref.shape[0], math.prod(shape)
    end = size % length  # Static, because slices in the simulator are static.
    whole = lambda: ref[pl.ds(start, length)]  # noqa: E731
    part = lambda: jnp.pad(ref[pl.ds(size - end, end)], (0, length - end), mode="edge")  # noqa: E731
    if not end or size < length:
        return (part() if end else whole()).reshape(shape)
    return lax.cond(start + length <= size, whole, part).reshape(shape)


def _simulated_store(ref, start, block):
    size, length = ref.shape[0], block.size
    end = size % length

    def whole():
        ref[pl.ds(start, length)] = block.reshape(-1)

    def part():
        ref[pl.ds(size - end, end)] = block.reshape(-1)[:end]

    if not end or size < length:
        (part if end else whole)()
    else:
        lax.cond(start + length <= size, whole, part)


def _ref_types(lists):
    return tuple(tuple(plgpu.RefType() for _ in refs) for refs in lists)


def _number():
    return plgpu.Layout.WG_SPLAT(())


def _chosen(lists, array):
    lengths = [ir.MemRefType(ref.type).shape[0] for ref in lists[0]]
    pointer_types = [mgpu.utils.memref_ptr(refs[0]).type for refs in lists]
    index = arith.index_cast(ir.IndexType.get(), array.registers.item())
    chosen = scf.IndexSwitchOp([*pointer_types, ir.IntegerType.get_signless(32)], index, range(len(lengths) - 1))
    default, *cases = chosen.regions
    for region, length, *refs in zip([*cases, default], lengths, *lists, strict=True):
        with ir.InsertionPoint(region.blocks[0]):
            scf.yield_([*map(mgpu.utils.memref_ptr, refs), _i32(length)])
    *pointers, size = chosen.results
    return pointers, size


def _place(start, k, width):
    thread = arith.remui(mgpu.utils.thread_idx(), _i32(LANES))
    row = arith.muli(arith.addi(thread, _i32(k * LANES)), _i32(width))
    return arith.addi(start.registers.item(), row)


def _load(pointer, element, type_, place):
    address = mgpu.utils.getelementptr(pointer, [place], element)
    return llvm.load(type_, address, alignment=_bytes(type_))


def _store(pointer, value, place):
    element = value.type.element_type if isinstance(value.type, ir.VectorType) else value.type
    llvm.store(value, mgpu.utils.getelementptr(pointer, [place], element), alignment=_bytes(value.type))


def _bytes(type_):
    if isinstance(type_, ir.VectorType):
        return type_.shape[0] * mgpu.utils.bytewidth(type_.element_type)
    return mgpu.utils.bytewidth(type_)


def _below(place, size):
    return arith.cmpi(arith.CmpIPredicate.slt, place, size)


def _i32(number):
    return mgpu.utils.c(number, ir.IntegerType.get_signless(32))


def _block(lanes, width, dtype):
    return plgpu.ShapeDtypeStruct((lanes, width), jnp.dtype(dtype), layout=block_layout(lanes, width))


def _map_registers(function, layout, *arrays, signed=None):
    results = np.empty_like(arrays[0].registers)
    for index in np.ndindex(results.shape):
        results[index] = function(*(array.registers[index] for array in arrays))
    return _fragmented(results, layout, signed)


def _fragmented(registers, layout, signed=None):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _row(numbers):
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)


def _index(register, k):
    return arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [k]))


def _is_signed(dtype: Any) -> bool | None:
    return jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
