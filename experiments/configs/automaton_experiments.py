import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from experiments.configs.automaton_base import HARD_GATES, PATTERNS, ROUNDED_STATES, AutomatonConfig, PatternConfig
from experiments.configs.base import Recipe
from experiments.data import patterns, user_data
from experiments.data.datasets import checksum
from experiments.output.files import OptionalPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class LifeConfig(AutomatonConfig):
    """The Game of Life, trained on one tick from each of the 512 states of 3 x 3 cells."""

    name: ClassVar[str] = "ca-life"
    grid: ClassVar = (3, 3)
    periodic: ClassVar = True
    channels: ClassVar = 1
    steps: ClassVar = 1
    perception: ClassVar = (16, (8, 4, 2, 1))
    update: ClassVar = (*[128] * 17, 64, 32, 16, 8, 4, 2, 1)
    published: ClassVar = (Recipe(batch_size=20, epochs=20, learning_rate=0.05), 3000)
    settings: ClassVar = HARD_GATES | dict(pass_through=7.0, weight_decay=0.02)
    test_examples: ClassVar = 512
    shown_grid: ClassVar = (32, 32)

    def starts(self, seeds, grid=None):
        if grid:
            return _random_states(seeds, *grid, 1)
        return (seeds[:, None] >> np.arange(9, dtype=np.uint32) & 1).astype(bool).reshape(-1, 3, 3, 1)

    def targets(self, starts):
        return patterns.life_step(starts[..., 0])[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckerboardConfig(PatternConfig):
    """A checkerboard with squares of 2 x 2 cells, grown from random states."""

    name: ClassVar[str] = "ca-checkerboard"
    settings: ClassVar = PATTERNS | dict(or_logit=0.0, shrink=2, restart_after=250)
    hardening: ClassVar = (16_000, 320)
    any_grid: ClassVar = True
    grid: ClassVar = (16, 16)
    periodic: ClassVar = False
    channels: ClassVar = 8
    steps: ClassVar = 20
    perception: ClassVar = (16, (8, 4, 2))
    update: ClassVar = (*[256] * 10, 128, 64, 32, 16, 8, 8)
    published: ClassVar = (Recipe(batch_size=2, epochs=20, learning_rate=0.05), 500)
    stands: ClassVar = True
    test_examples: ClassVar = 256

    def starts(self, seeds, grid=None):
        return _random_states(seeds, *(grid or self.grid), self.channels)

    def pattern(self, grid=None):
        return patterns.checkerboard(*(grid or self.grid))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncCheckerboardConfig(CheckerboardConfig):
    """The checkerboard, grown by cells that update with a probability of 0.6 per tick."""

    name: ClassVar[str] = "ca-checkerboard-async"
    settings: ClassVar = ROUNDED_STATES | dict(learning_rate=0.1, pass_through=7.0, restart_after=1000)
    hardening: ClassVar = (16_000, 80)
    test_examples: ClassVar = 512
    grid: ClassVar = (14, 14)
    steps: ClassVar = 50
    fire_rate: ClassVar = 0.6
    update: ClassVar = (*[256] * 14, 128, 64, 32, 16, 8, 8)
    published: ClassVar = (Recipe(batch_size=1, epochs=20, learning_rate=0.05), 800)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LizardConfig(PatternConfig):
    """A lizard, grown from one cell."""

    name: ClassVar[str] = "ca-lizard"
    settings: ClassVar = PATTERNS | dict(learning_rate=0.1)
    grid: ClassVar = (20, 20)
    periodic: ClassVar = True
    channels: ClassVar = 128
    steps: ClassVar = 12
    perception: ClassVar = (4, (8, 4, 2, 1))
    update: ClassVar = (*[512] * 8, 256, 128)
    published: ClassVar = (Recipe(batch_size=1, epochs=20, learning_rate=0.06), 3500)
    test_examples: ClassVar = 1
    trials: ClassVar = 1

    def starts(self, seeds, grid=None):
        return _one_cell(seeds, *(grid or self.grid), self.channels)

    def pattern(self, grid=None):
        return patterns.lizard()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LetterConfig(PatternConfig):
    """A letter in three colors, grown from zeros. Only the grid's border tells cells where they are."""

    name: ClassVar[str] = "ca-letter"
    grid: ClassVar = (16, 16)
    periodic: ClassVar = False
    channels: ClassVar = 64
    visible: ClassVar = 3
    steps: ClassVar = 15
    perception: ClassVar = (4, (8, 4, 2))
    update: ClassVar = (*[512] * 8, 256, 128, 64)
    published: ClassVar = (Recipe(batch_size=1, epochs=20, learning_rate=0.06), 3000)
    test_examples: ClassVar = 1
    trials: ClassVar = 1

    def starts(self, seeds, grid=None):
        return jnp.zeros((len(seeds), *(grid or self.grid), self.channels), bool)

    def pattern(self, grid=None):
        return patterns.letter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureConfig(PatternConfig):
    """A picture of your own, grown from one cell."""

    name: ClassVar[str] = "ca"
    periodic: ClassVar = False
    channels: ClassVar = 64
    perception: ClassVar = (4, (8, 4, 2))
    update: ClassVar = (*[512] * 8, 256, 128, 64)
    published: ClassVar = (Recipe(batch_size=1, epochs=20, learning_rate=0.06), 3000)
    test_examples: ClassVar = 1
    trials: ClassVar = 1

    target: OptionalPath = None
    """Picture of at most 64 x 64 pixels, such as a PNG file. See docs/own_data.md."""

    def __post_init__(self):
        self._check("target", self.target is not None, "a picture, such as a PNG file")
        super().__post_init__()

    @property
    def grid(self) -> tuple[int, int]:
        return self.pattern().shape[:2]

    @property
    def visible(self) -> int:
        return self.pattern().shape[2]

    @property
    def steps(self) -> int:
        """The number of ticks: more than a signal needs from the first cell to the border."""
        return max(self.grid) // 2 + 4

    @property
    def data_name(self) -> str:
        return self.target.name

    def starts(self, seeds, grid=None):
        return _one_cell(seeds, *(grid or self.grid), self.channels)

    def pattern(self, grid=None):
        return user_data.read_picture(self.target)

    def data_checksum(self, dataset):
        return checksum(self.pattern())


def _one_cell(seeds: UInt32[Array, " batch"], height: int, width: int, channels: int) -> Bool[Array, "batch ..."]:
    start = jnp.zeros((len(seeds), height, width, channels), bool)
    return start.at[:, height // 2, width // 2].set(True)


def _random_states(seeds: UInt32[Array, " batch"], *shape: int) -> Bool[Array, "batch ..."]:
    return jax.vmap(lambda seed: jax.random.bernoulli(jax.random.key(seed), shape=shape))(seeds)


AUTOMATA: Mapping[str, type[AutomatonConfig]] = {
    config.name: config
    for config in (
        *(LifeConfig, CheckerboardConfig, AsyncCheckerboardConfig),
        *(LizardConfig, LetterConfig, PictureConfig),
    )
}
