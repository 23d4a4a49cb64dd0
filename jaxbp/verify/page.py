"""The page of a comparison: one HTML file of its own, in a light and a dark scheme, with bars and tables.

A report is a `Comparison` as plain values: what `dataclasses.asdict` makes of it, and what its JSON file holds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Report = Mapping[str, Any]

# Readable on white and on black alike.
COLOURS = {"autodiff": "#8a8f98", "xla": "#3b82f6", "pallas": "#f0883e"}
LEAST = 1e-9
"""Where the bars of differences begin, which are logarithmic."""

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9ea7b3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; background: Canvas;
  color: CanvasText; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 0.95rem; margin: 1rem 0 0.25rem; }
p, pre, summary { color: var(--soft); } p { margin: 0.25rem 0; }
.verdict { color: CanvasText; font-size: 1.1rem; border-left: 4px solid #3b82f6; padding-left: 0.75rem; }
figure { margin: 0.5rem 0; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figures figure { flex: 1 1 20rem; min-width: 0; max-width: 29rem; } svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } pre { overflow-x: auto; font-size: 0.8rem; }
.bars { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content; gap: 0.2rem 0.75rem;
  align-items: center; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
.bars .label { overflow-wrap: anywhere; } .bar { height: 0.9rem; min-width: 1px; border-radius: 2px; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left;
  white-space: normal; overflow-wrap: anywhere; min-width: 8rem; } .failed { color: #d1242f; }
"""


def page(report: Report, verdict: Sequence[str], notes: Sequence[str] = (), before: str = "", after: str = "") -> str:
    """The page: the verdict, what `before` has, cost and difference, and what `after` has."""
    names = ", ".join(str(measured["implementation"]) for measured in report["measured"])
    title = f"{report['function']}: {names}"
    lines = "".join(f'<p class="verdict">{escape(line)}</p>\n' for line in verdict)
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
{lines}<p>{escape("; ".join((report["device"], *notes)))}</p>
{before}{section("Cost", _costs(report))}{section("Difference", _differences(report))}{after}
</body>
</html>
"""


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"  # noqa: E731
    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>\n'


def number(value: float | None, pattern: str = "{:.1e}") -> str:
    return "not finite" if value is None or not math.isfinite(value) else pattern.format(value)


def colour(implementation: str | None) -> str:
    return COLOURS.get(implementation, "#a371f7")


def _bars(title: str, bars: Sequence[tuple[str, float, str, str]]) -> str:
    """Bars of (label, length as a share, number, colour), a line each with its own columns: nothing overlaps."""
    lines = "".join(
        f'<span class="label">{escape(label)}</span><span class="bar" style="width: {100 * share:.1f}%; '
        f'background: {shade}"></span><span>{escape(shown)}</span>\n'
        for label, share, shown, shade in bars
    )
    return f'<h3>{escape(title)}</h3>\n<div class="bars">{lines}</div>\n' if bars else ""


def _costs(report: Report) -> str:
    programs = [
        (measured["implementation"], what.replace("_", " "), measured[what])
        for what in ("gradients", "hessian_product")
        for measured in report["measured"]
        if measured[what] is not None
    ]

    def bars(title, field, unit):
        largest = max((program[field] for _, _, program in programs), default=0) or 1
        return _bars(
            title,
            [
                (
                    f"{name}, {what}",
                    program[field] / largest,
                    _three_digits(program[field] / unit),
                    colour(name),
                )
                for name, what, program in programs
            ],
        )

    head = ("implementation", "program", "µs", "memory, MiB", "of it temporary", "compile, s", "host waited")
    rows = [
        (
            str(name),
            what,
            f"{program['microseconds']:,.1f}",
            f"{program['peak_bytes'] / 2**20:,.2f}",
            f"{program['temporary_bytes'] / 2**20:,.2f}",
            f"{program['compile_seconds']:.2f}",
            f"{program['host_waited']:.0%}",
        )
        for name, what, program in programs
    ]
    failed = "".join(
        f'<p class="failed">{escape(str(measured["implementation"]))}: {escape(measured["failed"])}</p>\n'
        for measured in report["measured"]
        if measured["failed"]
    )
    pictures = bars("µs a call", "microseconds", 1) + bars("memory, MiB", "peak_bytes", 2**20)
    note = "<p>Where the host hardly waited for the device, the time is the host's.</p>\n"
    return pictures + table(head, rows) + note + failed


def _differences(report: Report) -> str:
    reference, *candidates = report["measured"]
    found = {
        (measured["implementation"], difference["kind"], difference["name"]): difference
        for measured in candidates
        for difference in measured["differences"]
    }
    head = ["of", "shape"]
    head += [f"{measured['implementation']}: {what}" for measured in candidates for what in ("max abs", "relative")]
    rows, bars = [], []
    for difference in reference["differences"]:
        kind, name = difference["kind"], difference["name"]
        called = name if kind == "value" else f"{kind}: {name}"
        cells = [called, "×".join(map(str, difference["shape"]))]
        for measured in candidates:
            entry = found.get((measured["implementation"], kind, name))
            cells += [number(entry[field]) if entry else "" for field in ("absolute", "relative")]
            if entry:
                label = f"{called}, {measured['implementation']}" if len(candidates) > 1 else called
                bars.append((label, _decades(entry["relative"]), cells[-1], colour(measured["implementation"])))
        rows.append(cells)
    note = f"<p>Held against {escape(str(report['reference']))}; relative: the norm of the difference over the norm."
    return _bars(f"relative difference, from {LEAST:.0e} to 1", bars) + note + "</p>\n" + table(head, rows)


def _decades(value: float | None) -> float:
    """How far a number is on the way from `LEAST` to 1, by its logarithm."""
    if value is None or not math.isfinite(value):
        return 1.0
    return min(1.0, max(0.0, 1 - math.log10(max(value, LEAST)) / math.log10(LEAST)))


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
