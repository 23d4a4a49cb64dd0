"""The training loop of the experiments and of `jaxbp.estimators`. An epoch is one compiled scan over batches."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbp.training.optimizers import FusedOptimizer, apply
from jaxbp.training.precision import LossScale

Augment = Callable[[PRNGKeyArray, Array, Int[Array, ""]], Array]
"""`(key, inputs, step) -> inputs` changes a batch at random. `step` counts the run's steps."""

PureLoss = Callable[[PyTree, Array, Array], tuple[Float[Array, " batch"], Array | None]]
"""`(params, inputs, targets) -> (loss per example, predictions)`. Without predictions, there are no accuracies."""

Share = Callable[[Array], Array]

# For equal bits in repeated and resumed runs. Otherwise, cuDNN's convolution gradients sum in no fixed order, and
# autotuning may differ between processes.
COMPILER_OPTIONS = {"xla_gpu_deterministic_ops": True}


class TrainState(NamedTuple):
    params: PyTree
    opt_state: optax.OptState
    loss_scale: LossScale | None = None


class Metrics(NamedTuple):
    """The metrics of one epoch. The training loss and accuracy are means over the epoch's steps."""

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float | None
    """None if the loss returns no predictions."""
    test_loss: float | None
    """None without a test set."""
    test_accuracy: float | None
    """None without a test set or predictions."""
    images_per_second: float
    seconds: float
    evaluation_seconds: float
    compile_seconds: float
    """Only the first epoch of a process compiles."""
    loss_scale: float | None = None
    """The loss scale after this epoch, or None if the loss is not scaled."""
    skipped_steps: int = 0
    """Number of steps that were not finite, and changed only the loss scale."""


LEAST_SECONDS = 1e-9
"""A time of 0, of a clock that stands still, counts as this time."""
MOST_SKIPPED = 50
"""Consecutive skipped steps that end a run. Far fewer reach the smallest loss scale."""
MOST_LOSS, MOST_PARAMETER = 1e4, 1e4
"""A run with a larger mean loss or parameter has diverged. Networks of gates can diverge with a small loss."""
TIMINGS = ("images_per_second", "seconds", "evaluation_seconds", "compile_seconds")
"""The metrics that differ between two runs with the same settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The compiled functions that train a model. The functions keep the data."""

    train_epoch: Callable[[TrainState, int], tuple[TrainState, Array, Array | None, Array]]
    """`(state, epoch) -> (state, losses, accuracies, finite)`: see `train_epoch`. Overwrites the given state."""
    evaluate: Callable[[PyTree], tuple[Array, Array | None, Array | None]] | None = None
    """`params -> results` on the test set: see `evaluate`. None: there is no test set."""
    restarted: Callable[[int], TrainState | None] = lambda epoch: None
    """`epoch -> state`: an initial state if training restarts before the epoch, else None."""
    compile_seconds: float = 0.0
    epochs: int
    steps_per_epoch: int
    batch_size: int


def split(model: nnx.Module, loss: Callable) -> tuple[PyTree, PureLoss]:
    """Return the model's parameters, and its loss as a pure function `(params, inputs, targets)`.

    `loss` takes `(model, inputs, targets)`. Other variables of the model stay constant.
    """
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    return params, lambda params, inputs, targets: loss(nnx.merge(graphdef, params, constants), inputs, targets)


def train_epoch(
    state: TrainState,
    inputs: PyTree[Array],
    targets: Array,
    key: PRNGKeyArray,
    epoch: ArrayLike,
    *,
    loss: PureLoss,
    optimizer: optax.GradientTransformation | FusedOptimizer,
    batch_size: int,
    steps: int | None = None,
    augment: Augment | None = None,
    share: Share = lambda batch: batch,
) -> tuple[TrainState, Float[Array, " steps"], Float[Array, " steps"] | None, Bool[Array, " steps"]]:
    """Train for one pass over the N examples `inputs` and `targets`, in an order that depends on `key` and `epoch`.

    There are `steps` steps, by default `N // batch_size`, and the other shuffled examples are left out. Epochs are
    counted from 1. `share` divides a batch among the devices.

    Returns:
      The state, and for each step the mean loss, the accuracy, and whether the loss and all gradients were finite.
        Without a loss scale, all steps count as finite.
    """
    steps = len(targets) // batch_size if steps is None else steps
    order = jax.random.permutation(jax.random.fold_in(key, epoch), len(targets))
    batches = order[: steps * batch_size].reshape(steps, batch_size)
    # The complement `~epoch` gives other keys than the order of the examples.
    keys = jax.random.split(jax.random.fold_in(key, ~jnp.uint32(epoch)), steps) if augment else None

    def mean_loss(params: PyTree, inputs: Array, targets: Array) -> tuple[Float[Array, ""], Array | None]:
        losses, predictions = loss(params, inputs, targets)
        return jnp.mean(losses), predictions

    def step(state: TrainState, drawn: tuple[Int[Array, " batch"], PRNGKeyArray | None, Int[Array, ""]]):
        batch, key, number = drawn
        batch = share(batch)
        batch_inputs, batch_targets = jax.tree.map(lambda x: x[batch], (inputs, targets))
        if augment:
            batch_inputs = share(augment(key, batch_inputs, number))
        params, opt_state, scale = state
        if scale is None:
            differentiated = jax.value_and_grad(mean_loss, has_aux=True)
            (value, predictions), grads = differentiated(params, batch_inputs, batch_targets)
            finite = jnp.bool(True)
        else:
            differentiated = scale.value_and_grad(mean_loss, has_aux=True)
            (value, predictions), grads, finite, scale = differentiated(params, batch_inputs, batch_targets)
        new = apply(optimizer, grads, opt_state, params, finite if scale is not None else None)
        accuracy = None if predictions is None else jnp.mean(predictions == batch_targets)
        return TrainState(*new, scale), (value, accuracy, finite)

    numbers = (epoch - 1) * steps + jnp.arange(steps)
    state, (losses, accuracies, finite) = jax.lax.scan(step, state, (batches, keys, numbers))
    return state, losses, accuracies, finite


