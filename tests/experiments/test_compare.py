import dataclasses
import html
import json
import re
import xml.etree.ElementTree as ElementTree

import jax.numpy as jnp
import pytest
from flax import nnx

import jaxbp
from experiments import compare
from experiments.output import comparison_page
from jaxbp.nn import Linear

pytestmark = pytest.mark.once

WRONG = jaxbp.Pair(jnp.tanh, {"xla": lambda dy, x: dy * (1.1 - jnp.tanh(x) ** 2)}, name="wrong")


class Classifier(nnx.Module):
    def __init__(self, pair, implementation, rngs):
        self.linear = Linear(784, 10, implementation=implementation, rngs=rngs)
        self.pair, self.implementation = pair, implementation

    def __call__(self, images):
        logits = self.linear(images.reshape(len(images), -1))
        return self.pair(logits, implementation=self.implementation) if self.pair else logits


def loss(model, images, labels):
    logits = model(images)
    losses = jaxbp.softmax_cross_entropy(logits, labels, implementation=model.implementation)
    return losses, jnp.argmax(logits, axis=-1)


@pytest.fixture(scope="module")
def run(toy_config):
    """Runs the command line on a small experiment, with a right or a wrong backward."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(toy_config):
        implementation: str | None = None
        pair = None

        def build(self, key):
            return Classifier(self.pair, self.implementation, nnx.Rngs(key)), loss

    def run(*args, experiment="toy", pair=None):
        Config.pair = pair
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "EXPERIMENTS", {"toy": Config, "fixed": toy_config})
            return compare.main([experiment, "--seconds", "0.001", "--epochs", "1", *args])

    return run


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """A run's exit code, numbers and page."""
    path = tmp_path_factory.mktemp("compare") / "toy"
    json_path, html_path = path.with_suffix(".json"), path.with_suffix(".html")
    code = run(
        "--steps",
        "8",
        "--no-second-order",
        "--precision",
        "highest",
        "--json",
        str(json_path),
        "--html",
        str(html_path),
        pair=WRONG,
    )
    return code, json.loads(json_path.read_text()), html_path.read_text()


def test_numbers_say_how_gradients_and_training_differ(finished):
    code, report, _ = finished
    assert code == 0
    assert [one["implementation"] for one in report["measured"]] == ["autodiff", "xla"]
    relative = {one["name"]: one["relative"] for one in report["measured"][1]["differences"]}
    assert set(relative) == {"value", "params.linear.bias", "params.linear.weight"}
    assert relative["value"] < 1e-6 < 0.05 < relative["params.linear.weight"] < 0.5
    autodiff, xla = report["curves"]["autodiff"], report["curves"]["xla"]
    assert len(autodiff) == len(xla) == 8  # more than the 6 steps of an epoch
    assert xla[0] == pytest.approx(autodiff[0], rel=1e-6) and xla[-1] != pytest.approx(autodiff[-1], rel=1e-4)
    assert report["precision"] == "highest"
    assert report["config"]["experiment"] == "toy" and report["command"].startswith("python -m experiments.compare toy")


def test_right_implementations_train_alike(run, capsys, tmp_path):
    assert run("--steps", "3", "--json", str(tmp_path / "toy.json")) == 0
    report = json.loads((tmp_path / "toy.json").read_text())
    assert report["curves"]["xla"] == pytest.approx(report["curves"]["autodiff"], rel=1e-5)
    assert all(one["relative"] < 1e-5 for one in report["measured"][1]["differences"])
    printed = capsys.readouterr().out
    assert "Hessian product" in printed and "training loss" in printed


def test_the_page_is_well_formed_and_has_all_numbers(finished):
    _, report, text = finished
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{svg}svg")) == 6
    cells = {cell.text for cell in root.iter("td")}
    for one in report["measured"]:
        assert f"{one['gradients']['microseconds']:,.1f}" in cells
    for difference in report["measured"][1]["differences"]:
        assert f"{difference['relative']:.1e}" in cells
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    for reference in re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text):
        assert ids.count(reference) == 1


def test_the_page_asks_for_nothing_from_elsewhere(finished):
    root = ElementTree.fromstring(finished[2].removeprefix("<!DOCTYPE html>"))
    assert not {element.tag for element in root.iter()} & {"script", "link", "img", "iframe", "object", "base"}
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.rpartition("}")[2] in ("href", "src", "srcset", "action", "data"):
                assert value.startswith("#")
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)\)", finished[2]))
    assert "@import" not in finished[2]


def test_the_page_is_for_day_and_night_and_for_phones(finished):
    text = finished[2]
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "currentColor" in text and comparison_page._TEXT not in text


def test_a_failing_implementation_is_on_the_page_and_exits_with_1(run, tmp_path, capsys):
    path = tmp_path / "toy.html"
    args = ("--steps", "1", "--no-second-order", "--implementations", "pallas", "--html", str(path))
    assert run(*args, pair=WRONG) == 1
    assert "has no implementation 'pallas'" in html.unescape(path.read_text())
    assert "failed: pallas: NotImplementedError: wrong: has no implementation 'pallas'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--steps", "-1"], "steps is -1: wanted 0 or more"), (["--html", "no/page.html"], "there is no folder")],
)
def test_settings_that_no_comparison_can_have_are_refused(run, args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*args)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("args", "experiment", "message"),
    [
        (["--batch-size", "1000"], "toy", "batch_size = 1000: wanted at most 100"),
        ([], "fixed", "toy has no setting `implementation`"),
    ],
)
def test_what_the_user_can_mend_is_one_line(run, args, experiment, message, capsys):
    assert run(*args, experiment=experiment) == 2
    assert message in capsys.readouterr().err
