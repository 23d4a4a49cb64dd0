from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.configs.images import ImageConfig, LeNetConfig, MixerConfig, classification_loss
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_is_that_of_the_computation_alone(dtype):
    config = LeNetConfig(precision=f"mixed_{dtype}")
    images, labels = jnp.zeros((1, 1, 28, 28)), jnp.zeros(1, jnp.int32)

    def run():
        model, loss = config.build(jax.random.key(0))
        return nnx.state(model, nnx.Param), model(images), loss(model, images, labels)[0]

    parameters, logits, losses = jax.eval_shape(run)
    assert logits.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {jnp.dtype("float32")}
    assert losses.dtype == jnp.float32


def test_the_settings_are_the_models():
    config = MixerConfig(patch=14, channels=8, blocks=3, implementation="xla", precision="mixed_bfloat16")
    model = nnx.eval_shape(lambda: config.build(jax.random.key(0))[0])
    assert (model.patch, model.dtype, len(model.blocks)) == (14, "bfloat16", 3)
    assert model.embed.weight.shape == (8, 14 * 14)
    assert {block.implementation for block in model.blocks} == {"xla"}


@pytest.mark.parametrize(("setting", "value"), [("patch", 5), ("patch", 0), ("channels", 0), ("blocks", 1.5)])
def test_what_no_mixer_can_have_is_refused(setting, value):
    with pytest.raises(ValueError, match=f"{setting} is {value}; wants a"):
        MixerConfig(**{setting: value})


def test_it_learns_more_slowly_than_a_lenet():
    assert MixerConfig().learning_rate == 1e-3
    assert MixerConfig().batch_size == 16
