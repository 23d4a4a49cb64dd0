from typing import Any

from flax import nnx
from jax import Array

from jaxbp.nnx._layer import Layer
from jaxbp.ops.pointwise.dropout import dropout


class Dropout(Layer, nnx.Dropout):
    """`flax.nnx.Dropout`, computed by `jaxbp.dropout`. In 32-bit mode, it drops the same elements as Flax's layer."""

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Array:
        deterministic = self.deterministic if deterministic is None else deterministic
        rngs = self.rngs if rngs is None else rngs
        # Flax raises the errors for missing arguments.
        has_key = isinstance(rngs, nnx.Rngs | nnx.RngStream | Array)
        if deterministic is None or deterministic or self.rate in (0, 1) or not has_key or self._needs_flax(inputs):
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs[self.rng_collection]
        key = rngs if isinstance(rngs, Array) else rngs()
        return dropout(inputs, key, self.rate, self.broadcast_dims, implementation=self.implementation)
