"""Compile for GPUs that are not present: XLA's plugin for CUDA accepts a description of a GPU.

Compile for one architecture per process, because Mosaic GPU caches kernels without their architecture.
"""

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

from pallas_kernels.core.device import Device, targeting

# XLA's cost model reads Hopper's sizes, which `Device` lacks.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  core_count: {device.multiprocessors}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {device.shared_bytes}
  shared_memory_per_core: {shared_per_core}
  l2_cache_size: {device.l2_bytes}
  registers_per_block_limit: {device.registers}
  registers_per_core_limit: {device.registers}
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  threads_per_warp: 32
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  name: "{device.kind}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device.kind}"
"""

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


@contextlib.contextmanager
def gpus(device: Device, count: int = 1) -> Iterator[Sequence[jax.Device]]:
    major, minor = device.capability
    target = _TARGET.format(device=device, major=major, minor=minor, shared_per_core=device.shared_bytes + 1024)
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}")
    # Mosaic GPU would read the size of shared memory from this machine's GPU.
    memory = artificial_shared_memory_limit(device.shared_bytes)
    with targeting(device), jax.default_device(topology.devices[0]), memory:
        yield topology.devices


def kernels_compiled(device: Device, function: Callable, *structs: Any) -> int:
    """Return the number of compiled kernels. A program without kernels is only lowered."""
    with gpus(device) as (gpu,):
        sharding = jax.sharding.SingleDeviceSharding(gpu)
        structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), structs)
        lowered = jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",))
        if "@mosaic_gpu" not in lowered.as_text():
            return 0
        return lowered.compile(compiler_options=_OPTIONS).as_text().count('custom_call_target="mosaic_gpu')
