"""LeNet-5 on 28 x 28 images, and what its backward keeps in memory.

The backward is a chain of 21 steps, each an op of this library: softmax_cross_entropy; weights, bias and input of fc3,
the ReLU mask of fc2; weights, bias and input of fc2, the ReLU mask of fc1; weights, bias and input of fc1; max-pool 2,
ReLU 2; weights, bias and input of conv2; max-pool 1, ReLU 1; weights and bias of conv1. The gradient in the images is
a 22nd that is computed only when asked for.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxbp.implementations import Implementation
from jaxbp.nn.layers import Conv2d, Linear
from jaxbp.ops.activations import relu
from jaxbp.ops.losses import softmax_cross_entropy
from jaxbp.ops.max_pool2d import max_pool2d, max_pool2d_with_indices
from jaxbp.ops.shapes import flatten


class LeNet(nnx.Module):
    """`1x28x28 -> conv 6@5x5 -> ReLU -> pool 2 -> conv 16@5x5 -> ReLU -> pool 2 -> 256 -> 120 -> 84 -> 10`.

    Valid convolutions, ReLU between the dense layers, 44,426 parameters.

    Args:
      implementation: of every op, as in `jaxbp.conv2d`.
      dtype: of the computation; the parameters are float32.
      rngs: draws the parameters from its stream `params`.

    Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", 1998, with ReLU and max-pooling.
    """

    def __init__(self, *, implementation: Implementation = None, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        options = dict(implementation=implementation, dtype=dtype, rngs=rngs)
        self.conv1 = Conv2d(1, 6, (5, 5), **options)
        self.conv2 = Conv2d(6, 16, (5, 5), **options)
        self.fc1 = Linear(256, 120, **options)
        self.fc2 = Linear(120, 84, **options)
        self.fc3 = Linear(84, 10, **options)
        self.implementation = implementation

    def __call__(self, images: Float[Array, "batch 1 28 28"]) -> Float[Array, "batch 10"]:
        """The logits."""
        if images.ndim != 4 or images.shape[1:] != (1, 28, 28):
            raise ValueError(f"LeNet: images has shape {images.shape}; wants (batch, 1, 28, 28)")
        implementation = self.implementation
        x = max_pool2d(relu(self.conv1(images), implementation=implementation), 2, implementation=implementation)
        x = max_pool2d(relu(self.conv2(x), implementation=implementation), 2, implementation=implementation)
        x = relu(self.fc1(flatten(x)), implementation=implementation)
        x = relu(self.fc2(x), implementation=implementation)
        return self.fc3(x)


def lenet_saved_tensors(
    model: LeNet, images: Float[Array, "batch 1 28 28"], labels: Int[Array, "batch"]
) -> tuple[Float[Array, "batch"], dict[str, Array]]:
    """LeNet's forward and loss, with every tensor its backward needs, by name.

    These are the inputs of the five layers with parameters, the four values before a ReLU, the two maps of where the
    pools' maxima lay, and the probabilities.

    Args:
      model: a LeNet.
      images, labels: a batch and its classes.

    Returns:
      (loss, saved): a loss an example, and name -> tensor in the order of the forward.
    """
    implementation, saved = model.implementation, {}
    x = images.astype(model.conv1.dtype)
    for layer, pool in (("conv1", "pool1"), ("conv2", "pool2")):
        saved[f"{layer}.input"] = x
        saved[f"{layer}.pre_relu"] = x = getattr(model, layer)(x)
        x, indices = max_pool2d_with_indices(relu(x, implementation=implementation), 2, implementation=implementation)
        saved[f"{pool}.indices"] = indices
    x = flatten(x)
    for layer in ("fc1", "fc2"):
        saved[f"{layer}.input"] = x
        saved[f"{layer}.pre_relu"] = x = getattr(model, layer)(x)
        x = relu(x, implementation=implementation)
    saved["fc3.input"] = x
    logits = model.fc3(x)
    saved["probabilities"] = jax.nn.softmax(logits.astype(jnp.float32)).astype(logits.dtype)
    return softmax_cross_entropy(logits, labels, implementation=implementation), saved


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """A tensor of LeNet's training step: what it is for, its shape and dtype, and its size in bytes."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return jax.ShapeDtypeStruct(self.shape, self.dtype).size * jnp.dtype(self.dtype).itemsize


def lenet_memory_table(batch: int, dtype: DTypeLike = jnp.float32) -> list[MemoryRow]:
    """What a training step of LeNet keeps and produces, for a batch, in bytes.

    Args:
      batch: the number of images.
      dtype: of the computation.

    Returns:
      A row a tensor, of three kinds: "saved" (forward for backward), "activation gradient" (what a step of the chain
      hands to the next: 335,936 values at batch 32) and "parameter gradient" (44,426 values).

    Raises:
      ValueError: a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"lenet_memory_table: batch is {batch}; wants at least 1")
    model = nnx.eval_shape(lambda: LeNet(dtype=dtype, rngs=nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((batch, 1, 28, 28), dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    graph, state = nnx.split(model)
    _, saved = jax.eval_shape(
        lambda state, images, labels: lenet_saved_tensors(nnx.merge(graph, state), images, labels),
        state,
        images,
        labels,
    )
    gradients = {
        "logits": (batch, 10),
        "fc3.input": (batch, 84),
        "fc2.pre_relu": (batch, 84),
        "fc2.input": (batch, 120),
        "fc1.pre_relu": (batch, 120),
        "fc1.input": (batch, 256),
        "pool2.input": (batch, 16, 8, 8),
        "conv2.pre_relu": (batch, 16, 8, 8),
        "conv2.input": (batch, 6, 12, 12),
        "pool1.input": (batch, 6, 24, 24),
        "conv1.pre_relu": (batch, 6, 24, 24),
    }
    name = jnp.dtype(dtype).name
    return [
        *(MemoryRow("saved", key, a.shape, a.dtype.name) for key, a in saved.items()),
        *(MemoryRow("activation gradient", key, shape, name) for key, shape in gradients.items()),
        *(
            MemoryRow("parameter gradient", ".".join(map(str, path)), leaf.shape, leaf.dtype.name)
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
        ),
    ]
