"""The experiment `logic`, and the base class of `logic` and `logic-conv`."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

import jaxbp
from experiments.configs.base import Loss, Range, Recipe
from experiments.configs.images import ImageConfig, classification_loss
from experiments.data import datasets
from experiments.data.datasets import DatasetName
from jaxbp.logic.ops.gate_layer import Parametrization
from jaxbp.nn import LogicNetwork, thermometer

RECIPES: dict[DatasetName, Recipe] = {
    "digits": Recipe(batch_size=64, epochs=150, learning_rate=1e-1),
    "mnist": Recipe(batch_size=128, epochs=60, learning_rate=5e-2),
    "fashion_mnist": Recipe(batch_size=128, epochs=60, learning_rate=5e-2),
}


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

    def bits(self, images: Float[Array, "batch channels height width"]) -> Float[Array, "batch ..."]:
        raise NotImplementedError

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        return self.network(key), functools.partial(self._loss, hard=False)

    def evaluation(self, loss: Loss) -> Loss:
        return functools.partial(self._loss, hard=True)

    def _loss(self, model, images, labels, *, hard):
        scores = functools.partial(model, hard=hard)
        return classification_loss(
            lambda images: scores(self.bits(images)), images, labels, implementation=self.implementation
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicConfig(GateConfig):
    """A network of differentiable logic gates on bits of thresholded images.

    The test accuracy is for hard gates. The published networks for MNIST have 6 layers of 8000 or 64000 gates.
    """

    name: ClassVar[str] = "logic"
    gradient_clip: ClassVar[float | None] = 100.0

    layers: Annotated[int | None, Range(1)] = None
    """Number of layers of gates. None: 4 for digits, else 6."""
    gates: Annotated[int | None, Range(1)] = None
    """Number of gates per layer, a multiple of 10. None: 2000 for digits, else 8000."""
    tau: Annotated[float | None, Range(above=True)] = None
    """Divisor of a class's score, the sum of its gates' outputs. None: sqrt(gates / 80)."""
    levels: Annotated[int, Range(1)] = 3
    """Number of bits per pixel: whether it exceeds 1 / (levels + 1), 2 / (levels + 1), ..."""
    wiring: Literal["unique", "random"] = "unique"
    """With unique, no two gates of a layer have the same pair of inputs."""
    initialization: Literal["residual", "normal"] = "residual"
    """Initial gates: residual gates pass on their first input, normal gates are random mixtures."""
    parametrization: Parametrization = "softmax"
    """Parametrization of the gates: see jaxbp.gate_layer."""

    def __post_init__(self):
        super().__post_init__()
        self._check("gates", self.gates % datasets.CLASSES == 0, "a positive multiple of 10")
        self._fill({"tau": math.sqrt(self.gates / 80)})
        inputs = self.levels * math.prod(datasets.IMAGE_SHAPES[self.dataset])
        fits = self.wiring == "random" or inputs <= 2 * self.gates
        self._check("gates", fits, f"at least half of the {inputs} bits of an image, or wiring 'random'")

    def defaults(self) -> Mapping[str, Any]:
        sizes = {"layers": 4, "gates": 2000} if self.dataset == "digits" else {"layers": 6, "gates": 8000}
        return RECIPES[self.dataset]._asdict() | sizes

    def network(self, key: PRNGKeyArray) -> nnx.Module:
        return LogicNetwork(
            self.levels * math.prod(datasets.IMAGE_SHAPES[self.dataset]),
            [self.gates] * self.layers,
            datasets.CLASSES,
            tau=self.tau,
            wiring=getattr(jaxbp.Wires, self.wiring),
            seed=self.seed,
            initialization=self.initialization,
            parametrization=self.parametrization,
            implementation=self.implementation,
            dtype=self.policy.compute_dtype,
            rngs=nnx.Rngs(key),
        )

    def bits(self, images: Float[Array, "batch 1 height width"]) -> Float[Array, "batch bits"]:
        thresholds = jnp.arange(1, self.levels + 1) / (self.levels + 1)
        return thermometer(jaxbp.flatten(images), thresholds)
