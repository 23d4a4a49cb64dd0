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


def compiles_ahead(module_context: Any, keeps_kernels: bool) -> bool:
    """Whether kernels of the program that is being lowered are compiled ahead.

    They are where it is lowered for this machine's GPUs alone, which has cores to spare, and where a kernel that is
    lowered will be compiled: not where JAX keeps programs from one process to the next, which are lowered to find them,
    unless kernels are kept beside them (`kept_kernels`), so that only new ones are lowered.
    """
    return (
        jax.default_backend() == "gpu"
        and lowers_for_cuda_alone(module_context)
        and _cores() >= _MIN_CORES
        and (keeps_kernels or jax.config.jax_compilation_cache_dir is None)
    )


def lowers_for_cuda_alone(module_context: Any) -> bool:
    """Whether a program is lowered for CUDA and nothing else, to be compiled by this process."""
    return tuple(module_context.platforms) == ("cuda",) and not module_context.lowering_parameters.for_export


def compiled_ahead(function: Callable[..., Any], avals: Sequence[Any]) -> export.Exported:
    """`lowered`, while a thread begins to compile it."""
    exported = lowered(function, avals)
    _threads().submit(_compile, exported)
    return exported


def lowered(function: Callable[..., Any], avals: Sequence[Any]) -> export.Exported:
    """The function, lowered for CUDA once and for all: the same wherever it is called, on whichever mesh.

    Args:
      function: of arrays, to a list of arrays.
      avals: the arrays' shapes and dtypes.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*structs)
    return dataclasses.replace(exported, nr_devices=1)  # which JAX takes from the concrete mesh


def _compile(exported):
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
    jax.jit(exported.call).lower(*structs).compile()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _threads() -> Executor:
    return ThreadPoolExecutor(_cores(), thread_name_prefix="kernel")
