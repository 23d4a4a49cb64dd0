"""Estimators for tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, Shaped
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from jaxbp.common import checks
from jaxbp.estimators.base import LogicEstimator
from jaxbp.estimators.training import LEAST_INPUTS, Network, padded
from jaxbp.logic.circuits.netlist import Netlist
from jaxbp.logic.tables.quantizer import Quantizer

INPUTS_PER_FEATURE = 8
"""Smallest number of inputs of the network for the bits of one kind of one feature."""
MAX_TARGET = 1e30
"""Largest absolute target of `LogicRegressor`. Predictions are float32, and may be many times as large."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class TableEstimator(LogicEstimator):
    """Base of the estimators for tables. The inputs of the network are the bits of `quantizer_` and copies of them, in
    random order."""

    def network(self, groups: int) -> Network:
        inputs, last = len(self._sources()), groups * self.gates
        widths = (*[max(last, inputs // self.arity)] * (self.layers - 1), last)
        return Network(inputs, widths, groups, arity=self.arity, candidates=self.candidates)

    def network_bits(self, bits):
        return bits[:, self._sources()]

    def quantizer_of(self, rows, weights):
        return Quantizer.of_tables(type(self).__name__, rows, weights, self.thresholds, self._categorical())

    def circuit_of(self, made, params, simplify=True):
        listed, bits = made.harden(params).netlist(), len(self.quantizer_)
        sources = np.append(self._sources(), bits + np.arange(len(listed)))
        a, b, results = (sources[array] for array in (listed.a, listed.b, listed.results))
        netlist = Netlist.from_gates(bits, listed.gates, a, b, results)
        return netlist.simplify() if simplify else netlist

    def _sources(self) -> Int[np.ndarray, " inputs"]:
        """Return the bit that each input of the network reads."""
        sources = np.repeat(np.arange(len(self.quantizer_)), self._copies())
        return np.resize(np.random.default_rng(self._seed).permutation(sources), padded(sources.size, LEAST_INPUTS))

    def _copies(self) -> Int[np.ndarray, " bits"]:
        """Return the number of inputs per bit. If a feature of one bit had only one input, gates could not give it the
        weight that it needs."""
        groups = np.stack([self.quantizer_.features, self.quantizer_.kinds])
        _, group, bits = np.unique(groups, axis=1, return_inverse=True, return_counts=True)
        return -(-INPUTS_PER_FEATURE // bits)[group.ravel()]

    def _categorical(self) -> set[int]:
        chosen = set(self.categories_)
        if isinstance(self.categorical_features, str) or not np.iterable(self.categorical_features):
            if self.categorical_features not in (None, "from_dtype"):
                raise ValueError(
                    f"{type(self).__name__}: categorical_features is {self.categorical_features!r}; wants "
                    '"from_dtype", None, or a sequence of indices or names'
                )
            return chosen
        names = list(getattr(self, "feature_names_in_", ()))
        for feature in self.categorical_features:
            j = names.index(feature) if feature in names else feature
            if not checks.is_int(j) or not 0 <= j < self.n_features_in_:
                wanted = f"names of columns, or indices from 0 to {self.n_features_in_ - 1}"
                raise ValueError(f"{type(self).__name__}: categorical_features contains {feature!r}; wants {wanted}")
            chosen.add(int(j))
        return chosen


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Classifier(ClassifierMixin, LogicEstimator):
    """Base of the classifiers. A row's score for a class is the number of outputs of the class that are on."""

    tau: float = 20.0
    """Divisor of the scores. The probabilities are the softmax of the quotients. A larger number fits the training rows
    less closely."""
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None
    """Weights of the classes, by class. "balanced" gives all classes the same total weight."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "Classifier":
        """Learn a circuit from the rows X `(rows, features)` and their classes y.

        Raises:
          ValueError: X, y, or a parameter is invalid.
          FloatingPointError: training diverges, because the learning rate is too large.
        """
        rows, y, weights = self._checked(X, y, sample_weight, reset=True)
        self.classes_ = np.unique(y)
        self.begin(rows, weights)
        return self._train(rows, y, weights, once=False)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> "Classifier":
        """Train for one pass over the rows. The first call needs all classes, and determines the thresholds and the
        categories.

        Raises:
          ValueError: as in `fit`; `classes` is missing in the first call; or y contains other classes.
        """
        first = not hasattr(self, "circuit_")
        rows, y, weights = self._checked(X, y, sample_weight, reset=first)
        if first and classes is None:
            raise ValueError(f"{type(self).__name__}: classes is None; wants all classes in the first partial_fit")
        if classes is not None and not first and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"{type(self).__name__}: classes is {classes!r}; wants None or {self.classes_}, as in the first call"
            )
        if first:
            self.classes_ = np.unique(classes)
        if unknown := sorted(set(y.tolist()) - set(self.classes_.tolist())):
            raise ValueError(f"{type(self).__name__}: y contains {unknown[0]!r}; wants classes from {self.classes_}")
        if first:
            self.begin(rows, weights)
        return self._train(rows, y, weights, once=True)

    def predict_hard(self, X: Any) -> Int[np.ndarray, " rows"]:
        """Return the index of each row's class in `classes_`, as the function of `to_c` does: the first class with the
        most outputs on."""
        return self.counts(X).argmax(axis=-1)

    def predict(self, X: Any) -> Shaped[np.ndarray, " rows"]:
        """Return the circuit's class of each row, `classes_[predict_hard(X)]`."""
        check_is_fitted(self)
        return self.classes_[self.predict_hard(X)]

    def predict_proba(self, X: Any) -> Float[np.ndarray, "rows classes"]:
        """Return the softmax of `scores / tau`, where a score is the number of outputs of a class that are on."""
        return np.exp(self._log_probabilities(self.counts(X)))

    def validation_loss(self, counts, targets, weights):
        losses = -np.take_along_axis(self._log_probabilities(counts), targets[:, None], axis=1)[:, 0]
        return float(np.average(losses, weights=weights))

    def _log_probabilities(self, counts):
        scores = (counts - counts.max(axis=-1, keepdims=True)) / self.tau
        return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))

    def _checked(self, X, y, sample_weight, reset):
        self.check_parameters()
        if not checks.is_number(self.tau) or not self.tau > 0:
            raise ValueError(f"{type(self).__name__}: tau is {self.tau!r}; wants a number above 0")
        rows, y, weights = self.checked(X, y, sample_weight, reset, numeric=False)
        check_classification_targets(y)
        return rows, y, weights

    def _train(self, rows, y, weights, once):
        self.groups_, self.scale_, self.offset_ = len(self.classes_), self.tau, 0.0
        targets = np.searchsorted(self.classes_, y).astype(np.int32)
        factors = compute_sample_weight(self.class_weight, y)
        if not (np.isfinite(factors).all() and factors.min() >= 0 and factors.any()):
            wanted = "finite weights, none below zero, and one above zero for a class of y"
            raise ValueError(f"{type(self).__name__}: class_weight is {self.class_weight!r}; wants {wanted}")
        self.train(rows, targets, weights * factors, once)
        return self


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LogicClassifier(Classifier, TableEstimator):
    """A classifier for tables that learns a circuit of logic gates.

    The circuit reads bits: whether a feature is above a threshold, equal to a category, or missing. Features are
    rounded to float32. A missing value sets a bit only if the feature has missing values in `fit`, and an unknown
    category sets no bit.

    Attributes:
      classes_: the classes, sorted.
      circuit_: the circuit, a simplified `Netlist`. It has one group of `gates` outputs per class.
      quantizer_: the function from rows to bits.
      categories_: the categories of each column of a frame that is not a number, by index. In rows for the C function,
        such a column has the index of the category.
      n_iter_: the number of epochs.

    Source: as in `jaxbp.gate_layer`.
    """


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LogicRegressor(RegressorMixin, TableEstimator):
    """A regressor for tables that learns a circuit of logic gates.

    The prediction is a linear function of the number of outputs of the circuit that are on. It is fitted to the
    training rows by least squares. The bits are as in `LogicClassifier`.

    Attributes:
      values_: the prediction, float32, for each number of outputs that are on.
      circuit_, quantizer_, categories_, n_iter_: as in `LogicClassifier`.

    Source: as in `jaxbp.gate_layer`.
    """

    gates: int = 1000

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LogicRegressor":
        """Learn a circuit from the rows X `(rows, features)` and their targets y.

        Errors are as in `LogicClassifier`.
        """
        self.check_parameters()
        rows, y, weights = self.checked(X, y, sample_weight, reset=True, numeric=True)
        self.begin(rows, weights)
        return self._train(rows, y, weights, first=True, once=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LogicRegressor":
        """Train for one pass over the rows. The first call determines the thresholds, the categories, and the range of
        predictions."""
        self.check_parameters()
        first = not hasattr(self, "circuit_")
        rows, y, weights = self.checked(X, y, sample_weight, reset=first, numeric=True)
        if first:
            self.begin(rows, weights)
        return self._train(rows, y, weights, first=first, once=True)

    def predict_hard(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Return the prediction for each row. The C function in the source of `to_c` returns the same."""
        counts = self.counts(X)[:, 0]
        return self.values_[counts]

    predict = predict_hard

    def to_c(self, name: str = "predict") -> str:
        """Return C99 source of `float name(const float *row)` and `void name_rows(size_t n, const float *rows, float
        *results)`. See `LogicClassifier.to_c`."""
        return super().to_c(name)

    def validation_loss(self, counts, targets, weights):
        return float(np.average(((counts[:, 0] - self.offset_) / self.scale_ - targets) ** 2, weights=weights))

    def _train(self, rows, y, weights, first, once):
        y = y.astype(np.float64)
        if np.abs(y).max() > MAX_TARGET:
            raise ValueError(
                f"{type(self).__name__}: y contains {y[np.abs(y).argmax()]}; wants numbers from -{MAX_TARGET} to "
                f"{MAX_TARGET}, because predictions are float32"
            )
        if first:
            self._set_range(y, weights)
        targets = ((y - self._mean) / self._deviation).astype(np.float32)
        self.train(rows, targets, weights, once)
        if not once:
            self._fit_line(self.counts_of(self.circuit_, self.quantizer_(rows))[:, 0], y, weights)
        return self

    def _set_range(self, y, weights):
        self._mean = np.average(y, weights=weights)
        self._deviation = np.sqrt(np.average((y - self._mean) ** 2, weights=weights)) or 1.0
        largest = np.abs(y - self._mean).max() / self._deviation
        self.groups_, self.offset_ = 1, self.gates / 2
        self.scale_ = self.offset_ / np.clip(1.1 * largest, 1, 6)
        self._set_values(self._mean - self._deviation * self.offset_ / self.scale_, self._deviation / self.scale_)

    def _fit_line(self, counts, y, weights):
        centered = counts - np.average(counts, weights=weights)
        variance = np.average(centered**2, weights=weights)
        if variance:
            slope = np.average(centered * y, weights=weights) / variance
            self._set_values(np.average(y - slope * counts, weights=weights), slope)

    def _set_values(self, intercept, slope):
        self.values_ = (intercept + slope * np.arange(self.gates + 1)).astype(np.float32)
