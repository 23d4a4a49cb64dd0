"""Compile for GPUs that are not present: XLA's plugin for CUDA accepts a description of a GPU.

Compile for one architecture per process, because Mosaic GPU caches kernels without their architecture.
"""

import contextlib
from collections.abc import Iterator, Sequence

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


@contextlib.contextmanager
def gpus(device: Device, count: int = 1) -> Iterator[Sequence[jax.Device]]:
    major, minor = device.capability
    target = _TARGET.format(device=device, major=major, minor=minor, shared_per_core=device.shared_bytes + 1024)
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}")
    # Mosaic GPU would read the size of shared memory from this machine's GPU.
    memory = artificial_shared_memory_limit(device.shared_bytes)
    with targeting(device), jax.default_device(topology.devices[0]), memory:
        yield topology.devices
