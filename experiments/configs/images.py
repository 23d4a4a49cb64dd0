"""Experiments on images: the base class, LeNet, and the MLP-Mixer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

import jaxbp
from experiments.configs.base import Augment, Loss, Range, Recipe, TrainingConfig
from experiments.data import augmentation, datasets
from experiments.data.datasets import Dataset, DatasetName
from jaxbp.nn import LeNet, Mixer

ImplementationName = Literal["pallas", "xla", "autodiff"]

RECIPES: dict[DatasetName, Recipe] = {
    "digits": Recipe(batch_size=16, epochs=20, learning_rate=5e-3),
    "mnist": Recipe(batch_size=64, epochs=12, learning_rate=3e-3),
    "fashion_mnist": Recipe(batch_size=64, epochs=12, learning_rate=3e-3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainingConfig):
    datasets: ClassVar[Sequence[DatasetName]] = ("digits", "mnist", "fashion_mnist")

    dataset: DatasetName = "digits"
    """mnist and fashion_mnist are downloaded if needed, and cifar10 must be in data_dir."""
    data_dir: Path | None = None
    """Folder of the dataset's files. None: a cache folder."""
    implementation: ImplementationName | None = None
    """Implementation of the backward passes. None: the fastest that the platform supports."""
    shift: Annotated[int, Range()] = 0
    """Largest random shift of training images in each direction, in pixels."""
    distortion: Annotated[float, Range()] = 0.0
    """Standard deviation of smooth random distortions of training images, in pixels."""

    def __post_init__(self):
        self._check_choice("dataset", self.datasets)
        super().__post_init__()
        side = min(datasets.IMAGE_SHAPES[self.dataset][1:])
        self._check("shift", self.shift < side, f"a whole number from 0 to {side - 1}")
        self._check("distortion", self.distortion < side, f"a number of pixels from 0, below {side}")

    def defaults(self) -> Mapping[str, Any]:
        return RECIPES[self.dataset]._asdict()

    def load(self) -> Dataset:
        return datasets.load(self.dataset, self.data_dir)

    def augmentation(self) -> Augment | None:
        return self._augmented if self.shift or self.distortion else None

    def _augmented(self, key, images, step):
        if self.distortion:
            images = augmentation.distort(jax.random.fold_in(key, 1), images, self.distortion)
        return augmentation.shift(key, images, self.shift) if self.shift else images


def classification_loss(
    model: Callable[[Array], Array],
    images: Float[Array, "batch channels height width"],
    labels: Int[Array, " batch"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, " batch"], Int[Array, " batch"]]:
    """Return each example's softmax cross-entropy, computed in float32, and its most likely class."""
    logits = model(images).astype(jnp.float32)
    return jaxbp.softmax_cross_entropy(logits, labels, implementation=implementation), jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeNetConfig(ImageConfig):
    """LeNet-5 on images of 28 x 28 pixels."""

    name: ClassVar[str] = "lenet"

    fused: bool = True
    """Compute convolution, ReLU, and max-pooling as one op, instead of as three ops."""

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = LeNet(
            fused=self.fused, implementation=self.implementation, dtype=self.policy.compute_dtype, rngs=nnx.Rngs(key)
        )
        return model, LeNet.loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ImageConfig):
    """MLP-Mixer on images of 28 x 28 pixels."""

    name: ClassVar[str] = "mixer"

    patch: Annotated[int, Range(1)] = 7
    """Height and width of a patch, a divisor of 28."""
    channels: Annotated[int, Range(1)] = 128
    """Number of channels per patch."""
    blocks: Annotated[int, Range(1)] = 2
    """Number of blocks. Each mixes the patches per channel, then the channels per patch."""

    def __post_init__(self):
        super().__post_init__()
        self._check("patch", 28 % self.patch == 0, "a divisor of 28, the height and width of an image")

    def defaults(self) -> Mapping[str, Any]:
        return {**super().defaults(), "learning_rate": 1e-3}

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = Mixer(
            patch=self.patch,
            channels=self.channels,
            blocks=self.blocks,
            implementation=self.implementation,
            dtype=self.policy.compute_dtype,
            rngs=nnx.Rngs(key),
        )
        return model, functools.partial(classification_loss, implementation=self.implementation)
