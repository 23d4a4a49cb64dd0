"""CUDA's compilers, without a GPU: whether they are installed, and the number of kernels that they compile."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.ahead_of_time import gpus
from pallas_kernels.core.device import Device

# Autotuning would run programs.
_OPTIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_gpu_disable_gpuasm_optimizations": True,
}


def missing() -> str | None:
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "JAX's plugin for CUDA: pip install -e '.[cuda13-compiler]'"
    nvidia = importlib.util.find_spec("nvidia")
    folders = nvidia.submodule_search_locations if nvidia else ()
    if not any(Path(folder, "cu13", "bin", "ptxas").exists() for folder in folders) and shutil.which("ptxas") is None:
        return "ptxas: pip install -e '.[cuda13-compiler]'"
    return None


def kernels_compiled(device: Device, function: Callable, *structs: Any) -> int:
    """Return the number of compiled kernels. A program without kernels is only lowered."""
    with gpus(device) as (gpu,):
        sharding = jax.sharding.SingleDeviceSharding(gpu)
        structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), structs)
        lowered = jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",))
        if "@mosaic_gpu" not in lowered.as_text():
            return 0
        return lowered.compile(compiler_options=_OPTIONS).as_text().count('custom_call_target="mosaic_gpu')
