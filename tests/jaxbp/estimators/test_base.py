import time
import warnings

import pytest
from sklearn.utils.estimator_checks import check_estimator

from jaxbp.estimators import LogicClassifier, LogicRegressor


@pytest.mark.parametrize("estimator", [LogicClassifier, LogicRegressor])
def test_scikit_learns_checks_pass_with_default_settings_in_time(estimator):
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator(), on_skip=None)
    assert len(results) > 40 and time.process_time() - started < 180
    # Without SCIPY_ARRAY_API=1, scikit-learn skips this check.
    assert {result["check_name"] for result in results if result["status"] != "passed"} <= {"check_array_api_input"}
