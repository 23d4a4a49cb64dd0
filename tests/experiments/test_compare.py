import html
import json

import jax.numpy as jnp
import pytest

import jaxbp
from experiments import compare


def test_numbers_say_how_gradients_and_training_differ(comparison):
    code, report, _ = comparison
    assert code == 0
    assert [one["implementation"] for one in report["measured"]] == ["autodiff", "xla"]
    relative = {one["name"]: one["relative"] for one in report["measured"][1]["differences"]}
    assert set(relative) == {"value", "params.linear.bias", "params.linear.kernel"}
    assert relative["value"] < 1e-6 < 0.05 < relative["params.linear.kernel"] < 0.5
    autodiff, xla = report["curves"]["autodiff"], report["curves"]["xla"]
    assert len(autodiff) == len(xla) == 8
    assert xla[0] == pytest.approx(autodiff[0], rel=1e-6) and xla[-1] != pytest.approx(autodiff[-1], rel=1e-4)
    assert report["precision"] == "highest"
    assert report["config"]["experiment"] == "toy" and report["command"].startswith("python -m experiments.compare toy")


def test_right_implementations_train_alike(compare_toy, capsys, tmp_path):
    assert compare_toy("--steps", "3", "--json", str(tmp_path / "toy.json")) == 0
    report = json.loads((tmp_path / "toy.json").read_text())
    assert report["complete"]
    assert report["curves"]["xla"] == pytest.approx(report["curves"]["autodiff"], rel=1e-5)
    assert all(one["relative"] < 1e-5 for one in report["measured"][1]["differences"])
    printed = capsys.readouterr().out
    assert "Hessian" in printed and "training loss" in printed


def test_the_implementations_of_a_language_model_are_compared(tmp_path):
    path, text = tmp_path / "gpt.json", tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 400)
    sizes = ["--layers", "1", "--features", "8", "--heads", "2", "--context", "16", "--batch-size", "2"]
    options = ["--steps", "3", "--no-second-order", "--seconds", "1e-4", "--devices", "1", "--json", str(path)]
    assert compare.main(["gpt", "--text", str(text), *sizes, *options]) == 0
    report = json.loads(path.read_text())
    assert report["curves"]["xla"] == pytest.approx(report["curves"]["autodiff"], rel=1e-5)
    differences = {one["name"]: one["relative"] for one in report["measured"][1]["differences"]}
    assert max(differences.values()) < 1e-5 and "params.blocks.0.query_key_value.bias" in differences


def test_ctrl_c_keeps_what_is_compared(compare_toy, tmp_path, press_ctrl_c, capsys, monkeypatch):
    path, original = tmp_path / "toy.json", compare.train

    def interrupted(config, steps, dataset):
        return original(config, steps, dataset) if config.implementation == "autodiff" else press_ctrl_c()

    monkeypatch.setattr(compare, "train", interrupted)
    assert compare_toy("--steps", "2", "--no-second-order", "--json", str(path)) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped; {path} has the results so far"
    report = json.loads(path.read_text())
    assert not report["complete"] and len(report["measured"]) == 2 and list(report["curves"]) == ["autodiff"]


def test_an_implementation_that_there_is_not_is_on_the_page_and_has_not_failed(
    compare_toy, wrong_pair, tmp_path, capsys
):
    path = tmp_path / "toy.html"
    args = ("--steps", "1", "--no-second-order", "--implementations", "pallas", "--html", str(path))
    assert compare_toy(*args, pair=wrong_pair) == 0
    assert "has no kernel" in html.unescape(path.read_text())
    assert "failed" not in capsys.readouterr().out


def test_a_failing_implementation_exits_with_1(compare_toy, capsys):
    def fails(dy, *arrays):
        raise ValueError("no gradient today")

    pair = jaxbp.Pair(jnp.tanh, {"xla": fails}, name="wrong")
    assert compare_toy("--steps", "0", "--no-second-order", pair=pair) == 1
    assert "failed: xla: ValueError: no gradient today" in capsys.readouterr().out


def test_settings_that_no_comparison_can_have_are_refused(compare_toy, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare_toy("--steps", "-1")
    assert "--steps is -1; wants at least 0" in " ".join(capsys.readouterr().err.split())
    assert compare_toy("--html", "no/page.html") == 2
    assert "there is no folder no; wants an existing folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "experiment", "message"),
    [
        (["--batch-size", "1000"], "toy", "batch_size is 1000; wants at most 100"),
        ([], "fixed", "toy has no setting `implementation`"),
    ],
)
def test_what_the_user_can_mend_is_one_line(compare_toy, args, experiment, message, capsys):
    assert compare_toy(*args, experiment=experiment) == 2
    assert message in capsys.readouterr().err
