"""The training loop. An epoch is one compiled scan over batches."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from experiments.configs.base import Augment, TrainingConfig
from experiments.data.datasets import Dataset
from experiments.output.errors import UserError
from experiments.training import devices
from jaxbp.training.optimizers import FusedOptimizer, apply, fused_adamw
from jaxbp.training.precision import LossScale

PureLoss = Callable[[PyTree, Array, Array], tuple[Float[Array, " batch"], Array]]

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
    train_accuracy: float
    test_loss: float
    test_accuracy: float
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
MOST_INPUT = 1e6
"""A larger input, such as a damaged pixel, would overflow or dominate the training."""
MOST_SKIPPED = 50
"""Consecutive skipped steps that end a run. Far fewer reach the smallest loss scale."""
MOST_LOSS, MOST_PARAMETER = 1e4, 1e4
"""A run with a larger mean loss or parameter has diverged. Networks of gates can diverge with a small loss."""
TIMINGS = ("images_per_second", "seconds", "evaluation_seconds", "compile_seconds")
"""The metrics that differ between two runs with the same settings."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and the compiled functions that train it. The functions keep the dataset on the devices."""

    mesh: Mesh
    state: TrainState
    model: nnx.Module
    constants_checksum: str | None
    train_epoch: Callable[[TrainState, int], tuple[TrainState, Array, Array, Array]]
    """`(state, epoch) -> (state, losses, accuracies, finite)`: see `train_epoch`. Overwrites the given state."""
    evaluate: Callable[[PyTree], tuple[Array, Array, Array]]
    """`params -> results` on the test set: see `evaluate`."""
    restarted: Callable[[int], TrainState | None]
    """`epoch -> state`: an initial state if training restarts before the epoch, else None."""
    compile_seconds: float
    epochs: int
    steps_per_epoch: int
    batch_size: int


def prepare(config: TrainingConfig, dataset: Dataset) -> Training:
    examples = len(dataset.train_images)
    if config.batch_size > examples:
        raise UserError(f"batch_size is {config.batch_size}; wants at most {examples}, the size of the training set")
    for name in ("train_images", "test_images"):
        images = np.asarray(getattr(dataset, name))
        # The thresholds of a table's features fit their values.
        most = np.finfo(np.float32).max if dataset.features else MOST_INPUT
        if np.issubdtype(images.dtype, np.floating) and not (np.abs(images) <= most).all():
            worst = images.flat[np.argmax(np.where(np.isnan(images), np.inf, np.abs(images)))]
            raise UserError(
                f"{name} of the dataset {dataset.name} has the value {worst:g}; wants numbers from -{most:g} to "
                f"{most:g}"
            )
    mesh = devices.mesh_of(config)
    steps_per_epoch = examples // config.batch_size
    init_key, shuffle_key = jax.random.split(jax.random.key(config.seed))
    model, loss = config.build(init_key)
    params, train_loss = split(model, loss)
    _, test_loss = split(model, config.evaluation(loss))
    if config.independent:
        train_loss, test_loss = (devices.shared(function, mesh) for function in (train_loss, test_loss))
    steps = config.epochs * steps_per_epoch
    options = dict(clip=config.gradient_clip, weight_decay=config.weight_decay)
    optimizer = config.optimizer(steps) or make_optimizer(config.learning_rate, steps, **options)

    def initial(params: PyTree) -> TrainState:
        scale = LossScale.create() if config.policy.compute_dtype == jnp.float16 else None
        return devices.on_each(mesh, TrainState(params, optimizer.init(params), scale))

    def restarted(epoch: int) -> TrainState | None:
        attempt = config.attempt(epoch)
        if epoch == 1 or attempt == config.attempt(epoch - 1):
            return None
        return initial(split(*config.build(jax.random.fold_in(init_key, attempt)))[0])

    state = initial(params)
    share = functools.partial(jax.lax.with_sharding_constraint, shardings=devices.shares(mesh))
    batches = dict(batch_size=config.batch_size, share=share)
    augment = config.augmentation()
    train = functools.partial(train_epoch, loss=train_loss, optimizer=optimizer, augment=augment, **batches)
    test = functools.partial(evaluate, loss=test_loss, **batches)
    train_data = devices.on_each(mesh, (dataset.train_images, dataset.train_labels))
    test_data = devices.on_each(mesh, (dataset.test_images, dataset.test_labels))

    def compiled(function: Callable, *arguments: Any, **options: Any) -> Callable:
        jitted = jax.jit(function, compiler_options=COMPILER_OPTIONS, out_shardings=devices.whole(mesh), **options)
        return jitted.lower(*arguments).compile()

    started = time.perf_counter()
    compiled_train = compiled(train, state, *train_data, shuffle_key, jnp.int32(0), donate_argnums=0)
    compiled_test = compiled(test, state.params, *test_data)
    return Training(
        mesh=mesh,
        state=state,
        model=model,
        constants_checksum=constants_checksum(model),
        train_epoch=lambda state, epoch: compiled_train(state, *train_data, shuffle_key, jnp.int32(epoch)),
        evaluate=lambda params: compiled_test(params, *test_data),
        restarted=restarted,
        compile_seconds=time.perf_counter() - started,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        batch_size=config.batch_size,
    )


