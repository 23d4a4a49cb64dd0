from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxbp.common import checks
from jaxbp.nnx._layer import Layer
from jaxbp.ops.dense.embedding import embedding
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.dense.linear_softmax_cross_entropy import Reduction, linear_softmax_cross_entropy


class Linear(Layer, nnx.Linear):
    """`flax.nnx.Linear`, computed by `jaxbp.linear`: `y = x @ kernel + bias`."""

    flax_only = (("dot_general", lax.dot_general), ("preferred_element_type", None))

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        x, kernel, bias = self._promoted(inputs, "kernel", "bias")
        if self._needs_flax(x, kernel, bias, out_sharding=out_sharding is not None):
            return super().__call__(inputs, out_sharding)
        return linear(x, kernel.T, bias, precision=self.precision, implementation=self.implementation)


class LinearSoftmaxCrossEntropy(Linear):
    """`flax.nnx.Linear`, and the softmax cross-entropy of its logits by `jaxbp.linear_softmax_cross_entropy`.

    A call returns the logits, and `loss` the loss without storing all logits. If the weights are tied to an `Embed`,
    call the op instead (docs/nnx.md).

    Args:
      label_smoothing, z_loss, softcap, reduction: as in `jaxbp.linear_softmax_cross_entropy`.

    Raises:
      NotImplementedError: an option of the constructor exists only in Flax, such as `dot_general`.
    """

    def __init__(
        self,
        *args: Any,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        **options: Any,
    ):
        super().__init__(*args, **options)
        if used := [name for name, is_used in self._only_in_flax().items() if is_used]:
            raise NotImplementedError(
                f"LinearSoftmaxCrossEntropy: {', '.join(used)} is not the default value; wants the default value, "
                "because the loss does not use this argument"
            )
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.softcap, self.reduction = checks.softcap("LinearSoftmaxCrossEntropy", softcap), reduction

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Return the logits."""
        logits = super().__call__(inputs, out_sharding)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def loss(self, inputs: Any, labels: Any, *, where: Any = None) -> Array:
        """Return the loss for inputs `(..., in_features)`, in float32, or in the dtype of the computation if it is
        wider.

        `labels`, `where`, and the errors are as in `jaxbp.linear_softmax_cross_entropy`.
        """
        x, kernel, bias = self._promoted(inputs, "kernel", "bias")
        return linear_softmax_cross_entropy(
            x,
            kernel.T,
            labels,
            bias,
            where=where,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            precision=self.precision,
            implementation=self.implementation,
        )


class Embed(Layer, nnx.Embed):
    """`flax.nnx.Embed`, computed by `jaxbp.embedding`: `y = embedding[x]`. `attend` calls `jaxbp.linear`."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        is_integer = jnp.issubdtype(inputs.dtype, jnp.integer)  # otherwise, Flax raises an error
        if self._needs_flax(table, out_sharding=out_sharding is not None) or self.num_embeddings == 1 or not is_integer:
            return super().__call__(inputs, out_sharding)
        return embedding(inputs, table, implementation=self.implementation)

    def attend(self, query: Any, out_sharding: Any = None) -> Array:
        x, table = self._promoted(query, "embedding")
        if self._needs_flax(x, table, out_sharding=out_sharding is not None):
            return super().attend(query, out_sharding)
        return linear(x, table, implementation=self.implementation)
