import io

import numpy as np
import pytest
from matplotlib import figure, image

from experiments.training import curves
from experiments.training.loop import Metrics


@pytest.fixture
def drawn(monkeypatch):
    figures, save = [], figure.Figure.savefig

    def remember(self, *args, **options):
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", remember)
    return figures


def metrics_of(*test_accuracies, **scaling):
    fields = dict.fromkeys(Metrics._fields, 1.0) | {"loss_scale": None, "skipped_steps": 0} | scaling
    lines = enumerate(test_accuracies, start=1)
    return [Metrics(**(fields | {"epoch": epoch, "test_accuracy": accuracy})) for epoch, accuracy in lines]


def with_mistakes(dataset, wrong):
    predictions = np.array(dataset.test_labels)
    predictions[wrong] = (predictions[wrong] + 1) % 10
    return predictions


def test_a_picture_has_the_last_numbers_and_the_mistakes(toy_config, drawn):
    dataset = toy_config().load()
    predictions = with_mistakes(dataset, [3, 5])
    png = curves.draw("a run", metrics_of(0.5, 0.9), dataset, predictions, ("relaxed train", "hardened test"))
    assert image.imread(io.BytesIO(png)).ndim == 3
    above, below = drawn[0].subfigs
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in above.axes]
    assert legends == [
        ["relaxed train (1.0000)", "hardened test (1.0000)"],
        ["relaxed train (0.0000)", "hardened test (0.1000)"],
    ]
    assert below._suptitle.get_text().startswith("2 of 37 test images are misclassified")
    titles = [axes.get_title() for axes in below.axes if axes.get_title()]
    assert titles == [f"{dataset.test_labels[i]} → {predictions[i]}" for i in (3, 5)]


def test_the_error_rate_is_on_a_logarithmic_axis_also_where_it_is_0(toy_config, drawn):
    dataset = toy_config().load()
    curves.draw("a run", metrics_of(0.9, 1.0), dataset, None)
    error = drawn[0].subfigs[0].axes[1]
    assert (error.get_title(), error.get_yscale()) == ("error rate", "log")
    train, test = (line.get_ydata() for line in error.lines)
    np.testing.assert_allclose(train, 0.5 / 100)
    np.testing.assert_allclose(test, [0.1, 0.5 / 37])


def test_a_run_with_a_loss_scale_shows_it_and_the_steps_that_it_skipped(toy_config, drawn):
    curves.draw("a run", metrics_of(0.9, 1.0, loss_scale=2.0**15, skipped_steps=3), toy_config().load(), None)
    axes = drawn[0].subfigs[0].axes[2]
    assert axes.get_title() == "loss scale"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["6 skipped (32,768)"]
    assert axes.lines[0].get_ydata().tolist() == [2.0**15] * 2


@pytest.mark.parametrize(("mistakes", "rows"), [(0, 0), (1, 1), (10, 1), (11, 2), (37, 3)])
def test_a_picture_is_as_high_as_what_it_shows(toy_config, drawn, mistakes, rows):
    dataset = toy_config().load()
    png = curves.draw("a run", metrics_of(0.9), dataset, with_mistakes(dataset, np.arange(mistakes)))
    assert len(drawn[0].subfigs) == 1 + bool(rows)
    pixels = image.imread(io.BytesIO(png))[..., :3]
    blank = np.flatnonzero(np.all(pixels == 1, axis=(1, 2)))
    longest = max(np.diff(np.flatnonzero(np.diff(blank, prepend=-2, append=2 * len(pixels)) != 1)), default=0)
    assert longest < 0.15 * len(pixels)
