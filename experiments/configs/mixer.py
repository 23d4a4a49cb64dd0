"""The experiment `mixer`."""

import dataclasses
import functools
from typing import ClassVar

from flax import nnx
from jaxtyping import PRNGKeyArray

from experiments.configs.base import Loss, Recipe, is_whole
from experiments.configs.images import ImageConfig, classification_loss
from jaxbp.nn import Mixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ImageConfig):
    """MLP-Mixer on images of 28 x 28 pixels."""

    name: ClassVar[str] = "mixer"

    patch: int = 7
    """Height and width of a patch, a divisor of 28."""
    channels: int = 128
    """Numbers that stand for a patch."""
    blocks: int = 2
    """Times that patches and channels are mixed."""

    def __post_init__(self):
        self._check("patch", is_whole(self.patch) and self.patch >= 1 and 28 % self.patch == 0, "a divisor of 28")
        self._check("channels", is_whole(self.channels) and self.channels >= 1, "a whole number of at least 1")
        self._check("blocks", is_whole(self.blocks) and self.blocks >= 1, "a whole number of at least 1")
        super().__post_init__()

    def defaults(self) -> Recipe:
        return super().defaults()._replace(learning_rate=1e-3)

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = Mixer(
            patch=self.patch,
            channels=self.channels,
            blocks=self.blocks,
            implementation=self.implementation,
            dtype=self.policy.compute_dtype,
            rngs=nnx.Rngs(key),
        )
        return model, functools.partial(classification_loss, implementation=self.implementation)
