"""A model of bytes by counts of the preceding bytes, to which a language model is compared."""

import dataclasses

import numpy as np
from jaxtyping import Float64, Int64, UInt8, UInt64

DISCOUNT = 0.75


@dataclasses.dataclass(frozen=True)
class Counts:
    """The different n-grams of one length in a text, and their contexts. A context is an n-gram without its last byte.

    An n-gram is stored as a number whose lowest byte is the last byte. The n-grams and the contexts are sorted.
    """

    ngrams: UInt64[np.ndarray, " ngrams"]
    number: Int64[np.ndarray, " ngrams"]
    contexts: UInt64[np.ndarray, " contexts"]
    total: Int64[np.ndarray, " contexts"]
    """The sum of the numbers of the n-grams with a context."""
    distinct: Int64[np.ndarray, " contexts"]
    """The number of the different n-grams with a context."""


class NGramModel:
    """A byte's probability given the bytes before it, by interpolated Kneser-Ney smoothing::

        pₖ(b | c) = (max(n(cb) - d, 0) + d t(c) pₖ₋₁(b | c')) / n(c),    p₋₁(b) = 1 / 256

    c are the k bytes before b, c' is c without its first byte, and d is `DISCOUNT`. If k is the order of the model,
    n(cb) is how often c followed by b occurs in the training text. For smaller k, n(cb) is the number of different
    bytes that precede cb there. n(c) = Σ_b n(cb), and t(c) is the number of different bytes b with n(cb) > 0. If n(c) =
    0, pₖ(b | c) = pₖ₋₁(b | c'). The first bytes of a text have shorter contexts.

    Source: S. F. Chen and J. Goodman, "An empirical study of smoothing techniques for language modeling", 1999.
    """

    def __init__(self, text: bytes, order: int = 4):
        if not 0 <= order <= 7:
            raise ValueError(f"NGramModel: order is {order}; wants 0 to 7, so that an n-gram fits into 64 bits")
        array = np.frombuffer(text, np.uint8)
        # The different n-grams with one more byte in front, without this byte.
        longer = _ngrams(array, order + 1)
        self.counts = [_count(longer)]
        for k in reversed(range(order)):
            longer = self.counts[0].ngrams & np.uint64(2 ** (8 * (k + 1)) - 1)
            self.counts.insert(0, _count(longer))

    def probabilities(self, text: bytes) -> Float64[np.ndarray, " bytes"]:
        """Return the probability of each byte of a text, given the bytes before it."""
        array = np.frombuffer(text, np.uint8)
        p = np.full(len(array), 1 / 256)
        for k, counts in enumerate(self.counts):
            ngrams = _ngrams(array, k + 1)
            number = _lookup(counts.ngrams, counts.number, ngrams)
            total, distinct = (_lookup(counts.contexts, of, ngrams >> 8) for of in (counts.total, counts.distinct))
            interpolated = (np.maximum(number - DISCOUNT, 0) + DISCOUNT * distinct * p[k:]) / np.maximum(total, 1)
            p[k:] = np.where(total > 0, interpolated, p[k:])
        return p

    def bits_per_byte(self, text: bytes) -> float:
        return float(-np.log2(self.probabilities(text)).mean())


def _ngrams(array: UInt8[np.ndarray, " bytes"], n: int) -> UInt64[np.ndarray, " ngrams"]:
    size = max(len(array) - n + 1, 0)
    ngrams = np.zeros(size, np.uint64)
    for i in range(n):
        ngrams = (ngrams << 8) | array[i : i + size]
    return ngrams


def _count(ngrams: UInt64[np.ndarray, " all"]) -> Counts:
    ngrams, number = np.unique(ngrams, return_counts=True)
    contexts, starts, distinct = np.unique(ngrams >> 8, return_index=True, return_counts=True)
    total = np.add.reduceat(number, starts) if len(starts) else number
    return Counts(ngrams, number, contexts, total, distinct)


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> Int64[np.ndarray, " wanted"]:
    """Return the value of each wanted key, or 0 if there is no such key."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64)
    indices = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[indices] == wanted, values[indices], 0)
