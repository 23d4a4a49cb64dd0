"""Bits, packed into words."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, UInt32, UInt64

from jaxbp.common import checks

WORD_BITS = 32
GRID_WORD_BITS = 64


def pack_bits(bits: Bool[np.ndarray, "samples features"]) -> UInt32[np.ndarray, "features words"]:
    """Pack the samples of each feature into words: bit k of word w is sample `32 * w + k`. Unused bits are 0.

    Raises:
      ValueError: `bits` is not a matrix, or contains other numbers than 0 and 1.
    """
    bits = booleans("pack_bits", bits)
    if bits.ndim != 2:
        raise ValueError(f"pack_bits: bits has shape {bits.shape}; wants (samples, features)")
    return _packed(bits.T, WORD_BITS)


def unpack_bits(words: UInt32[np.ndarray, "features words"], samples: int) -> Bool[np.ndarray, "samples features"]:
    """Return the first `samples` samples that `pack_bits` packed into `words`.

    Raises:
      ValueError: `words` is not a matrix, or has fewer than `samples` samples.
    """
    if np.ndim(words) != 2:
        raise ValueError(f"unpack_bits: words has shape {np.shape(words)}; wants (features, words)")
    most = np.shape(words)[1] * WORD_BITS
    if not checks.is_int(samples) or not 0 <= samples <= most:
        raise ValueError(
            f"unpack_bits: samples is {samples!r}; wants an int in [0, {most}], because words has {most} bits per row"
        )
    return _unpacked(words, WORD_BITS, samples).T


def pack_grid(
    state: Bool[np.ndarray, "batch height width channels"],
) -> UInt64[np.ndarray, "channels batch height words"]:
    """Pack 64 cells of a row into one word: bit j of word w is cell `64 * w + j`. Unused bits are 0."""
    return _packed(np.moveaxis(state, -1, 0), GRID_WORD_BITS)


def unpack_grid(words: UInt64[np.ndarray, "channels batch height words"], width: int) -> np.ndarray:
    """Return the state `(batch, height, width, channels)` that `pack_grid` packed into `words`.

    Raises:
      ValueError: `width` is below 0 or above the number of bits per row.
    """
    most = GRID_WORD_BITS * words.shape[-1]
    if not 0 <= width <= most:
        wanted = f"at most {most}, the number of bits in the words of one row"
        raise ValueError(f"unpack_grid: width is {width}; wants {wanted}")
    return np.moveaxis(_unpacked(words, GRID_WORD_BITS, width), 0, -1)


def booleans(op: str, bits: ArrayLike) -> Bool[np.ndarray, "..."]:
    bits = np.asarray(bits)
    if bits.dtype != bool and (wrong := bits[(bits != 0) & (bits != 1)]).size:
        raise ValueError(f"{op}: bits contains {wrong[0]}; wants only 0 and 1, as jaxbp.nn.thermometer returns")
    return bits.astype(bool)


def _packed(bits: np.ndarray, word_bits: int) -> np.ndarray:
    packed = np.packbits(np.ascontiguousarray(bits), axis=-1, bitorder="little")
    words = np.zeros((*bits.shape[:-1], -(-bits.shape[-1] // word_bits)), f"<u{word_bits // 8}")
    words.view(np.uint8)[..., : packed.shape[-1]] = packed
    return words.astype(f"u{word_bits // 8}")


def _unpacked(words: np.ndarray, word_bits: int, count: int) -> np.ndarray:
    packed = np.ascontiguousarray(words, dtype=f"<u{word_bits // 8}").view(np.uint8)
    return np.unpackbits(packed, axis=-1, count=count, bitorder="little").astype(bool)
