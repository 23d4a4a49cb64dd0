import dataclasses

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int

from jaxbp.common import checks
from jaxbp.common.cases import FixedArgument
from jaxbp.common.content import ByContent
from jaxbp.common.windows import Size
from jaxbp.logic.wires.wires import bounded_count, constants, require_below


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TreeWires(ByContent):
    """The wires of a convolution. Each kernel is a complete binary tree of two-input gates, whose leaves read a window.

    A kernel of depth d has `2^d` leaves and `2^d - 1` gates, level by level, with the root last. Gate g of a level
    reads the gates `2 * g` and `2 * g + 1` of the previous level as its inputs a and b. The first level reads leaves.

    Attributes:
      leaves: the channel, and the row and column in the window, that each leaf reads; int32.
      readers: the leaves, sorted by the channel that they read. Leaf l of kernel k is `k * 2^depth + l`.
      reader_offsets: for each channel, the index in `readers` of its first leaf, followed by the length of `readers`.
      window: height and width.
    """

    leaves: Int[Array, "kernels leaves 3"]
    readers: Int[Array, " kernels*leaves"]
    reader_offsets: Int[Array, " channels+1"]
    channels: int = dataclasses.field(metadata=dict(static=True))
    window: tuple[int, int] = dataclasses.field(metadata=dict(static=True))

    @property
    def kernels(self) -> int:
        return self.leaves.shape[-3]

    @property
    def depth(self) -> int:
        return self.leaves.shape[-2].bit_length() - 1

    @property
    def gates(self) -> int:
        """The number of gates per tree."""
        return self.leaves.shape[-2] - 1

    @property
    def dtype(self) -> np.dtype:
        return self.leaves.dtype

    @classmethod
    def from_leaves(cls, leaves: ArrayLike, channels: int, window: Size) -> "TreeWires":
        """Make trees in which leaf l of kernel k reads `leaves[k, l]`: a channel, and a row and column in the window.

        Raises:
          TypeError: `leaves` does not contain integers.
          ValueError: `leaves` is not `(kernels, 2^depth, 3)`, or not within the channels and the window.
        """
        op = "TreeWires.from_leaves"
        channels, window = bounded_count(op, "channels", channels), checks.pair(op, "window", window)
        leaves = np.asarray(leaves)
        if not np.issubdtype(leaves.dtype, np.integer):
            raise TypeError(f"{op}: leaves has dtype {leaves.dtype}; wants integers")
        if leaves.ndim != 3 or leaves.shape[2] != 3 or not leaves.shape[0] or leaves.shape[1].bit_count() != 1:
            wanted = "(kernels, leaves, 3), where leaves is a power of two"
            raise ValueError(f"{op}: leaves has shape {leaves.shape}; wants {wanted}")
        if leaves.shape[1] < 2:
            raise ValueError(f"{op}: a kernel has 1 leaf; wants at least 2, the number of inputs of one gate")
        meanings = "the number of channels", "the height of the window", "the width of the window"
        require_below(op, "leaves", leaves, (channels, *window), *meanings)
        read = leaves[..., 0].ravel()
        readers = np.argsort(read, kind="stable")
        offsets = np.searchsorted(read, np.arange(channels + 1), sorter=readers)
        arrays = constants(leaves=leaves, readers=readers, reader_offsets=offsets)
        return cls(**arrays, channels=channels, window=window)

    @classmethod
    def random(
        cls,
        channels: int,
        kernels: int,
        window: Size,
        *,
        depth: int = 3,
        channels_per_kernel: int = 2,
        seed: int,
    ) -> "TreeWires":
        """Make random trees, each of which reads `channels_per_kernel` channels, or all channels if there are fewer.

        The number of kernels per channel, and in each kernel the number of leaves per channel, vary by at most one.
        Leaves of one kernel read different pixels, unless more leaves read a channel than the window has positions.

        Raises:
          ValueError: a count is below 1.
        """
        op = "TreeWires.random"
        channels, kernels = bounded_count(op, "channels", channels), bounded_count(op, "kernels", kernels)
        depth = checks.count(op, "depth", depth)
        per_kernel = min(checks.count(op, "channels_per_kernel", channels_per_kernel), channels, 2**depth)
        window = checks.pair(op, "window", window)
        random = np.random.default_rng(seed)
        of_channel, size = -(-(2**depth) // per_kernel), window[0] * window[1]
        chosen = _channels_of_kernels(channels, kernels, per_kernel, random)[..., None]
        rounds = [_shuffled(size, kernels * per_kernel, random) for _ in range(-(-of_channel // size))]
        places = np.concatenate(rounds, axis=1)[:, :of_channel].reshape(kernels, per_kernel, of_channel)
        leaves = np.stack([np.broadcast_to(chosen, places.shape), *np.divmod(places, window[1])], axis=-1)
        # Channels alternate, so that the surplus leaves, which are dropped here, read different channels.
        leaves = leaves.swapaxes(1, 2).reshape(kernels, -1, 3)[:, : 2**depth]
        order = _shuffled(2**depth, kernels, random)[..., None]
        return cls.from_leaves(np.take_along_axis(leaves, order, axis=1), channels, window)


def _shuffled(count: int, rows: int, random: np.random.Generator) -> np.ndarray:
    return random.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)


def _channels_of_kernels(channels: int, kernels: int, per_kernel: int, random: np.random.Generator) -> np.ndarray:
    rounds = _shuffled(channels, -(-kernels * per_kernel // channels), random)
    chosen = rounds.ravel()[: kernels * per_kernel].reshape(kernels, per_kernel)
    while True:
        repeated = (np.diff(np.sort(chosen, axis=1), axis=1) == 0).any(axis=1)
        if not repeated.any():
            return chosen
        for kernel in np.flatnonzero(repeated):
            other, i, j = random.integers(kernels), *random.integers(per_kernel, size=2)
            chosen[kernel, i], chosen[other, j] = chosen[other, j], chosen[kernel, i]


@dataclasses.dataclass(frozen=True)
class TreeWiresArgument(FixedArgument):
    create = TreeWires.random
    channels: int
    kernels: int
    window: tuple[int, int]
    depth: int = 3