def split(model: nnx.Module, loss: Callable) -> tuple[PyTree, PureLoss]:
    """Return the model's parameters, and its loss as a pure function `(params, inputs, targets)`.

    `loss` takes `(model, inputs, targets)`. Other variables of the model stay constant.
    """
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    return params, lambda params, inputs, targets: loss(nnx.merge(graphdef, params, constants), inputs, targets)


def constants_checksum(model: nnx.Module) -> str | None:
    """Return the SHA-256 of the model's variables that are not an `nnx.Param`, or None without any."""
    variables, _ = jax.tree.flatten_with_path(nnx.state(model, nnx.Not(nnx.Param)))
    checksum = hashlib.sha256()
    for path, array in variables:
        array = np.asarray(array)
        checksum.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return checksum.hexdigest() if variables else None


def make_optimizer(peak: float, steps: int, clip: float | None = None, weight_decay: float = 0.0) -> FusedOptimizer:
    """Return AdamW with gradients clipped to ±clip.

    The learning rate rises to `peak` in the first 5% of `steps`, then falls to 0 as a cosine.
    """
    warmup_steps = steps // 20
    rate = optax.warmup_cosine_decay_schedule(0.0 if warmup_steps else peak, peak, warmup_steps, steps)
    return fused_adamw(rate, weight_decay=weight_decay, clip=clip)


def train_epoch(
    state: TrainState,
    inputs: Array,
    targets: Array,
    key: PRNGKeyArray,
    epoch: ArrayLike,
    *,
    loss: PureLoss,
    optimizer: optax.GradientTransformation | FusedOptimizer,
    batch_size: int,
    augment: Augment | None = None,
    share: Share = lambda batch: batch,
) -> tuple[TrainState, Float[Array, " steps"], Float[Array, " steps"], Bool[Array, " steps"]]:
    """Train for one pass over the N examples `inputs` and `targets`, in an order that depends on `key` and `epoch`.

    The last `N % batch_size` shuffled examples are left out. Epochs are counted from 1. `share` divides a batch
    among the devices.

    Returns:
      The state, and for each step the mean loss, the accuracy, and whether the loss and all gradients were finite.
        Without a loss scale, all steps count as finite.
    """
    steps = len(inputs) // batch_size
    order = jax.random.permutation(jax.random.fold_in(key, epoch), len(inputs))
    batches = order[: steps * batch_size].reshape(steps, batch_size)
    # The complement `~epoch` gives other keys than the order of the examples.
    keys = jax.random.split(jax.random.fold_in(key, ~jnp.uint32(epoch)), steps) if augment else None

    def mean_loss(params: PyTree, inputs: Array, targets: Array) -> tuple[Float[Array, ""], Array]:
        losses, predictions = loss(params, inputs, targets)
        return jnp.mean(losses), predictions

    def step(state: TrainState, drawn: tuple[Int[Array, " batch"], PRNGKeyArray | None, Int[Array, ""]]):
        batch, key, number = drawn
        batch = share(batch)
        batch_inputs, batch_targets = inputs[batch], targets[batch]
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
        return TrainState(*new, scale), (value, jnp.mean(predictions == batch_targets), finite)

    numbers = (epoch - 1) * steps + jnp.arange(steps)
    state, (losses, accuracies, finite) = jax.lax.scan(step, state, (batches, keys, numbers))
    return state, losses, accuracies, finite


