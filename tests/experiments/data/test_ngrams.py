import collections

import numpy as np
import pytest

from experiments.data.ngrams import DISCOUNT, NGramModel

TEXT = bytes(np.random.default_rng(0).integers(97, 101, 300, np.uint8))


def naive(text, order, context, byte):
    """Compute the formula of `NGramModel` with dictionaries."""
    ngrams = [text[i : i + order + 1] for i in range(len(text) - order)]
    counts = [collections.Counter(ngrams)]
    for _ in range(order):
        counts.insert(0, collections.Counter(ngram[1:] for ngram in counts[0]))
    p = 1 / 256
    for k, numbers in enumerate(counts):
        following = {ngram[-1]: n for ngram, n in numbers.items() if ngram[:-1] == context[len(context) - k :]}
        if following:
            mass = max(following.get(byte, 0) - DISCOUNT, 0) + DISCOUNT * len(following) * p
            p = mass / sum(following.values())
    return p


def test_it_is_the_formula():
    model, unseen = NGramModel(TEXT, 2), b"abcadzcbaaab"
    found = model.probabilities(unseen)
    wanted = [naive(TEXT, 2, unseen[i - 2 : i], unseen[i]) for i in range(2, len(unseen))]
    np.testing.assert_allclose(found[2:], wanted, rtol=1e-12)
    assert model.bits_per_byte(unseen) == pytest.approx(-np.log2(found).mean())


@pytest.mark.parametrize("context", [b"", b"a", b"dcba", b"zzzz", b"zzza"])
def test_the_probabilities_of_all_bytes_after_a_context_add_up_to_1(context):
    model = NGramModel(TEXT, 4)
    probabilities = [model.probabilities(context + bytes([byte]))[-1] for byte in range(256)]
    assert min(probabilities) > 0
    assert sum(probabilities) == pytest.approx(1, rel=1e-12)


def test_a_higher_order_predicts_a_repetitive_text_better():
    text = b"the quick brown fox " * 30
    bits = [NGramModel(text, order).bits_per_byte(text) for order in (0, 1, 4)]
    assert bits[0] > bits[1] > bits[2] > 0


def test_without_a_training_text_all_bytes_are_equally_likely():
    assert NGramModel(b"", 3).bits_per_byte(b"abcde") == 8


def test_an_order_that_needs_more_than_64_bits_is_refused():
    with pytest.raises(ValueError, match="order is 8; wants 0 to 7"):
        NGramModel(TEXT, 8)
