import json
import shutil

import pytest

from experiments.studies import estimators


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_each_estimator_has_a_row_and_circuits_have_the_size_of_their_code(tmp_path):
    path = tmp_path / "estimators.json"
    assert estimators.main(["--datasets", "iris", "--splits", "2", "--json", str(path)]) == 0
    logic, boosting = json.loads(path.read_text())["rows"]
    assert (logic["estimator"], boosting["estimator"]) == ("LogicClassifier", "HistGradientBoostingClassifier")
    assert logic["dataset"] == "iris" and (logic["rows"], logic["features"]) == (150, 4)
    assert min(logic["accuracy"], boosting["accuracy"]) > 0.9
    assert 0 < logic["bits"] < logic["gates"] < logic["c_bytes"] and "gates" not in boosting
