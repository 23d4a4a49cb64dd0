import dataclasses
from typing import ClassVar

from flax import nnx
from jaxtyping import PRNGKeyArray

from experiments.configs.base import Loss
from experiments.configs.images import ImageConfig
from jaxbp.nn import LeNet


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeNetConfig(ImageConfig):
    """LeNet-5 on images of 28 x 28 pixels."""

    name: ClassVar[str] = "lenet"

    fused: bool = True
    """Compute convolution, ReLU, and max-pooling as one op, instead of as three ops."""

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        model = LeNet(
            fused=self.fused, implementation=self.implementation, dtype=self.policy.compute_dtype, rngs=nnx.Rngs(key)
        )
        return model, LeNet.loss
