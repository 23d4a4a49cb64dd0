import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.configs.base import from_dict, to_dict
from experiments.configs.images import ImageConfig, LeNetConfig, classification_loss
from experiments.data import augmentation, datasets
from experiments.output.errors import UserError


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


@pytest.fixture
def own(tmp_path):
    def save(shape, classes=3, examples=200):
        path, labels = tmp_path / "own.npz", np.arange(examples) % classes
        np.savez(path, x_train=np.random.default_rng(0).random((examples, *shape), np.float32), y_train=labels)
        return path

    return save


def test_a_model_has_the_classes_of_own_data(own):
    config = LeNetConfig(data=own((28, 28)))
    assert (config.shape, config.classes, config.data_name) == ((1, 28, 28), 3, "own.npz")
    # The same number of steps as for the digits, 20 epochs of 89.
    assert (config.batch_size, config.epochs) == (8, 89)
    logits = nnx.eval_shape(lambda: config.build(jax.random.key(0))[0](jnp.zeros((2, 1, 28, 28))))
    assert logits.shape == (2, 3)


def test_settings_of_a_saved_run_need_no_file(own):
    path = own((28, 28))
    config = LeNetConfig(data=path)
    path.rename(path.with_name("moved.npz"))
    saved = from_dict(LeNetConfig, json.loads(json.dumps(to_dict(config))))
    assert saved == config
    with pytest.raises(FileNotFoundError, match=r"own\.npz is not a file"):
        saved.load()
    assert len(from_dict(LeNetConfig, to_dict(config) | {"data": str(path.with_name("moved.npz"))}).load()[0]) == 161
    own((20, 20))
    with pytest.raises(UserError, match=r"own.npz has the shape \(1, 20, 20\); wants \(1, 28, 28\), as in the run"):
        saved.load()


def test_own_data_that_a_model_cannot_take_are_refused(own):
    path = own((20, 20))
    cases = {
        r"has examples of shape \(1, 20, 20\); wants \(1, 28, 28\)": dict(data=path),
        "dataset is 'mnist'; wants no name of a dataset, because data is": dict(data=path, dataset="mnist"),
        "classes is 3; wants 10, as in digits": dict(classes=3),
    }
    for message, settings in cases.items():
        with pytest.raises(UserError, match=message):
            LeNetConfig(**settings)
    with pytest.raises(UserError, match=r"data is table.csv; wants a file whose name ends in .npz$"):
        LeNetConfig(data=Path("table.csv"))
