"""Pictures of runs: learning curves, the gates of a circuit, and the states of a cellular automaton."""

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

# pyplot has global state, and depends on the display.
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from experiments.data.datasets import Dataset
from experiments.output.files import written
from experiments.output.pages import COLORS, PALETTES
from experiments.training.compiled import AnyCircuit
from jaxbp import CellularCircuit
from jaxbp.training.loop import Metrics

GATES = ["False", "a∧b", "a∧¬b", "a", "¬a∧b", "b", "a⊕b", "a∨b"]
GATES += ["¬(a∨b)", "¬(a⊕b)", "¬b", "a∨¬b", "¬a", "¬a∨b", "¬(a∧b)", "True"]
PARTS = ("train", "test")
COLUMNS, MOST_MISTAKES = 10, 30


def png(figure: Figure, dpi: int) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()


def curves(
    title: str,
    metrics: Sequence[Metrics],
    dataset: Dataset,
    predictions: np.ndarray | None,
    names: tuple[str, str] = ("train", "test"),
    loss_name: str = "loss",
) -> bytes:
    """Return a PNG with each epoch's loss and error rate, if any, and test images whose `predictions` are wrong."""
    mistakes = np.zeros(0, int)
    if predictions is not None and dataset.test_images.ndim == 4:
        mistakes = np.flatnonzero(predictions != dataset.test_labels)
    rows = -(-min(len(mistakes), MOST_MISTAKES) // COLUMNS)
    heights = [4.0] + ([0.5 + 1.15 * rows] if rows else [])
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    figure.suptitle(title)
    above, *below = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    scales = [line.loss_scale for line in metrics if line.loss_scale is not None]
    has_accuracy = metrics[-1].test_accuracy is not None
    loss, *others = above.subplots(1, 1 + has_accuracy + bool(scales), squeeze=False)[0]
    _draw_curves(
        loss, metrics, loss_name, [[getattr(line, f"{part}_loss") for line in metrics] for part in PARTS], names
    )
    if has_accuracy:
        error, *others = others
        errors = [[1 - getattr(line, f"{part}_accuracy") for line in metrics] for part in PARTS]
        # A logarithmic axis cannot show 0, so no mistakes count as half a mistake.
        least = [0.5 / len(examples) for examples in (dataset.train_labels, dataset.test_labels)]
        _draw_curves(error, metrics, "error rate", errors, names, least)
    for axes in others:
        _draw_curves(axes, metrics, "loss scale", [scales], [f"{sum(line.skipped_steps for line in metrics)} skipped"])
    for figure_below in below:
        _draw_mistakes(figure_below, dataset, predictions, mistakes, rows)
    return png(figure, 120)


def _draw_curves(
    axes: Axes,
    metrics: Sequence[Metrics],
    quantity: str,
    lines: Sequence[Sequence[float]],
    names: Sequence[str],
    least: Sequence[float] | None = None,
) -> None:
    epochs = [line.epoch for line in metrics]
    for values, name, lowest in zip(lines, names, least or [0.0] * len(lines), strict=True):
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


def gates(circuit: AnyCircuit, title: str) -> bytes:
    counts = circuit.histogram()
    figure = Figure(figsize=(10, 1.5 + 1.4 * len(counts)), layout="constrained")
    figure.suptitle(f"{title}: the gates of each layer")
    rows = figure.subplots(len(counts), sharex=True, squeeze=False)[:, 0]
    for i, (axes, layer) in enumerate(zip(rows, counts, strict=True), start=1):
        axes.bar(np.arange(len(layer)), layer)
        axes.set_ylabel(f"layer {i}")
        axes.grid(axis="y", alpha=0.3)
    rows[-1].set_xticks(np.arange(len(GATES)), GATES, rotation=45)
    return png(figure, 100)


FRAMES = 8
GIF_PIXELS = 384
"""The largest side of a GIF, unless the grid has more cells."""
GIF_MILLISECONDS, GIF_LAST_MILLISECONDS = 100, 1500


def write_pictures(
    folder: Path,
    circuit: CellularCircuit,
    initial_state: Bool[np.ndarray, "height width channels"],
    large_state: Bool[np.ndarray, "large_height large_width channels"],
    ticks: int,
    *,
    visible: int = 1,
    fire_rate: float = 1.0,
    seed: int = 0,
    trained_ticks: int | None = None,
    target: Bool[np.ndarray, "height width visible"] | None = None,
) -> list[Path]:
    """Write pictures of three runs of an automaton, and return their paths.

    The first run starts from `initial_state`, and the second from `large_state`. The third starts from the last state
    of the first run, with zeros in a square. automaton.png shows all three runs. Each run also has an animation.

    Args:
      ticks: the number of time steps per run.
      visible: the number of channels to show, beginning with the first.
      fire_rate: the probability that a cell updates at a tick.
      seed: determines which cells update.
      trained_ticks: the number of ticks in training. automaton.png also shows the state after them.
      target: an image that automaton.png shows after the first run.
    """

    def run(state, number):
        return circuit.states(state[None], ticks, fire_rate=fire_rate, seed=seed + number)[:, 0]

    grown = run(initial_state, 0)
    runs = {
        "as trained": grown,
        "a larger grid": run(large_state, 1),
        "a square destroyed": run(with_square_destroyed(grown[-1]), 2),
    }
    names = ("automaton.gif", "automaton_large.gif", "automaton_healing.gif")
    written(folder / "automaton.png", lambda: strip(runs, visible, trained_ticks, target))
    for name, states in zip(names, runs.values(), strict=True):
        written(folder / name, functools.partial(animation, states, visible))
    return [folder / name for name in ("automaton.png", *names)]


def with_square_destroyed(state: Bool[np.ndarray, "height width channels"], side: int | None = None) -> np.ndarray:
    height, width, _ = state.shape
    side = side or max(1, min(height, width) // 2)
    top, left = (height - side) // 2, (width - side) // 2
    state = state.copy()
    state[top : top + side, left : left + side] = False
    return state


def picture(states: Bool[np.ndarray, "*ticks height width channels"], visible: int) -> Int[np.ndarray, "..."]:
    if visible not in PALETTES or states.shape[-1] < visible:
        raise ValueError(
            f"picture: visible is {visible}; wants 1 to 3, and at most {states.shape[-1]}, the number of channels"
        )
    return states[..., :visible] @ (1 << np.arange(visible))


def strip(
    runs: Mapping[str, Bool[np.ndarray, "ticks height width channels"]],
    visible: int = 1,
    trained_ticks: int | None = None,
    target: Bool[np.ndarray, "height width visible"] | None = None,
) -> bytes:
    """Return a PNG with one row of images per run, which show the automaton at evenly spaced ticks.

    The state after `trained_ticks` is among them. The first row ends with the target.
    """
    colors = ListedColormap([COLORS[name] for name in PALETTES[visible]])
    columns = FRAMES + (target is not None)
    figure = Figure(figsize=(1.4 * columns, 1.75 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), columns, squeeze=False)
    for axes in grid.ravel():
        axes.set_axis_off()

    def show(axes: Axes, state: np.ndarray, title: str) -> None:
        axes.set_axis_on()
        axes.imshow(picture(state, visible), colors, vmin=0, vmax=colors.N - 1, interpolation="nearest")
        axes.set_title(title, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color("#d8dee4")

    for row, (name, states) in zip(grid, runs.items(), strict=True):
        for axes, tick in zip(row, _shown_ticks(len(states) - 1, trained_ticks), strict=False):
            show(axes, states[tick], f"tick {tick}, trained for" if tick == trained_ticks else f"tick {tick}")
        row[0].set_ylabel(name, fontsize=9)
    if target is not None:
        show(grid[0, -1], target, "target")
    return png(figure, 150)


def _shown_ticks(last: int, trained_ticks: int | None) -> list[int]:
    if trained_ticks is None or not 0 < trained_ticks < last:
        return np.unique(np.linspace(0, last, FRAMES).round().astype(int)).tolist()
    evenly = np.linspace(0, last, FRAMES - 1).round().astype(int)
    return np.unique([*evenly, trained_ticks]).tolist()


def animation(states: Bool[np.ndarray, "ticks height width channels"], visible: int = 1) -> bytes:
    scale = max(1, GIF_PIXELS // max(states.shape[1:3]))
    palette = [int(COLORS[name][i : i + 2], 16) for name in PALETTES[visible] for i in (1, 3, 5)]
    first, *others = [_frame(frame, scale, palette) for frame in picture(states, visible)]
    durations: Sequence[int] = [GIF_MILLISECONDS] * len(others) + [GIF_LAST_MILLISECONDS]
    gif = io.BytesIO()
    first.save(gif, format="gif", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()


def _frame(picture: np.ndarray, scale: int, palette: list[int]) -> Image.Image:
    frame = Image.fromarray(picture.repeat(scale, axis=0).repeat(scale, axis=1).astype(np.uint8))
    frame.putpalette(palette)
    return frame
