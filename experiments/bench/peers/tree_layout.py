"""Convert trees of gates between the layouts of jaxbp and torchlogix.

torchlogix has one array per level of the trees, with the axis of the gates before the axis of the kernels. The inputs a
of all gates come before the inputs b.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped


def pairs_of_leaves(leaves: Int[np.ndarray, "kernels leaves 3"]) -> Int[np.ndarray, "2 kernels gates 3"]:
    """Return the positions (row, column, channel) that the gates of the first level read: all inputs a, then all b.

    In `leaves`, a position is (channel, row, column).
    """
    return np.stack([leaves[:, ::2], leaves[:, 1::2]])[..., [1, 2, 0]]


def to_levels(parameters: Shaped[np.ndarray, "kernels gates parameters"]) -> list[np.ndarray]:
    """Return arrays of shape `(gates, kernels, parameters)`, one per level, from the leaves to the root."""
    counts = [2**level for level in reversed(range((parameters.shape[1] + 1).bit_length() - 1))]
    return np.split(parameters.swapaxes(0, 1), np.cumsum(counts)[:-1])


def from_levels(levels: Sequence[np.ndarray]) -> Shaped[np.ndarray, "kernels gates parameters"]:
    """Invert `to_levels`."""
    return np.concatenate(levels).swapaxes(0, 1)
