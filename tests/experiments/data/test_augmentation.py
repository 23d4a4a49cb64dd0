"""Random changes of training examples: what a shift is, and which shifts there are."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import EXPERIMENTS, ImageConfig
from experiments.data import augmentation
from experiments.output.errors import UserError

pytestmark = pytest.mark.once


def translate(image, down, right):
    """`image (..., height, width)` moved, by the definition: zeros but where a pixel has come from."""
    moved = np.zeros_like(image)
    for row, column in np.ndindex(image.shape[-2:]):
        if 0 <= row - down < image.shape[-2] and 0 <= column - right < image.shape[-1]:
            moved[..., row, column] = image[..., row - down, column - right]
    return moved


@pytest.mark.parametrize("pixels", [1, 3])
def test_images_are_moved_by_every_offset_up_to_the_limit_all_as_often_and_by_no_other(pixels):
    image = np.random.default_rng(0).random((2, 7, 5), np.float32)
    offsets = list(itertools.product(range(-pixels, pixels + 1), repeat=2))
    offset_of = {translate(image, *offset).tobytes(): offset for offset in offsets}
    batch = jnp.broadcast_to(image, (100 * len(offsets), *image.shape))
    moved = np.asarray(augmentation.shift(jax.random.key(0), batch, pixels))
    counts = collections.Counter(offset_of[one.tobytes()] for one in moved)
    assert set(counts) == set(offsets) and len(offset_of) == len(offsets)
    assert min(counts.values()) > 60 and max(counts.values()) < 140  # of 100 each: four standard deviations


def test_each_image_of_a_batch_is_moved_by_itself():
    images = np.random.default_rng(0).random((50, 1, 4, 4), np.float32)
    moved = np.asarray(augmentation.shift(jax.random.key(1), images, 2))
    for image, one in zip(images, moved, strict=True):
        assert any(np.array_equal(one, translate(image, *at)) for at in itertools.product(range(-2, 3), repeat=2))


@pytest.mark.parametrize(
    "config", [config for config in EXPERIMENTS.values() if issubclass(config, ImageConfig)], ids=lambda c: c.name
)
def test_every_experiment_on_images_can_shift_and_need_not(config):
    assert config(shift=0).augmentation() is None
    shifts_by_itself = config().augmentation() is not None
    assert shifts_by_itself == (config.name == "logic-conv")  # whose sizes say by how much
    images = jnp.ones((1, 1, 28, 28))
    moved = config(shift=27).augmentation()(jax.random.key(0), images, 0)
    assert moved.shape == images.shape and 0 < moved.sum() < 28 * 28
    for pixels in (-1, 28, 1.0, True):
        with pytest.raises(UserError, match=f"^shift = {pixels}: wanted a whole number from 0 to 27"):
            config(shift=pixels)
