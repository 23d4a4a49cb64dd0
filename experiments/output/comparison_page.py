"""The HTML page with the results of `experiments.compare`."""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from jaxbp.verify import Comparison
from jaxbp.verify.comparison import color, printed, section

Report = Mapping[str, Any]

# The page's text color replaces this color.
_TEXT = "#010203"


def page(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    settings = json.dumps({"command": report["command"], **report["config"]}, indent=1)
    before = ""
    if report["curves"]:
        table = printed(curves_table(report["curves"], report["reference"]))
        before = section("Training", _figures(report, _draw_curves, _draw_distances) + table)
    notes = f"{report['precision']} precision", versions, report["date"]
    after = f"<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>"
    return Comparison.of(report).page(notes, before, after)


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
