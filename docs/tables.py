"""Write the tables and charts of the book and the README from the measured runs in docs/results/.

    python docs/tables.py            # rewrite stale pages and charts
    python docs/tables.py --check    # list stale pages and charts; the exit code is 1 if there are any

In a page, a table is between two marks. The first mark says how the table is made:

    <!-- table: works backwards op=conv2d_* -->
    ...
    <!-- end -->

Here `works` is a function in `TABLES`, and `backwards` is the file docs/results/backwards.json. The name of a file may
be a pattern. `op=` keeps the rows whose op matches, and further options go to the function. If the file is missing, one
line says so instead of the table. `computed_in` needs no file, because it reads what JAX traces. `CHARTS` are pictures
made from the same files.
"""

import argparse
import fnmatch
import html
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
PREFERRED = ("pallas", "None", "xla")
"""Implementations in order of preference. The first one with a time in the run represents jaxbp in a summary."""
HOST_BOUND = 0.05
"""If the host waits for the device for less than this share of the time, the host limits the measured time. The report
of the bench uses the same number."""
WHY = "why not faster"
"""Heading of the summary's column of prose."""
REGION = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Mapping[str, Any]
Report = Mapping[str, Any]
Reports = Mapping[str, Report]
"""Name of a file -> its run, the oldest run first."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python docs/tables.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only list stale pages and charts")
    check = parser.parse_args(args).check
    found = stale()
    for path, text in found.items():
        print(path.relative_to(DOCS.parent))
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


def stale() -> dict[Path, str]:
    """Return the correct contents of each stale page and chart."""
    wanted = {page: render(page.read_text(encoding="utf-8"), page) for page in pages()}
    wanted |= {DOCS / "images" / f"{name}.svg": chart() for name, chart in CHARTS.items()}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def pages() -> list[Path]:
    """Return the pages that may have tables. The lab's diary keeps the figures of its day."""
    return [DOCS.parent / "README.md", *(path for path in sorted(DOCS.rglob("*.md")) if not is_diary(path))]


def is_diary(page: Path) -> bool:
    return page.is_relative_to(DOCS / "lab") or page.is_relative_to(DOCS / "formulas")


def render(text: str, page: Path) -> str:
    """Return the page with new tables. Their links are relative to `DOCS` and become relative to the page."""
    to_docs = os.path.relpath(DOCS, page.parent)

    def table(match):
        made = made_by(*match[2].split())
        made = made if to_docs == "." else made.replace("](", f"]({to_docs}/")
        return f"{match[1]}\n{made}\n\n{match[3]}"

    return REGION.sub(table, text)


def made_by(kind: str, *words: str) -> str:
    """Return the table that a mark requests, with its sources below."""
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
    if kind in WITH_THEIR_SOURCES:
        return table
    sources = "\n".join(provenance(name, report) for name, report in reports.items())
    return "\n\n".join([f"{table}\n{sources}", *missing])


# -------------------------------------------------------------------------------------------------------------- results


def load(pattern: str) -> dict[str, Report]:
    """Return the runs of the files whose names match."""
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
    """Yield a title for each workload and batch, with its rows by implementation."""
    for (work, batch), group in itertools.groupby(rows, lambda row: (row["work"], row.get("batch"))):
        title = re.sub(r"^(\w+)", r"`\1`", work) if "_" in work.split()[0] else work
        named = {row["implementation"]: row for row in group}
        # The place of a norm, such as 65536x1024, begins with its batch.
        yield title if batch is None or f"{batch}x" in work else f"{title}, batch {batch:,}", named


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return the rows of each key, with the keys in order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def time(row: Row | None) -> float | None:
    return row.get("microseconds") if row else None


def library(rows: Mapping[str, Row]) -> Row | None:
    """Return the row that represents jaxbp, the preferred implementation's row."""
    return next((rows[name] for name in PREFERRED if time(rows.get(name)) is not None), None)


def best_peer(rows: Mapping[str, Row]) -> Row | None:
    return min((row for row in rows.values() if row.get("peer") and time(row) is not None), key=time, default=None)


# ---------------------------------------------------------------------------------------------------------------- cells


