"""Compile kernels while the surrounding program is still being lowered.

XLA would otherwise compile them one after another, after lowering the whole program. It later finds the kernels in
Mosaic GPU's cache, or raises the same errors.
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
_MIN_CORES = 4
"""Compiling ahead saves no time on two CPU cores: docs/lab/2026-11-24-compile.md."""


def compiles_ahead(module_context: Any) -> bool:
    return (
        jax.default_backend() == "gpu"
        and tuple(module_context.platforms) == ("cuda",)
        and not module_context.lowering_parameters.for_export
        and _cores() >= _MIN_CORES
        # A persistent cache may already have the program.
        and jax.config.jax_compilation_cache_dir is None
    )


def compiled_ahead(function: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """Lower `function` for CUDA and arrays like `avals`. Return a callable that inserts the lowered code into the
    surrounding program. While JAX lowers this program, a thread compiles the code."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
    # A kernel runs on one device, but JAX would take the mesh from the context.
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
