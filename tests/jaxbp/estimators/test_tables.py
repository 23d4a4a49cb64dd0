import ctypes
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
from compiled_rows import results_in_c
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from verilog import needs_icarus, run_in_icarus

from jaxbp.estimators import LogicClassifier, LogicRegressor
from jaxbp.logic.tables import columns

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
SMALL = dict(gates=60, layers=2, epochs=20, tau=6.0, batch_size=32, learning_rate=0.2, random_state=0)

SMALL_LINE = dict(gates=20, layers=1, epochs=2, batch_size=8, random_state=0)


def passengers(rows=240):
    random = np.random.default_rng(0)
    table = {
        "age": random.uniform(1, 80, rows).round(1),
        "fare": random.lognormal(3, 1, rows),
        "port": random.choice(["south", "north", "west"], rows),
        "is_crew": random.random(rows) < 0.3,
    }
    table["age"][random.random(rows) < 0.2] = np.nan
    saved = (table["port"] == "west") | np.isnan(table["age"]) | ((table["fare"] > 25) & ~table["is_crew"])
    return pd.DataFrame(table), np.where(saved, "saved", "lost")


FRAME, SAVED = passengers()
TEST, TEST_SAVED = FRAME[180:], SAVED[180:]


@pytest.fixture(scope="module")
def fitted():
    return LogicClassifier(**SMALL).fit(FRAME[:180], SAVED[:180])


def rows_in_c(estimator, frame):
    return columns.matrix(columns.of_frame("op", frame, estimator.categories_), estimator.categories_)


def test_a_frame_with_categories_and_missing_values_is_learned(fitted):
    assert fitted.score(TEST, TEST_SAVED) > 0.9
    assert {"age missing", "port equal to 'west'", "is_crew above 0.5"} <= set(
        fitted.quantizer_.describe(FRAME.columns, fitted.categories_)
    )


@needs_compiler
def test_compiled_c_classifies_raw_rows_as_predict_does(fitted, tmp_path):
    classes = results_in_c(fitted.to_c(), rows_in_c(fitted, FRAME), tmp_path)
    assert np.array_equal(classes, fitted.predict_hard(FRAME))
    assert np.array_equal(fitted.classes_[classes], fitted.predict(FRAME))
    assert len(set(classes)) == 2


def test_the_code_describes_its_inputs(fitted):
    source, module = fitted.to_c(), fitted.to_verilog("ticket")
    assert "// row[2] is port (0 for 'north', 1 for 'south', 2 for 'west').\n" in source
    assert "// The classes are 0 for 'lost', 1 for 'saved'.\n" in source
    assert re.search(r"^// x\[\d+\]: age missing$", module, re.MULTILINE) and "module ticket (" in module


@needs_icarus
def test_the_test_bench_in_verilog_passes_for_rows(fitted, tmp_path):
    source = fitted.to_verilog("ticket") + fitted.to_verilog_testbench(TEST[:9], "ticket")
    assert run_in_icarus(source, tmp_path) == ["PASS:", "9", "samples"]


def test_probabilities_are_the_softmax_of_the_counts_of_outputs(fitted):
    counts = fitted.counts(TEST)
    wanted = np.exp(counts / 6.0)
    np.testing.assert_allclose(fitted.predict_proba(TEST), wanted / wanted.sum(axis=1, keepdims=True), rtol=1e-12)
    outputs = fitted.circuit_(fitted.quantizer_(rows_in_c(fitted, TEST).astype(np.float32)))
    assert np.array_equal(counts, outputs.reshape(len(TEST), 2, 60).sum(axis=-1))


def polars(frame):
    return pl.DataFrame(frame.to_dict("list"), nan_to_null=True)


def test_polars_and_pandas_give_the_same_circuit(fitted):
    other = LogicClassifier(**SMALL).fit(polars(FRAME[:180]), SAVED[:180])
    assert other.circuit_ == fitted.circuit_
    assert np.array_equal(other.predict(polars(TEST)), fitted.predict(TEST))


def test_a_copy_by_pickle_predicts_and_trains_as_the_original(fitted):
    one, other = (pickle.loads(pickle.dumps(fitted)) for _ in range(2))
    assert np.array_equal(one.predict_proba(TEST), fitted.predict_proba(TEST))
    for copy in (one, other):
        copy.partial_fit(TEST, TEST_SAVED)
    assert one.circuit_ == other.circuit_ != fitted.circuit_
    assert one.n_iter_ == fitted.n_iter_ + 1 == 21