def number(value: float | None) -> str:
    """Round to two digits below 10, to three below 100, and to an integer above."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2g}"


def microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    if row.get("failed"):
        return "unsupported" if row["failed"].startswith("NotImplementedError") else "failed"
    return number(time(row)) + "*" * waits_for_host(row)


def waits_for_host(row: Row) -> bool:
    return row.get("host_waited") is not None and row["host_waited"] < HOST_BOUND


def speedup(row: Row | None, over: Row | None) -> float | None:
    """Return the time of `over` divided by the time of `row`."""
    return time(over) / time(row) if time(row) and time(over) else None


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}x"


def rate(value: float, unit: str) -> str:
    return f"{value / 1e12:.3g} T{unit}" if value >= 1e11 else f"{value / 1e9:.3g} G{unit}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def floor(row: Row | None) -> str:
    return percent(min(row["floor_fraction"], 1.0)) if row and row.get("floor_fraction") is not None else ""


def mebibytes(size: int | None) -> str:
    return "" if size is None else number(size / 2**20)


def temporaries(row: Row | None) -> str:
    """Return the memory that a call needs beyond its arguments and results."""
    return mebibytes(row.get("temporary_bytes") if row else None)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in every line."""
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines)]
    rule = ["---" if heading in (head[0], WHY) else "---:" for heading in head]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in (head, rule, *lines))


def link(name: str) -> str:
    return f"[{name}.json](results/{name}.json)"


def provenance(name: str, report: Report) -> str:
    """Return the lines below a table: device, date, command, and the largest errors against float64."""
    versions, rows = report.get("versions", {}), rows_of(report)
    shown = ["jax", *(name for name in versions if name not in ("python", "jax", "jaxlib", "jaxbp", "numpy"))]
    libraries = ", ".join(f"{library} {versions[library]}" for library in shown if library in versions)
    commit = f", commit {report['commit'][:10]}" if report.get("commit") else ""
    where = f"{report['device']}, {libraries}, {day(report)}{commit}"
    where += "".join(f"; {report[of]}" for of in ("processor", "compiler") if of in report)
    if "dtype" in report:
        where += f"; {report['dtype']}, {report.get('precision', 'default')} precision"
    if "copy_bytes_per_second" in report:
        operations = report["operations_per_second"][report["precision"]]
        where += f"; in this run, a copy moved {rate(report['copy_bytes_per_second'], 'B/s')}"
        where += f" and a matrix product computed {rate(operations, 'FLOP/s')}"
    parts = [f"{link(name)}: {where}.", report.get("note", "")]
    compared = [row for row in rows if "work" in row and row.get("error") is not None]
    errors = grouped(compared, lambda row: row.get("peer") or row["implementation"])
    largest = [f"{name} {max(row['error'] for row in of):.1e}" for name, of in errors.items()]
    if largest:
        parts.append(f"Largest error of a result against float64: {', '.join(largest)}.")
    if any(map(waits_for_host, rows)):
        parts.append("\\*: the device waited for the host, so the device takes less time than this.")
    return "\n".join(["", " ".join(filter(None, parts)), "", f"    {command(report)}"])


def day(report: Report) -> str:
    return str(report["date"])[:10]


def command(report: Report) -> str:
    """Return the command of a run. Two scripts have moved since then. Others exist only in the history."""
    moved = re.sub(r"docs/lab/(many_devices|profiles)\.py", r"-m experiments.studies.\1", report["command"])
    return f"git checkout {report['commit']} && {moved}" if "docs/lab/" in moved else moved


# --------------------------------------------------------------------------------------------------------------- tables

COLUMNS: dict[str, tuple[str, Callable[[Mapping[str, Row]], str]]] = {
    "speedup": ("speedup over autodiff", lambda rows: times(speedup(library(rows), rows.get("autodiff")))),
    "peer": ("speedup over best peer", lambda rows: times(speedup(library(rows), best_peer(rows)))),
    "floor": ("jaxbp, % of roofline", lambda rows: floor(library(rows))),
    "memory": ("temporaries, MiB", lambda rows: temporaries(library(rows))),
    "peer_memory": ("temporaries of best peer, MiB", lambda rows: temporaries(best_peer(rows))),
    "autodiff_memory": ("temporaries of autodiff, MiB", lambda rows: temporaries(rows.get("autodiff"))),
}
"""Optional columns of `works`: the heading, and a function from a workload's rows to the cell."""


