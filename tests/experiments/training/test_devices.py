import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import train
from experiments.configs import GPTConfig, LogicConfig
from experiments.data.datasets import Dataset
from experiments.training import devices, pictures, run_directory
from experiments.training import loop as training
from jaxbp.training import loop

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over"),
]


def noise(train=48, test=21):
    random, total = np.random.default_rng(0), train + test
    numbers = random.random((total, 1, 28, 28), np.float32), random.integers(0, 10, total, np.int32)
    return Dataset(*(part[:train] for part in numbers), *(part[train:] for part in numbers), "noise")


def run(config, dataset=None):
    prepared = training.prepare(config, dataset or config.load())
    epochs = list(loop.run(prepared, prepared.state))
    return [epoch[0] for epoch in epochs], jax.tree.map(np.asarray, epochs[-1][1])


def assert_within_rounding(one, other, tolerance=1e-5):
    (metrics, state), (other_metrics, other_state) = one, other
    for a, b in zip(metrics, other_metrics, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=tolerance)
        assert a.test_loss == pytest.approx(b.test_loss, rel=tolerance)
        assert (a.loss_scale, a.skipped_steps) == (b.loss_scale, b.skipped_steps)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other_state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(a).max())


@pytest.fixture
def sgd(monkeypatch):
    """Adam takes a full step even if a gradient is only rounding error."""
    return lambda config: monkeypatch.setattr(type(config), "optimizer", lambda config, steps: optax.sgd(0.1))


def test_the_same_number_of_devices_gives_the_same_bits(toy_config):
    one, other = (run(toy_config(devices=4))[1] for _ in range(2))
    assert [a.tobytes() for a in jax.tree.leaves(one)] == [a.tobytes() for a in jax.tree.leaves(other)]


def test_eight_devices_train_within_rounding_of_one(sgd):
    tiny = dict(layers=2, gates=100, levels=1, wiring="random", implementation="pallas")
    config = LogicConfig(batch_size=24, epochs=1, **tiny)
    sgd(config)
    assert_within_rounding(*(run(dataclasses.replace(config, devices=n), noise()) for n in (1, 8)))


def test_a_loss_that_depends_on_the_whole_batch_is_that_of_the_whole_batch(toy_config, sgd, monkeypatch):
    build = toy_config.build

    def with_the_first(config, key):
        model, loss = build(config, key)

        def scaled(model, images, labels):
            losses, predictions = loss(model, images, labels)
            return losses * jnp.sum(images[0]) / 100, predictions

        return model, scaled

    monkeypatch.setattr(toy_config, "build", with_the_first)
    monkeypatch.setattr(toy_config, "independent", False)
    sgd(toy_config())
    assert_within_rounding(*(run(toy_config(epochs=1, devices=n)) for n in (1, 4)))


def test_a_step_that_is_not_finite_on_one_device_is_skipped_by_all(toy_config, sgd, monkeypatch):
    monkeypatch.setattr(training, "MOST_INPUT", np.inf)
    config = toy_config(precision="mixed_float16", epochs=2, batch_size=48)
    sgd(config)
    data = noise(train=96)
    data.train_images[7] = np.inf
    one, eight = (run(dataclasses.replace(config, devices=n), data) for n in (1, 8))
    assert [metrics.skipped_steps for metrics in eight[0]] == [1, 1]
    assert eight[0][-1].loss_scale == 2.0**13
    assert_within_rounding(one, eight)


def test_gradients_are_summed_in_the_parameters_dtype_and_not_in_that_of_the_computation():
    mesh = jax.make_mesh((8,), (devices.EXAMPLES,), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x, y):
        return w.astype(jnp.float16) * x, y

    def total(w, x):
        return jnp.sum(devices.shared(loss, mesh)(w, x, x)[0].astype(jnp.float32))

    gradients = jnp.array([2048, *[1] * 7], jnp.float16)  # 2048 + 1 is 2048 in float16
    assert jax.jit(jax.grad(total))(jnp.float32(1), gradients) == 2055


