"""Mosaic GPU, imported when a kernel first uses one of its names, because the import is slow. Kernels use `plgpu` only
within functions."""

import contextlib
import functools
import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax.experimental.mosaic.gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:

    class _Module(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    mgpu = _Module("jax.experimental.mosaic.gpu")
    plgpu = _Module("jax.experimental.pallas.mosaic_gpu")

__all__ = ["mgpu", "plgpu", "query_ptxas_once"]


@functools.cache
def query_ptxas_once() -> None:
    """Let Mosaic GPU keep the version of ptxas. Otherwise, it starts ptxas, for about 10 ms, whenever it lowers a
    conversion from or to at most 8 bits, such as the predicate of `pl.when`."""
    with contextlib.suppress(ImportError, AttributeError):  # without JAX's plugin for CUDA, there is no version
        library = importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array").mgpu_lib._mosaic_gpu_ext
        library._get_ptxas_isa_version = functools.cache(library._get_ptxas_isa_version)
