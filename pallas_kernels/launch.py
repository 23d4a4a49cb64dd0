"""Launching a kernel: the one file that knows JAX versions, the interpreters and Mosaic's lowering semantics.

A kernel body is an ordinary function of references into GPU memory. Its program ids arrive as keyword arguments named
after the grid's axes:

    def body(x_ref, y_ref, *, row):
        y_ref[row] = 2.0 * x_ref[row]

    launch(body, x, out=jax.ShapeDtypeStruct(x.shape, x.dtype), grid={"row": x.shape[0]}, name="double")

Lowered for CUDA it is a Mosaic GPU kernel. Lowered for anything else the same body runs in Pallas' own interpreter,
which is plain XLA code without side effects: slow, but at home in every JAX transformation. `simulated` runs it in
the Mosaic simulator instead, which is slower still and raises on what a GPU would leave undefined.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

# The interpreter would import it at its first use, which changes jit's cache key: everything would compile twice.
import jax.experimental.pallas.tpu
import jax.numpy as jnp
from jax import Array, lax

# What has no public name in JAX 0.10.2: the simulator (partly public from 0.12 on), and turning off, within a kernel,
# the types by which shard_map tells along which mesh axes a value differs.
from jax._src.config import _check_vma
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _simulator
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128
"""Threads of a warpgroup, the unit that runs a program: vectors are a multiple of it."""

OPERAND_BYTES = 128
"""Of a row of shared memory, in which the tensor cores look for their operands."""

# The default semantics differ between JAX versions. Lane lowers unrolled bodies 10 to 40 times faster.
_LANE = plgpu.LoweringSemantics.Lane

# A JAX context, not a global: its value is part of jit's cache key.
_simulation = jax.make_user_context(None)


def launch(
    body: Callable[..., None],
    *arrays: Array,
    out: Any,
    grid: dict[str, int],
    name: str,
    warpgroups: int | None = None,
    cluster: dict[str, int] | None = None,
    scratch: Sequence[Any] = (),
    barriers: bool = True,
    sums_across_warps: bool = True,
) -> Any:
    """Runs `body(*array_refs, *out_refs, *scratch_refs, **program_ids)` once for every point of `grid`.

    Args:
      body: the kernel. It writes every element of every output.
      arrays: the inputs, whole.
      out: a `jax.ShapeDtypeStruct`, or a tuple of them.
      grid: axis name -> number of programs. The last axis runs fastest.
      name: the kernel's name in programs and profiles.
      warpgroups: that many run each program together, told apart by the further program id `warpgroup`.
      cluster: axis name -> number of programs that run side by side for every point of `grid`, and reach each other's
        shared memory.
      scratch: shared memory and barriers, for programs that copy asynchronously or use the tensor cores. With it a
        kernel runs on GPUs and in the simulator only: see `on_gpu`.
      barriers: whether a warpgroup meets before and after each store. Not needed where no thread reads what another
        wrote, or only behind a barrier of the body's own, as `plgpu.commit_smem`.
      sums_across_warps: whether the body sums along an axis that several warps share. Without, the 2 KiB of shared
        memory for them are free.

    Returns:
      An array for each entry of `out`, in its structure.
    """

    cluster = cluster or {}
    options = {"lowering_semantics": _LANE, "unsafe_no_auto_barriers": not barriers}
    if not sums_across_warps:
        options["reduction_scratch_bytes"] = 0

    def mosaic(*arrays, interpret=None):
        def numbered(*refs):
            axes = [*grid, *cluster, "warpgroup"] if warpgroups else [*grid, *cluster]
            body(*refs, **{axis: lax.axis_index(axis) for axis in axes})

        numbered.__name__ = name
        return plgpu.kernel(
            numbered,
            out_type=out,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            cluster=tuple(cluster.values()),
            cluster_names=tuple(cluster),
            num_threads=warpgroups,
            thread_name="warpgroup" if warpgroups else None,
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(**options),
            interpret=interpret,
        )(*arrays)

    def interpreted(*arrays):
        def numbered(*refs):
            body(*refs, **{axis: pl.program_id(i) for i, axis in enumerate(grid)})

        return pl.pallas_call(numbered, out_shape=out, grid=tuple(grid.values()), interpret=True, name=name)(*arrays)

    arrays = vary_alike(arrays)
    with _check_vma(False):
        if (params := _simulation.value) is not None:
            results = mosaic(*arrays, interpret=params)
        elif scratch:
            results = mosaic(*arrays)
        else:
            if jax.default_backend() == "cpu":
                _warn_interpreted()
            results = lax.platform_dependent(*arrays, cuda=mosaic, default=interpreted)
    return vary_alike((arrays, results))[1]


def on_gpu(kernel: Callable, otherwise: Callable, *arrays: Array) -> Any:
    """`kernel(*arrays)` lowered for a GPU or simulated, `otherwise(*arrays)`, the same but for rounding, elsewhere."""
    if _simulation.value is not None:
        return kernel(*arrays)
    arrays = vary_alike(arrays)
    return vary_alike((arrays, lax.platform_dependent(*arrays, cuda=kernel, default=otherwise)))[1]


def vary_alike(arrays: Any) -> Any:
    """Within shard_map, the same arrays typed as differing along every mesh axis along which one of them differs.

    The gradient of an array that was the same on all devices is thereby summed over the devices.
    """
    axes = [jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)]
    union = frozenset().union(*axes)

    def cast(a):
        missing = union - jax.typeof(a).manual_axis_type.varying
        return lax.pcast(a, tuple(missing), to="varying") if missing else a

    return jax.tree.map(cast, arrays)


@functools.cache
def _warn_interpreted() -> None:
    warnings.warn(
        "jaxbp: no GPU found, so Pallas kernels run in an interpreter: right, but slow. "
        "implementation='xla' is the fast one here.",
        stacklevel=2,
    )


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within it, kernels run in the Mosaic GPU simulator, on the CPU and about 0.4 ms a memory access.

    Memory starts as NaN (integers: their largest value), a read out of bounds raises, and a data race raises
    `RuntimeError` here or an error where it happens.
    """
    _simulator.reset_gpu_interpret_mode_state()
    try:
        with _simulation(InterpretGPUParams(detect_races=True)):
            yield
        jax.effects_barrier()
        if _simulator.gpu_callbacks._races is not None and _simulator.get_races().races_found:
            raise RuntimeError("pallas_kernels: the simulator found a data race; its report is on standard output")
    finally:
        _simulator.reset_gpu_interpret_mode_state()


