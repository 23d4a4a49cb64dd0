"""Launch a kernel. On CUDA, its body becomes a Mosaic GPU kernel. Elsewhere, Pallas' interpreter runs it.

`launch` binds a JAX primitive, and JAX traces the body only when it lowers this primitive: see docs/architecture.md.
docs/kernel_bodies.md has examples.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

# Importing `fuser` later would change jit's cache key, and recompile earlier programs.
import jax.experimental.pallas.fuser
import jax.numpy as jnp
from jax import Array, lax

# Private in JAX 0.10.2.
from jax._src.config import _check_vma
from jax._src.dispatch import apply_primitive
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.core.arrays import has_explicit_axes, on_no_mesh, unify_varying_axes
from pallas_kernels.core.body_errors import explained
from pallas_kernels.core.compilation import compiled_ahead, compiles_ahead
from pallas_kernels.core.layouts import quotient, remainder
from pallas_kernels.core.mosaic import plgpu, query_ptxas_once
from pallas_kernels.core.simulator import interpreting, simulating
from pallas_kernels.core.source_lines import recording_lines

try:
    from jax._src.interpreters.remat import rules as remat_rules
except ImportError:  # before JAX 0.12
    remat_rules = {}


def launch(
    body: Callable[..., None],
    *arrays: Any,
    out: Any,
    grid: dict[str, int],
    name: str,
    warpgroups: int | None = None,
    cluster: dict[str, int] | None = None,
    scratch: Sequence[Any] = (),
    barriers: bool = True,
    sums_across_warps: bool = True,
    in_place: Mapping[int, int] | None = None,
    skippable: Sequence[int] = (),
    approximate: bool = False,
    semaphores: int = 0,
) -> Any:
    """Run `body(*array_refs, *out_refs, *scratch_refs, **indices)` once per point of `grid`. Return the outputs.

    `indices` are the CTA's indices along the axes of `grid` and `cluster`, such as `row` for `grid={"row": 8}`.
    `arrays`, `out`, and `scratch` may contain pytrees and None. The body gets references to whole arrays in the same
    structure.

    Args:
      body: must write every element of every output.
      out: a `jax.ShapeDtypeStruct`, an array with the shape and dtype, or a tuple of them.
      grid: axis name -> number of CTAs. The last axis runs fastest.
      warpgroups: number per CTA. The body gets its warpgroup's index as `warpgroup`.
      cluster: axis name -> number of CTAs. Each point of `grid` is then a cluster.
      scratch: shared memory and barriers. Barriers are only for GPUs and the simulator: see `on_gpu`.
      barriers: whether Mosaic synchronizes a warpgroup around each store. Pass False if a barrier, such as
        `plgpu.commit_smem`, precedes each read of another thread's data.
      sums_across_warps: whether the body sums along an axis that several warps share. Mosaic then reserves 2 KiB of
        shared memory.
      in_place: index of an input among the leaves of `arrays` -> index of an output that may use its memory. Only the
        CTA that reads an element may write it, after the read. XLA copies an input that is used later.
      skippable: indices in the tuple `out`. The body gets None for outputs that the program does not use. Not together
        with `in_place`.
      approximate: whether `exp2`, `log`, and `tanh` may be single instructions (PTX ISA). `exp2` then has about
        float32's rounding error, and `tanh` an error of 2^-11.
      semaphores: number of semaphores in device memory, which are 0 when the kernel starts. The body gets them as
        `semaphores`, or None without a GPU. With semaphores, `vmap` launches the kernel once per example.

    Raises:
      NotImplementedError: when the program is lowered for CUDA, if Mosaic GPU cannot lower the body.
    """
    # Unrolled bodies lower much faster with `Lane`, not the default in every JAX version.
    options = {"lowering_semantics": plgpu.LoweringSemantics.Lane, "unsafe_no_auto_barriers": not barriers}
    options["approx_math"] = approximate
    if not sums_across_warps:
        options["reduction_scratch_bytes"] = 0
    if in_place and skippable:
        raise ValueError(f"{name}: skippable is {skippable}; wants an empty sequence, because in_place is given")
    out = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), out)
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    entries = tuple(_Entry(tuple(jax.tree.leaves(a)), i in skippable) for i, a in enumerate(outputs))

    def functions(entries):
        kept = [a if entry.kept else None for a, entry in zip(outputs, entries, strict=True)]
        structure, shapes = jax.tree.structure((*inputs, *kept, *scratch)), tuple(jax.tree.leaves(kept))
        call = dict(structure=structure, out=shapes, grid=grid, name=name, scratch=jax.tree.leaves(scratch))
        call["semaphores"] = semaphores
        mosaic = functools.partial(_mosaic, body, **call, cluster=cluster or {}, warpgroups=warpgroups, options=options)
        return mosaic, functools.partial(_interpret, body, **call)

    inputs, arrays = arrays, jax.tree.leaves(arrays)
    # A weak type would change dtypes in a body, and `compiled_ahead` rejects it.
    arrays = unify_varying_axes(
        [lax.convert_element_type(a, a.dtype) if jax.typeof(a).weak_type else a for a in arrays]
    )
    if (params := simulating()) is not None:
        with _check_vma(False):
            results = functions(entries)[0](*arrays, interpret=params)
    else:
        if not _has_barriers(scratch) and jax.default_backend() == "cpu":
            _warn_interpreted()
        in_place = in_place if CHANGES_IN_PLACE else None
        results = _bind(name, functions, arrays, entries, in_place, bool(semaphores))
    return jax.tree.unflatten(jax.tree.structure(out), unify_varying_axes((arrays, list(results)))[1])


CHANGES_IN_PLACE = jax.__version_info__ >= (0, 11)
"""Whether JAX passes mutable references to kernels. Otherwise, `in_place` has no effect."""


def _mosaic(
    body,
    *arrays,
    structure,
    out,
    grid,
    name,
    scratch,
    semaphores,
    cluster,
    warpgroups,
    options,
    in_place=None,
    interpret=None,
):
    arrays, out_type = list(arrays), out
    *outer, _ = grid.values()
    launched = {"flat": math.prod(grid.values())} if math.prod(outer) > _MAX_OUTER_CTAS else grid
    shared = {o: i for i, o in (in_place or {}).items()}
    if shared:
        for i in in_place:
            arrays[i] = jax.new_ref(lax.optimization_barrier(arrays[i]))
        out_type = tuple(a for o, a in enumerate(out) if o not in shared)

    def outputs(of_arrays, others):
        others = iter(others)
        return tuple(of_arrays[shared[o]] if o in shared else next(others) for o in range(len(out)))

    def kernel_body(*refs):
        if shared:
            inputs, others, rest = refs[: len(arrays)], refs[len(arrays) :], refs[len(arrays) + len(out_type) :]
            refs = [*inputs, *outputs(inputs, others), *rest]
        axes = [*launched, *cluster, "warpgroup"] if warpgroups else [*launched, *cluster]
        indices = {axis: lax.axis_index(axis) for axis in axes}
        indices = indices if launched is grid else _along_axes(grid, indices)
        if semaphores:
            counters = plgpu.SemaphoreType.REGULAR((semaphores,))
            indices["semaphores"] = pl.get_global(counters) if interpret is None else None
        with recording_lines():
            body(*structure.unflatten(refs), **indices)

    kernel_body.__name__ = name
    results = plgpu.kernel(
        kernel_body,
        out_type=out_type,
        grid=tuple(launched.values()),
        grid_names=tuple(launched),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name="warpgroup" if warpgroups else None,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(**options),
        interpret=interpret,
    )(*arrays)
    if not shared:
        return results
    # Without barriers, XLA would fuse the launch with a slice before it or a slice update after it. The fusion's result
    # has new memory, but the kernel writes to its argument.
    return outputs({i: lax.optimization_barrier(arrays[i][...]) for i in in_place}, results)


_MAX_OUTER_CTAS = 2**16 - 1
"""Maximum CTAs along y or z of a CUDA grid. The last axis of `grid` is x, which may have 2**31 - 1 CTAs."""


def _along_axes(grid, indices):
    indices = dict(indices)
    rest = indices.pop("flat")
    for axis, size in reversed(grid.items()):
        rest, indices[axis] = quotient(rest, size), remainder(rest, size)
    return indices


class _NeedsGPU(NotImplementedError):
    """The interpreter cannot run the kernel."""


def _interpret(body, *arrays, structure, out, grid, name, scratch, semaphores):
    if _has_barriers(scratch):
        raise _NeedsGPU(f"{name}: uses barriers, which the interpreter lacks; wants a GPU or the context `simulated`")

    def kernel_body(*refs):
        with interpreting(True):
            indices = {axis: pl.program_id(i) for i, axis in enumerate(grid)}
            body(*structure.unflatten(refs), **indices, **(dict(semaphores=None) if semaphores else {}))

    call = dict(out_shape=out, grid=tuple(grid.values()), scratch_shapes=scratch, interpret=True, name=name)
    return pl.pallas_call(kernel_body, **call)(*arrays)


def _has_barriers(scratch):
    return not all(isinstance(a, pl.MemoryRef) for a in jax.tree.leaves(scratch))


_launch_p = Primitive("launch")
_launch_p.multiple_results = True
_launch_p.def_impl(functools.partial(apply_primitive, _launch_p))


@_launch_p.def_abstract_eval
def _(*arrays, shapes, **functions):
    return [jax.core.ShapedArray(a.shape, a.dtype, sharding=_on_mesh_of(arrays, a.ndim)) for a in shapes]


def _on_mesh_of(arrays, ndim):
    meshes = (a.sharding.mesh for a in arrays)
    mesh = next((mesh for mesh in meshes if not mesh.empty and {*mesh.axis_types} == {AxisType.Auto}), None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*[None] * ndim))


class _Entry(NamedTuple):
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    skippable: bool = False
    kept: bool = True


def _bind(name, functions, arrays, entries, in_place, in_turn):
    # During lowering, when JAX traces the body, the x64 setting may differ.
    x64 = jax.config.jax_enable_x64

    def parameters(entries):
        mosaic, interpreter = functions(entries)
        cuda = functools.partial(mosaic, in_place=in_place) if in_place else mosaic
        traced = {
            key: functools.partial(_trace, function, x64)
            for key, function in dict(cuda=cuda, batched=mosaic, default=interpreter).items()
        }
        return dict(entries=entries, shapes=_kept_shapes(entries), **traced)

    return _launch_p.bind(*arrays, name=name, parameters=parameters, in_turn=in_turn, **parameters(entries))


def _kept_shapes(entries):
    return tuple(shape for entry in entries if entry.kept for shape in entry.shapes)


def _drop_unused_outputs(used, *others):
    equation, flags = others[-1], iter(used)
    inputs, params = [any(used)] * len(equation.invars), equation.params
    if not any(used):
        return inputs, None
    entries, outvars = [], iter(equation.outvars)
    kept_outvars = []
    for entry in params["entries"]:
        count = len(entry.shapes) if entry.kept else 0
        is_used = any([next(flags) for _ in range(count)])
        variables = [next(outvars) for _ in range(count)]
        keep = entry.kept and (is_used or not entry.skippable)
        kept_outvars += variables if keep else []
        entries.append(entry._replace(kept=keep))
    if len(kept_outvars) == len(equation.outvars):
        return inputs, equation
    params = params | params["parameters"](tuple(entries))
    return inputs, equation.replace(outvars=kept_outvars, params=params)


pe.dce_rules[_launch_p] = _drop_unused_outputs


def _trace(function, x64, *arrays):
    # Arrays that a body creates lie on no mesh.
    context = on_no_mesh() if has_explicit_axes() else contextlib.nullcontext()
    with jax.enable_x64(x64), _check_vma(False), context:
        return jax.tree.leaves(function(*arrays))


def _lower_elsewhere(context, *arrays, default, shapes, **_):
    def lower(function):
        return mlir.lower_fun(function, multiple_results=True)(context, *arrays)

    try:
        return lower(default)
    except _NeedsGPU:
        if "cuda" not in context.module_context.platforms:
            raise
        # A program for several platforms contains the branches of `on_gpu` for CUDA once per platform, also where they
        # never run.
        return lower(lambda *_: [jnp.full(a.shape, jnp.nan).astype(a.dtype) for a in shapes])


# JAX cannot lower for several platforms if a primitive has a rule per platform and is not cacheable.
mlir.register_lowering(_launch_p, _lower_elsewhere)


def _lower_for_cuda(context, *arrays, name, cuda, **_):
    query_ptxas_once()
    try:
        ahead = compiles_ahead(context.module_context)
        function = compiled_ahead(cuda, context.avals_in) if ahead else cuda
        return mlir.lower_fun(function, multiple_results=True)(context, *arrays)
    except Exception as error:
        if (explanation := explained(error, name)) is None:
            raise
        raise explanation from error


mlir.register_lowering(_launch_p, _lower_for_cuda, platform="cuda")


def _refuse_derivative(*_, name, **__):
    raise NotImplementedError(
        f"{name}: JAX cannot differentiate a kernel; wants `jaxbp.differentiable(kernel, formula)`, which has the "
        "derivatives of a formula, also around a kernel that the `save` of a `Pair` calls"
    )


ad.primitive_jvps[_launch_p] = _refuse_derivative


def _batch(arrays, axes, *, name, parameters, entries, in_turn, **_):
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)

    def of_batch(entries):
        of_one = parameters(entries)
        # JAX does not batch kernels that change an array in place.
        over = _in_turn if in_turn else jax.vmap
        batched, default = (over(of_one[key], tuple(axes)) for key in ("batched", "default"))
        shapes = tuple(jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in of_one["shapes"])
        return dict(entries=entries, shapes=shapes, cuda=batched, batched=batched, default=default)

    results = _launch_p.bind(*arrays, name=name, parameters=of_batch, in_turn=in_turn, **of_batch(entries))
    return results, (0,) * len(results)


def _in_turn(function, axes):
    """Return `jax.vmap(function, axes)` as a loop, because the examples of a batch must not share semaphores."""

    def batched(*arrays):
        mapped = [jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True) if axis is not None]

        def one(of_one):
            of_one = iter(of_one)
            return function(*(a if axis is None else next(of_one) for a, axis in zip(arrays, axes, strict=True)))

        return lax.map(one, mapped)

    return batched


batching.primitive_batchers[_launch_p] = _batch


def on_gpu(kernel: Callable, fallback: Callable, *arrays: Array) -> Any:
    """Return `kernel(*arrays)` on a GPU or in the simulator, else `fallback(*arrays)`, equal up to rounding."""
    if simulating() is not None:
        return kernel(*arrays)
    arrays = unify_varying_axes(arrays)
    return unify_varying_axes((arrays, lax.platform_dependent(*arrays, cuda=kernel, default=fallback)))[1]


@functools.cache
def _warn_interpreted() -> None:
    warnings.warn(
        "jaxbp: no GPU found, so Pallas kernels run in an interpreter: correct, but slow. "
        "implementation='xla' is fast here.",
        stacklevel=2,
    )
