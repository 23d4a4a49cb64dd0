import numpy as np
import pytest

from jaxbp.logic.tables.quantizer import Quantizer, quantiles

NAN = np.float32(np.nan)
ROWS = np.array([[1, 0, 5], [2, 1, NAN], [3, 7, 5], [4, 1, NAN]], np.float32)


def test_few_values_have_a_threshold_between_each_pair_of_neighbors():
    assert quantiles(np.float32([3, 1, 1, 7]), np.ones(4), 2).tolist() == [2, 5]
    assert quantiles(np.float32([4, 4]), np.ones(2), 2).size == 0


def test_thresholds_divide_many_values_into_parts_of_equal_weight():
    column = np.random.default_rng(0).permutation(np.arange(1000, dtype=np.float32))
    assert quantiles(column, np.ones(1000), 3).tolist() == [249.5, 499.5, 749.5]
    heavy = np.where(column < 100, 9.0, 1.0)
    assert quantiles(column, heavy, 1).tolist() == [99.5]


def test_a_weight_is_a_number_of_equal_rows():
    random = np.random.default_rng(0)
    column, weights = random.normal(size=50).astype(np.float32), random.integers(0, 4, 50)
    kept = weights > 0
    repeated = quantiles(column.repeat(weights), np.ones(weights.sum()), 7)
    assert np.array_equal(quantiles(column[kept], weights[kept], 7), repeated)


def test_a_threshold_lies_between_neighboring_floats():
    low = np.float32(1)
    high = np.nextafter(low, np.float32(2))
    (threshold,) = quantiles(np.array([low, high]), np.ones(2), 1)
    assert low <= threshold < high


def test_bits_are_thresholds_categories_and_missing_values():
    quantizer = Quantizer.of_tables("op", ROWS, np.ones(4), 1, {1})
    assert quantizer.describe("abc", {}) == ["a above 2.5", *(f"b equal to {v}" for v in (0, 1, 7)), "c missing"]
    assert quantizer.describe("abc", {1: "pqrstuvw"})[3] == "b equal to 'w'"
    bits = quantizer(ROWS).astype(int).tolist()
    assert bits == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 1], [1, 0, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert quantizer(np.float32([[NAN, 5, 1e30]])).any() == False  # noqa: E712


def test_constant_features_have_one_bit_in_all():
    assert len(Quantizer.of_tables("op", np.ones((3, 2), np.float32), np.ones(3), 5)) == 1


def test_all_pixels_of_a_plane_have_the_same_threshold():
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    quantizer = Quantizer.of_images(rows, np.ones(2), 1, (2, 2, 2))
    assert quantizer.features.tolist() == list(range(8))
    assert quantizer.values.tolist() == [5.5] * 4 + [9.5] * 4


def test_too_many_categories_are_refused():
    rows = np.arange(300, dtype=np.float32)[:, None]
    with pytest.raises(ValueError, match="op: feature 0 has 300 different values; wants at most 255 categories"):
        Quantizer.of_tables("op", rows, np.ones(300), 5, {0})
