"""Write the tables and charts of the documentation from the measured runs in docs/results/.

With `--check`, list stale pages and charts instead. The exit code is then 1 if there are any.

A page has a table between `<!-- table: works backwards op=conv2d_* -->` and `<!-- end -->`. `works` is a key of
`TABLES`, and `backwards` is a pattern of names in docs/results/. `op=` keeps the rows whose op matches. Other options,
such as `columns=`, go to the function of the table.
"""

import argparse
import fnmatch
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import computed_in
import launches
from figures import measurements
from figures.bench_tables import comparison, dtypes, masks, models, ratios, slower, works
from figures.cells import link, provenance
from figures.charts import CHARTS
from figures.measurements import load, no_file, rows_of
from figures.run_tables import (
    accuracy,
    communication,
    compilation,
    frozen,
    gates,
    profile,
    programs,
    rows,
    sanitizer,
    seeds,
    supported,
    training,
)
from figures.summary import summary

REGION = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python docs/tables.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only list stale pages and charts")
    check = parser.parse_args(args).check
    found = stale()
    for path, text in found.items():
        print(path.relative_to(measurements.DOCS.parent))
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


def stale() -> dict[Path, str]:
    wanted = {page: render(page.read_text(encoding="utf-8"), page) for page in pages()}
    wanted |= {measurements.DOCS / "images" / f"{name}.svg": chart() for name, chart in CHARTS.items()}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def pages() -> list[Path]:
    docs = measurements.DOCS
    without_tables = [docs / "lab", docs / "formulas"]
    found = (path for path in sorted(docs.rglob("*.md")) if not any(map(path.is_relative_to, without_tables)))
    return [docs.parent / "README.md", *found]


def render(text: str, page: Path) -> str:
    to_docs = os.path.relpath(measurements.DOCS, page.parent)

    described: set[str] = set()

    def table(match):
        made = made_by(described, *match[2].split())
        made = made if to_docs == "." else made.replace("](", f"]({to_docs}/")
        return f"{match[1]}\n{made}\n\n{match[3]}"

    return REGION.sub(table, text)


def made_by(described: set[str], kind: str, *words: str) -> str:
    """Return a table of this kind, and describe its result files that are not yet in `described`."""
    options = dict(word.split("=", 1) for word in words if "=" in word)
    op = options.pop("op", "*")
    found = {pattern: load(pattern) for pattern in words if "=" not in pattern}
    reports = {
        name: report | {"rows": [row for row in rows_of(report) if fnmatch.fnmatchcase(row.get("op", ""), op)]}
        for named in found.values()
        for name, report in named.items()
    }
    missing = [no_file(pattern) for pattern, named in found.items() if not named]
    if found and not reports:
        return missing[0]
    if op != "*" and not any(report["rows"] for report in reports.values()):
        return f"*Not measured yet: `docs/results/{', '.join(reports)}.json` has no such rows.*"
    table = TABLES[kind](reports, **options)
    if kind not in (below.__name__ for below in DESCRIBED_BELOW):
        return table
    sources = "\n".join(
        f"\n{link(name)}: described above." if name in described else provenance(name, report, "roofline" in table)
        for name, report in reports.items()
    )
    described.update(reports)
    return "\n\n".join([f"{table}\n{sources}", *missing])


DESCRIBED_BELOW = (
    *(works, masks, models, ratios, comparison, dtypes, rows, seeds, frozen),
    *(profile, accuracy, sanitizer, communication, compilation),
)
"""Tables below which `made_by` describes the result files. The other tables describe them, or have none."""
OTHERS = (summary, slower, training, programs, gates, supported)
TABLES: dict[str, Callable[..., str]] = {
    **{table.__name__: table for table in (*DESCRIBED_BELOW, *OTHERS)},
    "runs": rows,
    "computed_in": lambda reports: computed_in.table(),
    "launches": lambda reports: launches.table(),
}


if __name__ == "__main__":
    sys.exit(main())
