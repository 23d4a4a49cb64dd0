"""The findings of `compare`, as tables and as an HTML page."""

import dataclasses
import io
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import jax
import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

KINDS = ("value", "gradient", "hessian product")
WIDTH, BAR_WIDTH = 140, 60
COLORS = {"autodiff": "#8a8f98", "xla": "#3b82f6", "pallas": "#f0883e"}
_STYLE = """
:root { color-scheme: light dark; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --soft: #9ea7b3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; background: Canvas;
  color: CanvasText; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
p, summary { color: var(--soft); } p { margin: 0.25rem 0; }
.verdict { color: CanvasText; font-size: 1.1rem; border-left: 4px solid #3b82f6; padding-left: 0.75rem; }
figure { margin: 0.5rem 0; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figures figure { flex: 1 1 20rem; min-width: 0; max-width: 29rem; } svg { width: 100%; height: auto; display: block; }
pre { overflow-x: auto; font-size: 0.8rem; line-height: 1.2; }
"""
AS_FAST = 1.05
HOST_BOUND = 0.05


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between an array a and the reference's array.

    Attributes:
      kind: one of `KINDS`.
      name: the name of the result or of the differentiated argument.
      absolute: the largest difference of an element; infinite if an element is NaN in only one array.
      relative: `‖a - reference‖ / ‖reference‖`.
      mistakes: the number of elements that rounding does not explain.
      worst: a text with the index, the value, and the expected value of the element that exceeds the allowed
        difference most. Empty if `mistakes` is 0.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    mistakes: int = 0
    worst: str = ""


