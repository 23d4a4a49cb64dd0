import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.nn._layers import LayerNorm, LayerNormLinear, Linear
from jaxbp.ops.pointwise.activations import relu
from jaxbp.pairing import Implementation

IMAGE_SIZE = 28


class MixerBlock(nnx.Module):
    """A block that computes `x + mlp(norm(x)ᵀ)ᵀ` across the patches, then `x + mlp(norm(x))` across the channels.

    The second norm and the next dense layer are one op. The options are `implementation`, `dtype`, and `rngs`.
    """

    def __init__(self, patches: int, channels: int, patches_hidden: int, channels_hidden: int, **options):
        self.norm = LayerNorm(channels, **options)
        self.patches1 = Linear(patches, patches_hidden, **options)
        self.patches2 = Linear(patches_hidden, patches, **options)
        self.channels1 = LayerNormLinear(channels, channels_hidden, **options)
        self.channels2 = Linear(channels_hidden, channels, **options)
        self.implementation = options.get("implementation")

    def __call__(self, x: Float[AnyArray, "batch patches channels"]) -> Float[Array, "batch patches channels"]:
        across_patches = self.patches1(self.norm(x).swapaxes(1, 2))
        x = x + self.patches2(relu(across_patches, implementation=self.implementation)).swapaxes(1, 2)
        return x + self.channels2(relu(self.channels1(x), implementation=self.implementation))


class Mixer(nnx.Module):
    """MLP-Mixer on 28 x 28 images: a dense layer on patches, `MixerBlock`s, a norm, and a dense layer. The logits are a
    mean over the patches.

    Args:
      classes: the number of logits.
      patch: height and width of a patch, a divisor of 28.
      channels: the number of channels of each patch.
      patches_hidden, channels_hidden: the hidden widths of the blocks' MLPs.
      dtype: as in `LeNet`.

    Raises:
      ValueError: the patches do not fill the image.

    Source: I. Tolstikhin et al., "MLP-Mixer: an all-MLP architecture for vision", NeurIPS 2021, with ReLU.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        patch: int = 7,
        channels: int = 128,
        patches_hidden: int = 64,
        channels_hidden: int = 128,
        blocks: int = 2,
        implementation: Implementation = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if patch < 1 or IMAGE_SIZE % patch:
            raise ValueError(f"Mixer: patch is {patch}; wants a divisor of {IMAGE_SIZE}, the image's height and width")
        classes = checks.count("Mixer", "classes", classes)
        options = dict(implementation=implementation, dtype=dtype, rngs=rngs)
        patches = (IMAGE_SIZE // patch) ** 2
        self.embed = Linear(patch**2, channels, **options)
        self.blocks = nnx.List(
            MixerBlock(patches, channels, patches_hidden, channels_hidden, **options) for _ in range(blocks)
        )
        self.head = LayerNormLinear(channels, classes, **options)
        self.patch, self.dtype = patch, dtype

    def __call__(self, images: Float[AnyArray, "batch 1 28 28"]) -> Float[Array, "batch classes"]:
        """Return the logits."""
        if images.ndim != 4 or images.shape[1:] != (1, IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(f"Mixer: images has shape {images.shape}; wants (batch, 1, {IMAGE_SIZE}, {IMAGE_SIZE})")
        side = IMAGE_SIZE // self.patch
        x = images.astype(self.dtype).reshape(len(images), side, self.patch, side, self.patch)
        x = self.embed(x.swapaxes(2, 3).reshape(len(images), side**2, self.patch**2))
        for block in self.blocks:
            x = block(x)
        return jnp.mean(self.head(x), axis=1)
