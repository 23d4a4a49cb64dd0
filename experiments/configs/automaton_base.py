"""The settings and losses of logic cellular automata, trained by backpropagation through their ticks.

A training example is two integers: the seed of a start state, and the number of the optimizer step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt32

import jaxbp
from experiments.configs import automaton_first_gates as first_gates
from experiments.configs import automaton_repair
from experiments.configs.base import Loss, Range, Recipe, TrainingConfig
from experiments.configs.images import ImplementationName
from experiments.data.datasets import Dataset
from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.nn import LogicAutomaton
from jaxbp.training.loop import Augment
from jaxbp.training.optimizers import FusedOptimizer, fused_adamw

Settings = Mapping[str, Any]
PUBLISHED: Settings = dict(
    pass_through=10.0,
    or_logit=0.0,
    weight_decay=1e-2,
    hard_share=0.0,
    rounded_share=0.0,
    certainty=0.0,
    hard_from=0.0,
    first_gates="a",
    shrink=1,
    restart_after=0,
    search_steps=0,
    target_accuracy=None,
)
HARD_GATES: Settings = PUBLISHED | dict(
    pass_through=5.0, weight_decay=0.0, hard_share=1.0, hard_from=0.15, target_accuracy=1.0
)
ROUNDED_STATES: Settings = HARD_GATES | dict(hard_share=0.0, rounded_share=0.1, weight_decay=0.02)
PATTERNS: Settings = ROUNDED_STATES | dict(
    learning_rate=0.2,
    pass_through=10.0,
    or_logit=5.0,
    first_gates="separating",
    restart_after=2500,
    search_steps=500,
)
SEARCHED, MOST_SEARCHED = 2**30, 4
"""The seed of the first initial state for which the local search repairs an automaton, and the most such states."""
OR = 7
"""The number of the function a OR b."""
MOST_WRONG = 0.02
"""The largest share of wrong values with which the local search begins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutomatonConfig(TrainingConfig):
    """A logic cellular automaton. docs/automata.md defines the loss, the accuracy, and the recipes."""

    gradient_clip: ClassVar[float | None] = 100.0
    independent: ClassVar[bool] = False
    """False, because the first seed of a batch draws the hard gates and the cells that update."""
    examples: ClassVar[str] = "grids"

    grid: ClassVar[tuple[int, int]]
    periodic: ClassVar[bool]
    channels: ClassVar[int]
    visible: ClassVar[int] = 1
    """The number of leading channels that enter the loss."""
    any_grid: ClassVar[bool] = False
    """Whether grids of every size have a target."""
    steps: ClassVar[int]
    fire_rate: ClassVar[float] = 1.0
    perception: ClassVar[tuple[int, Sequence[int]]]
    """The number of perception kernels, and the gates per layer of a kernel."""
    update: ClassVar[Sequence[int]]
    """The gates per layer of the update."""
    published: ClassVar[tuple[Recipe, int]]
    settings: ClassVar[Settings] = HARD_GATES
    hardening: ClassVar[tuple[int, int] | None] = None
    """The updates and epochs for `recipe="hardening"`. None: the published numbers."""
    stands: ClassVar[bool] = False
    """Whether the state must still be correct after another `steps` ticks."""
    test_examples: ClassVar[int] = 32
    trials: ClassVar[int] = 256
    """The number of unseen start states in the final test."""
    shown_grid: ClassVar[tuple[int, int] | None] = None

    recipe: Literal["hardening", "published"] = "hardening"
    """Defaults of the settings that are None: for a correct hardened automaton, or as published."""
    updates: Annotated[int | None, Range(1)] = None
    """Number of optimizer steps, rounded up to a multiple of `epochs`."""
    epochs: Annotated[int | None, Range(1)] = None
    """Number of epochs, each with an equal share of the updates."""
    learning_rate: Annotated[float | None, Range(above=True)] = None
    """Learning rate of AdamW."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate: constant, or half a cosine to 0."""
    weight_decay: Annotated[float | None, Range()] = None
    """Weight decay of AdamW."""
    pass_through: Annotated[float | None, Range()] = None
    """Initial logit of the function that passes on one input."""
    or_logit: Annotated[float | None, Range()] = None
    """Initial logit of the function a OR b. Only the parametrization softmax has such a logit."""
    hard_share: Annotated[float | None, Range(0, 1)] = None
    """Share of the gates that are hard at the last update. They keep the gradients of relaxed gates."""
    rounded_share: Annotated[float | None, Range(0, 1)] = None
    """Share of the state's values that each tick rounds to 0 or 1. Gradients ignore the rounding."""
    certainty: Annotated[float | None, Range()] = None
    """Final weight of a penalty on gates that are not almost hard."""
    hard_from: Annotated[float | None, Range(0, 1)] = None
    """Share of the updates before `hard_share` and `certainty` grow linearly from 0."""
    first_gates: Literal["a", "drawn", "separating"] | None = None
    """Input, a or b, that each gate initially passes on: see docs/automata.md."""
    shrink: Annotated[int | None, Range(1)] = None
    """Divisor of the grid's sides and of the number of ticks, in training only."""
    restart_after: Annotated[int | None, Range()] = None
    """Updates after which training restarts with new parameters. 0: never."""
    search_steps: Annotated[int | None, Range()] = None
    """Steps of the local search that repairs the hard automaton at the end of each attempt. 0: no search."""
    noise: Annotated[float, Range()] = 0.0
    """Scale of the Gumbel noise that each loss adds to the parameters."""
    parametrization: Parametrization = "softmax"
    """Parametrization of the gates: see jaxbp.gate_layer."""
    target_accuracy: Annotated[float | None, Range(0, 1)] = None
    """Stop after the first epoch with this test accuracy. None: 1, or with the published recipe, never."""
    implementation: ImplementationName | None = None
    """Implementation of the backward passes. None: the fastest that the platform supports."""

    def __post_init__(self):
        super().__post_init__()
        self._check("search_steps", not self.search_steps or self.fire_rate == 1, "0, because cells update at random")
        has_logit = self.parametrization == "softmax" or not self.or_logit
        self._check("or_logit", has_logit, f"0, because the parametrization {self.parametrization!r} has no such logit")
        most = min(*self.grid, self.steps) if self.any_grid else 1
        self._check("shrink", self.shrink <= most, f"a whole number from 1 to {most}")

    @property
    def curves(self) -> tuple[str, str]:
        return "partly hard train" if self.hard_share else "relaxed train", "hardened test"

    def extended(self, epochs: int) -> "AutomatonConfig":
        in_an_epoch = -(-self.updates // self.epochs)
        return dataclasses.replace(self, epochs=epochs, updates=epochs * in_an_epoch)

    def defaults(self) -> Mapping[str, Any]:
        recipe, updates = self.published
        settings = {**recipe._asdict(), "updates": updates}
        if self.recipe == "published":
            return settings | PUBLISHED
        settings |= self.settings
        if self.hardening:
            settings["updates"], settings["epochs"] = self.hardening
        return settings if self.parametrization == "softmax" else settings | dict(or_logit=0.0)

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = LogicAutomaton(
            self.channels,
            *self.perception,
            self.update,
            self.periodic,
            seed=self.seed,
            residual_logit=self.pass_through,
            parametrization=self.parametrization,
            implementation=self.implementation,
            rngs=nnx.Rngs(key),
        )
        if self.or_logit:
            for layer in (*model.perception, *model.update):
                layer[...] = layer[...].at[..., OR].set(self.or_logit)
        if self.first_gates != "a":
            self._draw_first_gates(model, key)
        return model, self._training_loss

    def attempt(self, epoch):
        return (epoch - 1) * -(-self.updates // self.epochs) // self.restart_after if self.restart_after else 0

    def evaluation(self, loss: Loss) -> Loss:
        return self._evaluation_loss

    def repaired(self, model, params, epoch):
        is_last = epoch == self.epochs or self.attempt(epoch + 1) != self.attempt(epoch)
        if not self.search_steps or not is_last:
            return params
        graph, _, constants = nnx.split(model, nnx.Param, ...)
        model = nnx.clone(nnx.merge(graph, params, constants))
        functions = jax.tree.map(lambda layer: gates.harden(layer, self.parametrization), model.logits)
        starts = self.starts(SEARCHED + jnp.arange(min(self.trials, MOST_SEARCHED), dtype=jnp.uint32))
        targets = jnp.broadcast_to(self.targets(starts), (*starts.shape[:-1], self.visible))
        key = jax.random.fold_in(jax.random.key(self.seed), epoch)
        options = dict(ticks=self.steps, steps=self.search_steps, most=int(MOST_WRONG * targets.size))
        found, before, after = automaton_repair.repaired(
            functions, model.automaton.get_value(), starts, targets, key, **options
        )
        if after >= before:
            return params
        for layers, numbers in zip((model.perception, model.update), found, strict=True):
            for layer, number in zip(layers, numbers, strict=True):
                layer[...] = jnp.clip(gates.hard_logits(number, self.parametrization, layer.dtype), -100, 100)
        return nnx.split(model, nnx.Param, ...)[1]

    def data_checksum(self, dataset: Dataset) -> str | None:
        return None  # the examples are numbers, which the settings determine

    def load(self) -> Dataset:
        in_an_epoch = self.batch_size * -(-self.updates // self.epochs)
        train, test = (
            np.stack([np.arange(n), np.zeros(n, int)], 1).astype(np.uint32) for n in (in_an_epoch, self.test_examples)
        )
        # A prediction says whether an example is correct. All targets are True.
        return Dataset(train, np.ones(len(train), bool), test, np.ones(len(test), bool), self.name)

    def augmentation(self) -> Augment | None:
        def drawn(key, examples, step):
            seeds = jax.random.bits(key, len(examples), examples.dtype)
            return jnp.stack([seeds, jnp.full_like(seeds, step)], axis=1)

        return drawn

    def optimizer(self, steps: int) -> FusedOptimizer:
        steps = self.restart_after or steps
        rate = optax.cosine_decay_schedule(self.learning_rate, steps) if self.schedule == "cosine" else None
        decay, clip = self.weight_decay, self.gradient_clip
        return fused_adamw(rate or self.learning_rate, b1=0.9, b2=0.99, weight_decay=decay, clip=clip)

    def starts(
        self, seeds: UInt32[Array, " batch"], grid: tuple[int, int] | None = None
    ) -> Bool[Array, "batch height width channels"]:
        raise NotImplementedError

    def targets(self, starts: Bool[Array, "batch height width channels"]) -> Bool[Array, "... height width visible"]:
        raise NotImplementedError

    def as_of(self, update: Int[Array, ""], field: str) -> Float[Array, ""]:
        """Return the setting `field` at an optimizer step.

        It is 0 for the fraction `hard_from` of the steps, then grows linearly. It reaches its configured
        value at the last step, or with restarts, at the last step before each restart.
        """
        updates = self.updates
        if self.restart_after:
            updates, update = self.restart_after, update % self.restart_after
        first = self.hard_from * updates
        return getattr(self, field) * jnp.clip((update - first) / max(updates - 1 - first, 1), 0, 1)

    def _training_loss(self, model, examples, targets):
        grid = tuple(n // self.shrink for n in self.grid) if self.shrink > 1 else None
        starts, key = self._starts_and_key(examples, grid)
        update = examples[0, 1].astype(jnp.float32)
        of_gates, of_cells = jax.random.split(key)
        logits, options = model.logits, dict(parametrization=self.parametrization, implementation=self.implementation)
        if self.noise:
            logits = _each(lambda key, x: x + self.noise * jax.random.gumbel(key, x.shape, x.dtype), of_gates, logits)
        penalty = self.penalty(logits, update) if self.certainty else 0.0
        if self.hard_share:
            share = self.as_of(update, "hard_share")

            def partly_hard(key, layer):
                hard = jax.random.uniform(key, layer.shape[:-1]) < share
                return gates.straight_through(layer, hard, self.parametrization)

            logits = _each(partly_hard, jax.random.fold_in(of_gates, 1), logits)
            options["parametrization"] = "softmax"
        state, automaton = starts.astype(self.policy.compute_dtype), model.automaton.get_value()
        options |= dict(key=of_cells, fire_rate=self.fire_rate, rounding_rate=self.rounded_share)
        last = jaxbp.automaton_rollout(logits, automaton, state, self.steps // self.shrink, **options)
        losses, right = self._losses(last, starts)
        return losses + penalty, right

    def penalty(self, logits: PyTree, update: Int[Array, ""]) -> Float[Array, ""]:
        variances = [jnp.sum(gates.variance(layer, self.parametrization)) for layer in jax.tree.leaves(logits)]
        return self.as_of(update, "certainty") * sum(variances)

    def _evaluation_loss(self, model, examples, targets):
        starts, key = self._starts_and_key(examples)
        advance = functools.partial(model, steps=self.steps, fire_rate=self.fire_rate, hard=True)
        first_key, second_key = jax.random.split(key)
        last = advance(starts.astype(jnp.float32), key=first_key)
        losses, right = self._losses(last, starts)
        if self.stands:
            right &= self._losses(advance(last, key=second_key), starts)[1]
        return losses, right

    def _starts_and_key(self, examples, grid=None):
        return self.starts(examples[:, 0], grid), jax.random.fold_in(jax.random.key(examples[0, 0]), 1)

    def _draw_first_gates(self, model, key):
        automaton, starts = model.automaton.get_value(), self.starts(jnp.zeros(1, jnp.uint32))
        start, target = np.asarray(starts)[0], np.asarray(self.targets(starts))
        if self.first_gates == "drawn" or self.trials > 1 or not start.any():
            choice = first_gates.drawn(automaton, key)
        else:
            choice = first_gates.separating(automaton, start, target, self.steps, key)
        for part, passes_on_b in zip((model.perception, model.update), choice, strict=True):
            for layer, chosen in zip(part, passes_on_b, strict=True):
                exchanged = first_gates.with_inputs_exchanged(layer[...], self.parametrization)
                layer[...] = jnp.where(chosen[..., None], exchanged, layer[...])

    def _losses(self, last, starts):
        errors = self.policy.cast_to_output(last[..., : self.visible]) - self.targets(starts)
        return jnp.sum(errors**2, axis=(1, 2, 3)), jnp.all(jnp.abs(errors) < 0.5, axis=(1, 2, 3))


def _each(function: Callable[[PRNGKeyArray, Array], Array], key: PRNGKeyArray, logits: PyTree) -> PyTree:
    layers, structure = jax.tree.flatten(logits)
    keys = jax.random.split(key, len(layers))
    return jax.tree.unflatten(structure, [function(*pair) for pair in zip(keys, layers, strict=True)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternConfig(AutomatonConfig):
    settings: ClassVar[Settings] = PATTERNS
    hardening: ClassVar = (160_000, 1600)

    def pattern(self, grid: tuple[int, int] | None = None) -> Bool[np.ndarray, "height width visible"]:
        raise NotImplementedError

    def targets(self, starts):
        return jnp.asarray(self.pattern(starts.shape[1:3]))