def works(reports: Reports, columns: str = "speedup,peer,floor") -> str:
    """Return a table with one line per workload and batch, and one column of times per jaxbp implementation."""
    rows = all_rows(reports)
    implementations = list(dict.fromkeys(row["implementation"] for row in rows if not row.get("peer")))
    shown = [COLUMNS[column] for column in columns.split(",")]
    head = ["workload, µs", *(f"`{name}`" for name in implementations), *(heading for heading, _ in shown)]
    lines = [
        [title, *(microseconds(group.get(name)) for name in implementations), *(cell(group) for _, cell in shown)]
        for title, group in works_of(rows)
    ]
    return markdown(head, lines)


def variants(reports: Reports) -> str:
    """Return a table with one line per implementation or variant of a peer, and one column of times per workload."""
    rows = all_rows(reports)
    peers = {row["implementation"] for row in rows if row.get("peer")}
    columns = {}
    for title, group in works_of(rows):
        fastest = min((time(row) for row in group.values() if time(row) is not None), default=None)
        columns[title] = {
            name: f"**{microseconds(row)}**" if time(row) == fastest is not None else microseconds(row)
            for name, row in group.items()
        }
    lines = [
        [name if name in peers else f"`{name}`", *(column.get(name, "") for column in columns.values())]
        for name in dict.fromkeys(row["implementation"] for row in rows)
    ]
    return markdown(["µs", *columns], lines)


def ratios(reports: Reports, low: str = "0", high: str = "inf") -> str:
    """Return the workloads where the time of `None` divided by autodiff's time is outside a band. Count the others."""
    found = [(title, rows.get("None"), rows.get("autodiff")) for title, rows in works_of(all_rows(reports))]
    timed = [(time(a) / time(b), title, a, b) for title, a, b in found if time(a) and time(b)]
    outside = sorted((line for line in timed if not float(low) <= line[0] <= float(high)), key=lambda line: -line[0])
    band = " and ".join([f"at least {low}x"] * (float(low) > 0) + [f"at most {high}x"] * math.isfinite(float(high)))
    inside = f"{len(timed) - len(outside)} of {len(timed)} workloads"
    count = f"`None` takes {band} the time of `autodiff` in {inside}."
    lines = [[title, microseconds(a), microseconds(b), times(value)] for value, title, a, b in outside]
    table = markdown(["workload, µs", "`None`", "`autodiff`", "times `autodiff`"], lines)
    return f"{count} The table lists the others.\n\n{table}" if outside else count


def dtypes(reports: Reports) -> str:
    """Return a table with one line per workload, batch, and dtype, compared with float32 in the same run."""
    lines = []
    for report in reports.values():
        works = grouped(report["rows"], lambda row: (row["op"], row["place"], row["batch"]))
        for (op, place, batch), rows in works.items():
            name = " ".join(part for part in (op.partition("-")[0], place) if part)
            wide = {row["implementation"]: row for row in rows if row["dtype"] == "float32"}
            for row in rows:
                if row.get("peer") or not time(row):
                    continue
                same = {other["implementation"]: other for other in rows if other["dtype"] == row["dtype"]}
                float32 = wide.get(row["implementation"])
                memory, wide_memory = row_bytes(row), row_bytes(float32)
                share = percent(memory / wide_memory) if memory and wide_memory else ""
                over_float32, over_peer = (times(speedup(row, other)) for other in (float32, best_peer(same)))
                cells = [microseconds(row), over_float32, mebibytes(memory), share, over_peer]
                lines.append([f"{name}, batch {batch:,}", row["dtype"], *cells])
    head = ["step", "computed in", "µs", "speedup over float32", "MiB", "% of float32 memory", "speedup over best peer"]
    return markdown(head, lines)


def row_bytes(row: Row | None) -> int | None:
    """Return the size of arguments, results, and temporaries."""
    if row is None or row.get("temporary_bytes") is None:
        return None
    return row["argument_bytes"] + row["result_bytes"] + row["temporary_bytes"]


