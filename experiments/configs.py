"""What can be trained, with which settings: one frozen dataclass an experiment.

A config also builds its model and loss, which is all that the training loop knows of either. To add an experiment,
subclass `TrainingConfig` (or `ImageConfig`, for one trained on an image dataset), write what it leaves open, and list
the class in `EXPERIMENTS`: the command line, the run directory and the loop then work with it as they are.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

import jaxbp
from experiments import datasets
from experiments.datasets import Dataset, DatasetName
from experiments.errors import UserError
from jaxbp.nn import LeNet, Mixer

Loss = Callable[[nnx.Module, Array, Array], tuple[Float[Array, " batch"], Array]]
"""`loss(model, inputs, targets) -> (loss of each example, predictions)`; the predictions compare with the targets."""

DTypeName = Literal["float32", "bfloat16", "float16"]
ImplementationName = Literal["pallas", "xla", "autodiff"]


class Recipe(NamedTuple):
    """How fast and how long to train, unless the user says otherwise."""

    batch_size: int
    epochs: int
    learning_rate: float


RECIPES: dict[DatasetName, Recipe] = {
    "digits": Recipe(batch_size=16, epochs=20, learning_rate=5e-3),
    "mnist": Recipe(batch_size=64, epochs=12, learning_rate=3e-3),
    "fashion_mnist": Recipe(batch_size=64, epochs=12, learning_rate=3e-3),
}

# Where the run lies and where the data came from change nothing about what it computes.
FIELDS_WITHOUT_EFFECT = frozenset({"run_dir", "resume", "data_dir"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings that every experiment shares.

    Raises:
      UserError: (a ValueError) for a value no run can have, naming the field, the value and what is wanted.
    """

    name: ClassVar[str]

    seed: int = 0
    """Seed of the initial parameters and of the order of the examples."""
    batch_size: int | None = None
    """Examples a step; what an epoch's shuffle leaves over for an incomplete batch is dropped. None: the recipe's."""
    epochs: int | None = None
    """Passes over the training set; the learning rate's schedule spans them. None: the recipe's."""
    learning_rate: float | None = None
    """Adam's peak learning rate, after a short warm-up and before a cosine decay to zero. None: the recipe's."""
    target_accuracy: float | None = None
    """Stop after the first epoch with this test accuracy, a share from 0 to 1. None: train all epochs."""
    run_dir: Path | None = None
    """Where the run is kept; None: a new folder under runs/, named after the experiment and the time."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint."""

    def __post_init__(self):
        unset = [field for field in Recipe._fields if getattr(self, field) is None]
        for field in unset:
            # Filled in here, so that the config that is printed, saved and compared says what the run does.
            object.__setattr__(self, field, getattr(self.recipe(), field))
        self._check("seed", _is_int(self.seed) and 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1")
        self._check("batch_size", _is_int(self.batch_size) and self.batch_size >= 1, "a whole number of at least 1")
        self._check("epochs", _is_int(self.epochs) and self.epochs >= 1, "a whole number of at least 1")
        rate = self.learning_rate
        is_rate = isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
        self._check("learning_rate", is_rate, "a finite number above 0")
        target = self.target_accuracy
        is_share = target is None or (isinstance(target, int | float) and 0 <= target <= 1)
        self._check("target_accuracy", is_share, "a number from 0 to 1")
        self._check("resume", not self.resume or self.run_dir is not None, "run_dir as well, to know which run")

    def is_last(self, epoch: int, test_accuracy: float) -> bool:
        """Whether training ends with this epoch."""
        return epoch == self.epochs or (self.target_accuracy is not None and test_accuracy >= self.target_accuracy)

    def recipe(self) -> Recipe:
        """The settings that the user left open."""
        raise NotImplementedError

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        """The model, its parameters drawn from `key`, and its loss."""
        raise NotImplementedError

    def load(self) -> Dataset:
        """The data to train and test on."""
        raise NotImplementedError

    def _check(self, field: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise UserError(f"{field} = {getattr(self, field)!r}: wanted {wanted}")

    def _check_choice(self, field: str, choices: Sequence[str | None]) -> None:
        self._check(field, getattr(self, field) in choices, f"one of {', '.join(map(str, choices))}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainingConfig):
    """The settings of the experiments that classify images."""

    dataset: DatasetName = "digits"
    """digits comes with scikit-learn; the other two are read from data_dir, or downloaded into it."""
    data_dir: Path | None = None
    """Folder of the dataset's IDX files; None: a cache folder. digits needs none."""
    implementation: ImplementationName | None = None
    """Which backward passes run; None: the fastest that the platform supports."""
    dtype: DTypeName = "float32"
    """What the model computes in; parameters and optimiser stay float32."""

    def __post_init__(self):
        self._check_choice("dataset", get_args(DatasetName))
        self._check_choice("implementation", (None, *jaxbp.IMPLEMENTATIONS))
        self._check_choice("dtype", get_args(DTypeName))
        super().__post_init__()

    def recipe(self) -> Recipe:
        return RECIPES[self.dataset]

    def load(self) -> Dataset:
        return datasets.load(self.dataset, self.data_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeNetConfig(ImageConfig):
    """LeNet-5 on images of 28 x 28 pixels."""

    name: ClassVar[str] = "lenet"

    fused: bool = True
    """Whether convolution, ReLU and pool are one op; --no-fused trains through the chain of single ops."""

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = LeNet(
            fused=self.fused, implementation=self.implementation, dtype=jnp.dtype(self.dtype), rngs=nnx.Rngs(key)
        )
        return model, LeNet.loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ImageConfig):
    """MLP-Mixer on images of 28 x 28 pixels."""

    name: ClassVar[str] = "mixer"

    patch: int = 7
    """Height and width of a patch, a divisor of 28."""
    channels: int = 128
    """Numbers that stand for a patch."""
    blocks: int = 2
    """Times that patches and channels are mixed."""

    def __post_init__(self):
        self._check("patch", _is_int(self.patch) and self.patch >= 1 and 28 % self.patch == 0, "a divisor of 28")
        self._check("channels", _is_int(self.channels) and self.channels >= 1, "a whole number of at least 1")
        self._check("blocks", _is_int(self.blocks) and self.blocks >= 1, "a whole number of at least 1")
        super().__post_init__()

    def recipe(self) -> Recipe:
        return super().recipe()._replace(learning_rate=1e-3)

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = Mixer(
            patch=self.patch,
            channels=self.channels,
            blocks=self.blocks,
            implementation=self.implementation,
            dtype=jnp.dtype(self.dtype),
            rngs=nnx.Rngs(key),
        )
        return model, functools.partial(classification_loss, implementation=self.implementation)


EXPERIMENTS: dict[str, type[TrainingConfig]] = {config.name: config for config in (LeNetConfig, MixerConfig)}


def classification_loss(
    model: nnx.Module,
    images: Float[Array, "batch channels height width"],
    labels: Int[Array, " batch"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, " batch"], Int[Array, " batch"]]:
    """Softmax cross entropy of each image in float32, whatever the model computes in, and the likeliest class."""
    logits = model(images).astype(jnp.float32)
    return jaxbp.softmax_cross_entropy(logits, labels, implementation=implementation), jnp.argmax(logits, axis=-1)


def to_dict(config: TrainingConfig) -> dict[str, Any]:
    """The config as plain values that JSON can hold, the experiment's name first."""
    fields = {field: str(value) if isinstance(value, Path) else value for field, value in vars(config).items()}
    return {"experiment": config.name} | fields


def to_json(config: TrainingConfig) -> str:
    """The config as the indented JSON that is printed and saved."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def differences(saved: dict[str, Any], config: TrainingConfig) -> dict[str, tuple[Any, Any]]:
    """The fields that change a run's result and differ, each with its saved and its present value."""
    present = to_dict(config)
    fields = [field for field in (*present, *(saved.keys() - present.keys())) if field not in FIELDS_WITHOUT_EFFECT]
    pairs = {field: (saved.get(field), present.get(field)) for field in fields}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
