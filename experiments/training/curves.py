"""The picture of a run: loss and accuracy by epoch, and below them misclassified test images, if they are images."""

import io
from collections.abc import Sequence

import numpy as np

# Figure and canvas by hand: pyplot keeps figures in global state and picks a backend by the machine's display.
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure

from experiments.data.datasets import Dataset
from experiments.training.loop import Metrics

ROWS, COLUMNS = 3, 10


def draw(
    title: str,
    metrics: Sequence[Metrics],
    dataset: Dataset,
    predictions: np.ndarray,
    names: tuple[str, str] = ("train", "test"),
) -> bytes:
    """A PNG of loss and accuracy by epoch; below them the first test images that `predictions (N,)` get wrong.

    Args:
      names: of the curves of training and of the evaluation.
    """
    is_images = dataset.test_images.ndim == 4
    figure = Figure(figsize=(10, 8 if is_images else 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    above, *below = figure.subfigures(1 + is_images, 1, squeeze=False)[:, 0]
    loss, accuracy = above.subplots(1, 2)
    _draw_curves(loss, metrics, "loss", names)
    loss.set_yscale("log")
    _draw_curves(accuracy, metrics, "accuracy", names)
    for figure_below in below:
        _draw_mistakes(figure_below, dataset, predictions)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _draw_curves(axes: Axes, metrics: Sequence[Metrics], quantity: str, names: tuple[str, str]) -> None:
    epochs = [line.epoch for line in metrics]
    for part, name in zip(("train", "test"), names, strict=True):
        values = [getattr(line, f"{part}_{quantity}") for line in metrics]
        axes.plot(epochs, values, marker="." if len(epochs) < 30 else None, label=f"{name} ({values[-1]:.4f})")
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(quantity)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_mistakes(figure: SubFigure, dataset: Dataset, predictions: np.ndarray) -> None:
    mistakes = np.flatnonzero(predictions != dataset.test_labels)
    figure.suptitle(f"{len(mistakes)} of {len(predictions)} test images are misclassified (true label → predicted)")
    grid = figure.subplots(ROWS, COLUMNS).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, index in zip(grid, mistakes, strict=False):
        axes.imshow(dataset.test_images[index, 0], cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(f"{dataset.test_labels[index]} → {predictions[index]}", fontsize=9)
