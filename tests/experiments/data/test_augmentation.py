import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import EXPERIMENTS
from experiments.configs.images import ImageConfig
from experiments.data import augmentation
from experiments.output.errors import UserError


def translate(image, down, right):
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
    assert min(counts.values()) > 60 and max(counts.values()) < 140  # 100, four standard deviations


def test_each_image_of_a_batch_is_moved_by_itself():
    images = np.random.default_rng(0).random((50, 1, 4, 4), np.float32)
    moved = np.asarray(augmentation.shift(jax.random.key(1), images, 2))
    for image, one in zip(images, moved, strict=True):
        assert any(np.array_equal(one, translate(image, *at)) for at in itertools.product(range(-2, 3), repeat=2))


def bilinear(image, row, column):
    top, left = int(np.floor(row)), int(np.floor(column))
    value = 0.0
    for r, c in itertools.product((top, top + 1), (left, left + 1)):
        if 0 <= r < image.shape[0] and 0 <= c < image.shape[1]:
            value += (1 - abs(row - r)) * (1 - abs(column - c)) * image[r, c]
    return value


def test_a_distorted_image_is_read_between_its_pixels_where_the_field_says():
    images, key = np.random.default_rng(0).random((2, 3, 5, 4), np.float32), jax.random.key(3)
    distorted, moves = augmentation.distort(key, images, 1.5, knots=1), 1.5 * jax.random.normal(key, (2, 2, 1, 1))
    for (n, channel, row, column), value in np.ndenumerate(np.asarray(distorted)):
        down, right = np.asarray(moves[n]).ravel()
        np.testing.assert_allclose(value, bilinear(images[n, channel], row + down, column + right), atol=1e-5)


def test_a_distortion_is_smooth_as_large_as_asked_for_and_none_of_0_pixels():
    ramps = jnp.broadcast_to(jnp.arange(28.0), (1000, 1, 28, 28))  # a pixel's value is its column
    by = augmentation.distort(jax.random.key(0), ramps, 0.7)[:, 0, 7:21, 7:21] - ramps[:, 0, 7:21, 7:21]
    assert 0.7 * 0.6 < jnp.std(by) < 0.7
    assert jnp.std(jnp.diff(by, axis=-1)) < 0.25 * jnp.std(by)
    np.testing.assert_array_equal(augmentation.distort(jax.random.key(0), ramps, 0.0), ramps)


EXPERIMENTS_ON_IMAGES = [config for config in EXPERIMENTS.values() if issubclass(config, ImageConfig)]


@pytest.mark.parametrize("config", EXPERIMENTS_ON_IMAGES, ids=lambda c: c.name)
def test_every_experiment_on_images_can_distort_before_it_shifts(config):
    images, key = jnp.asarray(np.random.default_rng(0).random((2, 1, 28, 28), np.float32)), jax.random.key(0)
    shift = config(shift=1).augmentation()
    both = config(shift=1, distortion=0.5).augmentation()(key, images, 0)
    alone = config(shift=0, distortion=0.5).augmentation()(key, images, 0)
    assert not jnp.array_equal(alone, images)
    np.testing.assert_array_equal(both, shift(key, alone, 0))
    for pixels in (-0.1, 28, float("nan"), "1"):
        with pytest.raises(UserError, match=f"^distortion is {pixels!r}; wants a "):
            config(distortion=pixels)


@pytest.mark.parametrize("config", EXPERIMENTS_ON_IMAGES, ids=lambda c: c.name)
def test_every_experiment_on_images_can_shift_and_need_not(config):
    assert config(shift=0).augmentation() is None
    shifts_by_itself = config().augmentation() is not None
    assert shifts_by_itself == (config.name == "logic-conv")
    images = jnp.ones((1, 1, 28, 28))
    moved = config(shift=27).augmentation()(jax.random.key(0), images, 0)
    assert moved.shape == images.shape and 0 < moved.sum() < 28 * 28
    for pixels in (-1, 28, 1.0, True):
        with pytest.raises(UserError, match=f"^shift is {pixels}; wants a whole number "):
            config(shift=pixels)


@pytest.mark.parametrize("config", EXPERIMENTS_ON_IMAGES, ids=lambda c: c.name)
def test_every_experiment_on_images_can_flip_about_half_of_them(config):
    images, key = jnp.asarray(np.random.default_rng(0).random((400, 1, 28, 28), np.float32)), jax.random.key(0)
    flipped = config(shift=0, flip=True).augmentation()(key, images, 0)
    mirrored = (flipped == images[..., ::-1]).all((1, 2, 3))
    np.testing.assert_array_equal(flipped, np.where(mirrored[:, None, None, None], images[..., ::-1], images))
    assert 160 < mirrored.sum() < 240
    shifted = config(shift=1).augmentation()(key, flipped, 0)
    np.testing.assert_array_equal(config(shift=1, flip=True).augmentation()(key, images, 0), shifted)