CUSTOM_RULES = "custom rules"
"""The name of a function that takes no `implementation`, with the derivatives of its custom rules."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The costs of a compiled program.

    Attributes:
      microseconds: the time per call, while further calls are queued. Small arrays stay in the device's cache.
      host_waited: the fraction of the time in which the host waits for the device. Near 0, the host limits the time.
      peak_bytes: the size of arguments, results, and temporaries, as XLA reports it.
      fastest, slowest: microseconds per call in the fastest and the slowest round.
    """

    microseconds: float
    host_waited: float
    compile_seconds: float
    peak_bytes: int
    temporary_bytes: int
    fastest: float | None = None
    slowest: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The findings for one implementation.

    Attributes:
      failed: why all programs, or only the Hessian product, failed; else None.
      same_as: the earlier implementation with an identical program of value and gradients, or None.
      missing: whether the function has no implementation of this name.
      interpreted: whether kernels ran in Pallas' interpreter, because there is no GPU.
    """

    implementation: str | None
    differences: tuple[Difference, ...] = ()
    gradients: Program | None = None
    hessian_product: Program | None = None
    failed: str | None = None
    same_as: str | None = None
    missing: bool = False
    interpreted: bool = False

    @property
    def label(self) -> str:
        return f"{self.implementation}, interpreter" if self.interpreted else str(self.implementation)

    @property
    def programs(self) -> list[tuple[str, Program]]:
        both = zip(KINDS[1:], (self.gradients, self.hessian_product), strict=True)
        return [(kind, program) for kind, program in both if program is not None]

    def difference(self, kind: str, name: str) -> Difference | None:
        return next((one for one in self.differences if (one.kind, one.name) == (kind, name)), None)

    def largest(self, kind: str) -> Difference | None:
        of_kind = [difference for difference in self.differences if difference.kind == kind]
        return max(of_kind, key=lambda difference: difference.relative, default=None)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The findings of `compare`. `measured` has one entry per implementation, first the reference."""

    function: str
    device: str
    reference: str | None
    measured: tuple[Measured, ...]

    @property
    def verdict(self) -> list[str]:
        """One sentence per implementation except the reference."""
        reference, *others = self.measured
        return [self._verdict(reference, one) for one in others]

    def to_html(self, path: str | os.PathLike) -> None:
        Path(path).write_text(self.page([f"jax {jax.__version__}"]), encoding="utf-8")

    def page(self, notes: Sequence[str], before: str = "", after: str = "") -> str:
        """Return an HTML page. `notes` follow the device. `before` and `after` are HTML around the comparison."""
        names = ", ".join(str(one.implementation) for one in self.measured)
        title = escape(f"{self.function}: {names}")
        lines = "".join(f'<p class="verdict">{escape(line)}</p>\n' for line in self.verdict)
        time, memory = self._bars("µs", "microseconds", 1), self._bars("MiB", "peak_bytes", 2**20)
        sections = {"Time": [time], "Memory": [memory], "Numbers": self._tables()}
        sections = "".join(section(name, printed(*parts)) for name, parts in sections.items())
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{lines}<p>{escape("; ".join([self.device, *notes]))}</p>
{before}{sections}{after}
</body>
</html>
"""

    def _verdict(self, reference: Measured, one: Measured) -> str:
        if one.missing:
            return f"{self.function} has no {'kernel' if one.implementation == 'pallas' else one.implementation}"
        if one.gradients is None:
            return f"{one.implementation} failed: {one.failed}"
        if one.same_as is not None:
            hint = "does the function pass `implementation=` on?"
            if one.implementation == CUSTOM_RULES:
                hint = "does the function have a custom rule, or take `implementation=`?"
            return f"{one.implementation} compiles to the same program as {one.same_as}; {hint}"
        ratio = reference.gradients.microseconds / one.gradients.microseconds
        if abs(np.log(ratio)) < np.log(AS_FAST):
            speed = "as fast"
        else:
            speed = f"{_times(ratio)} faster" if ratio > 1 else f"{_times(1 / ratio)} slower"
            speed += _spread(reference.gradients, one.gradients, ratio > 1)
        if min(reference.gradients.host_waited, one.gradients.host_waited) < HOST_BOUND:
            speed += " (the host limits the time)"
        worst = max(one.differences, key=lambda difference: (difference.mistakes > 0, difference.relative))
        if worst.mistakes:
            where = f"{worst.mistakes:,} of {math.prod(worst.shape):,} elements of {worst.kind} {worst.name}"
            found = f"more than rounding in {where}: {worst.worst}"
        else:
            found = f"differences at most {worst.relative:.0e}: rounding" if worst.relative else "no difference"
        failed = f"; no Hessian product (second_order=False leaves it out): {one.failed}" if one.failed else ""
        return f"{one.label} {speed}; {found}{failed}"

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=WIDTH))
        return text.getvalue()

    def show(self, console: Console) -> None:
        show(console, *(Text(line, style="bold") for line in self.verdict))
        show(console, *self._tables())

    def _tables(self) -> list[Table | Text]:
        failed = [one for one in self.measured if one.failed and not one.missing]
        reasons = [Text(f"failed: {one.implementation}: {one.failed}", style="red") for one in failed]
        return [self._costs(), self._differences(), *reasons]

    def _bars(self, unit: str, field: str, size: float) -> Table:
        bars = Table.grid("", "", "", padding=(0, 1))
        values = [(one, kind, getattr(p, field)) for one in self.measured for kind, p in one.programs]
        largest = max(value for *_, value in values) or 1
        for one, kind, value in values:
            bar = Text("█" * round(BAR_WIDTH * value / largest), style=color(one.implementation))
            bars.add_row(f"{one.label}, {kind}", bar, f"{value / size:,.2f} {unit}")
        return bars

    def _costs(self) -> Table:
        costs = Table(
            "", "program", "µs", "host\nwaited", "MiB,\ntemporary", "compile,\ns", "largest difference",
            title=f"{self.function} on {self.device}",
        )  # fmt: skip
        for column in costs.columns[2:6]:
            column.justify = "right"
        for column in costs.columns[:-1]:
            column.no_wrap = True
        costs.columns[-1].overflow = "fold"
        for one in self.measured:
            for kind, program in one.programs:
                memory = ", ".join(f"{size / 2**20:.2f}" for size in (program.peak_bytes, program.temporary_bytes))
                worst = one.largest(kind)
                costs.add_row(
                    one.label,
                    "Hessian" if kind == "hessian product" else kind,
                    f"{program.microseconds:.1f}",
                    f"{program.host_waited:.0%}",
                    memory,
                    f"{program.compile_seconds:.2f}",
                    "" if worst is None else f"{worst.relative:.1e} {worst.name}",
                )
            costs.add_section()
        return costs

    def _differences(self) -> Table:
        others = [one for one in self.measured if one.differences and one.implementation != self.reference]
        differences = Table(
            "kind", "name", "shape", *(f"{one.implementation}: max abs, relative" for one in others),
            title=f"differences from {self.reference}",
        )  # fmt: skip
        for expected in self.measured[0].differences:
            rows = [one.difference(expected.kind, expected.name) for one in others]
            numbers = [f"{row.absolute:.1e}  {row.relative:.1e}" if row else "" for row in rows]
            differences.add_row(expected.kind, Text(expected.name), str(expected.shape), *numbers)
        return differences


def _spread(reference: Program, one: Program, faster: bool) -> str:
    if None in (reference.fastest, one.fastest):
        return ""
    low, high = reference.fastest / one.slowest, reference.slowest / one.fastest
    low, high = (low, high) if faster else (1 / high, 1 / low)
    return f" ({_times(low)} to {_times(high)})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"


def printed(*parts: RenderableType) -> str:
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    show(console, *parts)
    return console.export_html(theme=MONOKAI, inline_styles=True, code_format="<pre>{code}</pre>\n")


def show(console: Console, *parts: RenderableType) -> None:
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def color(implementation: str | None) -> str:
    return COLORS.get(implementation, "#a371f7")
