import numpy as np
import pytest

import jaxbp
from jaxbp.logic.circuits.bits import pack_grid, unpack_grid

BITS = np.random.default_rng(0).random((75, 9)) < 0.5  # three words, the last one not full


def test_bits_are_packed_32_a_word_from_the_lowest():
    bits = np.zeros((33, 2), bool)
    bits[0, 0] = bits[31, 0] = bits[32, 1] = True
    assert jaxbp.pack_bits(bits).tolist() == [[1 + 2**31, 0], [0, 1]]


@pytest.mark.parametrize("samples", [0, 1, 32, 75])
def test_packed_bits_are_unpacked_again(samples):
    assert np.array_equal(jaxbp.unpack_bits(jaxbp.pack_bits(BITS[:samples]), samples), BITS[:samples])


def test_what_is_not_packed_or_more_than_is_packed_is_refused():
    with pytest.raises(ValueError, match=r"^pack_bits: bits has shape \(9,\); wants \(samples, features\)"):
        jaxbp.pack_bits(BITS[0])
    words = jaxbp.pack_bits(BITS)
    with pytest.raises(ValueError, match=r"^unpack_bits: samples is 97; wants an int in \[0, 96\], because words"):
        jaxbp.unpack_bits(words, 97)
    with pytest.raises(ValueError, match=r"^unpack_bits: words has shape \(3,\); wants \(features, words\)"):
        jaxbp.unpack_bits(words[0], 75)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 130])
def test_a_packed_state_has_64_cells_of_a_row_in_a_word_and_is_unpacked_again(width):
    state = np.random.default_rng(0).random((2, 3, width, 4)) < 0.5
    words = pack_grid(state)
    assert words.shape == (4, 2, 3, -(-width // 64)) and words.dtype == np.uint64
    assert bool(words[3, 1, 2, (width - 1) // 64] >> np.uint64((width - 1) % 64) & np.uint64(1)) == state[1, 2, -1, 3]
    assert np.array_equal(unpack_grid(words, width), state)
    with pytest.raises(ValueError, match=r"^unpack_grid: width is .*; wants at most"):
        unpack_grid(words, 64 * words.shape[-1] + 1)
