"""The page of a comparison: one HTML file that contains its pictures, in a light and a dark scheme.

It is made from the report's JSON file alone:

    python -m experiments.output.comparison_page lenet.json     # writes lenet.html
"""

import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

# Figure and canvas by hand: pyplot keeps figures in global state and picks a backend by the machine's display.
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from experiments.output.files import write_atomically

Report = Mapping[str, Any]

# Readable on white and on black alike.
COLOURS = {"autodiff": "#8a8f98", "xla": "#3b82f6", "pallas": "#f0883e"}
# Replaced in the finished picture by the page's text colour.
_TEXT = "#010203"

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9ea7b3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; background: Canvas;
  color: CanvasText; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
p, pre, summary { color: var(--soft); } p { margin: 0.25rem 0; }
figure { margin: 0.5rem 0; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figures figure { flex: 1 1 20rem; min-width: 0; max-width: 29rem; } svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } pre { overflow-x: auto; font-size: 0.8rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left;
  white-space: normal; overflow-wrap: anywhere; min-width: 8rem; } .failed { color: #d1242f; }
"""


def page(report: Report) -> str:
    """The page."""
    config = report["config"]
    names = ", ".join(measured["implementation"] for measured in report["measured"])
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    settings = json.dumps({"command": report["command"], **config}, indent=1)
    sections = [
        _section("Cost", _figures(report, _draw_times, _draw_memory, _draw_compilation) + _costs(report)),
        _section("Difference", _figures(report, _draw_differences) + _differences(report)),
    ]
    if report["curves"]:
        sections.insert(0, _section("Training", _figures(report, _draw_curves, _draw_distances) + _curves(report)))
    title = f"{report['function']}: {names}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(report["device"])}; {escape(report["precision"])} precision; {escape(versions)}; {escape(report["date"])}</p>
{"".join(sections)}
<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>
</body>
</html>
"""


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"


# --------------------------------------------------------------------------------------------------------------- tables


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"  # noqa: E731
    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>\n'


def _costs(report: Report) -> str:
    rows = []
    for measured in report["measured"]:
        for what in ("gradients", "hessian_product"):
            if (program := measured[what]) is not None:
                rows.append(
                    (
                        measured["implementation"],
                        what.replace("_", " "),
                        f"{program['microseconds']:,.1f}",
                        f"{program['peak_bytes'] / 2**20:,.2f}",
                        f"{program['temporary_bytes'] / 2**20:,.2f}",
                        f"{program['compile_seconds']:.2f}",
                        f"{program['host_waited']:.0%}",
                    )
                )
    failed = "".join(
        f'<p class="failed">{escape(measured["implementation"])}: {escape(measured["failed"])}</p>\n'
        for measured in report["measured"]
        if measured["failed"]
    )
    head = ("implementation", "program", "µs", "memory, MiB", "of it temporary", "compile, s", "host waited")
    note = "<p>Where the host hardly waited for the device, the time is the host's.</p>\n"
    return _table(head, rows) + note + failed


def _differences(report: Report) -> str:
    reference, *candidates = report["measured"]
    head = (
        "of",
        "shape",
        *(f"{measured['implementation']}: {what}" for measured in candidates for what in ("max abs", "relative")),
    )
    found = {
        (measured["implementation"], difference["kind"], difference["name"]): difference
        for measured in candidates
        for difference in measured["differences"]
    }
    rows = []
    for difference in reference["differences"]:
        name = difference["name"] if difference["kind"] == "value" else f"{difference['kind']}: {difference['name']}"
        cells = [name, "×".join(map(str, difference["shape"]))]
        for measured in candidates:
            entry = found.get((measured["implementation"], difference["kind"], difference["name"]), {})
            cells += [_number(entry[field]) if entry else "" for field in ("absolute", "relative")]
        rows.append(cells)
    note = f"<p>Held against {escape(report['reference'])}; relative: the norm of the difference over the norm.</p>\n"
    return note + _table(head, rows)


def _curves(report: Report) -> str:
    curves, steps = report["curves"], len(report["curves"][report["reference"]])
    shown = sorted({0, *(steps * i // 10 for i in range(1, 10)), steps - 1})
    rows = [(str(step + 1), *(_number(curve[step], "{:.6f}") for curve in curves.values())) for step in shown]
    return _table(("step", *curves), rows)


def _number(value: float | None, pattern: str = "{:.1e}") -> str:
    return "not finite" if value is None else pattern.format(value)


# ------------------------------------------------------------------------------------------------------------- pictures


def _figures(report: Report, *draw: Callable[[Axes, Report], None]) -> str:
    return f'<div class="figures">{"".join(_svg(picture, report) for picture in draw)}</div>\n'


def _svg(draw: Callable[[Axes, Report], None], report: Report) -> str:
    """A picture as an element of the page, in its text's colour and font."""
    text = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT)
    # The salt keeps the ids of the pictures on a page apart, and the same from run to run.
    style = {
        **text,
        "svg.fonttype": "none",
        "svg.hashsalt": draw.__name__,
        "font.size": 10,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.5, 3), layout="constrained")
        FigureCanvasSVG(figure)
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


def _colour(implementation: str) -> str:
    return COLOURS.get(implementation, "#a371f7")


def _draw_bars(axes: Axes, report: Report, title: str, unit: float, field: str) -> None:
    names = [measured["implementation"] for measured in report["measured"]]
    axes.set_title(title)
    for offset, what, alpha in ((-0.2, "gradients", 1.0), (0.2, "hessian_product", 0.5)):
        bars = [
            (i, measured[what][field] / unit)
            for i, measured in enumerate(report["measured"])
            if measured[what] is not None
        ]
        for i, value in bars:
            axes.bar(i + offset, value, width=0.38, color=_colour(names[i]), alpha=alpha)
            axes.annotate(
                f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
                (i + offset, value),
                ha="center",
                va="bottom",
                fontsize=8,
            )
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("left: gradients, right: Hessian product")


def _draw_times(axes: Axes, report: Report) -> None:
    _draw_bars(axes, report, "µs a call", 1, "microseconds")


def _draw_memory(axes: Axes, report: Report) -> None:
    _draw_bars(axes, report, "memory, MiB", 2**20, "peak_bytes")


def _draw_compilation(axes: Axes, report: Report) -> None:
    _draw_bars(axes, report, "compilation, s", 1, "compile_seconds")


def _draw_differences(axes: Axes, report: Report) -> None:
    reference, *candidates = report["measured"]
    names = [difference["name"] for difference in reference["differences"] if difference["kind"] == "gradient"]
    for measured in candidates:
        for kind, filled in (("gradient", True), ("hessian product", False)):
            relative = {
                difference["name"]: difference["relative"]
                for difference in measured["differences"]
                if difference["kind"] == kind
            }
            points = [(relative[name], i) for i, name in enumerate(names) if relative.get(name)]
            if points:  # a logarithmic axis has no zero
                colour = _colour(measured["implementation"])
                label = f"{measured['implementation']}: {kind}"
                style = dict(facecolors=colour if filled else "none", edgecolors=colour, label=label)
                axes.scatter(*zip(*points, strict=True), s=18, **style)
                axes.set_xscale("log")
    axes.set_title(f"relative difference from {report['reference']}")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    _legend_below(axes)


def _draw_curves(axes: Axes, report: Report) -> None:
    for name, curve in report["curves"].items():
        # Curves that agree overlap: the reference is a broad line under the thin ones.
        is_reference = name == report["reference"]
        style = dict(linewidth=5, alpha=0.5) if is_reference else dict(linewidth=1.2)
        axes.plot(_steps(curve), _line(curve), color=_colour(name), label=name, **style)
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
            axes.plot(_steps(curve), shown, color=_colour(name), label=name, linewidth=1.2, marker=".", markersize=3)
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


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        write_atomically(path.with_suffix(".html"), page(json.loads(path.read_text())).encode())
