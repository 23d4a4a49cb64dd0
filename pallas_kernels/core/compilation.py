"""Kernels compiled while the program around them is still being lowered.

XLA compiles the kernels of a program when all of it has been lowered, one after the other, on one core. Mosaic GPU
remembers by a kernel's hash what it has compiled in this process. So a thread compiles each kernel as soon as it is
lowered, as a program of its own, and the compilation of the program around it finds it compiled.

A kernel that fails here fails again there, where the error is raised. One that is not yet compiled there is compiled
twice, and whichever is first is used.
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
"""The names under which versions of JAX have Mosaic GPU's kernels."""
_MIN_CORES = 4
"""On two busy cores nothing is gained: docs/lab/2026-11-24-compile.md."""


def compiles_ahead(module_context: Any) -> bool:
    """Whether kernels of the program that is being lowered are compiled ahead.

    They are if it is lowered for this machine's GPUs alone, if there are cores to spare, and if JAX keeps no programs
    from one process to the next. A program that JAX finds there needs no kernel compiled.
    """
    return (
        jax.default_backend() == "gpu"
        and tuple(module_context.platforms) == ("cuda",)
        and not module_context.lowering_parameters.for_export
        and _cores() >= _MIN_CORES
        and jax.config.jax_compilation_cache_dir is None
    )


def compiled_ahead(function: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """Return the function, lowered for CUDA once and for all, while a thread begins to compile it.

    Args:
      function: of arrays, to a list of arrays.
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
