import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments.configs import AUTOMATA, from_dict, to_dict
from experiments.configs.automaton_base import PUBLISHED
from experiments.configs.automaton_experiments import (
    CheckerboardConfig,
    LetterConfig,
    LifeConfig,
    LizardConfig,
    PictureConfig,
)
from experiments.data import patterns
from experiments.output.errors import UserError
from jaxbp import Automaton

# Channels, kernels times bits per channel, ticks, gates of the first update layer, learning rate, batch, updates.
TABLE = {
    "ca-life": (1, 16, 1, 128, 0.05, 20, 3000),
    "ca-checkerboard": (8, 32, 20, 256, 0.05, 2, 500),
    "ca-checkerboard-async": (8, 32, 50, 256, 0.05, 1, 800),
    "ca-lizard": (128, 4, 12, 512, 0.06, 1, 3500),
    "ca-letter": (64, 8, 15, 512, 0.06, 1, 3000),
}


def seeds(*numbers):
    return jnp.array(numbers, jnp.uint32)


@pytest.mark.parametrize("name", TABLE)
def test_the_published_settings(name):
    channels, bits, *_, rate, batch, updates = TABLE[name]
    config = AUTOMATA[name](recipe="published")
    wires = Automaton.create(config.channels, *config.perception, config.update, config.periodic, seed=0)
    assert (wires.channels, wires.kernels * wires.bits, config.steps, wires.update[0].gates) == TABLE[name][:4]
    assert wires.update[0].inputs == channels * (1 + bits)
    assert (config.learning_rate, config.batch_size, config.updates) == (rate, batch, updates)
    assert (config.weight_decay, config.pass_through, config.gradient_clip, config.schedule) == (
        1e-2,
        10,
        100,
        "constant",
    )
    assert (config.hard_share, config.noise, config.target_accuracy) == (0, 0, None)
    assert (config.first_gates, config.shrink, config.restart_after, config.search_steps) == ("a", 1, 0, 0)
    assert len(config.load().train_images) == batch * updates // config.epochs
    targets = config.targets(config.starts(seeds(0)))
    assert targets.shape[-3:] == (*config.grid, config.visible)


def test_every_pattern_has_one_recipe_and_some_have_other_attempts(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(path)
    configs = [CheckerboardConfig(), LizardConfig(), LetterConfig(), PictureConfig(target=path)]
    recipes = [{name: getattr(config, name) for name in (*PUBLISHED, "learning_rate")} for config in configs]
    assert [config.updates // config.restart_after for config in configs] == [64] * 4
    checkerboard, lizard, letter, picture = recipes
    assert letter == picture
    assert checkerboard == picture | dict(or_logit=0.0, shrink=2, restart_after=250)
    assert lizard == picture | dict(learning_rate=0.1)


def test_every_board_of_the_game_of_life_is_an_example():
    boards = np.asarray(LifeConfig().starts(jnp.arange(512, dtype=jnp.uint32)))
    assert len({board.tobytes() for board in boards}) == 512


def test_where_automata_start():
    first, other = CheckerboardConfig().starts(seeds(3, 4))
    assert (first != other).any() and 0.4 < first.mean() < 0.6
    assert np.argwhere(LizardConfig().starts(seeds(0))[0, ..., 0]).tolist() == [[10, 10]]
    assert not LetterConfig().starts(seeds(0)).any()
    assert CheckerboardConfig().starts(seeds(3), (5, 6)).shape == (1, 5, 6, 8)


def test_the_letter_is_in_the_colors_of_three_channels():
    assert np.array_equal(LetterConfig().pattern(), patterns.letter())


def test_a_picture_determines_the_grid_the_channels_and_the_ticks(tmp_path):
    path = tmp_path / "picture.png"
    pixels = np.full((9, 12, 3), 255, np.uint8)
    pixels[2:5, 3] = 0
    Image.fromarray(pixels).save(path)
    config = PictureConfig(target=path)
    assert (config.grid, config.visible, config.steps, config.data_name) == ((9, 12), 1, 10, "picture.png")
    assert np.argwhere(config.starts(seeds(0))[0, ..., 5]).tolist() == [[4, 6]]
    assert np.argwhere(config.targets(config.starts(seeds(0)))).tolist() == [[2, 3, 0], [3, 3, 0], [4, 3, 0]]
    before = config.data_checksum(config.load())
    pixels[2, 3] = (0, 0, 255)
    Image.fromarray(pixels).save(path)
    assert config.visible == 3 and config.data_checksum(config.load()) != before
    path.unlink()
    assert from_dict(PictureConfig, to_dict(config)) == config
    with pytest.raises(UserError, match="target is None; wants a picture, such as a PNG file"):
        PictureConfig()
