"""A language model of bytes, trained on the standard library of Python or on text of your own."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from experiments.configs.base import Loss, Range, TrainingConfig
from experiments.configs.images import ImplementationName
from experiments.data import text
from experiments.data.datasets import Dataset
from experiments.output.files import OptionalPath
from jaxbp.nn import GPT

Preset = Literal["default", "small"]
PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "default": dict(
        layers=2,
        features=128,
        heads=4,
        context=128,
        batch_size=8,
        steps_per_epoch=600,
        epochs=4,
        learning_rate=4e-3,
        precision="float32",
    ),
    "small": dict(
        layers=8,
        features=512,
        heads=8,
        context=1024,
        batch_size=16,
        epochs=6,
        learning_rate=1e-3,
        precision="mixed_bfloat16",
    ),
}

TOKENS_PER_DEVICE = 32 * 1024
"""Two H200s took 68 ms for 2 x 32 rows of 1,024 tokens with GPT-2's 124M parameters, and one H200 about 121 ms
(docs/benchmarks/devices.md). Time and communication are both proportional to the number of parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TrainingConfig):
    """A language model of bytes: see docs/gpt.md."""

    name: ClassVar[str] = "gpt"
    examples: ClassVar[str] = "rows"
    curves: ClassVar[tuple[str, str]] = ("train", "validation")
    loss_name: ClassVar[str] = "bits/byte"
    target_accuracy: ClassVar[None] = None

    preset: Preset = "default"
    """Defaults of the settings that are None: for two CPU cores, or for one GPU."""
    text: OptionalPath = None
    """Text file of your own, or folder of text files. None: the standard library of Python."""
    layers: Annotated[int | None, Range(1)] = None
    """Number of blocks."""
    features: Annotated[int | None, Range(2)] = None
    """Width of the residual stream."""
    heads: Annotated[int | None, Range(1)] = None
    """Number of heads of attention. Each has an even number of features."""
    context: Annotated[int | None, Range(1)] = None
    """Number of bytes per row, the longest context."""
    steps_per_epoch: Annotated[int | None, Range(1)] = None
    """Most steps per epoch, on rows drawn at random. An epoch has at most all rows."""
    weight_decay: Annotated[float, Range()] = 0.1
    """Weight decay of AdamW. Each step multiplies it by the learning rate."""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] | None = None
    """Dtype of the computation. With mixed precision, parameters stay in float32."""
    tensor_parallel: Annotated[int, Range(1)] = 1
    """Number of devices that divide the heads, hidden layers, and vocabulary, a divisor of devices and heads."""
    checkpoint: bool = False
    """Recompute each block in the backward, which takes less memory and more time."""
    implementation: ImplementationName | None = None
    """Implementation of the backward passes. None: the fastest that the platform supports."""

    def __post_init__(self):
        super().__post_init__()
        divisor = f"a divisor of features, {self.features}, with an even quotient"
        self._check("heads", self.features % (2 * self.heads) == 0, divisor)
        divides = self.heads % self.tensor_parallel == 0 and 256 % self.tensor_parallel == 0
        self._check("tensor_parallel", divides, f"a divisor of heads, {self.heads}, and of the 256 bytes")

    @property
    def data_name(self) -> str:
        return "standard library" if self.text is None else self.text.name

    def defaults(self) -> Mapping[str, Any]:
        return PRESETS[self.preset]

    def load(self) -> Dataset:
        return text.load(self.text, self.context)

    @property
    def examples_per_device(self) -> int:
        return math.ceil(TOKENS_PER_DEVICE / self.context)

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = GPT(
            256,
            num_layers=self.layers,
            features=self.features,
            num_heads=self.heads,
            checkpoint=self.checkpoint,
            dtype=self.policy.compute_dtype,
            implementation=self.implementation,
            rngs=nnx.Rngs(key),
        )
        return model, mean_bits_per_byte

    def shardings(self, model: GPT, mesh: Mesh, axis: str, state: PyTree) -> PyTree[NamedSharding]:
        return model.shardings(mesh, axis, state)

    def evaluation(self, loss: Loss) -> Loss:
        return bits_per_byte


def bits_per_byte(
    model: GPT, inputs: Int[Array, "batch t"], targets: Int[Array, "batch t"]
) -> tuple[Float[Array, " batch"], None]:
    return jnp.mean(_bits(model, inputs, targets, reduction=None), axis=-1), None


def mean_bits_per_byte(
    model: GPT, inputs: Int[Array, "batch t"], targets: Int[Array, "batch t"]
) -> tuple[Float[Array, " batch"], None]:
    """Return the mean loss of the batch in bits, for each row.

    The mean over the rows is the same as for `bits_per_byte`, but the backward need not compute the logits again.
    """
    return jnp.broadcast_to(_bits(model, inputs, targets, reduction="mean"), len(inputs)), None


def _bits(model: GPT, inputs: Array, targets: Array, *, reduction: Literal["mean"] | None) -> Array:
    tokens, targets = inputs.astype(jnp.int32), targets.astype(jnp.int32)
    return model.loss(tokens, targets, text.segment_ids(tokens), reduction=reduction) / math.log(2)
