"""Explain errors that Mosaic GPU raises while it lowers a kernel's body: `docs/kernel_bodies.md` has examples."""

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

_LOWERING = "pallas.mosaic_gpu.lowering"
_HIDDEN = (Path(jax.__file__).parent, Path(__file__).parent)
_JIT = ("jit", "pjit")

_ADVICE = {
    r"^(scan|while): .*(FragmentedArray|unexpected layout)": (
        "a loop's carry changes its register layout; wants the same layout in all iterations. A constant such as "
        "`jnp.zeros` has another layout than a loaded vector. Begin with `zeros_like(vector)` of "
        "`pallas_kernels.core.layouts`, where `vector` is loaded as in the loop"
    ),
    r"^cond: ": (
        "the branches of a conditional differ in their register layouts; wants the same layout. Use `jnp.where`, or "
        "`zeros_like(vector)` of `pallas_kernels.core.layouts` instead of a constant"
    ),
    r"multiple of 128 \(got (?P<length>\d+)\)": (
        "a vector has {length} elements; wants a multiple of 128, the number of threads in a warpgroup. Pad the array "
        "before `launch`, as `batch_last` does, and read `pl.ds(start, length)` of its last axis"
    ),
    r"Unimplemented primitive .*: dot_general": (
        "the body has a matrix product (`@`, `jnp.dot`, or `jnp.einsum`), which Mosaic GPU does not lower; wants "
        "multiplications and sums, such as `jnp.sum(a * b)` of two vectors. Compute large products outside of the "
        "kernel with `jnp.dot`, or with `plgpu.wgmma` on Hopper"
    ),
    r"int_indexer_shape non-empty|Unimplemented primitive .*: broadcast_to |^broadcast_in_dim: Unsupported layout": (
        "an index is a vector of loaded values, or a vector gets a new axis; wants scalars and slices as indices. Read "
        "each index as a scalar, as in `x_ref[index_ref[row]]`, with an axis of the grid or a loop over the indices. "
        "On a GPU, `pallas_kernels.core.gathers` reads one element per thread"
    ),
    r"Incompatible FragmentedArray layouts": (
        "two vectors differ in the number of adjacent elements per thread, because their dtypes differ; wants arrays "
        "of one dtype, or vectors of `vector_length(*arrays)` elements of `pallas_kernels.core.layouts`. Convert an "
        "array before `launch`, or read `pl.ds(start, length)`"
    ),
    r"No support for axes": (
        "a sum or a maximum is over one of several axes; wants one over a whole vector. Read one row, as in "
        "`jnp.sum(x_ref[row])`, or add the rows in a loop"
    ),
    r"Failed to infer the output layout of the iota": (
        "`jnp.arange` or an iota has no register layout; wants a loaded vector. Pass the numbers to `launch` as an "
        "array"
    ),
    r"Only arrays with tiled layouts can be sliced": (
        "a vector in registers is sliced; wants a slice of the reference, as in `x_ref[row, pl.ds(start, length)]`"
    ),
    r"Unimplemented primitive .*: (?P<primitive>\w+) ": (
        "the body uses `{primitive}`, which Mosaic GPU does not lower; wants arithmetic on vectors, sums and maxima "
        "over whole vectors, loops, and `jnp.where`. Compute `{primitive}` outside of the kernel"
    ),
}
"""Pattern for `primitive: message` -> reason and correction. The first match applies."""


def explained(error: Exception, name: str) -> NotImplementedError | None:
    """Return an error that explains `error` in the kernel `name`, or None if the error is unknown."""
    equations = list(_equations(error))
    if not equations:
        return None
    text = f"{equations[-1].primitive.name}: {error}"
    for pattern, advice in _ADVICE.items():
        if found := re.search(pattern, text, re.DOTALL):
            return NotImplementedError(f"{name}: {_line(equations)}{advice.format(**found.groupdict())}")
    return None


def _equations(error: Exception) -> Iterator[Any]:
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__", "").endswith(_LOWERING) and "eqn" in frame.f_locals:
            yield frame.f_locals["eqn"]
        traceback = traceback.tb_next


def _line(equations: list[Any]) -> str:
    # Within jitted functions such as `jnp.dot`, equations have the line of the first call.
    called = next((i for i, equation in enumerate(equations) if equation.primitive.name in _JIT), len(equations) - 1)
    source = equations[called].source_info.traceback
    for frame in source.frames if source is not None else []:
        path = Path(frame.file_name)
        if not any(path.is_relative_to(folder) for folder in _HIDDEN):
            code = linecache.getline(frame.file_name, frame.line_num).strip()
            return f"{path}:{frame.line_num}: " + (f"`{code}`: " if code else "")
    return ""
