import dataclasses
import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from jaxbp.verify.points import USER_DATA

WIDTH = 80
STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim", "inconclusive": "yellow"}
NOT_FLOATING = "not floating-point, so it has no gradient"
ROWS_IN_REPR = 3


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """The finding for one compared array: a result, or the derivative with respect to one argument.

    Attributes:
      argument: the name of the argument or of the result, or "all".
      order: 0 for a value, 1 for a gradient, 2 and 3 for derivatives of the gradient.
      against: how the expected array was computed.
      verdict: "ok", "failed", "skipped" if it was not tried, or "inconclusive" if the check cannot decide.
      absolute: the largest `|a - e|` of a compared element a and its expected number e.
      relative: `absolute / max(max |e|, atol / rtol)`, with atol and rtol as in `Tolerance`.
      index: the element with the largest difference relative to the allowed difference.
      analytic, numeric, inputs: at this index, the compared number, the expected number, and the arguments by name.
      reason: a description of the mistake, or the reason for another verdict.
      data: "own data" for the user's arguments, or the name of added data or of a transformation, such as "vmap".
      case: the options or shapes of a case from `cases`, or "".
    """

    op: str
    implementation: str | None
    dtype: str
    argument: str
    order: int
    against: str
    verdict: str
    elements: int = 0
    absolute: float | None = None
    relative: float | None = None
    index: tuple[int, ...] | None = None
    analytic: float | None = None
    numeric: float | None = None
    inputs: tuple[tuple[str, float], ...] = ()
    reason: str | None = None
    data: str = USER_DATA
    case: str = ""

    def __str__(self) -> str:
        return f"{self.op}, {self.implementation}, {self.dtype}, order {self.order}: {self.finding}"

    @property
    def finding(self) -> str:
        case = f"{self.case}: " if self.case else ""
        if self.index is None:
            on = f" ({self.data})" if self.data != USER_DATA else ""
            return f"{case}{self.argument}: {self.reason or self.verdict}{on}"
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        against = self.against if self.data == USER_DATA else f"{self.against}, {self.data}"
        inputs = ", ".join(f"{name} = {value:.6g}" for name, value in self.inputs)
        at = f", at {inputs}" if inputs else ""
        looks = f": {self.reason}" if self.verdict == "failed" and self.reason else ""
        found = f"{self.argument}{where} is {self.analytic:.9g}; wants {self.numeric:.9g} ({against}){at}"
        return f"{case}{found}{looks}"


