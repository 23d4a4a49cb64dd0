"""The GPU that kernels are traced for. It need not be present, so any machine can lower kernels for CUDA."""

import contextlib
import ctypes
import dataclasses
import functools

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. `shared_bytes` is per CTA, and `registers` per multiprocessor."""

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    registers: int = 65536

    @property
    def runs_kernels(self) -> bool:
        return self.capability >= (9, 0)


HOPPER = Device("NVIDIA H200", (9, 0), 132, 232_448, 62_914_560)
BLACKWELL = Device("NVIDIA B200", (10, 0), 148, 232_448, 132_644_864)
BLACKWELL_RTX = Device("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 101_376, 134_217_728)
"""The H200's figures come from its driver, the others from XLA's target configurations."""

_SHARED_BYTES, _L2_BYTES, _REGISTERS = 97, 38, 82
"""`CUdevice_attribute` in cuda.h: `MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`, `L2_CACHE_SIZE`, and
`MAX_REGISTERS_PER_MULTIPROCESSOR`."""

# A context's value is part of jit's cache key.
_target_context = jax.make_user_context(None)


def targeting(device: Device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which kernels are traced, and default implementations selected, for `device`."""
    return _target_context(device)


def target() -> Device:
    return gpu() or HOPPER


def gpu() -> Device | None:
    if _target_context.value is not None:
        return _target_context.value
    device = _default_device()
    return _describe(device) if device.platform == "gpu" else None


def kernels_run() -> bool:
    device = gpu()
    return device is not None and device.runs_kernels


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


@functools.cache
def _describe(device: jax.Device) -> Device | None:
    try:
        major, minor = map(int, device.compute_capability.split("."))
    except (AttributeError, ValueError):  # no NVIDIA GPU
        return None
    return Device(
        kind=device.device_kind,
        capability=(major, minor),
        multiprocessors=device.core_count,
        shared_bytes=_attribute(device, _SHARED_BYTES, HOPPER.shared_bytes),
        l2_bytes=_attribute(device, _L2_BYTES, HOPPER.l2_bytes),
        registers=_attribute(device, _REGISTERS, HOPPER.registers),
    )


def _attribute(device: jax.Device, attribute: int, default: int) -> int:
    """Ask the CUDA driver, because JAX exposes only some attributes."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return default
    value = ctypes.c_int()
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device.local_hardware_id)
    return default if failed else value.value
