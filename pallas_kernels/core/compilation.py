"""Kernels that are compiled while the surrounding program is still being lowered.

XLA compiles the kernels of a program after lowering all of it, one after the other, on one core. Mosaic GPU caches
compiled kernels in the process by their hash. A thread therefore compiles each kernel in a separate program, right
after its lowering. The compilation of the surrounding program then finds it in the cache.

A kernel that fails here fails again there, where the error is raised. A kernel that is not yet compiled there is
compiled twice, and the first result is used.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
from jax import export

_TARGETS = ("mosaic_gpu", "mosaic_gpu_v2")
"""Names under which JAX versions register Mosaic GPU's kernels."""
_MIN_CORES = 4
"""On two busy cores nothing is gained: docs/lab/2026-11-24-compile.md."""


def compiles_ahead(module_context: Any) -> bool:
    """Whether kernels of the program that is being lowered are compiled ahead.

    They are if it is lowered only for this machine's GPUs, if there are cores to spare, and if JAX has no persistent
    compilation cache. A program that JAX finds in this cache needs no kernel compiled.
    """
    return (
        jax.default_backend() == "gpu"
        and tuple(module_context.platforms) == ("cuda",)
        and not module_context.lowering_parameters.for_export
        and _cores() >= _MIN_CORES
        and jax.config.jax_compilation_cache_dir is None
    )


def compiled_ahead(function: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """Return the function, lowered for CUDA once, while a thread begins to compile it.

    Args:
      function: maps arrays to a list of arrays.
      avals: the arrays' shapes and dtypes.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
    # JAX takes the mesh from the context, and the number of devices from the concrete mesh. A kernel has one device.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*structs)
    exported = dataclasses.replace(exported, nr_devices=1)
    _threads().submit(_compile, exported, structs)
    return exported.call


def _compile(exported, structs):
    jax.jit(exported.call).lower(*structs).compile()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _threads() -> Executor:
    return ThreadPoolExecutor(_cores(), thread_name_prefix="kernel")
