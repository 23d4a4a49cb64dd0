import json

from experiments.studies import gpt_losses


def test_implementations_train_alike_and_are_compared_with_the_first(tmp_path):
    path = tmp_path / "found.json"
    args = ["--place", "tiny", "--batch", "2", "--steps", "4", "--dtype", "bfloat16", "--json", str(path)]
    assert gpt_losses.main([*args, "--implementations", "autodiff", "xla"]) == 0
    report = json.loads(path.read_text())
    autodiff, xla = report["rows"]
    assert (autodiff["implementation"], xla["implementation"], report["place"]) == ("autodiff", "xla", "tiny")
    assert len(xla["losses"]) == 4 and xla["losses"][3] < xla["losses"][0]
    assert autodiff["difference"] == 0.0 < xla["difference"] < 1e-2
    expected = max(abs(a / b - 1) for a, b in zip(xla["losses"], autodiff["losses"], strict=True))
    assert abs(xla["difference"] - expected) < 1e-12
