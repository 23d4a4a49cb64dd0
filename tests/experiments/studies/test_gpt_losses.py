import json

import numpy as np
import pytest

from experiments.studies import gpt_losses


def test_implementations_train_alike_and_are_compared_with_float32(tmp_path):
    path = tmp_path / "found.json"
    args = ["--place", "tiny", "--batch", "2", "--steps", "40", "--json", str(path)]
    assert gpt_losses.main([*args, "--implementations", "autodiff", "xla"]) == 0
    report = json.loads(path.read_text())
    exact, *others = report["rows"]
    found = [(row["implementation"], row["dtype"]) for row in report["rows"]]
    assert found == [("autodiff", "float32"), ("autodiff", "bfloat16"), ("xla", "bfloat16")]
    assert exact["difference"] == 0.0 and report["place"] == "tiny"
    assert len(exact["losses"]) == 40 and sum(exact["losses"][-5:]) < sum(exact["losses"][:5])
    for row in others:
        assert 0 < row["difference"] < 1e-2
        expected = max(abs(a / b - 1) for a, b in zip(row["losses"], exact["losses"], strict=True))
        assert abs(row["difference"] - expected) < 1e-12


def test_the_learning_rate_begins_at_0_with_a_cosine():
    constant, cosine = (
        next(gpt_losses.trained("tiny", 2, 40, "float32", ["xla"], schedule))["losses"]
        for schedule in ("constant", "cosine")
    )
    # The first update has the rate 0.
    assert constant[0] == cosine[0] and constant[1] < cosine[1]


def test_each_step_has_its_own_rows_of_text():
    inputs, targets = gpt_losses._batches(length=32, batch=2, steps=50)
    assert inputs.shape == targets.shape == (50, 2, 32)
    np.testing.assert_array_equal(inputs[..., 1:][targets[..., :-1] == 10], 10)
    assert len(np.unique(targets.reshape(100, 32), axis=0)) > 90


@pytest.mark.parametrize("option", ["batch", "steps"])
def test_sizes_below_1_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        gpt_losses.main([f"--{option}", "0"])
    assert f"--{option} is 0; wants at least 1" in capsys.readouterr().err


def test_too_many_steps_for_the_text_are_refused():
    with pytest.raises(gpt_losses.UserError, match=r"rows of 32 bytes; wants 1,000,000"):
        gpt_losses._batches(length=32, batch=1000, steps=1000)
