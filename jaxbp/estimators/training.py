"""Training for the estimators. Programs have padded shapes, so that data sets of similar sizes share them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from jaxbp.logic.gates import Arity
from jaxbp.logic.networks.logic_conv import LogicConvNetwork, LogicConvolution
from jaxbp.logic.networks.logic_network import LogicNetwork
from jaxbp.logic.wires.learned_wires import LearnedWires
from jaxbp.logic.wires.wires import Wires
from jaxbp.training import loop
from jaxbp.training.loop import TrainState

LEAST_INPUTS = 64


@dataclasses.dataclass(frozen=True)
class Network:
    """The settings of a network. With `image` and `convolutions`, the network is a `LogicConvNetwork`."""

    inputs: int
    widths: tuple[int, ...]
    groups: int
    image: tuple[int, int, int] | None = None
    convolutions: tuple[LogicConvolution, ...] = ()
    arity: Arity = 2
    candidates: int | Literal["all"] | None = None

    def build(self) -> nnx.Module:
        learned = functools.partial(LearnedWires.random, candidates=self.candidates)
        wiring = Wires.random if self.candidates is None else learned
        options = dict(arity=self.arity, wiring=wiring, parametrization="walsh", rngs=nnx.Rngs(0))
        if self.image is None:
            return LogicNetwork(self.inputs, self.widths, self.groups, **options)
        return LogicConvNetwork(self.image, self.convolutions, self.widths, self.groups, **options)


class Settings(NamedTuple):
    """The settings that a compiled program takes as arguments."""

    learning_rate: float
    steps: float
    """Number of steps in which the learning rate falls to 0 as a cosine. It stays constant if this is infinite."""
    scale: float
    """Number by which scores are divided."""
    offset: float = 0.0
    """Number that is subtracted from scores before the division."""


class Examples(NamedTuple):
    bits: Bool[np.ndarray, "rows inputs"]
    targets: np.ndarray
    weights: Float[np.ndarray, " rows"]

    @classmethod
    def merged(cls, bits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> "Examples":
        """Return one example for each distinct pair of bits and target, in sorted order, whatever the order of the
        arguments. Its weight is the sum of the weights of its copies. Then all weights are divided by their mean."""
        keys = np.concatenate([np.packbits(bits, axis=1), targets[:, None].view(np.uint8)], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        summed = np.bincount(inverse.ravel(), weights)
        return cls(bits[first], targets[first], summed / summed.mean())

    def repeated(self, rows: int) -> "Examples":
        """Repeat the examples in order until there are `rows` examples. The copies of an example share its weight, and
        the mean weight stays the same."""
        at = np.resize(np.arange(len(self.targets)), rows)
        return Examples(
            self.bits[at], self.targets[at], (self.weights / np.bincount(at))[at] * rows / len(self.weights)
        )


class Program(NamedTuple):
    """A network, its initial state, and a compiled function that trains it for one epoch, `(state, inputs, targets,
    key, epoch, settings)`."""

    model: nnx.Module
    state: TrainState
    train_epoch: Callable

    def restored(self, leaves: Sequence[np.ndarray] | None) -> TrainState:
        """Return a state that training may overwrite, with these `leaves`, or the initial state if they are None."""
        leaves = jax.tree.leaves(self.state) if leaves is None else leaves
        return jax.tree.unflatten(jax.tree.structure(self.state), [jnp.array(leaf) for leaf in leaves])

    def harden(self, params: PyTree) -> Any:
        nnx.update(self.model, params)
        return self.model.harden()


@functools.lru_cache(maxsize=32)
def program(network: Network, batch_size: int) -> Program:
    model = network.build()
    adam = optax.scale_by_adam()
    classify = network.groups > 1

    def loss(settings, model, inputs, targets):
        bits, weights = inputs
        scores = (model(bits) - settings.offset) / settings.scale
        if not classify:
            return weights * (scores[:, 0] - targets) ** 2, scores[:, 0]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
        return weights * losses, jnp.argmax(scores, axis=-1)

    params, _ = loop.split(model, loss)

    def train_epoch(state, inputs, targets, key, epoch, settings):
        def rate(step):
            return -settings.learning_rate * (1 + jnp.cos(jnp.pi * step / settings.steps)) / 2

        _, pure_loss = loop.split(model, functools.partial(loss, settings))
        optimizer = optax.chain(adam, optax.scale_by_schedule(rate))
        return loop.train_epoch(
            state, inputs, targets, key, epoch, loss=pure_loss, optimizer=optimizer, batch_size=batch_size
        )

    state = TrainState(params, optax.chain(adam, optax.scale_by_schedule(lambda step: 0.0)).init(params))
    jitted = jax.jit(train_epoch, donate_argnums=0, compiler_options=loop.COMPILER_OPTIONS)
    return Program(model, jax.tree.map(np.array, state), jitted)


def training(
    made: Program,
    examples: Examples,
    settings: Settings,
    batch_size: int,
    epochs: int,
    seed: int,
    evaluate: Callable[[PyTree], tuple[Array, Array, Array]] | None = None,
) -> loop.Training:
    """Return the `Training` of a program on examples, whose number is padded."""
    steps = steps_per_epoch(len(examples.targets), batch_size)
    bits, targets, weights = examples.repeated(steps * batch_size)
    inputs, targets = jax.device_put(((bits, weights.astype(np.float32)), targets))
    key = jax.random.key(seed)
    settings = Settings(*map(np.float32, settings))
    return loop.Training(
        train_epoch=lambda state, epoch: made.train_epoch(state, inputs, targets, key, np.int32(epoch), settings),
        evaluate=evaluate,
        epochs=epochs,
        steps_per_epoch=steps,
        batch_size=batch_size,
    )


def steps_per_epoch(rows: int, batch_size: int) -> int:
    return padded(-(-rows // batch_size))


def padded(size: int, least: int = 1) -> int:
    """Return the smallest power of 2, or 3 times a power of 2, that is not below `size` and `least`."""
    size = int(max(size, least))  # a NumPy integer has no `bit_length`
    power = 1 << (size - 1).bit_length()
    return 3 * power // 4 if power > 2 and size <= 3 * power // 4 else power
