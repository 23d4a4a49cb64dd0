import io

import numpy as np
from matplotlib import figure, image

from experiments.training import curves
from experiments.training.loop import Metrics


def test_a_picture_has_the_last_numbers_and_the_mistakes(toy_config, monkeypatch):
    drawn, save = [], figure.Figure.savefig

    def remember(self, *args, **options):
        drawn.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", remember)
    fields = dict.fromkeys(Metrics._fields, 1.0)
    metrics = [Metrics(**(fields | {"epoch": epoch, "test_accuracy": 0.5 * epoch})) for epoch in (1, 2)]
    dataset = toy_config().load()
    predictions = np.array(dataset.test_labels)
    predictions[[3, 5]] = (predictions[[3, 5]] + 1) % 10
    png = curves.draw("a run", metrics, dataset, predictions)
    assert image.imread(io.BytesIO(png)).ndim == 3
    (picture,) = drawn
    above, below = picture.subfigs
    assert [text.get_text() for text in above.axes[1].get_legend().get_texts()] == ["train (1.0000)", "test (1.0000)"]
    assert below._suptitle.get_text().startswith("2 of 37 test images are misclassified")
    titles = [axes.get_title() for axes in below.axes if axes.get_title()]
    assert titles == [f"{dataset.test_labels[i]} → {predictions[i]}" for i in (3, 5)]