def training(reports: Reports, experiment: str) -> str:
    """Return a table with one line per run of `experiments.train` with this experiment."""
    runs = {name: run for name, run in reports.items() if f"experiments.train {experiment}" in run["command"]}
    if not runs:
        return f"*Not measured yet: {', '.join(map(link, reports))} train other experiments.*"
    lines = []
    for name, run in runs.items():
        arguments = re.sub(r"^.*experiments\.train | ?--(?:json|data-dir|run-dir)[ =]\S+", "", run["command"])
        seconds = (number(run.get(f"{part}_seconds")) for part in ("train", "evaluation", "compile"))
        images = run.get("images_per_second")
        cells = [
            f"{run['test_accuracy']:.4f}",
            str(run["epochs"]),
            *seconds,
            "" if images is None else f"{images:,.0f}",
        ]
        lines.append([f"[`{arguments}`](results/{name}.json)", *cells])
    head = [
        "`experiments.train`",
        "test accuracy",
        "epochs",
        "training, s",
        "evaluation, s",
        "compilation, s",
        "images/s",
    ]
    note = f"Each row is one run ({devices(runs)}). Training excludes evaluation and compilation."
    return f"{markdown(head, lines)}\n\n{note}"


def devices(reports: Reports) -> str:
    return "; ".join(dict.fromkeys(f"{run['device']}, jax {run['versions']['jax']}" for run in reports.values()))


def seeds(reports: Reports) -> str:
    """Return a table with one line per setting of a study over seeds."""
    lines = {}
    for report in reports.values():
        recipes = list(report.get("recipes", ()))
        runs = [row for row in report["rows"] if not row.get("failed")]
        runs.sort(key=lambda row, recipes=recipes: recipes.index(row["recipe"]) if recipes else 0)
        for title, rows in grouped(runs, lambda row, report=report: setting(report, row)).items():
            lines[title] = over_seeds(rows)
    head = next(iter(lines.values()), ())
    return markdown(["settings", *head], [[title, *cells.values()] for title, cells in lines.items()])


def setting(report: Report, row: Row) -> str:
    """Return the settings of a run. Older files keep them in several fields."""
    if "recipe" in row:
        return f"{report['experiment']}: {report['recipes'][row['recipe']]}"
    parts = [report.get("dataset"), *(row.get(field) for field in ("experiment", "size", "precision"))]
    settings = row.get("settings")
    parts += [f"`{settings if isinstance(settings, str) else json.dumps(settings)}`"] if settings else []
    return ", ".join(filter(None, parts))


def over_seeds(rows: Sequence[Row]) -> dict[str, str]:
    """Return the cell for each heading. Automata count exact runs; other models have an accuracy."""
    is_automaton = "right" in rows[0]
    exact = [row for row in rows if row.get("right") == 1]

    def values(field: str, rows: Sequence[Row] = rows) -> list[float]:
        return [row[field] for row in rows if row.get(field) is not None]

    def mean(field: str, digits: int = 0) -> str:
        return f"{statistics.mean(values(field)):,.{digits}f}" if values(field) else ""

    def median(field: str) -> str:
        return number(float(statistics.median(values(field, exact)))) if exact else ""

    def count(field: str) -> str:
        return str(values(field).count(1)) if values(field) else ""

    accuracies = values("hardened") or values("test_accuracy")
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return {
        "seeds": "" if is_automaton else str(len(rows)),
        "exact": f"{len(exact)} of {len(rows)}" if is_automaton else "",
        "stand": count("stands"),
        "heal": count("heals"),
        "updates until exact, median": median("updates"),
        "gates, median": median("gates"),
        "gates placed": mean("placed_gates"),
        "simplified": mean("simplified_gates"),
        "test accuracy": "" if is_automaton else f"{statistics.mean(accuracies):.4f} ± {spread:.4f}",
        "test accuracy, relaxed": mean("relaxed", 4),
        "skipped steps": number(sum(values("skipped_steps")) or None),
        "epochs": "" if is_automaton else mean("epochs"),
        "s per run": "" if is_automaton else mean("seconds"),
        "C, samples/s": mean("c_samples_per_second"),
    }


