"""Compare two runs of the bench, but not the times of other libraries.

An implementation of a workload is slower if its median time grew by more than the threshold, and every timing round of
the new run took longer than every round of the old run. It is also slower if it fails only in the new run.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from experiments.output.errors import UserError, run_command

Report = Mapping[str, Any]
Row = Mapping[str, Any]
Verdict = Literal["slower", "faster", "the same", "fails", "works again"]
SLOWER = ("slower", "fails")
FIELDS = ("work", "batch", "dtype", "precision", "implementation")


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """List the workloads and implementations that became slower between two runs of the bench on the same device."""

    old: Annotated[Path, tyro.conf.Positional]
    """A file that the bench wrote."""
    new: Annotated[Path, tyro.conf.Positional]
    """A later file from the same device."""
    threshold: float = 0.05
    """A row is slower if its time grew by more than this share of the old time and by more than the noise."""


@dataclasses.dataclass(frozen=True)
class Change:
    title: str
    old: Row
    new: Row
    verdict: Verdict


def main(args: Sequence[str] | None = None) -> int:
    return run_command(run, CompareConfig, "experiments.bench compare", args)


def run(config: CompareConfig, _: str) -> int:
    if not config.threshold >= 0:
        raise UserError(f"--threshold is {config.threshold}; wants at least 0")
    old, new = _read(config.old), _read(config.new)
    for field in ("device", "platform"):
        if old[field] != new[field]:
            raise UserError(
                f"{config.old} has {field} {old[field]} and {config.new} has {field} {new[field]}; wants one {field}"
            )
    changed = changes(old, new, config.threshold)
    if not changed:
        raise UserError(
            f"{config.old} and {config.new} have no row in common; wants reports with at least one common row"
        )
    print_changes(old, new, changed)
    return 1 if any(change.verdict in SLOWER for change in changed) else 0


def _read(path: Path) -> Report:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}); wants a file that experiments.bench wrote with --json"
        ) from None
    rows = report.get("rows") if isinstance(report, dict) else None
    if not rows or any({*FIELDS, "peer", "microseconds", "round_microseconds", "failed"} - row.keys() for row in rows):
        raise UserError(f"{path} is not a report of the bench; wants a file that experiments.bench wrote with --json")
    return report


def changes(old: Report, new: Report, threshold: float) -> list[Change]:
    before, after = _rows(old), _rows(new)
    common = [
        Change(key, before[key], after[key], verdict(before[key], after[key], threshold))
        for key in before
        if key in after
    ]
    return sorted(
        common, key=lambda change: -(ratio(change) or (0.0 if change.verdict == "works again" else float("inf")))
    )


def _rows(report: Report) -> dict[str, Row]:
    rows = [row for row in report["rows"] if row["peer"] is None]
    return {", ".join(str(row[field]) for field in FIELDS): row for row in rows}


def verdict(old: Row, new: Row, threshold: float) -> Verdict:
    if new["failed"] or old["failed"]:
        return "the same" if old["failed"] and new["failed"] else "fails" if new["failed"] else "works again"
    a, b = old["microseconds"], new["microseconds"]
    old_rounds, new_rounds = old["round_microseconds"], new["round_microseconds"]
    if b > a * (1 + threshold) and min(new_rounds) > max(old_rounds):
        return "slower"
    return "faster" if a > b * (1 + threshold) and min(old_rounds) > max(new_rounds) else "the same"


def ratio(change: Change) -> float | None:
    old, new = change.old["microseconds"], change.new["microseconds"]
    return new / old if old and new else None


def print_changes(old: Report, new: Report, changed: Sequence[Change], console: Console | None = None) -> None:
    console = console or Console(width=140, highlight=False)
    for name, report in (("old", old), ("new", new)):
        copy = report.get("copy_bytes_per_second")
        rate = f", a copy moved {copy / 1e12:.3g} TB/s" if copy else ""
        where = f"{report['device']}, jax {report['versions'].get('jax')}, commit {report.get('commit')}"
        console.print(f"{name}: {where}, {report['date']}{rate}")
    table = Table("row", *(Column(name, justify="right") for name in ("old, µs", "new, µs", "new over old")), "")
    for change in changed:
        if change.verdict != "the same":
            style = "red" if change.verdict in SLOWER else "green"
            cells = (_time(change.old), _time(change.new), f"{ratio(change):.2f}" if ratio(change) else "")
            table.add_row(Text(change.title), *cells, Text(change.verdict, style=style))
    if table.row_count:
        console.print(table)
    slower = sum(change.verdict in SLOWER for change in changed)
    same = sum(change.verdict == "the same" for change in changed)
    console.print(f"{slower} of {len(changed)} rows slower, {same} unchanged up to noise and threshold")
    settled = [report.get("settling_seconds", 0.0) for report in (old, new)]
    if settled[0] != settled[1]:
        console.print(
            f"before timing, programs ran for up to {settled[0]} s in the old run and {settled[1]} s in the new run; "
            "a program that runs longer may be slower, if the GPU reaches its power limit"
        )
    of_old, of_new = _rows(old), _rows(new)
    for name, rows, other_rows in (("old", of_old, of_new), ("new", of_new, of_old)):
        if titles := [title for title in rows if title not in other_rows]:
            console.print(Text(f"only in the {name} run: {'; '.join(titles)}"), soft_wrap=True)


def _time(row: Row) -> str:
    if row["failed"]:
        return "failed"
    median, rounds = row["microseconds"], row["round_microseconds"]
    return f"{median:.1f} ± {(max(rounds) - min(rounds)) / 2 / median:.0%}"
