from typing import Any

from flax import nnx
from jax import Array

from jaxbp.nnx._layer import Layer
from jaxbp.nnx.linear import Linear
from jaxbp.ops.dense.linear import linear
from jaxbp.pairing import Implementation


class LoRA(Layer, nnx.LoRA):
    """`flax.nnx.LoRA`, computed by `jaxbp.linear`: `y = x lora_a lora_b + base_module(x)`."""

    def __call__(self, x: Any, **options: Any) -> Array:
        arrays = self._promoted(x, "lora_a", "lora_b")
        if self._needs_flax(*arrays) or not (self.base_module is None or callable(self.base_module)):
            return super().__call__(x, **options)
        y = _low_rank(*arrays, self.implementation)
        # Flax, too, gives the base module x in the dtype of the computation.
        return y if self.base_module is None else y + self.base_module(arrays[0], **options)


class LoRALinear(Layer, nnx.LoRALinear):
    """`flax.nnx.LoRALinear`, computed by `jaxbp.linear`: `y = x kernel + bias + x lora_a lora_b`."""

    flax_only = Linear.flax_only

    def __call__(self, x: Any, out_sharding: Any = None) -> Array:
        inputs, kernel, bias = self._promoted(x, "kernel", "bias")
        of_lora = self.lora.promote_dtype((x, self.lora.lora_a[...], self.lora.lora_b[...]), dtype=self.lora.dtype)
        is_sharded = out_sharding is not None
        if self._needs_flax(inputs, kernel, bias, out_sharding=is_sharded) or self._needs_flax(*of_lora):
            return super().__call__(x, out_sharding)
        y = linear(inputs, kernel.T, bias, precision=self.precision, implementation=self.implementation)
        return y + _low_rank(*of_lora, self.implementation)


def _low_rank(x: Array, lora_a: Array, lora_b: Array, implementation: Implementation) -> Array:
    return linear(linear(x, lora_a.T, implementation=implementation), lora_b.T, implementation=implementation)