def evaluate(
    params: PyTree,
    inputs: PyTree[Array],
    targets: Array,
    *,
    loss: PureLoss,
    batch_size: int,
    share: Share = lambda batch: batch,
) -> tuple[Float[Array, ""], Int[Array, ""] | None, Array | None]:
    """Return the mean loss over the inputs, the number of correct predictions, and the predictions.

    The last two are None if the loss returns no predictions. `share` divides a batch among the devices.
    """
    batches = -(-len(targets) // batch_size)
    # The last example pads the last batch.
    indices = jnp.minimum(jnp.arange(batches * batch_size), len(targets) - 1).reshape(batches, batch_size)

    def of_batch(batch: Int[Array, " batch"]) -> tuple[Float[Array, " batch"], Array | None]:
        batch = share(batch)
        return loss(params, *jax.tree.map(lambda x: x[batch], (inputs, targets)))

    losses, predictions = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[: len(targets)], jax.lax.map(of_batch, indices)
    )
    correct = None if predictions is None else jnp.sum(predictions == targets)
    return jnp.mean(losses), correct, predictions


def run(
    training: Training, state: TrainState, epochs_done: int = 0
) -> Iterator[tuple[Metrics, TrainState, np.ndarray | None]]:
    """Train from `state`, the state after `epochs_done` epochs, to the last epoch.

    After each epoch, yield its metrics, the state, and the predictions for the test set, if any. The next epoch
    overwrites the state's buffers.

    Raises:
      FloatingPointError: after an epoch, if a loss is not finite, or if the mean loss or a parameter is too large. With
        a loss scale, fewer than `MOST_SKIPPED` consecutive losses may be infinite or NaN.
    """
    compile_seconds = training.compile_seconds
    for epoch in range(epochs_done + 1, training.epochs + 1):
        if (new := training.restarted(epoch)) is not None:
            state = new
        started = time.perf_counter()
        state, losses, accuracies, finite = training.train_epoch(state, epoch)
        losses, accuracies, finite = jax.tree.map(np.asarray, (losses, accuracies, finite))
        seconds = max(time.perf_counter() - started, LEAST_SECONDS)
        started = time.perf_counter()
        test_loss, test_accuracy, predictions = None, None, None
        if training.evaluate:
            loss, correct, predictions = jax.tree.map(np.asarray, training.evaluate(state.params))
            test_loss = float(loss)
            test_accuracy = None if predictions is None else int(correct) / predictions.size
        evaluation_seconds = time.perf_counter() - started
        if state.loss_scale is not None:
            state.loss_scale.check(MOST_SKIPPED)
            # A skipped step may have a finite loss, with infinite gradients.
            losses = losses[np.isfinite(losses)] if np.isfinite(losses).any() else losses
        _refuse_divergence(epoch, losses, test_loss, state.params)
        metrics = Metrics(
            epoch=epoch,
            step=epoch * training.steps_per_epoch,
            train_loss=float(losses.mean(dtype=np.float64)),
            train_accuracy=None if accuracies is None else float(accuracies.mean(dtype=np.float64)),
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            images_per_second=training.steps_per_epoch * training.batch_size / seconds,
            seconds=seconds,
            evaluation_seconds=evaluation_seconds,
            compile_seconds=compile_seconds,
            loss_scale=None if state.loss_scale is None else float(state.loss_scale.value),
            skipped_steps=int(np.sum(~finite)),
        )
        yield metrics, state, predictions
        compile_seconds = 0.0


def _refuse_divergence(
    epoch: int, losses: Float[np.ndarray, " steps"], test_loss: float | None, params: PyTree
) -> None:
    finite = f"epoch {epoch - 1}" if epoch > 1 else "epoch 0, the initial state"
    stopped = f"so training stopped; the last finite state is of {finite}; a smaller learning rate may help"
    broken = np.flatnonzero(~np.isfinite(losses))
    if broken.size:
        raise FloatingPointError(
            f"the training loss became {losses[broken[0]]} at step {broken[0] + 1} of {losses.size} in epoch {epoch}, "
            f"{stopped}"
        )
    # After an epoch's last update, only the test loss shows infinite parameters.
    if test_loss is not None and not np.isfinite(test_loss):
        raise FloatingPointError(f"the test loss became {test_loss} after epoch {epoch}, {stopped}")
    largest, mean = float(_largest(params)), float(losses.mean(dtype=np.float64))
    for name, value, most in (("training loss", mean, MOST_LOSS), ("largest parameter", largest, MOST_PARAMETER)):
        if not value <= most:  # NaN as well
            raise FloatingPointError(
                f"training diverged: the {name} is {value:.3g} after epoch {epoch}, above the limit {most:g}, {stopped}"
            )


@jax.jit  # on the device, because the parameters may take more time to copy than the epoch
def _largest(params: PyTree) -> Float[Array, ""]:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(array)) for array in jax.tree.leaves(params) if array.size]))