def test_a_run_of_four_devices_goes_on_with_two(toy_config, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    four, mixed = tmp_path / "four", tmp_path / "mixed"
    train.train(toy_config(run_dir=four, devices=4))
    shutil.copytree(four, mixed)
    shutil.rmtree(mixed / "checkpoints" / "4")
    resumed = train.train(toy_config(run_dir=mixed, devices=2, resume=True))
    assert [run_directory.newest(path).config["devices"] for path in (four, mixed)] == [4, 2]
    assert resumed.test_loss == pytest.approx(run_directory.read_metrics(four)[-1].test_loss, rel=1e-4)


@pytest.fixture
def gpt(tmp_path, sgd):
    (tmp_path / "text").mkdir()
    for name in "abcdefgh":
        (tmp_path / "text" / name).write_text(f"{name} is one of eight files. " * 9)

    def config(**options):
        sizes = dict(layers=1, features=32, heads=4, context=16, batch_size=4, steps_per_epoch=3, epochs=2)
        return GPTConfig(text=tmp_path / "text", **sizes, **options)

    sgd(config())
    return config


def test_devices_that_divide_the_features_train_within_rounding_of_one(gpt):
    assert devices.number_of(gpt(tensor_parallel=2)) == 2
    config = gpt(devices=4, tensor_parallel=2)
    prepared = training.prepare(config, config.load())
    metrics, states, _ = zip(*loop.run(prepared, prepared.state), strict=True)
    kernel = states[-1].params["blocks"][0]["up"]["kernel"][...]
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 64)
    assert_within_rounding((metrics, jax.tree.map(np.asarray, states[-1])), run(gpt(devices=1)))


def test_a_run_whose_features_are_divided_resumes_with_the_same_bits(gpt, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "curves", lambda *_: b"\x89PNG")
    monkeypatch.setattr(train, "REPORTS", {})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train.train(gpt(devices=2, tensor_parallel=2, run_dir=whole))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "2")
    train.train(gpt(devices=2, tensor_parallel=2, run_dir=resumed, resume=True))
    one, other = (run_directory.newest(path).arrays for path in (whole, resumed))
    assert {name: a.tobytes() for name, a in one.items()} == {name: a.tobytes() for name, a in other.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tensor_parallel=4, devices=2), "devices is 2; wants a multiple of 4, the tensor_parallel"),
        (dict(tensor_parallel=2, devices=6), "batch_size is 4; wants a multiple of 3, devices / tensor_parallel"),
        (dict(tensor_parallel=8), "tensor_parallel is 8; wants a divisor of heads, 4"),
    ],
)
def test_devices_that_cannot_divide_the_features_are_refused(gpt, options, message):
    with pytest.raises(ValueError, match=message):
        devices.number_of(gpt(**options))


@pytest.mark.parametrize(("batch", "least", "taken"), [(64, 8, 8), (63, 8, 7), (40, 8, 5), (15, 8, 1), (64, None, 1)])
def test_left_open_a_run_takes_several_devices_only_if_each_has_enough_examples(
    toy_config, monkeypatch, batch, least, taken
):
    monkeypatch.setattr(toy_config, "examples_per_device", least)
    config = toy_config(batch_size=batch, devices=None)
    assert devices.number_of(config) == 1  # not measured on CPUs
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert devices.number_of(config) == taken == devices.mesh_of(config).size


def test_a_run_says_how_many_devices_it_takes_and_why(toy_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *_: next(iter(())))
    commands = iter([toy_config(devices=None, run_dir=tmp_path), toy_config(devices=4, run_dir=tmp_path)])
    monkeypatch.setattr(train, "parse", lambda *_: train.Command(next(commands), None))
    said = []
    for _ in range(2):
        with pytest.raises(StopIteration):
            train.main([])
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[0] == "training on 1 of 8 devices, because more devices were not measured for toy on cpu"
    assert said[1] == "training on 4 of 8 devices"


@pytest.mark.parametrize(("batch", "asked"), [(16, 2), (24, 3)])
def test_a_run_takes_the_devices_that_it_is_given(toy_config, batch, asked):
    assert devices.number_of(toy_config(batch_size=batch, devices=asked)) == asked


MISTAKES = [
    (16, 9, "devices is 9; wants at most 8, the number of available devices"),
    (100, 8, "batch_size is 100; wants a multiple of 8, the number of devices"),
]


@pytest.mark.parametrize(("batch", "asked", "message"), MISTAKES)
def test_devices_that_do_not_fit_are_refused(toy_config, batch, asked, message):
    with pytest.raises(ValueError, match=message):
        devices.number_of(toy_config(batch_size=batch, devices=asked))