@dataclasses.dataclass(frozen=True, repr=False)
class CheckResult:
    """The rows of a check. It is true if no row failed. `untried` lists what was not tried, and `notes` has remarks."""

    rows: tuple[CheckRow, ...]
    untried: str = ""
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.verdict == "failed")

    @property
    def tried(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.data for row in self.rows if row.verdict != "skipped"))

    @property
    def not_tried(self) -> tuple[str, ...]:
        everywhere, found, reasons = {row.implementation for row in self.rows}, {}, {}
        compared = {(row.data, row.implementation) for row in self.rows if row.verdict != "skipped"}
        for row in self.rows:
            if row.verdict == "skipped" and row.data != USER_DATA:
                partly = (row.data, row.implementation) in compared
                name = f"{row.data} for {row.argument}" if partly else row.data
                found.setdefault((name, row.reason), set()).add(row.implementation)
        for (name, reason), of in found.items():
            where = "" if of == everywhere else f" in {', '.join(sorted(map(str, of)))}"
            reasons.setdefault(f"{where} ({reason})", []).append(name)
        return tuple(_listed(names) + reason for reason, names in reasons.items())

    def __bool__(self) -> bool:
        return not self.failures

    def __repr__(self) -> str:
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in STYLES}
        counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        shown = "".join(f"\n  {row}"[:250] for row in self.failures[:ROWS_IN_REPR])
        return f"<CheckResult: {counted or 'no rows'}{shown}>"

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH).print(self.summary())
        return text.getvalue()

    def raise_if_failed(self) -> "CheckResult":
        """Raise an AssertionError with one line per failed row."""
        if self.failures:
            raise AssertionError("\n".join(map(str, self.failures)))
        return self

    def summary(self) -> Group:
        lines, groups = [], {}
        for row in self.rows:
            if row.reason != NOT_FLOATING:
                name = row.op if row.implementation is None else f"{row.op}, {row.implementation}"
                groups.setdefault(name, []).append(row)
        for name, rows in groups.items():
            lines += _lines_of(name, rows)
        lines += [Text(note, "dim") for note in self.notes]
        if self.tried:
            lines.append(Text(f"tried: {_listed(self.tried)}", "dim"))
        if cases := list(filter(None, dict.fromkeys(row.case for row in self.rows))):
            lines.append(Text(f"also tried with {'; '.join(cases)}", "dim"))
        if untried := ", ".join(filter(None, (*self.not_tried, self.untried))):
            lines.append(Text(f"not tried: {untried}", "dim"))
        return Group(*lines)

    def table(self) -> Table:
        fields = ("op", "implementation", "dtype", "case", "data", "argument", "order", "against")
        fields = [field for field in fields if field != "case" or any(row.case for row in self.rows)]
        table = Table(*fields, "max abs", "max rel", "verdict")
        for row, following in zip(self.rows, (*self.rows[1:], None), strict=True):
            verdict = Text(row.verdict + (f": {row.reason}" if row.reason else ""), style=STYLES[row.verdict])
            cells = (Text(str(getattr(row, field))) for field in fields)
            ends = following is None or following.implementation != row.implementation
            errors = ("" if value is None else f"{value:.1e}" for value in (row.absolute, row.relative))
            table.add_row(*cells, *errors, verdict, end_section=ends)
        return table


def _lines_of(name: str, rows: Sequence[CheckRow]) -> list[Text]:
    failed, skipped, open_, ok = (
        [row for row in rows if row.verdict == verdict] for verdict in ("failed", "skipped", "inconclusive", "ok")
    )
    verdict = "failed" if failed else "skipped" if len(skipped) == len(rows) else "ok" if ok else "inconclusive"
    lines = [Text(f"{verdict:7} ", STYLES[verdict], no_wrap=True, overflow="ellipsis")]
    lines[0].append(name, "default")
    if verdict == "ok":
        errors = {}
        for row in rows:
            if row.relative is not None and not row.reason:
                errors[row.dtype] = max(errors.get(row.dtype, 0.0), row.relative)
        shown = " ".join(f"{dtype.replace('loat', '')} {value:.0e}" for dtype, value in errors.items())
        lines[0].append(f": {len(ok)} results, errors up to {shown}", "default")
    if failed:
        lines.append(Text(f"        {failed[0].dtype}, order {failed[0].order}: {failed[0].finding}"))
    elif verdict == "skipped":
        lines.append(Text(f"        {skipped[0].reason}"))
    else:
        for reason in filter(None, dict.fromkeys(row.reason for row in ok)):
            on = _listed(row.data for row in ok if row.reason == reason)
            line = f"        beyond the tolerance, but {reason}: on {on}"
            lines.append(Text(line, "dim", no_wrap=True, overflow="ellipsis"))
    if len(failed) > 1:
        lines.append(Text(f"        {len(failed) - 1} more failed, on {_listed(row.data for row in failed)}"))
    if open_:
        on = _listed(f"order {row.order} on {row.data}" for row in open_)
        lines.append(Text(f"        inconclusive: {on}: {open_[0].reason}", "yellow"))
    return lines


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def progress_of(name: str) -> Progress:
    """Return the progress of a check, in one line on a terminal. `update(0, doing=...)` says what is checked."""
    console = Console(stderr=True)
    line = TextColumn("check {task.description}, {task.elapsed:.0f} s: {task.fields[doing]}", markup=False)
    progress = Progress(line, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(name, doing="")
    return progress
