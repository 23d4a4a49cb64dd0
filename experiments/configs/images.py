"""Experiments on images: the base class and LeNet."""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

import jaxbp
from experiments.configs.base import Loss, Range, Recipe, TrainingConfig
from experiments.data import augmentation, datasets, user_data
from experiments.data.datasets import Dataset, DatasetName
from experiments.output.errors import UserError
from experiments.output.files import OptionalPath
from jaxbp.nn import LeNet
from jaxbp.training.loop import Augment

ImplementationName = Literal["pallas", "xla", "autodiff"]

RECIPES: dict[DatasetName, Recipe] = {
    "digits": Recipe(batch_size=16, epochs=20, learning_rate=5e-3),
    "mnist": Recipe(batch_size=64, epochs=12, learning_rate=3e-3),
    "fashion_mnist": Recipe(batch_size=64, epochs=12, learning_rate=3e-3),
}
EXAMPLES: Mapping[DatasetName, int] = {"digits": 1437, "mnist": 60_000}
"""Numbers of training examples of the datasets whose recipes `ImageConfig.data` gets."""
LARGE = 10_000
"""From this number of training examples on, `ImageConfig.data` gets the recipe of MNIST."""
LEAST_BATCH, LEAST_STEPS_PER_EPOCH, MOST_EPOCHS = 8, 20, 300
"""Limits of the default batch size and epochs of `ImageConfig.data`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainingConfig):
    image_shape: ClassVar[tuple[int, int, int] | None] = None
    """The only shape of images that the model takes. None: every shape."""

    dataset: Literal["digits", "mnist", "fashion_mnist"] | None = None
    """mnist and fashion_mnist are downloaded if needed. None: digits, or the file data."""
    data_dir: OptionalPath = None
    """Folder of the dataset's files. None: a cache folder."""
    data: OptionalPath = None
    """NPZ file with a dataset of your own, as docs/own_data.md describes."""
    shape: tyro.conf.Suppress[tuple[int, ...] | None] = None
    """Shape of an example. None: as in the dataset."""
    classes: Annotated[int | None, Range(2)] = None
    """Number of classes. None: as in the dataset, or one more than the largest label in data."""
    implementation: ImplementationName | None = None
    """Implementation of the backward passes. None: the fastest that the platform supports."""
    shift: Annotated[int, Range()] = 0
    """Largest random shift of training images in each direction, in pixels."""
    distortion: Annotated[float, Range()] = 0.0
    """Standard deviation of smooth random distortions of training images, in pixels."""
    flip: bool = False
    """Mirror each training image left to right with probability 1/2."""

    def __post_init__(self):
        if self.data is None:
            self._fill({"dataset": "digits"})
        else:
            self._check("dataset", self.dataset is None, f"no name of a dataset, because data is {self.data}")
            self._check("data_dir", self.data_dir is None, f"no folder, because data is {self.data}")
        super().__post_init__()
        if self.dataset is not None:
            for field, value in self._named().items():
                self._check(field, getattr(self, field) == value, f"{value}, as in {self.dataset}")
        self._check_shape()
        if self.has_images:
            side = min(self.shape[1:])
            self._check("shift", self.shift < side, f"a whole number from 0 to {side - 1}")
            self._check("distortion", self.distortion < side, f"a number of pixels from 0, below {side}")
        else:
            for field in ("shift", "distortion", "flip"):
                value = getattr(self, field)
                self._check(field, not value, f"{type(value)()}, because the data are no images")

    @property
    def has_images(self) -> bool:
        return len(self.shape) == 3

    @property
    def data_name(self) -> str:
        return self.dataset or self.data.name

    def defaults(self) -> Mapping[str, Any]:
        """Return the default settings, which depend on the data.

        If `data` and `shape` are set, the config is from a saved run and has all settings. The result is then empty.
        """
        if self.data is None:
            return self._named() | self.recipe(self.dataset)
        if self.shape is not None:
            for name, value in {"classes": 2, **self.recipe("digits")}.items():
                self._check(name, value is None or getattr(self, name) is not None, "a value, as in every saved run")
            return {}
        dataset = self._read()
        examples = len(dataset.train_images)
        like: DatasetName = "digits" if examples < LARGE else "mnist"
        recipe = self.recipe(like)
        most = max(LEAST_BATCH, examples // LEAST_STEPS_PER_EPOCH)
        batch_size = self.batch_size or min(recipe["batch_size"], most, examples)
        steps = recipe["epochs"] * (EXAMPLES[like] // recipe["batch_size"])
        return recipe | {
            **self.data_settings(dataset),
            "batch_size": batch_size,
            "epochs": min(-(-steps // max(examples // batch_size, 1)), MOST_EPOCHS),
        }

    def recipe(self, dataset: DatasetName) -> dict[str, Any]:
        """Return the default settings that the data do not determine. They suit `dataset`, and other data about as
        large."""
        return RECIPES[dataset]._asdict()

    def data_settings(self, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that the data determine. A saved run keeps them, and resumes only with data that have
        equal settings."""
        return {"shape": dataset.train_images.shape[1:], "classes": dataset.classes}

    def load(self) -> Dataset:
        if self.data is None:
            return datasets.load(self.dataset, self.data_dir)
        dataset = self._read()
        for name, found in self.data_settings(dataset).items():
            if found != (saved := getattr(self, name)):
                raise UserError(f"{self.data} has the {name} {reprlib.repr(found)}; wants {saved}, as in the run")
        return dataset

    def data_checksum(self, dataset: Dataset) -> str | None:
        # The digits are resized on the run's device, whose rounding differs between platforms.
        return None if self.dataset == "digits" else super().data_checksum(dataset)

    def augmentation(self) -> Augment | None:
        return self._augmented if self.shift or self.distortion or self.flip else None

    def _named(self) -> dict[str, Any]:
        return {"shape": datasets.IMAGE_SHAPES[self.dataset], "classes": datasets.CLASSES}

    def _read(self) -> Dataset:
        return user_data.read(self.data, None, self.classes, [".npz"])

    def _check_shape(self) -> None:
        wanted = self.image_shape or "channels, height, and width of images"
        if not self.has_images or self.image_shape not in (None, self.shape):
            raise UserError(f"{self.data} has examples of shape {self.shape}; wants {wanted}")

    def _augmented(self, key, images, step):
        if self.distortion:
            images = augmentation.distort(jax.random.fold_in(key, 1), images, self.distortion)
        if self.flip:
            images = augmentation.flip(jax.random.fold_in(key, 2), images)
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
    image_shape: ClassVar = (1, 28, 28)

    fused: bool = True
    """Compute convolution, ReLU, and max-pooling as one op, instead of as three ops."""

    @property
    def examples_per_device(self) -> int:
        # Two H200s took 320 us for 2 x 8192 examples, and one H200 about 435 us (docs/benchmarks/devices.md).
        return 8192

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = LeNet(
            classes=self.classes,
            fused=self.fused,
            implementation=self.implementation,
            dtype=self.policy.compute_dtype,
            rngs=nnx.Rngs(key),
        )
        return model, LeNet.loss