def profile(reports: Reports) -> str:
    """Return a table of the kernels that took at least 5 µs in a run of experiments/studies/profiles.py.

    Times of all launches of a kernel in a workload are added, and percentages are averaged with these times as weights.
    """
    lines = []
    kernels = grouped(all_rows(reports), lambda row: (row["work"], row["dtype"], row["kernel"]))
    for (work, dtype, kernel), rows in kernels.items():
        total = sum(map(time, rows))
        if total < 5:
            continue
        shares = []
        for unit in ("dram", "l2", "l1", "sm", "warps"):
            values = [row[unit] * time(row) for row in rows if row.get(unit) is not None]
            shares.append(f"{sum(values) / total:.0f}%" if values else "")
        longest = max(rows, key=time)
        waits = f"{longest['waits_for'].replace('_', ' ')}, {number(longest['waited_cycles'])}"
        cells = (
            str(len(rows)),
            number(total),
            *shares,
            number(longest.get("issued")),
            number(longest.get("registers")),
        )
        lines.append([f"{work}, {dtype}", f"`{kernel.removesuffix('_mosaic_gpu_kernel')}`", *cells, waits])
    head = ["workload", "kernel", "launches", "µs", "DRAM", "L2", "L1, shared", "busiest unit", "warps"]
    return markdown([*head, "issued per cycle", "registers", "waits for, cycles"], lines)


def accuracy(reports: Reports) -> str:
    """Return a table with one line per op and its backwards: the largest error as a percentage of the allowed error."""
    rows = all_rows(reports)
    columns = list(dict.fromkeys((row["implementation"], row["dtype"]) for row in rows))
    lines = []
    for op, of in sorted(grouped(rows, lambda row: row["op"].partition("_backward")[0]).items()):
        excesses = grouped(of, lambda row: (row["implementation"], row["dtype"]))
        worst = [max((row["excess"] for row in excesses.get(column, [])), default=None) for column in columns]
        lines.append([f"`{op}`", *map(percent, worst)])
    beyond = sum(row["excess"] > 1 for row in rows)
    count = f"{len(rows) - beyond} of {len(rows)} rows (op, dtype, implementation) are within the allowed error."
    if any("" in line for line in lines):
        count += " Empty cells are not measured yet."
    head = ["op and its backwards", *(f'`"{implementation}"`, {dtype}' for implementation, dtype in columns)]
    return f"{count}\n\n{markdown(head, lines)}"


def fuzz(reports: Reports) -> str:
    """Return a table with one line per run of `experiments.fuzz`."""
    lines = []
    for name, run in reports.items():
        counts = (run["cases"], run["refused"], len(run["failures"]))
        crashed = f"{len(run['crashes']):,}" if "crashes" in run else ""  # it would have ended the run
        cells = (f"{devices({name: run})}, {day(run)}", *map("{:,}".format, counts), crashed, number(run["seconds"]))
        lines.append([f"[seed {run['seed']}](results/{name}.json)", *cells])
    return markdown(["run", "device", "cases", "unsupported by a kernel", "failed", "crashed", "seconds"], lines)


SAYS_NOTHING = ("failed", "timed out")
"""Outcomes of the sanitizer that are inconclusive."""


def sanitizer(reports: Reports) -> str:
    """Return the newest conclusive outcome of each compute-sanitizer tool. Ops with equal outcomes share one line."""
    rows = all_rows(reports)
    tools = sorted({row["tool"] for row in rows})
    outcomes: dict[str, dict[str, str]] = {}
    for row in rows:
        of = outcomes.setdefault(row["op"], {})
        if of.get(row["tool"]) in (None, *SAYS_NOTHING) or row["outcome"] not in SAYS_NOTHING:
            of[row["tool"]] = row["outcome"]
    alike = grouped(sorted(outcomes), lambda op: tuple(outcomes[op].get(tool, "not run") for tool in tools))
    lines = [[", ".join(f"`{op}`" for op in ops), *of] for of, ops in alike.items()]
    return markdown(["ops and their gradients", *tools], lines)


