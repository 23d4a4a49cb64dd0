import io
from collections.abc import Sequence

import numpy as np

# pyplot has global state, and depends on the display.
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from experiments.data.datasets import Dataset
from experiments.training.loop import Metrics

PARTS = ("train", "test")
COLUMNS, MOST_MISTAKES = 10, 30


def draw(
    title: str,
    metrics: Sequence[Metrics],
    dataset: Dataset,
    predictions: np.ndarray | None,
    names: tuple[str, str] = ("train", "test"),
) -> bytes:
    """Return a PNG with each epoch's loss and error rate, and test images whose `predictions` are wrong."""
    mistakes = np.zeros(0, int)
    if predictions is not None and dataset.test_images.ndim == 4:
        mistakes = np.flatnonzero(predictions != dataset.test_labels)
    rows = -(-min(len(mistakes), MOST_MISTAKES) // COLUMNS)
    heights = [4.0] + ([0.5 + 1.15 * rows] if rows else [])
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    figure.suptitle(title)
    above, *below = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    scales = [line.loss_scale for line in metrics if line.loss_scale is not None]
    loss, error, *scale = above.subplots(1, 3 if scales else 2)
    _draw_curves(loss, metrics, "loss", [[getattr(line, f"{part}_loss") for line in metrics] for part in PARTS], names)
    errors = [[1 - getattr(line, f"{part}_accuracy") for line in metrics] for part in PARTS]
    # A logarithmic axis cannot show 0, so no mistakes count as half a mistake.
    least = [0.5 / len(examples) for examples in (dataset.train_labels, dataset.test_labels)]
    _draw_curves(error, metrics, "error rate", errors, names, least)
    for axes in scale:
        _draw_curves(axes, metrics, "loss scale", [scales], [f"{sum(line.skipped_steps for line in metrics)} skipped"])
    for figure_below in below:
        _draw_mistakes(figure_below, dataset, predictions, mistakes, rows)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _draw_curves(
    axes: Axes,
    metrics: Sequence[Metrics],
    quantity: str,
    curves: Sequence[Sequence[float]],
    names: Sequence[str],
    least: Sequence[float] | None = None,
) -> None:
    epochs = [line.epoch for line in metrics]
    for values, name, lowest in zip(curves, names, least or [0.0] * len(curves), strict=True):
        marker = "." if len(epochs) < 30 else None
        last = f"{values[-1]:,.0f}" if values[-1] >= 1000 else f"{values[-1]:.4f}"
        axes.plot(epochs, np.maximum(values, lowest), marker=marker, label=f"{name} ({last})")
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(quantity)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_mistakes(figure: SubFigure, dataset: Dataset, predictions: np.ndarray, mistakes: np.ndarray, rows: int):
    figure.suptitle(f"{len(mistakes)} of {len(predictions)} test images are misclassified (true label → predicted)")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, index in zip(grid, mistakes, strict=False):
        pixels = np.moveaxis(dataset.test_images[index], 0, -1)
        axes.imshow(pixels, cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(f"{dataset.test_labels[index]} → {predictions[index]}", fontsize=9)
