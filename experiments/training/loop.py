"""The preparation of a run: its model, optimizer, data, and compiled functions on the devices."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree

from experiments.configs.base import TrainingConfig
from experiments.data.datasets import Dataset
from experiments.output.errors import UserError
from experiments.training import devices
from jaxbp.training.loop import COMPILER_OPTIONS, Training, TrainState, evaluate, split, train_epoch
from jaxbp.training.optimizers import FusedOptimizer, fused_adamw
from jaxbp.training.precision import LossScale

MOST_INPUT = 1e6
"""A larger input, such as a damaged pixel, would overflow or dominate the training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedTraining(Training):
    """A model and the compiled functions that train it. The functions keep the dataset on the devices."""

    state: TrainState
    shardings: TrainState
    """The sharding of each array of a state."""
    model: nnx.Module
    constants_checksum: str | None


def prepare(config: TrainingConfig, dataset: Dataset) -> PreparedTraining:
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
    steps_per_epoch = min(examples // config.batch_size, config.steps_per_epoch or examples)
    if config.epochs > (most := np.iinfo(np.int32).max // steps_per_epoch):
        raise UserError(f"epochs is {config.epochs}; wants at most {most}, because the step is an int32")
    init_key, shuffle_key = jax.random.split(jax.random.key(config.seed))
    model, loss = config.build(init_key)
    params, train_loss = split(model, loss)
    _, test_loss = split(model, config.evaluation(loss))
    divided = config.tensor_parallel > 1
    if config.independent and not divided:
        train_loss, test_loss = (devices.shared(function, mesh) for function in (train_loss, test_loss))
    steps = config.epochs * steps_per_epoch
    options = dict(clip=config.gradient_clip, weight_decay=config.weight_decay)
    # A kernel would gather the parameters.
    options |= dict(implementation="xla" if divided else None)
    optimizer = config.optimizer(steps) or make_optimizer(config.learning_rate, steps, **options)

    def shardings(state: TrainState) -> TrainState:
        if divided:
            return config.shardings(model, mesh, devices.FEATURES, state)
        return jax.tree.map(lambda _: devices.whole(mesh), state)

    def initial(params: PyTree) -> TrainState:
        scale = LossScale.create() if config.policy.compute_dtype == jnp.float16 else None
        state = TrainState(params, optimizer.init(params), scale)
        return devices.placed(state, shardings(state))

    def restarted(epoch: int) -> TrainState | None:
        attempt = config.attempt(epoch)
        if epoch == 1 or attempt == config.attempt(epoch - 1):
            return None
        return initial(split(*config.build(jax.random.fold_in(init_key, attempt)))[0])

    state = initial(params)
    of_state, whole = shardings(state), devices.whole(mesh)
    share = functools.partial(jax.lax.with_sharding_constraint, shardings=devices.shares(mesh))
    batches = dict(batch_size=config.batch_size, share=share)
    augment = config.augmentation()
    train = functools.partial(
        train_epoch, loss=train_loss, optimizer=optimizer, augment=augment, steps=steps_per_epoch, **batches
    )
    test = functools.partial(evaluate, loss=test_loss, **batches)
    train_data = devices.on_each(mesh, (dataset.train_images, dataset.train_labels))
    test_data = devices.on_each(mesh, (dataset.test_images, dataset.test_labels))

    def compiled(function: Callable, *arguments: Any, **options: Any) -> Callable:
        return jax.jit(function, compiler_options=COMPILER_OPTIONS, **options).lower(*arguments).compile()

    started = time.perf_counter()
    trained = dict(donate_argnums=0, out_shardings=(of_state, whole, whole, whole))
    compiled_train = compiled(train, state, *train_data, shuffle_key, jnp.int32(0), **trained)
    compiled_test = compiled(test, state.params, *test_data, out_shardings=whole)

    def trained(state: TrainState, epoch: int) -> tuple:
        state, *results = compiled_train(state, *train_data, shuffle_key, jnp.int32(epoch))
        params = jax.tree.map(
            lambda new, old: new if new is old else jax.device_put(new, old.sharding),
            config.repaired(model, state.params, epoch),
            state.params,
        )
        return state._replace(params=params), *results

    return PreparedTraining(
        state=state,
        shardings=of_state,
        model=model,
        constants_checksum=constants_checksum(model),
        train_epoch=trained,
        evaluate=lambda params: compiled_test(params, *test_data),
        restarted=restarted,
        compile_seconds=time.perf_counter() - started,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        batch_size=config.batch_size,
    )


def constants_checksum(model: nnx.Module) -> str | None:
    """Return the SHA-256 of the model's variables that are not an `nnx.Param`, or None without any."""
    variables, _ = jax.tree.flatten_with_path(nnx.state(model, nnx.Not(nnx.Param)))
    checksum = hashlib.sha256()
    for path, array in variables:
        array = np.asarray(array)
        checksum.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return checksum.hexdigest() if variables else None


def make_optimizer(peak: float, steps: int, weight_decay: float = 0.0, **options: Any) -> FusedOptimizer:
    """Return AdamW with the options of `fused_adamw`.

    The learning rate rises to `peak` in the first 5% of `steps`, then falls to 0 as a cosine.
    """
    warmup_steps = steps // 20
    rate = optax.warmup_cosine_decay_schedule(0.0 if warmup_steps else peak, peak, warmup_steps, steps)
    return fused_adamw(rate, weight_decay=weight_decay, **options)
