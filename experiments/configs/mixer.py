import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from flax import nnx
from jaxtyping import PRNGKeyArray

from experiments.configs.base import Loss, Range
from experiments.configs.images import ImageConfig, classification_loss
from jaxbp.nn import Mixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(ImageConfig):
    """MLP-Mixer on images of 28 x 28 pixels."""

    name: ClassVar[str] = "mixer"

    patch: Annotated[int, Range(1)] = 7
    """Height and width of a patch, a divisor of 28."""
    channels: Annotated[int, Range(1)] = 128
    """Number of channels per patch."""
    blocks: Annotated[int, Range(1)] = 2
    """Number of blocks. Each mixes the patches per channel, then the channels per patch."""

    def __post_init__(self):
        super().__post_init__()
        self._check("patch", 28 % self.patch == 0, "a divisor of 28, the height and width of an image")

    def defaults(self) -> Mapping[str, Any]:
        return {**super().defaults(), "learning_rate": 1e-3}

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
