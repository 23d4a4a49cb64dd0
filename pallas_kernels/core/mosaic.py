"""Mosaic GPU, imported when a kernel first uses one of its names, because the import is slow. Kernels use `plgpu` only
within functions."""

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

__all__ = ["mgpu", "plgpu"]
