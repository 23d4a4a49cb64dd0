import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image

from experiments.output.files import write_atomically
from jaxbp import CellularCircuit

COLOURS = {
    "off": "#ffffff",
    "on": "#24292f",
    "c1": "#e5484d",
    "c2": "#30a46c",
    "c3": "#f5a524",
    "c4": "#0b7bd6",
    "c5": "#b45ad1",
    "c6": "#12a5b8",
}
PALETTES = {
    1: ("off", "on"),
    2: ("off", "c1", "c4", "c5"),
    3: ("off", "c1", "c2", "c3", "c4", "c5", "c6", "on"),
}
"""Bit i of a color's index is the value of channel i."""
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
) -> list[Path]:
    """Write pictures of three runs of an automaton, and return their paths.

    The pictures show the first `visible` channels. The runs start from `initial_state`, `large_state`, and the first
    run's last state with zeros in a square.
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
    files = {"automaton.png": strip(runs, visible)}
    files |= {name: animation(states, visible) for name, states in zip(names, runs.values(), strict=True)}
    for name, data in files.items():
        write_atomically(folder / name, data)
    return [folder / name for name in files]


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


def strip(runs: Mapping[str, Bool[np.ndarray, "ticks height width channels"]], visible: int = 1) -> bytes:
    """Return a PNG with one row of images per run, which show the automaton at evenly spaced ticks."""
    colours = ListedColormap([COLOURS[name] for name in PALETTES[visible]])
    figure = Figure(figsize=(1.4 * FRAMES, 1.75 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), FRAMES, squeeze=False)
    for row, (name, states) in zip(grid, runs.items(), strict=True):
        ticks = np.unique(np.linspace(0, len(states) - 1, FRAMES).round().astype(int))
        for axes, tick in zip(row, ticks, strict=False):
            axes.imshow(picture(states[tick], visible), colours, vmin=0, vmax=colours.N - 1, interpolation="nearest")
            axes.set_title(f"tick {tick}", fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_color("#d8dee4")
        for axes in row[len(ticks) :]:
            axes.set_axis_off()
        row[0].set_ylabel(name, fontsize=9)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def animation(states: Bool[np.ndarray, "ticks height width channels"], visible: int = 1) -> bytes:
    scale = max(1, GIF_PIXELS // max(states.shape[1:3]))
    palette = [int(COLOURS[name][i : i + 2], 16) for name in PALETTES[visible] for i in (1, 3, 5)]
    first, *others = [_frame(frame, scale, palette) for frame in picture(states, visible)]
    durations: Sequence[int] = [GIF_MILLISECONDS] * len(others) + [GIF_LAST_MILLISECONDS]
    gif = io.BytesIO()
    first.save(gif, format="gif", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()


def _frame(picture: np.ndarray, scale: int, palette: list[int]) -> Image.Image:
    frame = Image.fromarray(picture.repeat(scale, axis=0).repeat(scale, axis=1).astype(np.uint8))
    frame.putpalette(palette)
    return frame
