"""The experiments `logic` and `logic-conv`. The kernels of `logic-conv` are trees of 7 logic gates.

Per kernel of the first convolution, the network `MNIST` has 8939 gates in its layers. A kernel's gates count once per
position in the image. The or-pools, each the OR of a window's bits, add 657 gates per kernel. With k such kernels:

                        layers       or-pools    the paper's network
    size s (k = 16)       143,024    10,512        147,000
    size m (k = 64)       572,096    42,048        566,000
    size l (k = 132)    1,179,948    86,724      1,270,000

The paper's network (see `jaxbp.logic_conv2d`) pads convolutions 2 and 3, and has a third pool.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

import jaxbp
from experiments.configs.base import Loss, Range, Recipe
from experiments.configs.images import ImageConfig, classification_loss
from experiments.data import user_data
from experiments.data.datasets import Dataset, DatasetName
from experiments.output.files import OptionalPath
from jaxbp.logic.gates import BASES, Arity, Parametrization
from jaxbp.logic.networks.logic_conv import halving_convolutions
from jaxbp.logic.tables.quantizer import ABOVE, Quantizer
from jaxbp.nn import LogicConvNetwork, LogicConvolution, LogicNetwork, image_thermometer, thermometer

RECIPES: dict[DatasetName, Recipe] = {
    "digits": Recipe(batch_size=64, epochs=150, learning_rate=1e-1),
    "mnist": Recipe(batch_size=128, epochs=60, learning_rate=5e-2),
    "fashion_mnist": Recipe(batch_size=128, epochs=60, learning_rate=5e-2),
}
TABLE_LEVELS = 15
"""Thresholds per feature of a table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig(ImageConfig):
    """A network of logic gates on images of bits.

    In training, each gate mixes all logic functions. In evaluation, it computes only the function with the largest
    weight.
    """

    curves: ClassVar[tuple[str, str]] = ("relaxed train", "hardened test")

    def network(self, key: PRNGKeyArray) -> nnx.Module:
        """Return a model that is called as `model(bits, hard=...)`. `hard=True` selects hard gates."""
        raise NotImplementedError

    @property
    def thresholds(self) -> Float[Array, " levels"]:
        return jnp.arange(1, self.levels + 1) / (self.levels + 1)

    def bits(self, images: Float[Array, "batch channels height width"]) -> Float[Array, "batch ..."]:
        raise NotImplementedError

    def bit_order(self, pixels: Shaped[np.ndarray, "channels height width levels"]) -> Shaped[np.ndarray, " bits"]:
        """Return values, one per pixel and threshold, in the order of the bits that `bits` returns for an image."""
        raise NotImplementedError

    def quantizer(self, dataset: Dataset) -> Quantizer:
        """Return the function from rows of a table or flattened images to the bits of the network."""
        if dataset.features is not None:
            return dataset.features.quantizer
        shape = (*self.shape, self.levels)
        pixels = np.arange(math.prod(self.shape)).reshape(*self.shape, 1)
        features, values = (self.bit_order(np.broadcast_to(a, shape)) for a in (pixels, np.asarray(self.thresholds)))
        return Quantizer(np.full(features.shape, ABOVE, np.uint8), features, values)

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        return self.network(key), functools.partial(self._loss, hard=False)

    def evaluation(self, loss: Loss) -> Loss:
        return functools.partial(self._loss, hard=True)

    def _loss(self, model, images, labels, *, hard):
        scores = functools.partial(model, hard=hard)
        return classification_loss(
            lambda images: scores(self.bits(images)), images, labels, implementation=self.implementation
        )


