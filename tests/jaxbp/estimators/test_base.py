import warnings

import pytest
from sklearn.utils.estimator_checks import check_estimator

from jaxbp.estimators import LogicClassifier, LogicRegressor

SMALL = dict(epochs=25, gates=100, layers=2, learning_rate=0.2)


@pytest.mark.parametrize(
    "estimator",
    [LogicClassifier(tau=8.0, **SMALL), LogicRegressor(**SMALL)],
    ids=lambda estimator: type(estimator).__name__,
)
def test_scikit_learns_checks_pass_without_exceptions(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_skip=None)
    assert len(results) > 40
    # Without SCIPY_ARRAY_API=1, scikit-learn skips this check.
    assert {result["check_name"] for result in results if result["status"] != "passed"} <= {"check_array_api_input"}
