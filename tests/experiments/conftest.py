import contextlib
import dataclasses
import functools
import io
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbp
from experiments import compare, train
from experiments.configs.automaton_experiments import CheckerboardConfig
from experiments.configs.base import Range, Recipe, TrainingConfig
from experiments.data.datasets import Dataset
from experiments.training import loop as training
from experiments.training.reports import logic
from jaxbp.nnx import Linear


class Classifier(nnx.Module):
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
    """Trains in milliseconds. Each class is a random image with noise."""

    name: ClassVar[str] = "toy"

    devices: Annotated[int | None, Range(1)] = 1

    def defaults(self):
        return Recipe(batch_size=16, epochs=4, learning_rate=1e-2)._asdict()

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


@pytest.fixture
def press_ctrl_c():
    """Under `nohup` and in the background of a script, Python ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def prepared_once():
    """Compile once for all runs of a module with equal settings."""
    prepare = training.prepare

    @functools.cache
    def prepared(build, config):
        made = prepare(config, config.load())
        # Training overwrites the buffers of its initial state.
        return dataclasses.replace(made, state=jax.tree.map(np.array, made.state))

    def once(config, dataset):
        settings = dataclasses.replace(config, run_dir=None, resume=False, target_accuracy=None)
        return prepared(type(config).build, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "prepare", once)
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyAutomaton(CheckerboardConfig):
    """An automaton that learns within seconds to be on everywhere."""

    name: ClassVar[str] = "ca-tiny"
    grid: ClassVar = (4, 3)
    channels: ClassVar = 2
    steps: ClassVar = 3
    perception: ClassVar = (2, (8, 4, 2))
    update: ClassVar = (8, 4, 2)
    published: ClassVar = (Recipe(batch_size=4, epochs=4, learning_rate=0.2), 80)
    hardening: ClassVar = None

    def pattern(self, grid=None):
        return np.ones((*(grid or self.grid), 1), bool)


@pytest.fixture(scope="session")
def tiny_automaton():
    return functools.partial(TinyAutomaton, recipe="published", implementation="xla", pass_through=1.0, hard_share=1.0)


WRONG = jaxbp.Pair(jnp.tanh, {"xla": lambda dy, x: dy * (1.1 - jnp.tanh(x) ** 2)}, name="wrong")


class Switched(nnx.Module):
    def __init__(self, pair, implementation, rngs):
        self.linear = Linear(784, 10, implementation=implementation, rngs=rngs)
        self.pair, self.implementation = pair, implementation

    def __call__(self, images):
        logits = self.linear(images.reshape(len(images), -1))
        return self.pair(logits, implementation=self.implementation) if self.pair else logits


def classifier_loss(model, images, labels):
    logits = model(images)
    losses = jaxbp.softmax_cross_entropy(logits, labels, implementation=model.implementation)
    return losses, jnp.argmax(logits, axis=-1)


@pytest.fixture(scope="session")
def compare_toy(toy_config):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(toy_config):
        implementation: str | None = None
        pair = None

        def build(self, key):
            return Switched(self.pair, self.implementation, nnx.Rngs(key)), classifier_loss

    def run(*args, experiment="toy", pair=None):
        Config.pair = pair
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "EXPERIMENTS", {"toy": Config, "fixed": toy_config})
            return compare.main([experiment, "--seconds", "0.001", "--epochs", "1", *args])

    return run


@pytest.fixture(scope="session")
def wrong_pair():
    return WRONG


@pytest.fixture(scope="session")
def comparison(compare_toy, tmp_path_factory):
    path = tmp_path_factory.mktemp("compare") / "toy"
    json_path, html_path = path.with_suffix(".json"), path.with_suffix(".html")
    code = compare_toy(
        "--steps",
        "8",
        "--no-second-order",
        "--matmul-precision",
        "highest",
        "--json",
        str(json_path),
        "--html",
        str(html_path),
        pair=WRONG,
    )
    return code, json.loads(json_path.read_text()), html_path.read_text()


@pytest.fixture(scope="module")
def gates_run(tmp_path_factory):
    def run(experiment, *options):
        folder, output = tmp_path_factory.mktemp(experiment) / "run", []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logic, "TIMED_SECONDS", 0.01)
            patch.setattr(logic, "TIMED_SAMPLES", 64)
            patch.setattr(logic, "MOST_MAPPED", 200)
            patch.setattr("builtins.print", lambda *words, **options: output.append(" ".join(map(str, words))))
            code = train.main([experiment, *options, "--run-dir", str(folder)])
        return code, "\n".join(output), folder

    return run


class GPTRun(NamedTuple):
    settings: Sequence[str]
    directory: Path
    output: str


@pytest.fixture(scope="session")
def gpt_run(tmp_path_factory):
    """The run of a tiny language model."""
    folder, output = tmp_path_factory.mktemp("gpt"), io.StringIO()
    words = np.random.default_rng(0).choice(["def ", "return ", "x", "(y)", ":\n"], 1500)
    (folder / "own.txt").write_text("".join(words))
    sizes = "--layers 1 --features 16 --heads 2 --context 16 --batch-size 8 --steps-per-epoch 10 --epochs 2 --devices 1"
    settings, directory = ["gpt", "--text", str(folder / "own.txt"), *sizes.split()], folder / "run"
    with contextlib.redirect_stdout(output):
        assert train.main([*settings, "--run-dir", str(directory), "--json", str(folder / "result.json")]) == 0
    return GPTRun(settings, directory, output.getvalue())