def evaluate(
    params: PyTree,
    inputs: Array,
    targets: Array,
    *,
    loss: PureLoss,
    batch_size: int,
    share: Share = lambda batch: batch,
) -> tuple[Float[Array, ""], Int[Array, ""], Array]:
    """Return the mean loss over the inputs, the number of correct predictions, and the predictions.

    `share` divides a batch among the devices.
    """
    batches = -(-len(inputs) // batch_size)
    # The last example pads the last batch.
    indices = jnp.minimum(jnp.arange(batches * batch_size), len(inputs) - 1).reshape(batches, batch_size)

    def of_batch(batch: Int[Array, " batch"]) -> tuple[Float[Array, " batch"], Array]:
        batch = share(batch)
        return loss(params, inputs[batch], targets[batch])

    losses, predictions = jax.lax.map(of_batch, indices)
    losses, predictions = (x.reshape(-1, *x.shape[2:])[: len(inputs)] for x in (losses, predictions))
    return jnp.mean(losses), jnp.sum(predictions == targets), predictions


def run(
    training: Training, state: TrainState, epochs_done: int = 0
) -> Iterator[tuple[Metrics, TrainState, np.ndarray]]:
    """Train from `state`, the state after `epochs_done` epochs, to the last epoch.

    After each epoch, yield its metrics, the state, and the predictions for the test set. The next epoch overwrites the
    state's buffers.

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
        losses, accuracies, finite = map(np.asarray, (losses, accuracies, finite))
        seconds = max(time.perf_counter() - started, LEAST_SECONDS)
        started = time.perf_counter()
        test_loss, test_correct, predictions = map(np.asarray, training.evaluate(state.params))
        evaluation_seconds = time.perf_counter() - started
        if state.loss_scale is not None:
            state.loss_scale.check(MOST_SKIPPED)
            # A skipped step may have a finite loss, with infinite gradients.
            losses = losses[np.isfinite(losses)] if np.isfinite(losses).any() else losses
        _refuse_divergence(epoch, losses, float(test_loss), state.params)
        metrics = Metrics(
            epoch=epoch,
            step=epoch * training.steps_per_epoch,
            train_loss=float(losses.mean(dtype=np.float64)),
            train_accuracy=float(accuracies.mean(dtype=np.float64)),
            test_loss=float(test_loss),
            test_accuracy=int(test_correct) / predictions.size,
            images_per_second=training.steps_per_epoch * training.batch_size / seconds,
            seconds=seconds,
            evaluation_seconds=evaluation_seconds,
            compile_seconds=compile_seconds,
            loss_scale=None if state.loss_scale is None else float(state.loss_scale.value),
            skipped_steps=int(np.sum(~finite)),
        )
        yield metrics, state, predictions
        compile_seconds = 0.0


def _refuse_divergence(epoch: int, losses: Float[np.ndarray, " steps"], test_loss: float, params: PyTree) -> None:
    kept = f"epoch {epoch - 1}" if epoch > 1 else "epoch 0, the initial state"
    stopped = (
        f"so training stopped; the newest checkpoint is of {kept}; a new run with a smaller learning rate may help"
    )
    broken = np.flatnonzero(~np.isfinite(losses))
    if broken.size:
        raise FloatingPointError(
            f"the training loss became {losses[broken[0]]} at step {broken[0] + 1} of {losses.size} in epoch {epoch}, "
            f"{stopped}"
        )
    # After an epoch's last update, only the test loss shows infinite parameters.
    if not np.isfinite(test_loss):
        raise FloatingPointError(f"the test loss became {test_loss} after epoch {epoch}, {stopped}")
    arrays = [array for array in map(np.asarray, jax.tree.leaves(params)) if array.size]
    largest = float(np.max([(array.max(), -array.min()) for array in arrays]))
    mean = float(losses.mean(dtype=np.float64))
    for name, value, most in (("training loss", mean, MOST_LOSS), ("largest parameter", largest, MOST_PARAMETER)):
        if not value <= most:  # NaN as well
            raise FloatingPointError(
                f"training diverged: the {name} is {value:.3g} after epoch {epoch}, above the limit {most:g}, {stopped}"
            )
