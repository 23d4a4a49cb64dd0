"""Convert trees of gates between the layouts of jaxbp and torchlogix.

A convolution's kernel is one tree of gates. torchlogix has one array per level of the trees, whose axis of gates comes
before its axis of kernels. It stores input a of every gate, then input b of every gate.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped


def pairs_of_leaves(leaves: Int[np.ndarray, "kernels leaves 3"]) -> Int[np.ndarray, "2 kernels gates 3"]:
    """Return the positions that the gates of the first level read, for all inputs a and then for all inputs b.

    A position is (channel, row, column) in `leaves`, and (row, column, channel) in the result.
    """
    return np.stack([leaves[:, ::2], leaves[:, 1::2]])[..., [1, 2, 0]]


def to_levels(parameters: Shaped[np.ndarray, "kernels gates parameters"]) -> list[np.ndarray]:
    """Return one array `(gates, kernels, parameters)` per level, starting with the level at the leaves."""
    counts = [2**level for level in reversed(range((parameters.shape[1] + 1).bit_length() - 1))]
    return np.split(parameters.swapaxes(0, 1), np.cumsum(counts)[:-1])


def from_levels(levels: Sequence[np.ndarray]) -> Shaped[np.ndarray, "kernels gates parameters"]:
    """Return the parameters from which `to_levels` made the levels."""
    return np.concatenate(levels).swapaxes(0, 1)
