"""Compare the estimators of logic gates with gradient boosting on the data sets that come with scikit-learn.

    python -m experiments.studies.estimators --json docs/results/estimators.json

A row has the mean accuracy over splits, and the mean time of a fit after the first, which compiles. The C code of each
split's circuit must agree with `predict` on all of its test rows.
"""

import ctypes
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.base import ClassifierMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import StratifiedKFold

from experiments.output.errors import UserError, exit_code
from experiments.studies import parser_of, write_rows
from experiments.training.compiled import load
from jaxbp.estimators import LogicClassifier, LogicConvClassifier

DATASETS = ("iris", "wine", "breast_cancer", "digits")
PIXELS = (8, 8)


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--splits", type=int, default=5)
    given = parser.parse_args(args)
    if shutil.which("cc") is None:
        raise UserError("there is no C compiler `cc`; wants one, to compare the C code with the estimators")
    return write_rows("estimators", args, {"splits": given.splits}, measured(given.datasets, given.splits), given.json)


def measured(names: Sequence[str], splits: int) -> Iterator[dict[str, Any]]:
    for name in names:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        estimators = [LogicClassifier(random_state=0), HistGradientBoostingClassifier(random_state=0)]
        if name == "digits":
            estimators.insert(1, LogicConvClassifier(image_shape=PIXELS, random_state=0))
        for estimator in estimators:
            yield {"dataset": name, "rows": len(X), "features": X.shape[1]} | cross_validated(estimator, X, y, splits)


def cross_validated(estimator: ClassifierMixin, X: np.ndarray, y: np.ndarray, splits: int) -> dict[str, Any]:
    folds = []
    for train, test in StratifiedKFold(splits, shuffle=True, random_state=2026).split(X, y):
        started = time.perf_counter()
        fitted = clone(estimator).fit(X[train], y[train])
        fold = {"seconds": time.perf_counter() - started, "accuracy": fitted.score(X[test], y[test])}
        if hasattr(fitted, "to_c"):
            with tempfile.TemporaryDirectory() as folder:
                fold |= in_c(fitted, X[test], Path(folder))
        folds.append(fold)
    means = {field: float(np.mean([fold[field] for fold in folds])) for field in folds[0]}
    means["seconds"] = float(np.mean([fold["seconds"] for fold in folds[1:]]))
    return {"estimator": type(estimator).__name__, "first_seconds": folds[0]["seconds"]} | means


def in_c(fitted: LogicClassifier | LogicConvClassifier, X: np.ndarray, folder: Path) -> dict[str, Any]:
    source, rows, classes = fitted.to_c(), np.ascontiguousarray(X, np.float32), np.empty(len(X), np.intc)
    predict = load(source, shutil.which("cc"), folder).predict_rows
    predict(ctypes.c_size_t(len(rows)), *(ctypes.c_void_p(array.ctypes.data) for array in (rows, classes)))
    if not np.array_equal(classes, fitted.predict_hard(X)):
        raise AssertionError(f"the C code of {fitted!r} disagrees with predict_hard")
    circuit = fitted.circuit_
    gates = circuit.placed_gates if isinstance(fitted, LogicConvClassifier) else len(circuit)
    return {"gates": gates, "bits": circuit.inputs, "c_bytes": len(source)}


if __name__ == "__main__":
    sys.exit(exit_code(main))