GATES_PER_DEVICE = 1024 * 6 * 8000
"""`examples_per_device` times the gates per example. Two H200s took 404 us for 2 x 1024 examples, and one H200 about
630 us; with 6 x 64000 gates and 2 x 128 examples, 584 and about 755 us (docs/benchmarks/devices.md). With 6 x 8000
gates and 2 x 128 examples, two H200s were slower than one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicConfig(GateConfig):
    """A network of differentiable logic gates on bits of thresholded images.

    The test accuracy is for hard gates. The published networks for MNIST have 6 layers of 8000 or 64000 gates.
    """

    name: ClassVar[str] = "logic"
    gradient_clip: ClassVar[float | None] = 100.0

    data: OptionalPath = None
    """NPZ or CSV file with a dataset of your own, as docs/own_data.md describes."""
    target: tyro.conf.DisallowNone[str | None] = None
    """Column of the CSV file with the classes, as text or numbered from 0."""
    categorical_features: tuple[str, ...] = ()
    """Columns of the CSV file whose numbers are text. Each different text is a category."""
    categories: tyro.conf.Suppress[tuple[tuple[str, tuple[str, ...]], ...] | None] = None
    """The columns of text, and the categories of each. None: as in data."""
    layers: Annotated[int | None, Range(1)] = None
    """Number of layers of gates. None: 4 for digits and small data, else 6."""
    gates: Annotated[int | None, Range(1)] = None
    """Gates per layer, a multiple of the number of classes. None: 2000 for digits and small data, else 8000."""
    tau: Annotated[float | None, Range(above=True)] = None
    """Divisor of a class's score, the sum of its gates' outputs. None: sqrt(gates / (8 classes))."""
    levels: Annotated[int | None, Range(1)] = None
    """Number of thresholds per pixel, in equal steps, or per feature, at quantiles. None: 3 or 15."""
    wiring: Literal["unique", "random", "learned"] | None = None
    """Inputs of gates: unique pairs, random, or learned. None: learned with candidates, else unique if possible."""
    candidates: int | Literal["all"] | None = None
    """Candidates per input of a gate with learned wires, or all inputs. None: 16, or fewer in small layers."""
    initialization: Literal["residual", "normal"] = "residual"
    """Initial gates: residual gates pass on their first input, normal gates are random mixtures."""
    arity: Arity = 2
    """Number of inputs per gate."""
    parametrization: Parametrization | None = None
    """Parametrization of the gates: see jaxbp.gate_layer. None: softmax, or with arity 4 input_wise."""
    straight_through: bool = False
    """Train hardened gates, with the gradients of relaxed gates."""

    def __post_init__(self):
        for field in ("target", "categorical_features"):
            is_named = self.data is not None or not getattr(self, field)
            self._check(field, is_named, "no column, or data as well, a CSV file")
        super().__post_init__()
        self._check("gates", self.gates % self.classes == 0, f"a positive multiple of {self.classes}")
        self._fill({"parametrization": "softmax" if self.arity == 2 else "input_wise"})
        fits = self.parametrization in BASES or self.arity == 2
        self._check("parametrization", fits, f"one of {', '.join(BASES)} with arity {self.arity}")
        pairs, read = self.inputs * (self.inputs - 1) // 2, self.gates * self.arity // 2
        self._fill({"tau": math.sqrt(self.gates / (8 * self.classes))})
        self._fill({"wiring": "learned" if self.candidates else "unique" if read <= pairs else "random"})
        is_unique, part = self.wiring == "unique", {2: "half", 4: "a quarter"}[self.arity]
        fits = not is_unique or self.inputs <= 2 * read
        self._check("gates", fits, f"at least {part} of the {self.inputs} bits of an example, or wiring 'random'")
        fits = not is_unique or read <= pairs
        most = f"at most {2 * pairs // self.arity}, for the {pairs} pairs of {self.inputs} bits, or wiring 'random'"
        self._check("gates", fits, most)
        most = min(self.inputs, self.gates if self.layers > 1 else 2 * read)
        if self.wiring != "learned":
            # Earlier runs stored the default, which had no effect.
            fits = self.candidates in (None, min(16, most))
            self._check("candidates", fits, f"none with wiring {self.wiring!r}, or wiring 'learned'")
            return
        self._fill({"candidates": min(16, most)})
        fits = self.candidates == "all" or 1 <= self.candidates <= most
        wanted = f"'all', or from 1 to {most}, the number of bits of an example or of gates of a layer"
        self._check("candidates", fits, wanted)

    @property
    def examples_per_device(self) -> int:
        return math.ceil(GATES_PER_DEVICE / (self.layers * self.gates))

    @property
    def inputs(self) -> int:
        return math.prod(self.shape) * (self.levels if self.has_images else 1)

    def data_settings(self, dataset: Dataset) -> dict[str, Any]:
        settings, features = super().data_settings(dataset), dataset.features
        if features is None:
            return settings
        categories = [(features.names[j], tuple(names)) for j, names in features.categories.items()]
        if features.classes is not None:
            categories.append((self.target, tuple(features.classes)))
        return settings | {"categories": tuple(categories)}

    def defaults(self) -> Mapping[str, Any]:
        settings = {**super().defaults()}
        if self.data is None or not settings:
            return settings
        shape, classes = settings["shape"], settings["classes"]
        if len(shape) == 1:
            settings["levels"] = TABLE_LEVELS
            inputs = shape[0]
        else:
            inputs = math.prod(shape) * (self.levels or settings["levels"])
        settings["gates"] = classes * -(-max(settings["gates"], -(-inputs // 2)) // classes)
        return settings

    def recipe(self, dataset: DatasetName) -> dict[str, Any]:
        sizes = {"layers": 4, "gates": 2000} if dataset == "digits" else {"layers": 6, "gates": 8000}
        return RECIPES[dataset]._asdict() | sizes | {"levels": 3}

    def network(self, key: PRNGKeyArray) -> nnx.Module:
        return LogicNetwork(
            self.inputs,
            [self.gates] * self.layers,
            self.classes,
            tau=self.tau,
            wiring=self._wires,
            seed=self.seed,
            initialization=self.initialization,
            arity=self.arity,
            parametrization=self.parametrization,
            straight_through=self.straight_through,
            implementation=self.implementation,
            dtype=self.policy.compute_dtype,
            rngs=nnx.Rngs(key),
        )

    def _wires(self, inputs: int, pairs: int, seed: int) -> jaxbp.Wires | jaxbp.LearnedWires:
        if self.wiring == "learned":
            return jaxbp.LearnedWires.random(inputs, pairs, seed, candidates=self.candidates)
        return getattr(jaxbp.Wires, self.wiring)(inputs, pairs, seed)

    def bits(self, images: Float[Array, "batch ..."]) -> Float[Array, "batch bits"]:
        """Return the bits of images. The rows of a table are bits already."""
        if not self.has_images:
            return images
        return thermometer(jaxbp.flatten(images), self.thresholds)

    def bit_order(self, pixels: Shaped[np.ndarray, "channels height width levels"]) -> Shaped[np.ndarray, " bits"]:
        return pixels.ravel()

    def _read(self) -> Dataset:
        dataset = user_data.read(self.data, self.target, self.classes, categorical=self.categorical_features)
        return user_data.as_bits(dataset, self.levels or TABLE_LEVELS) if dataset.features else dataset

    def _check_shape(self) -> None:
        if len(self.shape) != 1:
            super()._check_shape()


SizeName = Literal["s", "m", "l"]


class Size(NamedTuple):
    kernels: int
    tau: float | None
    levels: int
    recipe: Recipe
    weight_decay: float = 0.0
    shift: int = 0
    distortion: float = 0.0
    parametrization: Parametrization = "softmax"
    residual_logit: float = 5.0


class Architecture(NamedTuple):
    """Numbers of kernels and widths of a network's layers, in units of k, the first convolution's number of kernels."""

    convolutions: Sequence[LogicConvolution]
    widths: Sequence[int]
    sizes: Mapping[SizeName, Size]


_WALSH = {"parametrization": "walsh", "residual_logit": 1.5}
_MNIST_M = Size(64, 28.0, 3, Recipe(batch_size=128, epochs=100, learning_rate=0.02), shift=1, distortion=0.7, **_WALSH)
MNIST = Architecture(
    convolutions=(LogicConvolution(1, 5, pool=2), LogicConvolution(3, 3, pool=2), LogicConvolution(9, 3)),
    widths=(1280, 640, 320),
    sizes={
        "s": Size(16, 12.0, 3, Recipe(batch_size=128, epochs=60, learning_rate=0.03), shift=1, **_WALSH),
        "m": _MNIST_M,
        "l": _MNIST_M._replace(kernels=132, tau=40.0, recipe=_MNIST_M.recipe._replace(epochs=80)),
    },
)
CIFAR10_RECIPE = Recipe(batch_size=128, epochs=100, learning_rate=0.02)
CIFAR10 = Architecture(
    convolutions=tuple(LogicConvolution(kernels, 3, padding=1, pool=2) for kernels in (1, 4, 16, 32)),
    widths=(1280, 640, 320),
    sizes={
        "s": Size(32, 20.0, 3, CIFAR10_RECIPE, weight_decay=0.002),
        "m": Size(256, 40.0, 3, CIFAR10_RECIPE, weight_decay=0.002),
        "l": Size(512, 280.0, 5, CIFAR10_RECIPE, weight_decay=0.002),
    },
)
DIGITS_SIZE = Size(
    kernels=128,
    tau=10.0,
    levels=3,
    recipe=Recipe(batch_size=32, epochs=40, learning_rate=0.05),
    shift=1,
    parametrization="walsh",
    residual_logit=3.0,
)
DIGITS = Architecture(
    convolutions=(LogicConvolution(1, 5, stride=2), LogicConvolution(3, 3, pool=2)),
    widths=(80, 40),
    sizes={
        "s": DIGITS_SIZE,
        "m": DIGITS_SIZE._replace(kernels=256, tau=14.0),
        "l": DIGITS_SIZE._replace(kernels=512, tau=20.0),
    },
)
_USER_SMALL = DIGITS_SIZE._replace(tau=None, shift=0)
_USER_LARGE = MNIST.sizes["s"]._replace(tau=None, shift=0)
USER_SIZES: Mapping[DatasetName, Mapping[SizeName, Size]] = {
    like: {name: size._replace(kernels=kernels) for name, kernels in (("s", 32), ("m", 128), ("l", 512))}
    for like, size in (("digits", _USER_SMALL), ("mnist", _USER_LARGE))
}
"""Sizes for `ImageConfig.data`, by the dataset that is about as large."""
ARCHITECTURES: Mapping[DatasetName, Architecture] = {
    "digits": DIGITS,
    "mnist": MNIST,
    "fashion_mnist": MNIST,
    "cifar10": CIFAR10,
}


def architecture_for(shape: tuple[int, int, int]) -> Architecture:
    """Return convolutions that halve the height and width of images until both are below 4, and the layers of gates
    that follow them."""
    _, height, width = shape
    convolutions = halving_convolutions(height, width, 1, 32)
    for convolution in convolutions:
        height, width = height // convolution.pool[0], width // convolution.pool[1]
    width = min(max(8 * convolutions[-1].kernels * height * width, 80), 1280)
    return Architecture(convolutions, (width, width // 2, width // 4), {})


def _wires(inputs: int, gates: int, seed: int) -> jaxbp.Wires:
    has_pairs = gates <= inputs * (inputs - 1) // 2  # not so with few kernels on tiny images
    return (jaxbp.Wires.unique if has_pairs else jaxbp.Wires.random)(inputs, gates, seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicConvConfig(GateConfig):
    """A convolutional network of logic gates on bits of thresholded images. The test accuracy is for hard gates."""

    name: ClassVar[str] = "logic-conv"

    dataset: DatasetName | None = None
    """mnist and fashion_mnist are downloaded if needed, cifar10 must be in data_dir. None: digits, or the file data."""
    size: SizeName = "s"
    """Size of the network, which determines the settings that are None."""
    kernels: Annotated[int | None, Range(1)] = None
    """Number of kernels in the first convolution. The other layers grow in proportion."""
    tau: Annotated[float | None, Range(above=True)] = None
    """Divisor of a class's score, the sum of its gates' outputs."""
    levels: Annotated[int | None, Range(1)] = None
    """Number of bits per value: whether it exceeds 1 / (levels + 1), 2 / (levels + 1), ..."""
    weight_decay: Annotated[float | None, Range()] = None
    """Weight decay of AdamW."""
    shift: Annotated[int | None, Range()] = None
    """Largest random shift of training images in each direction, in pixels."""
    distortion: Annotated[float | None, Range()] = None
    """Standard deviation of smooth random distortions of training images, in pixels."""
    initialization: Literal["residual", "normal"] = "residual"
    """Initial gates: residual gates pass on their first input, normal gates are random mixtures."""
    residual_logit: Annotated[float | None, Range(above=True)] = None
    """Initial logit of the function that passes on the first input."""
    parametrization: Parametrization | None = None
    """Parametrization of the gates: see jaxbp.gate_layer."""

    def __post_init__(self):
        super().__post_init__()
        self._fill({"tau": math.sqrt(self.widths[-1] / self.classes / 4)})

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.dataset] if self.data is None else architecture_for(self.shape)

    @property
    def widths(self) -> list[int]:
        """The numbers of gates of the layers after the convolutions. The last is a multiple of `classes`."""
        *widths, last = (self.kernels * width for width in self.architecture.widths)
        return [*widths, self.classes * -(-last // self.classes)]

    def recipe(self, dataset: DatasetName) -> dict[str, Any]:
        sizes = ARCHITECTURES[dataset].sizes if self.data is None else USER_SIZES[dataset]
        size = sizes[self.size]._asdict()
        return size.pop("recipe")._asdict() | size

    def network(self, key: PRNGKeyArray) -> nnx.Module:
        channels, *size = self.shape
        convolutions = self.architecture.convolutions
        return LogicConvNetwork(
            (channels * self.levels, *size),
            [convolution._replace(kernels=self.kernels * convolution.kernels) for convolution in convolutions],
            self.widths,
            self.classes,
            tau=self.tau,
            wiring=_wires,
            seed=self.seed,
            initialization=self.initialization,
            residual_logit=self.residual_logit,
            parametrization=self.parametrization,
            implementation=self.implementation,
            dtype=self.policy.compute_dtype,
            rngs=nnx.Rngs(key),
        )

    def bits(self, images: Float[Array, "batch channels height width"]) -> Float[Array, "batch bits height width"]:
        return image_thermometer(images, self.thresholds)

    def bit_order(self, pixels: Shaped[np.ndarray, "channels height width levels"]) -> Shaped[np.ndarray, " bits"]:
        return np.moveaxis(pixels, -1, 1).ravel()
