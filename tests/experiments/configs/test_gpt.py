import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.configs.gpt import GPTConfig, bits_per_byte, mean_bits_per_byte
from experiments.data import text
from experiments.output.errors import UserError
from experiments.training.loop import prepare

TINY = dict(layers=1, features=8, heads=2, context=8, batch_size=4, steps_per_epoch=3, epochs=2)


def test_a_preset_gives_the_settings_that_are_none():
    default, small = GPTConfig(), GPTConfig(preset="small", layers=3)
    assert (default.precision, small.precision) == ("float32", "mixed_bfloat16")
    assert small.layers == 3 and small.features > default.features
    assert dataclasses.replace(small, run_dir=None) == small


def test_several_gpus_are_used_from_the_measured_number_of_tokens_per_gpu_on():
    rows = {context: GPTConfig(context=context).examples_per_device for context in (1024, 1000, 65_536)}
    assert rows == {1024: 32, 1000: 33, 65_536: 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(features=30, heads=4), "heads is 4; wants a divisor of features, 30"),
        (dict(features=12, heads=4), "heads is 4; wants a divisor of features, 12, with an even quotient"),
        (dict(layers=0), "layers is 0; wants a whole number of at least 1"),
        (dict(preset="large"), "preset is 'large'; wants one of default, small"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**settings)


def test_the_training_loss_is_the_mean_over_the_rows_of_the_evaluation_in_bits():
    model, loss = GPTConfig(**TINY).build(jax.random.key(0))
    assert loss is mean_bits_per_byte
    inputs, targets = text.pack([b"some text, ", b"and another one."], 8)
    graph, params = nnx.split(model)

    @jax.jit
    def losses(params, inputs, targets):
        model = nnx.merge(graph, params)
        return [loss(model, inputs, targets)[0] for loss in (mean_bits_per_byte, bits_per_byte)]

    trained, rows = losses(params, inputs, targets)
    assert rows.shape == (3,) and 7 < rows.mean() < 9  # nearly uniform: 8 bits
    np.testing.assert_allclose(trained, [rows.mean()] * 3, rtol=1e-5)


def test_two_devices_train_as_one(tmp_path):
    (tmp_path / "own.txt").write_text("".join(map(chr, np.random.default_rng(0).integers(97, 123, 600))))
    states = []
    for devices in (1, 2):
        config = GPTConfig(**TINY, text=tmp_path / "own.txt", devices=devices)
        prepared = prepare(config, config.load())
        states.append(prepared.train_epoch(prepared.state, 1)[:2])
    (one, losses), (two, losses_of_two) = states
    np.testing.assert_allclose(losses_of_two, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
