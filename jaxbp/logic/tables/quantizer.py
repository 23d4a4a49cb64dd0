"""Bits of rows of numbers: comparisons with thresholds, categories, and missing values."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

from jaxbp.logic.tables.columns import MAX_CATEGORIES

ABOVE, EQUAL, MISSING = range(3)
CONDITIONS = ("above {value}", "equal to {value}", "missing")


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizer:
    """Maps rows of float32 numbers to bits.

    Bit i of a row x depends on `v = x[features[i]]`. It is `v > values[i]` (kind `ABOVE`), `v == values[i]` (kind
    `EQUAL`), or whether v is NaN (kind `MISSING`). The comparisons are false if v is NaN.
    """

    kinds: UInt8[np.ndarray, " bits"]
    features: Int[np.ndarray, " bits"]
    values: Float32[np.ndarray, " bits"]

    @classmethod
    def of_tables(
        cls,
        op: str,
        rows: Float32[np.ndarray, "rows features"],
        weights: Float[np.ndarray, " rows"],
        thresholds: int,
        categorical: Collection[int] = (),
    ) -> "Quantizer":
        """Return a quantizer with up to `thresholds` bits per feature, one bit per category of a categorical feature,
        and one bit per feature with missing values. Thresholds are quantiles of the weighted values."""
        bits = []
        for j, column in enumerate(rows.T):
            missing = np.isnan(column)
            present, weight = column[~missing], weights[~missing]
            if j in categorical:
                kind, values = EQUAL, np.unique(present)
                if len(values) > MAX_CATEGORIES:
                    wanted = f"at most {MAX_CATEGORIES} categories"
                    raise ValueError(f"{op}: feature {j} has {len(values)} different values; wants {wanted}")
                values = values if len(values) > 1 else values[:0]
            else:
                kind, values = ABOVE, quantiles(present, weight, thresholds)
            bits += [(kind, j, value) for value in values]
            bits += [(MISSING, j, 0.0)] * int(missing.any() and not missing.all())
        # The network needs an input, even if all features are constant.
        return cls._of(bits or [(MISSING, 0, 0.0)])

    @classmethod
    def of_images(
        cls,
        rows: Float32[np.ndarray, "rows pixels"],
        weights: Float[np.ndarray, " rows"],
        thresholds: int,
        shape: Sequence[int],
    ) -> "Quantizer":
        """Return a quantizer whose bits are images `(planes, height, width)`. All pixels of a plane have the same
        threshold. Thresholds are quantiles of the values of one channel. `shape` is (channels, height, width)."""
        channels = rows.reshape(len(rows), shape[0], -1)
        size, bits = channels.shape[2], []
        for c in range(shape[0]):
            values = channels[:, c]
            cuts = quantiles(values.ravel(), np.repeat(weights, size), thresholds)
            bits += [(ABOVE, c * size + pixel, value) for value in cuts for pixel in range(size)]
        return cls._of(bits or [(ABOVE, pixel, rows.max()) for pixel in range(size)])

    @classmethod
    def _of(cls, bits):
        kinds, features, values = zip(*bits, strict=True)
        return cls(np.array(kinds, np.uint8), np.array(features), np.array(values, np.float32))

    def __len__(self) -> int:
        return self.kinds.size

    def __call__(self, rows: Float32[np.ndarray, "rows features"]) -> Bool[np.ndarray, "rows bits"]:
        bits = np.empty((len(rows), len(self)), bool)
        functions: tuple[Callable, ...] = (np.greater, np.equal, lambda v, _: np.isnan(v))
        for kind, function in enumerate(functions):
            at = self.kinds == kind
            bits[:, at] = function(rows[:, self.features[at]], self.values[at])
        return bits

    def describe(self, names: Sequence[Any], categories: Mapping[int, Sequence]) -> list[str]:
        """Return one condition per bit, such as "age above 30.5". If `categories` has an entry for a feature, the
        feature's values are indices into it, and the condition names the category: "port equal to 'south'"."""
        described = []
        for kind, feature, value in zip(self.kinds.tolist(), self.features.tolist(), self.values.tolist(), strict=True):
            is_category = kind == EQUAL and feature in categories
            shown = repr(categories[feature][int(value)]) if is_category else f"{value:.9g}"
            described.append(f"{names[feature]} {CONDITIONS[kind].format(value=shown)}")
        return described


def quantiles(
    column: Float32[np.ndarray, " rows"], weights: Float[np.ndarray, " rows"], count: int
) -> Float32[np.ndarray, " thresholds"]:
    """Return up to `count` thresholds that divide the weighted values into parts of about equal weight.

    A threshold t lies between two neighboring values a and b: `a <= t < b`. If there are at most `count + 1` different
    values, there is one threshold between each pair of neighbors.
    """
    values, inverse = np.unique(column, return_inverse=True)
    if len(values) < 2:
        return np.empty(0, np.float32)
    cuts = np.arange(len(values) - 1)
    if len(cuts) > count:
        below = np.cumsum(np.bincount(inverse, weights))
        wanted = below[-1] * np.arange(1, count + 1) / (count + 1)
        cuts = np.unique(np.minimum(np.searchsorted(below, wanted), cuts[-1]))
    low, high = values[cuts], values[cuts + 1]
    middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    return np.where(middle < high, middle, low)
