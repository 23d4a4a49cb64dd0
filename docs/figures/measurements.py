"""Read the measured runs in docs/results/, and compare the rows of one workload."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PREFERRED = ("pallas", "None", "xla")
"""jaxbp's time is from the first of these implementations that has one."""
HOST_BOUND = 0.05
"""The same number as in experiments/bench/report.py."""

Row = Mapping[str, Any]
Report = Mapping[str, Any]
Reports = Mapping[str, Report]
"""Runs by name of file, the oldest first."""


def load(pattern: str) -> dict[str, Report]:
    paths = (DOCS / "results").glob(f"{pattern}.json")
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths)}
    return dict(sorted(reports.items(), key=lambda item: str(item[1]["date"])))


def rows_of(report: Report) -> Sequence[Row]:
    return report.get("rows") or report.get("runs") or []


def no_file(name: str) -> str:
    return f"*Not measured yet: there is no `docs/results/{name}.json`.*"


def all_rows(reports: Reports) -> list[Row]:
    return [row for report in reports.values() for row in rows_of(report)]


def works_of(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Row]]]:
    """Yield the title of each workload and batch size, and its rows by implementation."""
    for (work, batch), group in itertools.groupby(rows, lambda row: (row["work"], row.get("batch"))):
        title = re.sub(r"^(\w+)", r"`\1`", work) if "_" in work.split()[0] else work
        named = {row["implementation"]: row for row in group}
        title = title.removesuffix(" at default precision").replace(" at highest precision", ", exact")
        # The size of a norm, such as 65536x1024, begins with its batch.
        yield title if batch is None or f"{batch}x" in work else f"{title}, batch {batch:,}", named


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def time(row: Row | None) -> float | None:
    return row.get("microseconds") if row else None


def library(rows: Mapping[str, Row]) -> Row | None:
    return next((rows[name] for name in PREFERRED if time(rows.get(name)) is not None), None)


def autodiff(rows: Mapping[str, Row]) -> Row | None:
    timed = [row for name, row in rows.items() if name.startswith("autodiff") and time(row) is not None]
    return min(timed, key=time, default=None)


EXACT = 1e-5
"""A row with a smaller error computes its products in exact float32."""


def products(row: Row | None) -> str:
    """Return the precision of a row's matrix products, or "".

    jaxbp may use TF32 only at large batches, so a small error at a smaller batch does not prove exactness.
    """
    if row is None or not row.get("operations"):
        return ""
    if row["dtype"] != "float32":
        return row["dtype"]
    if row["precision"] == "highest":
        return "exact"
    theirs = row.get("peer") or row["implementation"].startswith("autodiff")
    is_exact = (row.get("error") or 1.0) < EXACT and (theirs or row.get("error_batch") == row.get("batch"))
    return "exact" if is_exact else "TF32"


def best_peer(rows: Mapping[str, Row]) -> Row | None:
    return min((row for row in rows.values() if row.get("peer") and time(row) is not None), key=time, default=None)


def waits_for_host(row: Row) -> bool:
    return row.get("host_waited") is not None and row["host_waited"] < HOST_BOUND


def speedup(row: Row | None, over: Row | None) -> float | None:
    return time(over) / time(row) if time(row) and time(over) else None