def many_devices(reports: Reports) -> str:
    """Return a table with one line per step. It compares one device, a mesh of one, and a mesh of all.

    Each device has the same number of examples in all three.
    """
    (report,) = reports.values()
    lines = [
        [
            f"{step(row)}, {row['examples']:,} per device",
            number(row["alone"]),
            f"{row['mesh_of_one'] / row['alone'] - 1:+.1%}",
            f"{row['alone'] / row['mesh']:.1%}",
            f"{row['alone'] / row['mesh_overlapping']:.1%}",
        ]
        for row in report["rows"]
    ]
    efficiency = f"efficiency on {report['devices']} devices"
    head = ["step", "one device, µs", "cost of a mesh of one", efficiency, "efficiency with overlap"]
    return markdown(head, lines)


def step(row: Row) -> str:
    return row["work"].replace(" training step", "")


def communication(reports: Reports) -> str:
    """Return a table with one line per step: its communication, and the batch where that is a twentieth of the time."""
    compiled, *measured = reports.values()
    model = summing(compiled, *measured) if measured else None
    lines = []
    for plain, overlapping in zip(compiled["rows"][::2], compiled["rows"][1::2], strict=True):
        sums = ", ".join(f"{count} {kind}" for kind, count in plain["collectives"].items())
        parts = sum(overlapping["collectives"].values())
        meanwhile = f"{parts}, during {overlapping['kernels_meanwhile']} of {overlapping['kernels']} kernels"
        time_of_sum, batch = model(plain["work"]) if model else (None, None)
        cells = [f"{plain['bytes']:,}", sums, meanwhile, number(time_of_sum), "" if batch is None else f"{batch:,}"]
        lines.append([step(plain), *cells])
    head = ["step", "bytes", "collectives", "overlapping collectives", "sum over 8 devices, µs"]
    return markdown([*head, "batch for 95% efficiency"], lines)


def summing(compiled: Report, measured: Report) -> Callable[[str], tuple[float, int]]:
    """Return a model: workload -> microseconds of a sum over the compiled devices, and the batch for 95% efficiency.

    The model assumes that a step takes longer on the measured devices than on one device by the time of one sum. A line
    fitted to all steps gives the time per hop and the time per byte. A tree over n devices has log2 n hops, and each
    link moves 2 (n - 1)/n times the bytes. The time of a step on one device is linear in the batch, through the first
    and the last measured time. With only one measured time, it is proportional to the batch. At the returned batch, a
    step on one device takes 19 times as long as the sum.
    """
    sizes = {row["work"]: row["bytes"] for row in compiled["rows"]}
    rows = [row for row in measured["rows"] if row["work"] in sizes]
    longer = [row["mesh"] - row["alone"] for row in rows]
    a_byte, a_hop = statistics.linear_regression([sizes[row["work"]] for row in rows], longer)
    few, many = measured["devices"], compiled["devices"]
    hops, bytes_of_a_link = math.log2(many) / math.log2(few), (1 - 1 / many) / (1 - 1 / few)

    def model(work: str) -> tuple[float, int]:
        sum_time = a_hop * hops + a_byte * sizes[work] * bytes_of_a_link
        low, *_, high = [row for row in rows if row["work"] == work] * 2
        if low is not high:
            slope = (high["alone"] - low["alone"]) / (high["examples"] - low["examples"])
        else:
            slope = low["alone"] / low["examples"]
        fixed = low["alone"] - slope * low["examples"]
        return sum_time, many * max(1, math.ceil((19 * sum_time - fixed) / slope))

    return model


def computed_in(reports: Reports) -> str:
    """Return the table of `docs/computed_in.py`, which needs no run."""
    from computed_in import table

    return table()


# -------------------------------------------------------------------------------------------------------------- summary


class Family(NamedTuple):
    """A line of the summary."""

    name: str
    """Name of the workload in the table."""
    page: str
    """Page in docs/benchmarks/ with the tables of the family."""
    file: str
    """Name of the run's file."""
    work: str
    """Prefix of the workload and batch in the rows of the run."""
    why: str
    """Reason why jaxbp is no closer to the roofline, without figures."""

    def rows(self) -> dict[str, Row]:
        """Return the rows of the family by implementation."""
        named = ((f"{row['work']}, batch {row['batch']}", row) for row in all_rows(load(self.file)))
        return {row["implementation"]: row for name, row in named if name.startswith(self.work)}

    def speedups(self) -> tuple[float | None, float | None]:
        """Return the speedups over autodiff and over the best peer."""
        rows = self.rows()
        return speedup(library(rows), rows.get("autodiff")), speedup(library(rows), best_peer(rows))


