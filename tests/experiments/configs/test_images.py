from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs.images import ImageConfig, classification_loss
from experiments.data import augmentation, datasets


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("dataset", "cifar10", "digits"),
        ("implementation", "cuda", "pallas"),
        ("precision", "float16", "mixed_float16"),
        ("shift", 28, "a whole number from 0 to 27"),
    ],
)
def test_what_no_experiment_on_images_can_have_is_refused(setting, value, wanted):
    with pytest.raises(ValueError, match=f"{setting} is {value!r}; wants .*{wanted}"):
        ImageConfig(**{setting: value})


def test_the_recipe_is_that_of_the_dataset():
    assert ImageConfig(dataset="digits").epochs == 20
    assert ImageConfig(dataset="mnist").batch_size == 64


def test_images_are_moved_only_when_asked_for():
    assert ImageConfig().augmentation() is None
    images, key = jnp.ones((1, 1, 28, 28)), jax.random.key(0)
    moved = ImageConfig(shift=2).augmentation()(key, images, 0)
    assert jnp.array_equal(moved, augmentation.shift(key, images, pixels=2))


def test_it_loads_its_dataset(monkeypatch):
    monkeypatch.setattr(datasets, "load", lambda *asked: asked)
    assert ImageConfig(dataset="mnist", data_dir=Path("folder")).load() == ("mnist", Path("folder"))


def test_the_loss_is_in_float32_and_comes_with_the_likeliest_class():
    logits = jnp.asarray([[0.0, 2.0], [1.0, 0.0]], jnp.bfloat16)
    loss, classes = classification_loss(lambda images: logits, None, jnp.array([1, 1]), implementation="xla")
    np.testing.assert_allclose(loss, np.log1p(np.exp([-2.0, 1.0])), rtol=1e-6)
    assert loss.dtype == jnp.float32 and classes.tolist() == [1, 0]
