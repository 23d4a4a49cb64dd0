"""Charts of horizontal bars: speedups, and percentages of the roofline."""

import html
import math
from collections.abc import Callable, Mapping, Sequence

from figures.cells import PUBLISHED, times
from figures.measurements import all_rows, best_peer, load
from figures.summary import FAMILIES

STYLE = """
  .paper { fill: #ffffff; stroke: #d0d7de } .ink { fill: #1f2328 } .soft { fill: #59636e } .even { stroke: #59636e }
  .first { fill: #2a78d6 } .second { fill: #e07b39 } .pale { fill: #2a78d6; opacity: 0.4 }
  .value { fill: #59636e; stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round; paint-order: stroke }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d } .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .even { stroke: #9198a1 }
    .first { fill: #58a6ff } .second { fill: #f0986a } .pale { fill: #58a6ff }
    .value { fill: #9198a1; stroke: #0d1117 }
  }
  text { font: 13px system-ui, sans-serif }
"""
"""Pictures have a background, because the page may have another color scheme than the browser."""

WIDTH, LEFT, RIGHT, BAR = 880, 375, 100, 15
"""Pixels: widths of the picture, the names, and the space right of the longest bar; height of a bar."""

Bar = tuple[str, float, float, str]
"""CSS class, two ends as fractions of the axis, text after the bar."""


def speed() -> str:
    families = {family.name: family.speedups() for family in FAMILIES}
    values = [value for both in families.values() for value in both if value]
    low, high = min([0.5, *values]), max([2.0, *values])

    def place(value):
        return math.log(value / low) / math.log(high / low)

    bars = {
        name: [
            [(kind, *sorted((place(1), place(v))), times(v))]
            for kind, v in zip(("first", "second"), both, strict=True)
            if v
        ]
        for name, both in families.items()
        if any(both)
    }
    peers = dict.fromkeys(peer["peer"] for family in FAMILIES if (peer := best_peer(family.rows())))
    peers = [f"{peer} (reimplemented)" if peer == PUBLISHED else peer for peer in peers]
    legend = {"first": "over JAX's autodiff", "second": f"over the best peer: {', '.join(peers)}"}
    title = "Speedup of jaxbp (logarithmic axis; left of 1x, jaxbp is slower)"
    return chart(title, legend, {place(1): "1x"}, bars)


def floors() -> str:
    bars = {}
    for name, shares in sorted(kernel_shares().items(), key=lambda item: (-max(item[1]), item[0])):
        worst, best = min(shares), max(shares)
        words = " to ".join(dict.fromkeys((f"{worst:.0%}", f"{best:.0%}")))
        bars[name] = [[("first", 0.0, min(worst, 1.0), ""), ("pale", min(worst, 1.0), min(best, 1.0), words)]]
    title = "Percentage of the roofline that each kernel reaches (at 100%, the device allows no less time)"
    legend = {"first": "at the worst measured size", "pale": "at the best measured size"}
    return chart(title, legend, {share: f"{share:.0%}" for share in (0.25, 0.5, 0.75, 1.0)}, bars)


def kernel_shares() -> dict[str, list[float]]:
    """Return each kernel's fractions of the roofline, one per measured size, in the newest run."""
    latest: dict[str, dict[tuple, float]] = {}
    for row in all_rows(load("*")):
        if row.get("implementation") == "pallas" and row.get("floor_fraction"):
            work = row["work"].removesuffix(f" at {row['precision']} precision").removesuffix(f" in {row['dtype']}")
            work, *rest = work.split(", ")
            name = work.removesuffix(row["place"]).strip().replace("fwd+bwd", "and its gradient")
            options = [*rest, *([] if row["dtype"] == "float32" else [row["dtype"]])]
            place = row["place"], row["batch"], row["precision"]
            latest.setdefault(", ".join([name, *options]), {})[place] = row["floor_fraction"]
    return {name: list(places.values()) for name, places in latest.items()}


def chart(
    title: str, legend: Mapping[str, str], ticks: Mapping[float, str], bars: Mapping[str, Sequence[Sequence[Bar]]]
) -> str:
    """Return an SVG picture. `legend` maps CSS classes to explanations, `ticks` fractions of the axis to labels, and
    `bars` names to lines of bars."""

    def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
        return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'

    def at(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    parts, y = [text(20, 26, title, "ink")], 88
    for left, (kind, words) in zip(range(20, WIDTH, 220), legend.items(), strict=False):
        parts += [
            f'<rect class="{kind}" x="{left}" y="39" width="12" height="12"/>',
            text(left + 18, 50, words, "soft"),
        ]
    height = y + sum(BAR * len(lines) + 6 for lines in bars.values())
    for share, words in ticks.items():
        ends = f'x1="{at(share):.1f}" x2="{at(share):.1f}" y1="76" y2="{height}"'
        parts += [f'<line class="even" {ends} stroke-dasharray="3 3"/>', text(at(share), 72, words, "soft", "middle")]
    for name, lines in bars.items():
        parts.append(text(LEFT - 12, y + BAR * len(lines) / 2 + 4.5, name, "ink", "end"))
        for line in lines:
            for kind, start, end, words in line:
                box = f'x="{at(start):.1f}" y="{y}" width="{at(end) - at(start):.1f}" height="{BAR - 2}"'
                parts.append(f'<rect class="{kind}" {box}/>')
                if words:
                    parts.append(text(at(end) + 5, y + 11, words, "value"))
            y += BAR
        y += 6
    size = f'viewBox="0 0 {WIDTH} {height + 10}" width="{WIDTH}"'
    paper = f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height + 9}" rx="8"/>'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>", paper]
    return "\n".join([*head, *parts, "</svg>", ""])


CHARTS: dict[str, Callable[[], str]] = {"speed": speed, "roofline": floors}
