"""Dense layers and the embedding."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxbp.nnx._layer import Layer
from jaxbp.ops.dense.embedding import embedding
from jaxbp.ops.dense.linear import linear


class Linear(Layer, nnx.Linear):
    """`flax.nnx.Linear` on `jaxbp.linear`, `y = x kernel + bias`.

    `kernel` has the shape `(in_features, out_features)`. If `dot_general`, `preferred_element_type`, or `out_sharding`
    is given, Flax computes the call.
    """

    def _only_in_flax(self) -> dict[str, bool]:
        return {
            "dot_general": self.dot_general is not lax.dot_general,
            "preferred_element_type": self.preferred_element_type is not None,
        }

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        x, kernel, bias = self._promoted(inputs)
        if self._needs_flax(x, kernel, bias, out_sharding=out_sharding is not None):
            return super().__call__(inputs, out_sharding)
        return linear(x, kernel.T, bias, precision=self.precision, implementation=self.implementation)

    def _promoted(self, inputs: Any) -> tuple[Array, Array, Array | None]:
        """Return the inputs, the kernel, and the bias, in the dtype of the computation."""
        bias = None if self.bias is None else self.bias[...]
        return self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)


class Embed(Layer, nnx.Embed):
    """`flax.nnx.Embed` on `jaxbp.embedding`, `y = embedding[x]`.

    `embedding` has the shape `(num_embeddings, features)`. `attend` multiplies by it with `jaxbp.linear`, without a
    transpose. If `out_sharding` is given, or if there is only one embedding, Flax computes the call.
    """

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        is_integer = jnp.issubdtype(inputs.dtype, jnp.integer)  # otherwise, Flax raises an error
        if self._needs_flax(table, out_sharding=out_sharding is not None) or self.num_embeddings == 1 or not is_integer:
            return super().__call__(inputs, out_sharding)
        return embedding(inputs, table, implementation=self.implementation)

    def attend(self, query: Any, out_sharding: Any = None) -> Array:
        x, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        if self._needs_flax(x, table, out_sharding=out_sharding is not None):
            return super().attend(query, out_sharding)
        return linear(x, table, implementation=self.implementation)