def test_partial_fit_learns_batch_by_batch_and_keeps_the_thresholds_of_the_first():
    estimator = LogicClassifier(**SMALL)
    with pytest.raises(ValueError, match="LogicClassifier: classes is None; wants all classes in the first"):
        estimator.partial_fit(FRAME[:90], SAVED[:90])
    estimator.partial_fit(FRAME[:90], SAVED[:90], classes=["lost", "saved"])
    thresholds = estimator.quantizer_.values
    for _ in range(15):
        for first in (0, 90):
            estimator.partial_fit(FRAME[first : first + 90], SAVED[first : first + 90])
    assert estimator.quantizer_.values is thresholds
    assert estimator.score(TEST, TEST_SAVED) > 0.85
    with pytest.raises(ValueError, match=r"y contains 'maybe'; wants classes from \['lost' 'saved'\]"):
        estimator.partial_fit(FRAME[:2], ["maybe", "lost"])


@pytest.mark.parametrize("changed", [dict(gates=70), dict(layers=3), dict(arity=4), dict(candidates=4)])
def test_partial_fit_refuses_a_network_that_has_changed(changed):
    estimator = LogicClassifier(**SMALL).partial_fit(FRAME[:90], SAVED[:90], classes=["lost", "saved"])
    circuit = estimator.circuit_
    with pytest.raises(ValueError, match=r"LogicClassifier: gates, layers, or another parameter .* wants equal"):
        estimator.set_params(**changed).partial_fit(FRAME[:90], SAVED[:90])
    assert estimator.circuit_ == circuit
    estimator.set_params(**SMALL | dict(arity=2, candidates=None)).partial_fit(FRAME[:90], SAVED[:90])


def test_after_a_fit_that_failed_an_estimator_is_not_fitted():
    estimator = LogicClassifier(**SMALL).fit(FRAME[["fare"]], SAVED)
    with pytest.raises(FloatingPointError):
        estimator.set_params(learning_rate=1e30).fit(-FRAME[["fare"]], SAVED)
    with pytest.raises(NotFittedError):
        estimator.predict(FRAME[["fare"]])


@pytest.mark.parametrize("weights", [dict(lost=-1.0, saved=1.0), dict(lost=0.0, saved=0.0), dict(lost=np.inf)])
def test_class_weights_that_are_no_weights_are_refused(weights):
    with pytest.raises(ValueError, match=r"LogicClassifier: class_weight is .*; wants finite weights"):
        LogicClassifier(**SMALL, class_weight=weights).fit(FRAME, SAVED)


def test_targets_beyond_float32_are_refused():
    X = np.arange(8.0)[:, None]
    with pytest.raises(ValueError, match=r"LogicRegressor: y contains 7e\+30; wants numbers from -1e\+30 to 1e\+30"):
        LogicRegressor(**SMALL_LINE).fit(X, 1e30 * X[:, 0])
    assert np.isfinite(LogicRegressor(**SMALL_LINE).fit(X, 1e29 * X[:, 0]).values_).all()


def test_it_is_cloned_and_works_in_a_pipeline(fitted):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params() and not hasattr(copy, "circuit_")
    scaled = make_column_transformer((StandardScaler(), ["age", "fare", "is_crew"]))
    pipeline = make_pipeline(scaled, copy).fit(FRAME[:180], SAVED[:180])
    assert pipeline.score(FRAME, SAVED) > 0.7


def test_training_stops_early_and_keeps_the_best_circuit(capsys):
    noise = np.random.default_rng(1).choice(["a", "b"], 180)
    options = SMALL | dict(epochs=200, early_stopping=True, n_iter_no_change=4, validation_fraction=0.3, verbose=1)
    estimator = LogicClassifier(**options).fit(FRAME[:180], noise)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == estimator.n_iter_ < 100
    losses = [float(line.split("validation loss ")[1]) for line in lines]
    assert len(losses) - 1 - int(np.argmin(losses)) == 4 and min(losses) > 0
    assert lines[0].startswith("LogicClassifier: epoch 1 of 200, training loss ")


