"""LeNet-5 on 28 x 28 images, and a table of the tensors in a training step (docs/runs.md)."""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import wide
from jaxbp.ops.conv.conv2d import conv2d
from jaxbp.ops.conv.conv2d_relu_max_pool2d import conv2d_relu_max_pool2d_with_indices
from jaxbp.ops.conv.max_pool2d import max_pool2d_with_indices
from jaxbp.ops.dense import mlp_softmax_cross_entropy as mlp
from jaxbp.ops.dense.linear import linear
from jaxbp.ops.dense.softmax_cross_entropy import softmax_cross_entropy
from jaxbp.ops.pointwise.activations import relu
from jaxbp.ops.pointwise.shapes import flatten
from jaxbp.pairing import Implementation

Keep = Callable[[str, Array], None]


class _Affine(nnx.Module):
    """Base of layers with the parameters `weight` and `bias`, for which axis 0 is the outputs.

    The initial parameters are uniform within ±1/sqrt(number of inputs per output). Inputs and parameters are cast to
    `dtype`.
    """

    def __init__(
        self, *shape: int, implementation: Implementation = None, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        bound = math.prod(shape[1:]) ** -0.5
        self.weight = nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
        self.bias = nnx.Param(jax.random.uniform(rngs.params(), shape[:1], jnp.float32, -bound, bound))
        self.implementation, self.dtype = implementation, dtype

    def parameters(self) -> tuple[Array, Array]:
        return self.weight[...].astype(self.dtype), self.bias[...].astype(self.dtype)


class Conv2d(_Affine):
    """`jaxbp.conv2d` with its parameters, `weight (out_channels, in_channels, *filter_size)` and `bias`."""

    def __init__(self, in_channels: int, out_channels: int, filter_size: tuple[int, int], **options: Any):
        super().__init__(out_channels, in_channels, *filter_size, **options)

    def __call__(self, x: Float[AnyArray, "batch in_channels height width"]) -> Float[Array, "batch out_channels h w"]:
        return conv2d(x.astype(self.dtype), *self.parameters(), implementation=self.implementation)


class Linear(_Affine):
    """`jaxbp.linear` with its parameters, `weight (out_features, in_features)` and `bias`."""

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(out_features, in_features, **options)

    def __call__(self, x: Float[AnyArray, "*batch in_features"]) -> Float[Array, "*batch out_features"]:
        return linear(x.astype(self.dtype), *self.parameters(), implementation=self.implementation)


class LeNet(nnx.Module):
    """`1x28x28 -> conv 6@5x5 -> ReLU -> pool 2 -> conv 16@5x5 -> ReLU -> pool 2 -> 256 -> 120 -> 84 -> classes`.

    The convolutions have no padding. ReLU follows each dense layer except the last.

    Args:
      classes: the number of logits.
      fused: whether convolution, ReLU, and pool are one op, which keeps one byte per pooling window for the backward.
      dtype: the dtype of the computation. The parameters are float32.

    Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", 1998, with ReLU and max-pooling.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        fused: bool = True,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        classes = checks.count("LeNet", "classes", classes)
        options = dict(implementation=implementation, dtype=dtype, rngs=rngs)
        self.conv1 = Conv2d(1, 6, (5, 5), **options)
        self.conv2 = Conv2d(6, 16, (5, 5), **options)
        self.fc1 = Linear(256, 120, **options)
        self.fc2 = Linear(120, 84, **options)
        self.fc3 = Linear(84, classes, **options)
        self.fused, self.implementation, self.dtype = fused, implementation, dtype

    def __call__(self, images: Float[AnyArray, "batch 1 28 28"]) -> Float[Array, "batch classes"]:
        """Return the logits."""
        return self._logits(self._features(images))

    def loss(
        self, images: Float[AnyArray, "batch 1 28 28"], labels: Int[AnyArray, "batch"]
    ) -> tuple[Float[Array, "batch"], Int[Array, "batch"]]:
        """Return the softmax cross-entropy, in float32 or wider, and the most likely class of each image.

        The dense layers and the loss are one op if the model is fused and not in half precision.
        """
        x = self._features(images)
        if self._dense_fused:
            return mlp.mlp_softmax_cross_entropy_with_classes(
                x, labels, *self._dense_layers(), implementation=self.implementation
            )
        logits = self._logits(x)
        logits = logits.astype(wide(logits.dtype))
        loss = softmax_cross_entropy(logits, labels, implementation=self.implementation)
        return loss, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    @property
    def _dense_fused(self) -> bool:
        return self.fused and self.dtype == wide(self.dtype)

    def _dense_layers(self) -> list[Array]:
        return [a for fc in (self.fc1, self.fc2, self.fc3) for a in fc.parameters()]

    def _features(self, images: Array, keep: Keep = lambda name, value: None) -> Array:
        if images.ndim != 4 or images.shape[1:] != (1, 28, 28):
            raise ValueError(f"LeNet: images has shape {images.shape}; wants (batch, 1, 28, 28)")
        implementation = self.implementation
        x = images.astype(self.dtype)
        for i, conv in enumerate((self.conv1, self.conv2), start=1):
            keep(f"conv{i}.input", x)
            if self.fused:
                x, indices = conv2d_relu_max_pool2d_with_indices(
                    x, *conv.parameters(), window=2, implementation=implementation
                )
            else:
                x = relu(conv(x), implementation=implementation)
                keep(f"pool{i}.input", x)  # the backward of ReLU reads it
                x, indices = max_pool2d_with_indices(x, 2, implementation=implementation)
            keep(f"pool{i}.indices", indices)
        return flatten(x)

    def _logits(self, x: Array, keep: Keep = lambda name, value: None) -> Array:
        for i, fc in enumerate((self.fc1, self.fc2), start=1):
            keep(f"fc{i}.input", x)
            x = relu(fc(x), implementation=self.implementation)
        keep("fc3.input", x)
        return self.fc3(x)


def lenet_saved_tensors(
    model: LeNet, images: Float[AnyArray, "batch 1 28 28"], labels: Int[AnyArray, "batch"]
) -> tuple[Float[Array, "batch"], dict[str, Array]]:
    """Return LeNet's loss, and the tensors that its backward needs, in the order of the forward.

    The tensors are the inputs of the five layers with parameters, the positions of both pools' maxima, the logits, and,
    if the model is not fused, the pools' inputs.
    """
    saved = {}
    x = model._features(images, saved.__setitem__)
    if model._dense_fused:
        layers = model._dense_layers()
        loss, logits, hidden = mlp.rows(x, labels, layers[::2], layers[1::2])
        return loss, saved | dict(
            zip(("fc1.input", "fc2.input", "fc3.input", "logits"), (x, *hidden, logits), strict=True)
        )
    logits = model._logits(x, saved.__setitem__)
    saved["logits"] = logits
    return softmax_cross_entropy(logits, labels, implementation=model.implementation), saved


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """A tensor of LeNet's training step. `kind` is "saved", "activation gradient", or "parameter gradient"."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return jax.ShapeDtypeStruct(self.shape, self.dtype).size * jnp.dtype(self.dtype).itemsize


def lenet_memory_table(batch: int, dtype: DTypeLike = jnp.float32, *, fused: bool = False) -> list[MemoryRow]:
    """List the tensors that a training step of LeNet keeps from the forward to the backward, and its gradients.

    In half precision, the backward also needs a copy of each parameter, which is not listed.

    Raises:
      ValueError: the batch is below 1.
    """
    if batch < 1:
        raise ValueError(f"lenet_memory_table: batch is {batch}; wants at least 1")
    model = nnx.eval_shape(lambda: LeNet(fused=fused, dtype=dtype, rngs=nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((batch, 1, 28, 28), dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    # JAX sorts the keys of other dicts.
    saved_tensors = lambda *args: collections.OrderedDict(lenet_saved_tensors(*args)[1])  # noqa: E731
    saved = nnx.eval_shape(saved_tensors, model, images, labels)
    # Gradients between the parts of a fused op do not exist in memory.
    before_relu = {"fc3.input": "fc2", "fc2.input": "fc1", "pool2.input": "conv2", "pool1.input": "conv1"}
    gradients = {}
    for key, a in reversed(saved.items()):
        is_made = key.endswith(("logits", ".input")) and key != "conv1.input"
        if is_made and not (model._dense_fused and key in ("fc3.input", "fc2.input")):
            gradients[key] = a.shape
        if key in before_relu:
            gradients[f"{before_relu[key]}.pre_relu"] = a.shape
    name = jnp.dtype(dtype).name
    return [
        *(MemoryRow("saved", key, a.shape, a.dtype.name) for key, a in saved.items()),
        *(MemoryRow("activation gradient", key, shape, name) for key, shape in gradients.items()),
        *(
            MemoryRow("parameter gradient", ".".join(map(str, path)), leaf.shape, leaf.dtype.name)
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
        ),
    ]