def load(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    """What `ref` holds, in registers of `layout`; `optimized=False` allows slower accesses."""
    # Older versions want an index beside the reference.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    wanted = index is not None and index.default is index.empty
    return plgpu.load(ref, *([()] if wanted else []), layout=layout, optimized=optimized)


def store(ref: Any, value: Array) -> None:
    """Writes `value` to device memory, whichever way it lies in the registers."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


# A warp reads four rows, eight threads side by side, and no bank twice.
SUMMED_ROWS = 32
"""Rows that `sums_over_lanes` takes at a time, or half of them."""
_SUMS_OVER_LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def sums_over_lanes(rows: Any, totals: Any) -> None:
    """Writes the sum of each of `rows (n, LANES)` in shared memory to `totals (n,)` in device memory.

    One by one, sums of vectors would meet at barriers of their own; here at one, before any thread reads a row. n is
    half of `SUMMED_ROWS`, or a multiple of `SUMMED_ROWS`.
    """
    plgpu.commit_smem()
    together = min(rows.shape[0], SUMMED_ROWS)
    for n in range(0, rows.shape[0], together):
        here = pl.ds(n, together)
        store(totals.at[here], jnp.sum(load(rows.at[here], _SUMS_OVER_LANES), axis=1))


def operand(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the tensor cores read it: in tiles of eight rows of `OPERAND_BYTES`."""
    columns = OPERAND_BYTES // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(OPERAND_BYTES)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def multiply_registers(sums: Any, left: Array, right: Any, spare: Any) -> None:
    """`plgpu.wgmma` of registers and shared memory.

    The simulator multiplies shared memory alone: there, `left` goes through `spare`, from where copies may be leaving.
    """
    if _simulation.value is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        spare[...] = left
        plgpu.commit_smem()
        left = spare
    plgpu.wgmma(sums, left, right)
    if _simulation.value is not None:
        plgpu.wgmma_wait(0)


def rounded_to_tf32(x: Array) -> Array:
    """float32 rounded to TF32, where the tensor cores would cut it off; other dtypes as they are."""
    if x.dtype != jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # A NaN of all ones, which GPUs make, would run over.
    return jnp.where(x != x, x, lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32))


def zeros_like(vector: Array) -> Array:
    """Float32 zeros in the register layout of `vector`, which a loop's carry must have from its first turn."""
    return jnp.where(vector != vector, jnp.float32(0), jnp.float32(0))


def batch_last(x: Array) -> Array:
    """`(batch, ...) -> (..., lanes)`: an example a lane, the batch filled up with zeros to whole warpgroups."""
    missing = -x.shape[0] % LANES or (LANES if x.shape[0] == 0 else 0)
    x = jnp.moveaxis(x, 0, -1)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def batch_first(x: Array, batch: int) -> Array:
    """The inverse of `batch_last`."""
    return jnp.moveaxis(x[..., :batch], -1, 0)


def vector_length(*arrays: Array) -> int:
    """The longest vector, of at most 4 elements a thread, that divides the last axis of `batch_last` arrays.

    At most 2 where dtypes are mixed: a thread loads up to 8 bytes at once, and only vectors that are spread over the
    threads alike can be combined.
    """
    lanes = arrays[0].shape[-1]
    longest = 4 if len({a.dtype for a in arrays}) == 1 else 2
    return max(LANES * each for each in (1, 2, 4) if each <= longest and lanes % (LANES * each) == 0)


def largest_divisor(n: int, at_most: int) -> int:
    """The largest divisor of `n` not above `at_most`."""
    return max(d for d in range(1, max(1, min(n, at_most)) + 1) if n % d == 0)