def test_the_validation_loss_of_a_regressor_is_the_mean_squared_error_of_its_scores():
    estimator = LogicRegressor()
    estimator.offset_, estimator.scale_ = 4, 2
    counts, weights = np.array([[2], [6], [8]]), np.array([1, 1, 2])
    assert estimator.validation_loss(counts, np.array([-1, 1, 2]), weights) == 0
    assert estimator.validation_loss(counts, np.array([-1, 1, 4]), weights) == 2


def test_a_regressor_learns_by_partial_fit_alone():
    X = np.random.default_rng(0).uniform(-1, 1, (200, 2))
    y = 3 * X[:, 0] + 5
    estimator = LogicRegressor(gates=100, layers=2, batch_size=32, learning_rate=0.05, random_state=0)
    for _ in range(20):
        estimator.partial_fit(X, y)
    assert estimator.score(X, y) > 0.8


def test_a_class_with_a_large_weight_is_predicted_more_often(fitted):
    heavy = LogicClassifier(**SMALL, class_weight={"lost": 20.0, "saved": 1.0}).fit(FRAME[:180], SAVED[:180])
    assert np.sum(heavy.predict(TEST) == "lost") > np.sum(fitted.predict(TEST) == "lost")


def test_numbers_are_categories_if_the_user_says_so():
    X = np.random.default_rng(0).integers(0, 5, (200, 2)).astype(float)
    y = np.isin(X[:, 1], [1, 3])
    estimator = LogicClassifier(**SMALL, categorical_features=[1]).fit(X, y)
    assert [text for text in estimator.quantizer_.describe("ab", {}) if "equal" in text] == [
        f"b equal to {value}" for value in range(5)
    ]
    assert estimator.score(X, y) == 1
    for wrong in ([2], ["b"], "all"):
        with pytest.raises(ValueError, match="LogicClassifier: categorical_features "):
            LogicClassifier(categorical_features=wrong).fit(X, y)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("gates", 0), ("layers", 1.5), ("thresholds", True), ("epochs", 0), ("learning_rate", -1.0)),
        *(("tau", 0.0), ("validation_fraction", 1.0), ("batch_size", "64"), ("n_iter_no_change", 0)),
        *(("candidates", 0), ("arity", 3), ("early_stopping", "auto"), ("categorical_features", 3)),
    ],
)
def test_invalid_parameters_are_refused(name, value):
    with pytest.raises(ValueError, match=f"LogicClassifier: {name} is {value!r}; wants "):
        LogicClassifier(**{name: value}).fit([[0.0], [1.0]], [0, 1])


@needs_compiler
def test_compiled_c_predicts_numbers_as_the_regressor_does(tmp_path):
    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (300, 3))
    X[random.random(X.shape) < 0.1] = np.nan
    y = np.where(np.isnan(X[:, 0]), 5e3, 1e3 * X[:, 0]) - 2e3 * (np.nan_to_num(X[:, 1]) > 0)
    options = dict(gates=200, layers=2, epochs=100, batch_size=32, random_state=0)
    estimator = LogicRegressor(**options).fit(X[:200], y[:200])
    assert estimator.score(X[200:], y[200:]) > 0.9
    predictions = results_in_c(estimator.to_c(), X, tmp_path, ctypes.c_float)
    assert np.array_equal(predictions, estimator.predict(X)) and len(set(predictions)) > 20
    estimator.partial_fit(X[:200], y[:200])
    assert estimator.n_iter_ == 101


@needs_compiler
def test_the_defaults_are_good_and_c_agrees_on_every_test_row(tmp_path):
    X, y = load_breast_cancer(return_X_y=True)
    accuracies = []
    for i, (train, test) in enumerate(StratifiedKFold(3, shuffle=True, random_state=0).split(X, y)):
        estimator = LogicClassifier(random_state=0).fit(X[train], y[train])
        accuracies.append(estimator.score(X[test], y[test]))
        (folder := tmp_path / str(i)).mkdir()
        assert np.array_equal(results_in_c(estimator.to_c(), X[test], folder), estimator.predict(X[test]))
    assert np.mean(accuracies) > 0.96


def test_the_library_does_not_import_scikit_learn_and_without_it_the_error_names_the_extra():
    code = (
        "import sys, jaxbp; jaxbp.nn.LogicNetwork; assert 'sklearn' not in sys.modules; "
        "sys.modules['sklearn'] = None; import jaxbp.estimators"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "jaxbp.estimators: the module sklearn" in done.stderr and "pip install 'jaxbp[estimators]'" in done.stderr
