"""Convert kernels of convolutions, which are binary trees of gates, between the layouts of jaxbp and torchlogix.

torchlogix has one array of parameters per level of the trees, `(gates, kernels, parameters)`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped


def pairs_of_leaves(leaves: Int[np.ndarray, "kernels leaves 3"]) -> Int[np.ndarray, "2 kernels gates 3"]:
    """Split the leaves of trees of gates into the first and second inputs of the lowest gates.

    A leaf is a position in an image: (channel, row, column) in `leaves`, (row, column, channel) in the result.
    """
    return np.stack([leaves[:, ::2], leaves[:, 1::2]])[..., [1, 2, 0]]


def to_levels(parameters: Shaped[np.ndarray, "kernels gates parameters"]) -> list[np.ndarray]:
    # from the leaves to the root
    counts = [2**level for level in reversed(range((parameters.shape[1] + 1).bit_length() - 1))]
    return np.split(parameters.swapaxes(0, 1), np.cumsum(counts)[:-1])


def from_levels(levels: Sequence[np.ndarray]) -> Shaped[np.ndarray, "kernels gates parameters"]:
    return np.concatenate(levels).swapaxes(0, 1)