FAMILIES = (
    Family("LeNet training step, batch 128", "lenet", "lenet", "lenet training step, batch 128",
           "Many short kernels run, and each takes longer to launch than to run."),
    Family("LeNet training step, batch 8192", "lenet", "lenet", "lenet training step, batch 8192",
           "Shared memory transposes or routes operands before the tensor cores read them."),
    Family("LayerNorm backward, 65536x1024, bfloat16", "norm", "layer_norm", "layer_norm_backward 65536x1024",
           "Warps wait at the sums of each row, and few CTAs fit a multiprocessor's registers."),
    Family("LayerNorm + Linear, 65536x(1024->1024), bfloat16", "norm", "layer_norm_linear",
           "layer_norm_linear fwd+bwd 65536x1024x1024", "Three matrix products run at the GPU's power limit."),
    Family("LayerNorm + Linear, 262144x(256->256), bfloat16", "norm", "layer_norm_linear",
           "layer_norm_linear fwd+bwd 262144x256x256",
           "Two warps per scheduler do not hide the instructions of the normalization."),
    Family("gates, forward and backward, 4096->8192", "logic", "gates", "gate_layer fwd+bwd 4096->8192",
           "Rows are read in random order, so the throughput of the L2 cache bounds the time, not device memory."),
    Family("logic network step, 6x8000, batch 128", "logic", "logic", "logic training step 6x8000, batch 128",
           "Kernels are short, and Adam passes over all logits."),
    Family("logic network step, 6x64000, batch 1024", "logic", "logic-large", "logic training step 6x64000, batch 1024",
           "The L2 cache bounds each layer, and the activations of all layers are written and read."),
    Family("convolutional gates, M for MNIST, batch 128", "logic", "logic-conv", "logic-conv training step mnist-m",
           "Instructions of the trees and their latency bound the time. The leaves' gradients are written and read "
           "again."),
    Family("automaton step, 16x16, 20 ticks, batch 2", "logic", "automaton", "automaton training step 16x16",
           "The layers of a tick run one after another. Each gathers from shared memory, and the cells are too few to "
           "hide the latency."),
    Family("convolution, gradient of the weights, conv2", "conv", "backwards", "conv2d_backward_weights conv2",
           "Images are transposed to the batch-last layout that the kernel reads."),
    Family("convolution, gradient of the bias, conv1", "conv", "backwards", "conv2d_backward_bias conv1",
           "The kernel needs a transpose. `None` takes XLA's sum, which does not."),
    Family("convolution, ReLU, pool backward, block 1", "conv", "backwards",
           "conv2d_relu_max_pool2d_backward block1",
           "Shared memory bounds the time, because every image is read once per position of a maximum."),
    Family("max-pool backward, overlapping windows", "conv", "backwards", "max_pool2d_backward overlapping",
           "The kernel needs transposes. `None` takes the formula, which does not."),
    Family("softmax and cross-entropy backward", "dense", "backwards", "softmax_cross_entropy_backward classes",
           "The launch takes longer than the computation. `None` takes the formula, which XLA fuses."),
    Family("ReLU backward, images", "pointwise", "backwards", "relu_backward relu1",
           "The kernel already moves bytes at the rate of a copy."),
)  # fmt: skip


