"""The part of the estimators that does not depend on the task."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, Float32, Int
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from jaxbp.common import checks
from jaxbp.estimators.training import Examples, Network, Program, Settings, program, steps_per_epoch, training
from jaxbp.logic.circuits.netlist import BitCircuit
from jaxbp.logic.tables import columns
from jaxbp.logic.tables.quantizer import Quantizer
from jaxbp.logic.tables.row_source import c_source, circuit_comment
from jaxbp.training import loop

LEAST_STEPS = 2000
MAX_SEED = 2**31 - 1


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LogicEstimator(BaseEstimator):
    """Base of the estimators. A subclass sets `groups_`, `scale_` and `offset_`, and defines `network` and
    `validation_loss`."""

    gates: int = 300
    """Number of gates in the last layer, per class. The other layers have as many gates, or more, so that the first
    layer can read every bit."""
    layers: int = 3
    """Number of layers of gates."""
    arity: int = 2
    """Number of inputs per gate in these layers, 2 or 4."""
    candidates: int | Literal["all"] | None = None
    """Number of candidates among which each input of a gate in these layers chooses, or "all" inputs of the layer.
    None: the wires are not learned."""
    thresholds: int = 15
    """Largest number of thresholds per feature."""
    epochs: int | None = None
    """Number of passes over the rows. None: as many as make 2,000 steps, at least 10 and at most 100."""
    learning_rate: float = 0.1
    """Adam's learning rate. In `fit`, it falls to 0 as a cosine. In `partial_fit`, it is constant."""
    batch_size: int = 64
    """Rows per step."""
    categorical_features: Literal["from_dtype"] | Sequence[int | str] | None = "from_dtype"
    """Features that are categories. "from_dtype" selects the columns of a frame that are neither numbers nor booleans.
    These columns are always categories. A sequence of indices or names selects more features."""
    early_stopping: bool = False
    """Whether training stops when the hardened network's loss on a validation share stops falling. Then, the
    parameters of the best epoch are kept."""
    validation_fraction: float = 0.1
    """Share of the rows for early stopping."""
    n_iter_no_change: int = 10
    """Number of epochs without a smaller validation loss after which training stops."""
    verbose: int = 0
    """If 1 or more, print one line per epoch."""
    random_state: Any = None
    """Seed for the wires, for the order of the rows, and for the validation share."""

    _allows_nan = True

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._allows_nan
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "circuit_")

    def to_c(self, name: str = "predict") -> str:
        """Return C99 source of `int name(const float *row)`, which returns what `predict_hard` returns for a row. `row`
        has one number per feature. A missing value is NaN.

        `void name_rows(size_t n, const float *rows, int *results)` computes the results of n rows, up to 512 rows in
        about the time of one. With `-Dname_circuit_block=1`, a single row takes the least time and memory. The code
        allocates no memory, as the circuits' `to_c` says. Compilers' options that ignore NaN, such as `-ffast-math`,
        break missing values.
        """
        check_is_fitted(self)
        names = self._feature_names()
        described = columns.describe(names, self.categories_)
        classes, values = (getattr(self, attribute, None) for attribute in ("classes_", "values_"))
        classes = None if classes is None else classes.tolist()
        described_by = len(names), described, classes, values
        return c_source(type(self).__name__, name, self.quantizer_, self.circuit_, *described_by)

    def to_verilog(self, name: str = "circuit") -> str:
        """Return a Verilog module of the circuit. Its inputs are the bits of a row, which a comment describes."""
        check_is_fitted(self)
        names, outputs = self._feature_names(), self.circuit_.outputs
        comment = circuit_comment(self.quantizer_, names, self.categories_, outputs, self.groups_)
        return comment + self.circuit_.to_verilog(name)

    def to_verilog_testbench(self, X: Any, name: str = "circuit") -> str:
        """Return a Verilog module `{name}_test`, which compares the module of `to_verilog(name)` with the circuit for
        the rows X, and prints "PASS: 9 samples", or each row whose outputs differ."""
        check_is_fitted(self)
        bits = self.quantizer_(self._rows(X))
        return self.circuit_.to_verilog_testbench(bits.reshape(len(bits), *self.circuit_.shape), name)

    def network(self, groups: int) -> Network:
        raise NotImplementedError

    def circuit_of(self, made: Program, params: Any) -> BitCircuit:
        raise NotImplementedError

    def quantizer_of(self, rows: np.ndarray, weights: np.ndarray) -> Quantizer:
        raise NotImplementedError

    def validation_loss(self, counts: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
        raise NotImplementedError

    def check_parameters(self) -> None:
        op = type(self).__name__
        for name in ("gates", "layers", "thresholds", "batch_size", "n_iter_no_change"):
            checks.count(op, name, getattr(self, name))
        checks.boolean(op, "early_stopping", self.early_stopping)
        if self.arity not in (2, 4):
            raise ValueError(f"{op}: arity is {self.arity!r}; wants 2 or 4")
        for name in ("epochs", "candidates"):
            value = getattr(self, name)
            if value is not None and (name, value) != ("candidates", "all"):
                checks.count(op, name, value)
        for name, most in (("learning_rate", np.inf), ("validation_fraction", 1)):
            value = getattr(self, name)
            if not checks.is_number(value) or not 0 < value < most:
                wanted = "a positive number" if most == np.inf else f"a number between 0 and {most}"
                raise ValueError(f"{op}: {name} is {value!r}; wants {wanted}")

    def checked(self, X: Any, y: Any, sample_weight: Any, reset: bool, numeric: bool) -> tuple[np.ndarray, ...]:
        """Return the rows with a weight above 0, their targets, and their weights. With `reset`, also set the
        attributes that describe the features. With `numeric`, the targets are numbers."""
        op, options = type(self).__name__, self._check_options
        if reset:  # if this fit fails, no earlier circuit may read the bits of another quantizer
            vars(self).pop("circuit_", None)
        if columns.is_frame(X) and y is not None:
            validate_data(self, X, skip_check_array=True, reset=reset)
            found = columns.of_frame(op, X, None if reset else self.categories_)
            if reset:
                self.categories_ = columns.fit_categories(op, X.columns, found)
            X = columns.matrix(found, self.categories_)
            X, y = check_X_y(X, y, y_numeric=numeric, **options)
        else:
            X, y = validate_data(self, X, y, reset=reset, y_numeric=numeric, **options)
            self.categories_ = {} if reset else self.categories_
        weights = np.ones(len(X))
        if sample_weight is not None:
            weights = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
            if weights.ndim != 1:
                raise ValueError(f"{op}: sample_weight has shape {weights.shape}; wants ({len(X)},)")
            check_consistent_length(X, weights)
            if weights.min() < 0:
                raise ValueError(f"{op}: sample_weight contains {weights.min()}; wants no weight below 0")
            if not weights.any():
                raise ValueError(f"{op}: sample_weight is zero everywhere; wants at least one weight above zero")
        kept = weights > 0
        return X[kept], y[kept], weights[kept]

    def counts(self, X: Any) -> Int[np.ndarray, "rows groups"]:
        """Return the number of outputs of the circuit that are on, per row and group."""
        check_is_fitted(self)
        return self.counts_of(self.circuit_, self.quantizer_(self._rows(X)))

    def counts_of(self, circuit: BitCircuit, bits: np.ndarray) -> Int[np.ndarray, "rows groups"]:
        outputs = circuit(bits.reshape(len(bits), *circuit.shape))
        return outputs.reshape(len(bits), self.groups_, -1).sum(axis=-1)

    def begin(self, rows: Float32[np.ndarray, "rows features"], weights: np.ndarray) -> None:
        random = check_random_state(self.random_state)
        self.quantizer_ = self.quantizer_of(rows, weights)
        self._seed = int(random.randint(MAX_SEED))
        self._network = self._leaves = None

    def train(
        self,
        rows: Float32[np.ndarray, "rows features"],
        targets: np.ndarray,
        weights: Float[np.ndarray, " rows"],
        once: bool = False,
    ) -> None:
        """Train for `epochs`, or with `once` for one pass over the rows. Set `circuit_` and `n_iter_`."""
        network = self.network(self.groups_)
        if self._network not in (None, network):
            raise ValueError(
                f"{type(self).__name__}: gates, layers, or another parameter of the network has changed since the "
                "first partial_fit; wants equal parameters, or a call of fit"
            )
        made = program(network, self.batch_size)
        examples = Examples.merged(self.quantizer_(rows), targets, weights)
        evaluate = None
        if self.early_stopping and not once:
            examples, evaluate = self._validation(made, examples)
        steps = steps_per_epoch(len(examples.targets), self.batch_size)
        epochs = 1 if once else self.epochs or int(np.clip(LEAST_STEPS // steps, 10, 100))
        settings = Settings(self.learning_rate, np.inf if once else epochs * steps, self.scale_, self.offset_)
        padded = examples._replace(bits=self.network_bits(examples.bits))
        # Each call of partial_fit has another order of rows.
        seed = self._seed + (getattr(self, "n_iter_", 0) if once else 0)
        prepared = training(made, padded, settings, self.batch_size, epochs, seed, evaluate)
        best, best_loss, best_epoch = None, np.inf, 0
        for metrics, state, _ in loop.run(prepared, made.restored(self._leaves)):
            if self.verbose:
                print(f"{type(self).__name__}: {_line(metrics, epochs)}", flush=True)
            if evaluate and metrics.test_loss < best_loss:
                best, best_loss, best_epoch = jax.tree.map(np.array, state), metrics.test_loss, metrics.epoch
            if evaluate and metrics.epoch - best_epoch >= self.n_iter_no_change:
                break
        self.n_iter_ = metrics.epoch + (getattr(self, "n_iter_", 0) if once else 0)
        state = jax.tree.map(np.array, state) if best is None else best
        self._network, self._leaves = network, jax.tree.leaves(state)
        self.circuit_ = self.circuit_of(made, state.params)

    def network_bits(self, bits: np.ndarray) -> np.ndarray:
        return bits

    @property
    def _check_options(self) -> dict[str, Any]:
        return dict(dtype=np.float32, ensure_all_finite="allow-nan" if self._allows_nan else True)

    def _rows(self, X: Any) -> Float32[np.ndarray, "rows features"]:
        if not columns.is_frame(X):
            return validate_data(self, X, reset=False, **self._check_options)
        validate_data(self, X, skip_check_array=True, reset=False)
        found = columns.of_frame(type(self).__name__, X, self.categories_)
        return check_array(columns.matrix(found, self.categories_), **self._check_options)

    def _validation(self, made: Program, examples: Examples):
        rows = len(examples.targets)
        held_out = int(np.ceil(self.validation_fraction * rows))
        if not 0 < held_out < rows:
            raise ValueError(
                f"{type(self).__name__}: there are {rows} different rows, of which validation_fraction holds out "
                f"{held_out}; wants at least one row for training and one for validation"
            )
        order = np.random.default_rng(self._seed).permutation(rows)
        held, kept = (Examples(*(array[at] for array in examples)) for at in np.split(order, [held_out]))

        def evaluate(params):
            counts = self.counts_of(self.circuit_of(made, params, simplify=False), held.bits)
            loss = self.validation_loss(counts, held.targets, held.weights)
            predictions = counts.argmax(axis=-1)
            return loss, np.sum(predictions == held.targets), predictions

        return kept._replace(weights=kept.weights / kept.weights.mean()), evaluate

    def _feature_names(self) -> Sequence[str]:
        return getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)])


def _line(metrics: loop.Metrics, epochs: int) -> str:
    line = f"epoch {metrics.epoch} of {epochs}, training loss {metrics.train_loss:.4f}"
    return line if metrics.test_loss is None else f"{line}, validation loss {metrics.test_loss:.4f}"
