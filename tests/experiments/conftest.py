import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.configs import Recipe, TrainingConfig
from experiments.data.datasets import Dataset


class Classifier(nnx.Module):
    """A linear layer over a fixed random half of the pixels: one variable that is trained and one that is not."""

    def __init__(self, rngs: nnx.Rngs):
        self.mask = nnx.Variable(rngs.params.bernoulli(shape=(784,)).astype(jnp.float32))
        self.linear = nnx.Linear(784, 10, rngs=rngs)

    def __call__(self, images):
        return self.linear(images.reshape(len(images), -1) * self.mask[...])


def toy_loss(model, images, labels):
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels), jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(TrainingConfig):
    """An experiment that trains in milliseconds; ten random images, each with noise, are its classes."""

    name: ClassVar[str] = "toy"

    def recipe(self):
        return Recipe(batch_size=16, epochs=4, learning_rate=1e-2)

    def build(self, key):
        return Classifier(nnx.Rngs(key)), toy_loss

    def load(self):
        random = np.random.default_rng(0)
        classes = random.random((10, 1, 28, 28), np.float32)
        train_labels, test_labels = (random.integers(0, 10, size, np.int32) for size in (100, 37))
        train_images, test_images = (
            np.clip(classes[labels] + random.normal(0, 0.5, (len(labels), 1, 28, 28)), 0, 1).astype(np.float32)
            for labels in (train_labels, test_labels)
        )
        return Dataset(train_images, train_labels, test_images, test_labels, "toy")


@pytest.fixture(scope="session")
def toy_config():
    return ToyConfig
