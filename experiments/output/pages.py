"""HTML pages that need no network: the results of `experiments.compare`, and a cellular automaton that runs."""

import io
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Bool
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from experiments.output.files import write_atomically
from jaxbp import CellularCircuit
from jaxbp.logic.circuits.bits import pack_grid
from jaxbp.verify import Comparison
from jaxbp.verify.comparison import color, printed, section

COLORS = {
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


class _Template(string.Template):
    delimiter = "@@"


def write_page(
    path: Path,
    circuit: CellularCircuit,
    initial_state: Bool[np.ndarray, "height width channels"],
    target: Bool[np.ndarray, "height width visible"] | None = None,
    title: str = "A cellular automaton of logic gates",
    *,
    fire_rate: float = 1.0,
    visible: int | None = None,
) -> None:
    """Write an HTML page that runs the automaton. With a target, it counts the cells that equal the target.

    Args:
      fire_rate: the probability that a cell updates in a tick.
      visible: the number of leading channels to show. None: the channels of the target, or 1 without a target.
    """
    height, width, channels = initial_state.shape
    visible = visible or (1 if target is None else target.shape[-1])
    if channels != circuit.channels:
        raise ValueError(
            f"write_page: initial_state has {channels} channels; wants {circuit.channels}, as many as the circuit has"
        )
    if target is not None and target.shape != (height, width, visible):
        wanted = f"{(height, width, visible)}: the grid of initial_state, and the visible channels"
        raise ValueError(f"write_page: target has shape {target.shape}; wants {wanted}")
    if visible > channels or visible not in PALETTES:
        wanted = f"1 to 3, and at most {channels}, the number of channels"
        raise ValueError(f"write_page: visible is {visible}; wants {wanted}")
    weights = 1 << np.arange(visible)
    values = {
        "title": escape(title),
        "light": " ".join(f"--{name}: {color};" for name, color in COLORS.items()),
        "height": height,
        "width": width,
        "channels": channels,
        "gates": circuit.gates,
        "periodic": json.dumps(circuit.periodic),
        "edges": "joined" if circuit.periodic else "zeros outside",
        "fire_rate": float(fire_rate),
        "fires": f"{fire_rate:.0%}",
        "patch": max(1, min(height, width) // 4),
        "largest": max(height, width),
        "lines": "\n".join(f"  {line}" for line in _lines(circuit)),
        "initial": words_of(initial_state),
        "target": "" if target is None else "".join(f"{value:x}" for value in (target @ weights).ravel()),
        "visible": visible,
        "colors": json.dumps([f"--{name}" for name in PALETTES[visible]]),
    }
    template = Path(__file__).with_name("cellular_page.html").read_text(encoding="utf-8")
    write_atomically(Path(path), _Template(template).substitute(values).encode())


def words_of(state: Bool[np.ndarray, "height width channels"]) -> str:
    """Encode a state in hexadecimal, channel by channel and row by row, with eight digits per 32 cells of a row."""
    words = pack_grid(state[None])[:, 0].astype("<u8").view("<u4")[..., : -(-state.shape[1] // 32)]
    return "".join(f"{word:08x}" for word in words.ravel().tolist())


def _lines(circuit: CellularCircuit) -> list[str]:
    netlist, lines = circuit.netlist, []
    read = {*netlist.a.tolist(), *netlist.b.tolist(), *netlist.results.tolist()}
    for i in sorted(read & set(range(netlist.inputs))):
        place, channel = divmod(i, circuit.channels)
        at = f"i + {channel} * PLANE{(' - STRIDE', '', ' + STRIDE')[place // 3]}"
        word = (f"x[{at}] << 1 | x[{at} - 1] >>> 31", f"x[{at}]", f"x[{at}] >>> 1 | x[{at} + 1] << 31")[place % 3]
        lines.append(f"const x{i} = {word};")
    gates, results = netlist.statements("const", [f"x{i}" for i in range(netlist.inputs)], "0", "-1")
    return lines + gates + [f"y[i + {c} * PLANE] = {result};" for c, result in enumerate(results)]


Report = Mapping[str, Any]

# The page's text color replaces this color.
_TEXT = "#010203"


def page(report: Report, comparison: Comparison) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    settings = json.dumps({"command": report["command"], **report["config"]}, indent=1)
    before = ""
    if report["curves"]:
        table = printed(curves_table(report["curves"], report["reference"]))
        before = section("Training", _figures(report, _draw_curves, _draw_distances) + table)
    notes = f"{report['precision']} precision", versions, report["date"]
    after = f"<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>"
    return comparison.page(notes, before, after)


def curves_table(curves: Mapping[str, Sequence[float | None]], reference: str) -> Table:
    table, steps = Table("step", *curves, title="training loss"), len(curves[reference])
    for step in sorted({0, *(steps * i // 10 for i in range(1, 10)), steps - 1}):
        losses = (curve[step] for curve in curves.values())
        table.add_row(str(step + 1), *("not finite" if loss is None else f"{loss:.6f}" for loss in losses))
    furthest = (np.abs(_line(curve) - _line(curves[reference])).max() for curve in curves.values())
    table.add_section()
    table.add_row(f"furthest from {reference}", *(f"{distance:.1e}" for distance in furthest))
    return table


def _figures(report: Report, *draw: Callable[[Axes, Report], None]) -> str:
    return f'<div class="figures">{"".join(_svg(picture, report) for picture in draw)}</div>\n'


def _svg(draw: Callable[[Axes, Report], None], report: Report) -> str:
    text = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT)
    # The salt makes ids unique on the page, and equal in every run.
    style = {
        **text,
        "svg.fonttype": "none",
        "svg.hashsalt": draw.__name__,
        "font.size": 10,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.5, 3), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, report)
        file = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return f'<figure role="img" aria-label="{escape(axes.get_title())}">{svg}</figure>\n'


def _draw_curves(axes: Axes, report: Report) -> None:
    for name, curve in report["curves"].items():
        # Equal curves overlap, so the reference is a broad line below.
        is_reference = name == report["reference"]
        style = dict(linewidth=5, alpha=0.5) if is_reference else dict(linewidth=1.2)
        axes.plot(_steps(curve), _line(curve), color=color(name), label=name, **style)
    axes.set_title("training loss by step")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    _legend_below(axes)


def _draw_distances(axes: Axes, report: Report) -> None:
    reference = report["curves"][report["reference"]]
    for name, curve in report["curves"].items():
        distance = np.abs(_line(curve) - _line(reference))
        if (distance > 0).any():
            shown = np.where(distance > 0, distance, np.nan)
            axes.plot(_steps(curve), shown, color=color(name), label=name, linewidth=1.2, marker=".", markersize=3)
            axes.set_yscale("log")
    axes.set_xlim(0, len(reference) + 1)
    axes.set_title(f"distance of the loss from {report['reference']}'s")
    axes.grid(alpha=0.3)
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def _steps(curve: Sequence[Any]) -> range:
    return range(1, len(curve) + 1)


def _line(curve: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in curve])
