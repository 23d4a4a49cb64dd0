"""Convert trees of gates to torchlogix's layout: level by level, gates before kernels, and all a before all b."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped


def pairs_of_leaves(leaves: Int[np.ndarray, "kernels leaves 3"]) -> Int[np.ndarray, "2 kernels gates 3"]:
    """Return the inputs of the gates of the first level, as rows, columns, and channels.

    jaxbp's order is channels, rows, and columns.
    """
    return np.stack([leaves[:, ::2], leaves[:, 1::2]])[..., [1, 2, 0]]


def to_levels(parameters: Shaped[np.ndarray, "kernels gates parameters"]) -> list[np.ndarray]:
    """Return the parameters of each level, `(gates, kernels, parameters)`, from the leaves to the root."""
    counts = [2**level for level in reversed(range((parameters.shape[1] + 1).bit_length() - 1))]
    return np.split(parameters.swapaxes(0, 1), np.cumsum(counts)[:-1])


def from_levels(levels: Sequence[np.ndarray]) -> Shaped[np.ndarray, "kernels gates parameters"]:
    """Invert `to_levels`."""
    return np.concatenate(levels).swapaxes(0, 1)
