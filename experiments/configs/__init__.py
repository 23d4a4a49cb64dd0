"""What can be trained, with which settings: one frozen dataclass an experiment.

A config also builds its model and loss, which is all that the training loop knows of either. To add an experiment,
subclass `TrainingConfig` (or `ImageConfig`, for one trained on an image dataset), write what it leaves open, and list
the class in `EXPERIMENTS`: the command line, the run directory and the loop then work with it as they are.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

import jaxbp
from experiments.data import augmentation, datasets
from experiments.data.datasets import Dataset, DatasetName
from experiments.errors import UserError
from experiments.training import logic
from jaxbp.nn import LeNet, LogicNetwork, Mixer, thermometer
from jaxbp.ops.gate_layer import Parametrization

Loss = Callable[[nnx.Module, Array, Array], tuple[Float[Array, " batch"], Array]]
"""`loss(model, inputs, targets) -> (loss of each example, predictions)`; the predictions compare with the targets."""

Augment = Callable[[PRNGKeyArray, Array], Array]
"""`augment(key, inputs) -> inputs`, changed at random by `key` alone."""

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

LOGIC_RECIPES: dict[DatasetName, Recipe] = {
    "digits": Recipe(batch_size=64, epochs=150, learning_rate=1e-1),
    "mnist": Recipe(batch_size=128, epochs=60, learning_rate=5e-2),
    "fashion_mnist": Recipe(batch_size=128, epochs=60, learning_rate=5e-2),
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
    gradient_clip: ClassVar[float | None] = None
    """Bound on the absolute value of every element of the gradients."""

    seed: int = 0
    """Seed of the initial parameters, of the order of the examples and of their random changes."""
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

    def evaluation(self, loss: Loss) -> Loss:
        """What is computed on the test set, given the training's loss."""
        return loss

    def augmentation(self) -> Augment | None:
        """What changes a batch's inputs in training, and not in the evaluation; None: nothing."""
        return None

    def report(self, model: nnx.Module, dataset: Dataset) -> str:
        """What else there is to say of the trained model; it may add files to `run_dir`."""
        return ""

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
    shift: int = 0
    """Pixels, down or up and right or left, that a training image is moved by at most each time it is drawn."""

    def __post_init__(self):
        self._check_choice("dataset", get_args(DatasetName))
        self._check_choice("implementation", (None, *jaxbp.IMPLEMENTATIONS))
        self._check_choice("dtype", get_args(DTypeName))
        side = min(datasets.IMAGE_SHAPE)
        self._check("shift", _is_int(self.shift) and 0 <= self.shift < side, f"a whole number from 0 to {side - 1}")
        super().__post_init__()

    def recipe(self) -> Recipe:
        return RECIPES[self.dataset]

    def load(self) -> Dataset:
        return datasets.load(self.dataset, self.data_dir)

    def augmentation(self) -> Augment | None:
        return functools.partial(augmentation.shift, pixels=self.shift) if self.shift else None


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicConfig(ImageConfig):
    """A network of differentiable logic gates on the bits of thresholded images.

    The test accuracy is that of the hardened network. The published networks for MNIST have 6 layers of 8000 gates,
    and of 64000.
    """

    name: ClassVar[str] = "logic"
    gradient_clip: ClassVar[float | None] = 100.0

    layers: int | None = None
    """Of gates. None: 4 for digits, else 6."""
    gates: int | None = None
    """Of a layer, a multiple of 10. None: 2000 for digits, else 8000."""
    tau: float | None = None
    """What the sums of a class's outputs are divided by. None: sqrt(gates / 80), which is 10 for 8000."""
    levels: int = 3
    """Bits of a pixel: whether it is above 1 / (levels + 1), 2 / (levels + 1), ..."""
    wiring: Literal["unique", "random"] = "unique"
    """Which inputs the gates read: no pair twice, or any."""
    initialization: Literal["residual", "normal"] = "residual"
    """Whether gates pass on an input at first, or are random mixtures."""
    parametrization: Parametrization = "softmax"
    """What a gate's parameters are: see jaxbp.gate_layer."""

    def __post_init__(self):
        digits = self.dataset == "digits"
        defaults = {"layers": 4 if digits else 6, "gates": 2000 if digits else 8000}
        for field, value in defaults.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        self._check("layers", _is_int(self.layers) and self.layers >= 1, "a whole number of at least 1")
        is_multiple = _is_int(self.gates) and self.gates >= 10 and self.gates % datasets.CLASSES == 0
        self._check("gates", is_multiple, "a positive multiple of 10")
        if self.tau is None:
            object.__setattr__(self, "tau", math.sqrt(self.gates / 80))
        is_number = isinstance(self.tau, int | float) and math.isfinite(self.tau) and self.tau > 0
        self._check("tau", is_number, "a finite number above 0")
        self._check("levels", _is_int(self.levels) and self.levels >= 1, "a whole number of at least 1")
        self._check_choice("wiring", ("unique", "random"))
        self._check_choice("initialization", ("residual", "normal"))
        self._check_choice("parametrization", get_args(Parametrization))
        super().__post_init__()
        inputs = self.levels * math.prod(datasets.IMAGE_SHAPE)
        fits = self.wiring == "random" or inputs <= 2 * self.gates
        self._check("gates", fits, f"at least half of the {inputs} bits of an image, or wiring random")

    def recipe(self) -> Recipe:
        return LOGIC_RECIPES[self.dataset]

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = LogicNetwork(
            self.levels * math.prod(datasets.IMAGE_SHAPE),
            [self.gates] * self.layers,
            datasets.CLASSES,
            tau=self.tau,
            wiring=getattr(jaxbp.Wires, self.wiring),
            seed=self.seed,
            initialization=self.initialization,
            parametrization=self.parametrization,
            implementation=self.implementation,
            dtype=jnp.dtype(self.dtype),
            rngs=nnx.Rngs(key),
        )
        return model, functools.partial(self._loss, hard=False)

    def evaluation(self, loss: Loss) -> Loss:
        return functools.partial(self._loss, hard=True)

    def report(self, model: LogicNetwork, dataset: Dataset) -> str:
        return logic.report(self, model, dataset)

    def bits(self, images: Float[Array, "batch 1 height width"]) -> Float[Array, "batch bits"]:
        """What the network reads of images."""
        thresholds = jnp.arange(1, self.levels + 1) / (self.levels + 1)
        return thermometer(jaxbp.flatten(images), thresholds)

    def _loss(self, model, images, labels, *, hard):
        scores = functools.partial(model, hard=hard)
        return classification_loss(
            lambda images: scores(self.bits(images)), images, labels, implementation=self.implementation
        )


EXPERIMENTS: dict[str, type[TrainingConfig]] = {
    config.name: config for config in (LeNetConfig, MixerConfig, LogicConfig)
}


def classification_loss(
    model: Callable[[Array], Array],
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