def summary(reports: Reports) -> str:
    """Return a table with one line per family: times, speedups, % of roofline, and why jaxbp is not faster."""
    lines, measured = [], {}
    for family in FAMILIES:
        title = f"[{family.name}](benchmarks/{family.page}.md)"
        measured |= load(family.file)
        rows = family.rows()
        if not library(rows):
            lines.append([title, "not measured yet", *[""] * 5, family.why])
            continue
        autodiff, peer = rows.get("autodiff"), best_peer(rows)
        over_autodiff, over_peer = map(times, family.speedups())
        named = f"{microseconds(peer)} ({peer['implementation']})" if peer else ""
        cells = [microseconds(library(rows)), microseconds(autodiff), over_autodiff, named, over_peer]
        lines.append([title, *cells, floor(library(rows)), family.why])
    if not measured:
        return no_file(FAMILIES[0].file)
    speedups = "speedup over autodiff", "speedup over best peer"
    head = ["workload, µs", "jaxbp", "autodiff", speedups[0], "best peer", speedups[1], "% of roofline", WHY]
    days = sorted(map(day, measured.values()))
    dates = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    files = ", ".join(map(link, sorted(measured)))
    return f"{markdown(head, lines)}\n\nMeasured on one {devices(measured)}, {dates}. Files: {files}."


TABLES: dict[str, Callable[..., str]] = {
    "computed_in": computed_in,
    "dtypes": dtypes,
    "seeds": seeds,
    "many_devices": many_devices,
    "communication": communication,
    "sanitizer": sanitizer,
    "accuracy": accuracy,
    "fuzz": fuzz,
    "works": works,
    "variants": variants,
    "ratios": ratios,
    "training": training,
    "summary": summary,
    "profile": profile,
}
WITH_THEIR_SOURCES = ("computed_in", "fuzz", "training", "summary")
"""Tables that state where their figures come from."""


# --------------------------------------------------------------------------------------------------------------- charts

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
"""The background of a picture keeps it readable if the page's color scheme differs from the browser's. The outline of a
`value` has the background's color, so that grid lines do not cross the text."""

WIDTH, LEFT, RIGHT, BAR = 880, 375, 100, 15
"""Pixels: width of the picture, of the names, and of the space right of the longest bar; height of a bar."""

Bar = tuple[str, float, float, str]
"""Class of the bar, its two ends as shares of the axis, and the text after it."""


def speed() -> str:
    """Return the chart of the README: the speedups over autodiff and over the best peer for each family."""
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
    legend = {"first": "over JAX's autodiff", "second": "over best peer: PyTorch, Liger-Kernel, tokamax, torchlogix"}
    title = "Speedup of jaxbp (logarithmic axis; left of 1x, jaxbp is slower)"
    return chart(title, legend, {place(1): "1x"}, bars)


def floors() -> str:
    """Return the chart of the percentage of the roofline that each kernel reaches, at its worst and best size."""
    bars = {}
    for name, shares in sorted(kernel_shares().items(), key=lambda item: (-max(item[1]), item[0])):
        worst, best = min(shares), max(shares)
        words = " to ".join(dict.fromkeys((f"{worst:.0%}", f"{best:.0%}")))
        bars[name] = [[("first", 0.0, min(worst, 1.0), ""), ("pale", min(worst, 1.0), min(best, 1.0), words)]]
    title = "Percentage of the roofline that each kernel reaches (at 100%, the device allows no less time)"
    legend = {"first": "at the worst measured size", "pale": "at the best measured size"}
    return chart(title, legend, {share: f"{share:.0%}" for share in (0.25, 0.5, 0.75, 1.0)}, bars)


def kernel_shares() -> dict[str, list[float]]:
    """Return the share of the roofline at each measured size, for each kernel with its dtype and layout.

    If several runs measured the same size, the newest counts.
    """
    latest: dict[str, dict[tuple, float]] = {}
    for row in all_rows(load("*")):
        if row.get("implementation") == "pallas" and row.get("floor_fraction"):
            work, *rest = row["work"].removesuffix(f" in {row['dtype']}").split(", ")
            name = work.removesuffix(row["place"]).strip().replace("fwd+bwd", "and its gradient")
            options = [*rest, *([] if row["dtype"] == "float32" else [row["dtype"]])]
            place = row["place"], row["batch"], row["precision"]
            latest.setdefault(", ".join([name, *options]), {})[place] = row["floor_fraction"]
    return {name: list(places.values()) for name, places in latest.items()}


def chart(
    title: str, legend: Mapping[str, str], ticks: Mapping[float, str], bars: Mapping[str, Sequence[Sequence[Bar]]]
) -> str:
    """Return a picture of horizontal bars. Each name has lines, and each line has consecutive bars."""

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


if __name__ == "__main__":
    sys.exit(main())
