import warnings

import pytest
from sklearn.utils.estimator_checks import check_estimator

from jaxbp.estimators import LogicClassifier, LogicRegressor, base
from jaxbp.estimators.training import program


@pytest.mark.parametrize("estimator", [LogicClassifier, LogicRegressor])
def test_scikit_learns_checks_pass_with_default_settings_and_share_programs(estimator, monkeypatch):
    monkeypatch.setattr(base, "LEAST_STEPS", 20)  # enough for every check
    program.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator(), on_skip=None)
    # Without SCIPY_ARRAY_API=1, scikit-learn skips this check.
    assert {result["check_name"] for result in results if result["status"] != "passed"} <= {"check_array_api_input"}
    assert len(results) > 40 and program.cache_info().misses < 10
