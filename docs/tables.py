"""Tables and charts for the book and the README, of the measured runs in docs/results/.

    python docs/tables.py            # writes them again
    python docs/tables.py --check    # names what is stale, and returns 1 if something is

A table stands in a page between two marks, of which the first says how it is made:

    <!-- table: works backwards op=conv2d_* -->
    ...
    <!-- end -->

Here `works` is a function of `TABLES`, and `backwards` the file docs/results/backwards.json. A file's name may be a
pattern. `op=` keeps the rows whose op matches; the rest are options of the function. A table without its file is one
line that says so. `computed_in` alone has no file: it is found in what JAX traces. `CHARTS` are pictures, made from the
same files.
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
"""In this order, the implementation that stands for the library in a summary: the first that the run has."""
HOST_BOUND = 0.05
"""Below this share of waiting for the device a time is the host's, as in the bench's own report."""
WHY = "why not more"
"""The heading of the summary's column of prose."""
REGION = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Mapping[str, Any]
Report = Mapping[str, Any]
Reports = Mapping[str, Report]
"""The name of a file -> its run, the oldest first."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python docs/tables.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only name what is stale")
    check = parser.parse_args(args).check
    found = stale()
    for path, text in found.items():
        print(path.relative_to(DOCS.parent))
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


def stale() -> dict[Path, str]:
    """File -> what it ought to contain, for the pages and charts that do not."""
    wanted = {page: render(page.read_text(encoding="utf-8"), page) for page in pages()}
    wanted |= {DOCS / "images" / f"{name}.svg": chart() for name, chart in CHARTS.items()}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def pages() -> list[Path]:
    """What may have tables: README and CHANGELOG do not change, and neither does the lab's diary."""
    return [DOCS.parent / "README.md", *(path for path in sorted(DOCS.rglob("*.md")) if not is_diary(path))]


def is_diary(page: Path) -> bool:
    return page.is_relative_to(DOCS / "lab") or page.is_relative_to(DOCS / "formulas")


def render(text: str, page: Path) -> str:
    """The page with its tables made again. Their links begin at `DOCS`, and those of the page where it is."""
    to_docs = os.path.relpath(DOCS, page.parent)

    def table(match):
        made = made_by(*match[2].split())
        made = made if to_docs == "." else made.replace("](", f"]({to_docs}/")
        return f"{match[1]}\n{made}\n\n{match[3]}"

    return REGION.sub(table, text)


def made_by(kind: str, *words: str) -> str:
    """Return the table that a mark asks for, with its sources below."""
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
    """The runs of the files whose names match."""
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
    """Work and its batch -> its rows by implementation."""
    for (work, batch), group in itertools.groupby(rows, lambda row: (row["work"], row.get("batch"))):
        title = re.sub(r"^(\w+)", r"`\1`", work) if "_" in work.split()[0] else work
        named = {row["implementation"]: row for row in group}
        # The place of a norm, say 65536x1024, begins with its batch.
        yield title if batch is None or f"{batch}x" in work else f"{title}, batch {batch:,}", named


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows of each key, in the order in which the keys come first."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def time(row: Row | None) -> float | None:
    return row.get("microseconds") if row else None


def library(rows: Mapping[str, Row]) -> Row | None:
    """The library's row: that of the preferred implementation."""
    return next((rows[name] for name in PREFERRED if time(rows.get(name)) is not None), None)


def best_peer(rows: Mapping[str, Row]) -> Row | None:
    return min((row for row in rows.values() if row.get("peer") and time(row) is not None), key=time, default=None)


# ---------------------------------------------------------------------------------------------------------------- cells


def number(value: float | None) -> str:
    """Three digits at least, and no more than are whole."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2g}"


def microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    if row.get("failed"):
        return "does not take it" if row["failed"].startswith("NotImplementedError") else "failed"
    return number(time(row)) + "*" * waits_for_host(row)


def waits_for_host(row: Row) -> bool:
    return row.get("host_waited") is not None and row["host_waited"] < HOST_BOUND


def speedup(row: Row | None, over: Row | None) -> float | None:
    """How many times as fast `row` is as `over`."""
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
    """What a call needs beyond its arguments and results."""
    return mebibytes(row.get("temporary_bytes") if row else None)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, without the columns that have nothing in any line."""
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines)]
    rule = ["---" if heading in (head[0], WHY) else "---:" for heading in head]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in (head, rule, *lines))


def link(name: str) -> str:
    return f"[{name}.json](results/{name}.json)"


def provenance(name: str, report: Report) -> str:
    """Below a table: where, when and by which command it was measured, and how far the results are from float64."""
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
        where += f"; in this run a copy moved {rate(report['copy_bytes_per_second'], 'B/s')}"
        where += f" and a matrix product did {rate(operations, 'FLOP/s')}"
    parts = [f"{link(name)}: {where}.", report.get("note", "")]
    compared = [row for row in rows if "work" in row and row.get("error") is not None]
    errors = grouped(compared, lambda row: row.get("peer") or row["implementation"])
    largest = [f"{name} {max(row['error'] for row in of):.1e}" for name, of in errors.items()]
    if largest:
        parts.append(f"Largest error of a result against float64: {', '.join(largest)}.")
    if any(map(waits_for_host, rows)):
        parts.append("\\*: the device waited for the host, so its own time is less.")
    return "\n".join(["", " ".join(filter(None, parts)), "", f"    {command(report)}"])


def day(report: Report) -> str:
    return str(report["date"])[:10]


def command(report: Report) -> str:
    """Return the command of a run. Two scripts have moved since the run, and others are in the history alone."""
    moved = re.sub(r"docs/lab/(many_devices|profiles)\.py", r"-m experiments.studies.\1", report["command"])
    return f"git checkout {report['commit']} && {moved}" if "docs/lab/" in moved else moved


# --------------------------------------------------------------------------------------------------------------- tables

COLUMNS: dict[str, tuple[str, Callable[[Mapping[str, Row]], str]]] = {
    "speedup": ("ours over autodiff", lambda rows: times(speedup(library(rows), rows.get("autodiff")))),
    "peer": ("ours over the best peer", lambda rows: times(speedup(library(rows), best_peer(rows)))),
    "floor": ("ours, % of the floor", lambda rows: floor(library(rows))),
    "memory": ("temporaries, MiB", lambda rows: temporaries(library(rows))),
    "peer_memory": ("the best peer's, MiB", lambda rows: temporaries(best_peer(rows))),
    "autodiff_memory": ("autodiff's, MiB", lambda rows: temporaries(rows.get("autodiff"))),
}
"""What `works` can show beside the times: a heading, and the cell of a work's rows."""


def works(reports: Reports, columns: str = "speedup,peer,floor") -> str:
    """A line for each work and batch, with a column of microseconds for each implementation of ours."""
    rows = all_rows(reports)
    implementations = list(dict.fromkeys(row["implementation"] for row in rows if not row.get("peer")))
    shown = [COLUMNS[column] for column in columns.split(",")]
    head = ["work, µs", *(f"`{name}`" for name in implementations), *(heading for heading, _ in shown)]
    lines = [
        [title, *(microseconds(group.get(name)) for name in implementations), *(cell(group) for _, cell in shown)]
        for title, group in works_of(rows)
    ]
    return markdown(head, lines)


def variants(reports: Reports) -> str:
    """A line for each implementation and each variant of a peer, with a column of microseconds for each work."""
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
    """The works where the time of `None` by that of autodiff is outside of a band, and how many are inside."""
    found = [(title, rows.get("None"), rows.get("autodiff")) for title, rows in works_of(all_rows(reports))]
    timed = [(time(a) / time(b), title, a, b) for title, a, b in found if time(a) and time(b)]
    outside = sorted((line for line in timed if not float(low) <= line[0] <= float(high)), key=lambda line: -line[0])
    band = " and ".join([f"at least {low}x"] * (float(low) > 0) + [f"at most {high}x"] * math.isfinite(float(high)))
    inside = f"{len(timed) - len(outside)} of {len(timed)} works"
    count = f"`None` takes {band} as long as `autodiff` in {inside}"
    lines = [[title, microseconds(a), microseconds(b), times(value)] for value, title, a, b in outside]
    table = markdown(["work, µs", "`None`", "`autodiff`", "`None` over `autodiff`"], lines)
    return f"{count}; the others:\n\n{table}" if outside else f"{count}."


def dtypes(reports: Reports) -> str:
    """A line for each work and batch in each dtype: its time and memory beside those in float32 of the same run."""
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
    head = ["step", "computed in", "µs", "over float32", "MiB", "of float32's", "over the best peer"]
    return markdown(head, lines)


def row_bytes(row: Row | None) -> int | None:
    """Arguments, results and temporaries."""
    if row is None or row.get("temporary_bytes") is None:
        return None
    return row["argument_bytes"] + row["result_bytes"] + row["temporary_bytes"]


def training(reports: Reports, experiment: str) -> str:
    """A line for each run of this experiment by `experiments.train`."""
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
    return f"{markdown(head, lines)}\n\nA run each: {devices(runs)}. Training is without evaluation and compilation."


def devices(reports: Reports) -> str:
    return "; ".join(dict.fromkeys(f"{run['device']}, jax {run['versions']['jax']}" for run in reports.values()))


def seeds(reports: Reports) -> str:
    """A line for each setting of a study over seeds. Columns that no line has are left out."""
    lines = {}
    for report in reports.values():
        recipes = list(report.get("recipes", ()))
        runs = [row for row in report["rows"] if not row.get("failed")]
        runs.sort(key=lambda row, recipes=recipes: recipes.index(row["recipe"]) if recipes else 0)
        for title, rows in grouped(runs, lambda row, report=report: setting(report, row)).items():
            lines[title] = over_seeds(rows)
    head = next(iter(lines.values()), ())
    return markdown(["trained", *head], [[title, *cells.values()] for title, cells in lines.items()])


def setting(report: Report, row: Row) -> str:
    """Return what was trained. Older files say it in several fields."""
    if "recipe" in row:
        return f"{report['experiment']}: {report['recipes'][row['recipe']]}"
    parts = [report.get("dataset"), *(row.get(field) for field in ("experiment", "size", "precision"))]
    settings = row.get("settings")
    parts += [f"`{settings if isinstance(settings, str) else json.dumps(settings)}`"] if settings else []
    return ", ".join(filter(None, parts))


def over_seeds(rows: Sequence[Row]) -> dict[str, str]:
    """Return the cell below each heading. An automaton comes out exact or not; other models have an accuracy."""
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
        "s a run": "" if is_automaton else mean("seconds"),
        "C, samples/s": mean("c_samples_per_second"),
    }


def profile(reports: Reports) -> str:
    """A line for each kernel that took at least 5 µs in a run of experiments/studies/profiles.py, with how busy it kept
    the device. Launches of one kernel in one work are added up, and their shares weighed by their times."""
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
    head = ["work", "kernel", "launches", "µs", "DRAM", "L2", "L1, shared", "busiest unit", "warps", "issued a cycle"]
    return markdown([*head, "registers", "waits for, cycles"], lines)


def accuracy(reports: Reports) -> str:
    """A line for each op with its backwards: what its worst place in all these files takes of what is allowed."""
    rows = all_rows(reports)
    columns = list(dict.fromkeys((row["implementation"], row["dtype"]) for row in rows))
    lines = []
    for op, of in sorted(grouped(rows, lambda row: row["op"].partition("_backward")[0]).items()):
        excesses = grouped(of, lambda row: (row["implementation"], row["dtype"]))
        worst = [max((row["excess"] for row in excesses.get(column, [])), default=None) for column in columns]
        lines.append([f"`{op}`", *map(percent, worst)])
    beyond = sum(row["excess"] > 1 for row in rows)
    count = f"{len(rows) - beyond} of {len(rows)} rows (op, dtype, implementation) are within what is allowed."
    if any("" in line for line in lines):
        count += " An empty cell is not measured yet."
    head = ["op with its backwards", *(f'`"{implementation}"`, {dtype}' for implementation, dtype in columns)]
    return f"{count}\n\n{markdown(head, lines)}"


def fuzz(reports: Reports) -> str:
    """A line for each run of `experiments.fuzz`."""
    lines = []
    for name, run in reports.items():
        counts = (run["cases"], run["refused"], len(run["failures"]))
        crashed = f"{len(run['crashes']):,}" if "crashes" in run else ""  # it would have ended the run
        cells = (f"{devices({name: run})}, {day(run)}", *map("{:,}".format, counts), crashed, number(run["seconds"]))
        lines.append([f"[seed {run['seed']}](results/{name}.json)", *cells])
    return markdown(["cases", "device", "drawn", "no kernel takes", "failed", "crashed", "seconds"], lines)


SAYS_NOTHING = ("failed", "timed out")
"""Outcomes of the sanitizer after which nothing is known of the kernels."""


def sanitizer(reports: Reports) -> str:
    """What each tool of compute-sanitizer said last of each op. The ops with the same answers are one line."""
    rows = all_rows(reports)
    tools = sorted({row["tool"] for row in rows})
    outcomes: dict[str, dict[str, str]] = {}
    for row in rows:
        of = outcomes.setdefault(row["op"], {})
        if of.get(row["tool"]) in (None, *SAYS_NOTHING) or row["outcome"] not in SAYS_NOTHING:
            of[row["tool"]] = row["outcome"]
    alike = grouped(sorted(outcomes), lambda op: tuple(outcomes[op].get(tool, "not run") for tool in tools))
    lines = [[", ".join(f"`{op}`" for op in ops), *of] for of, ops in alike.items()]
    return markdown(["ops, each with its gradients", *tools], lines)


def many_devices(reports: Reports) -> str:
    """A line for each step with as many examples per device: on one, on a mesh of one, and on a mesh of all."""
    (report,) = reports.values()
    lines = [
        [
            f"{step(row)}, {row['examples']:,} a device",
            number(row["alone"]),
            f"{row['mesh_of_one'] / row['alone'] - 1:+.1%}",
            f"{row['alone'] / row['mesh']:.1%}",
            f"{row['alone'] / row['mesh_overlapping']:.1%}",
        ]
        for row in report["rows"]
    ]
    return markdown(
        ["step", "one device, µs", "mesh of one", f"efficiency on {report['devices']}", "with overlap"], lines
    )


def step(row: Row) -> str:
    return row["work"].replace(" training step", "")


def communication(reports: Reports) -> str:
    """A line for each step: what it communicates, and from which batch on that is a twentieth of its time."""
    compiled, *measured = reports.values()
    model = summing(compiled, *measured) if measured else None
    lines = []
    for plain, overlapping in zip(compiled["rows"][::2], compiled["rows"][1::2], strict=True):
        sums = ", ".join(f"{count} {kind}" for kind, count in plain["collectives"].items())
        parts = sum(overlapping["collectives"].values())
        meanwhile = f"{parts}, {overlapping['kernels_meanwhile']} of {overlapping['kernels']} kernels meanwhile"
        time_of_sum, batch = model(plain["work"]) if model else (None, None)
        cells = [f"{plain['bytes']:,}", sums, meanwhile, number(time_of_sum), "" if batch is None else f"{batch:,}"]
        lines.append([step(plain), *cells])
    return markdown(["step", "bytes", "collectives", "overlapping", "a sum over 8, µs", "batch for 95%"], lines)


def summing(compiled: Report, measured: Report) -> Callable[[str], tuple[float, int]]:
    """Work -> the microseconds that the sum over the compiled devices would take, and the batch of which it is 1/19.

    A step takes longer on the measured devices than on one by the time of a sum. A line through all steps says how much
    of it is a hop's, and how much a byte's. A tree over n devices has log2 n times the hops, and each link moves
    2 (n - 1)/n times the bytes. A step's time is a line through its times alone, or proportional to one.
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
    """Not from a run: from what JAX traces."""
    from computed_in import table

    return table()


# -------------------------------------------------------------------------------------------------------------- summary


class Family(NamedTuple):
    """A line of the table that answers "is it fast?"."""

    name: str
    """The workload, for people."""
    page: str
    """The page in docs/benchmarks/ with the family's own tables."""
    file: str
    """The run."""
    work: str
    """The workload and the batch, as in the rows of the run: they begin so."""
    why: str
    """The reason why it is no nearer to its floor, without figures."""

    def rows(self) -> dict[str, Row]:
        """Its rows by implementation."""
        named = ((f"{row['work']}, batch {row['batch']}", row) for row in all_rows(load(self.file)))
        return {row["implementation"]: row for name, row in named if name.startswith(self.work)}

    def speedups(self) -> tuple[float | None, float | None]:
        """How many times as fast as autodiff, and as the best peer."""
        rows = self.rows()
        return speedup(library(rows), rows.get("autodiff")), speedup(library(rows), best_peer(rows))


FAMILIES = (
    Family("LeNet training step, batch 128", "lenet", "lenet", "lenet training step, batch 128",
           "many short launches, each of which takes longer to start than to run"),
    Family("LeNet training step, batch 8192", "lenet", "lenet", "lenet training step, batch 8192",
           "operands pass through shared memory, to be transposed or routed, before the tensor cores read them"),
    Family("LayerNorm backward, 65536x1024, bfloat16", "norm", "layer_norm", "layer_norm_backward 65536x1024",
           "warps wait at the sums of a row; few programs fit a multiprocessor's registers"),
    Family("LayerNorm + Linear, 65536x(1024->1024), bfloat16", "norm", "layer_norm_linear",
           "layer_norm_linear fwd+bwd 65536x1024x1024", "three matrix products at the GPU's power limit"),
    Family("LayerNorm + Linear, 262144x(256->256), bfloat16", "norm", "layer_norm_linear",
           "layer_norm_linear fwd+bwd 262144x256x256",
           "instructions of the normalisation, which two warps a scheduler do not hide"),
    Family("gates, forward and backward, 4096->8192", "logic", "gates", "gate_layer fwd+bwd 4096->8192",
           "rows are read in random order: the L2 cache's throughput, not memory's, bounds it"),
    Family("logic network step, 6x8000, batch 128", "logic", "logic", "logic training step 6x8000, batch 128",
           "short launches, and Adam's pass over the logits"),
    Family("logic network step, 6x64000, batch 1024", "logic", "logic-large", "logic training step 6x64000, batch 1024",
           "the L2 cache, as for one layer; activations of all layers are written and read"),
    Family("convolutional gates, M for MNIST, batch 128", "logic", "logic-conv", "logic-conv training step mnist-m",
           "instructions of the trees and their latency; the gradients of leaves are written and read again"),
    Family("automaton step, 16x16, 20 ticks, batch 2", "logic", "automaton", "automaton training step 16x16",
           "layers of a tick wait for one another, and few cells hide it: gathers from shared memory, one after the "
           "other"),
    Family("convolution, gradient of the weights, conv2", "conv", "backwards", "conv2d_backward_weights conv2",
           "transposes to the batch-last layout that the kernel reads"),
    Family("convolution, gradient of the bias, conv1", "conv", "backwards", "conv2d_backward_bias conv1",
           "a transpose that the library's sum does not need; `None` takes the library's"),
    Family("convolution, ReLU, pool backward, block 1", "conv", "backwards",
           "conv2d_relu_max_pool2d_backward block1",
           "shared memory: every image is read once for each place of a maximum"),
    Family("max-pool backward, overlapping windows", "conv", "backwards", "max_pool2d_backward overlapping",
           "transposes around the kernel; `None` takes the formula, which needs none"),
    Family("softmax and cross-entropy backward", "dense", "backwards", "softmax_cross_entropy_backward classes",
           "a launch takes longer than the work; `None` takes the formula, which XLA fuses"),
    Family("ReLU backward, images", "pointwise", "backwards", "relu_backward relu1",
           "nothing to win: it moves bytes at the rate of a copy"),
)  # fmt: skip


def summary(reports: Reports) -> str:
    """A line a family: ours, autodiff, the best peer, ratios, per cent of the floor, and why not more."""
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
    head = ["work, µs", "ours", "autodiff", "over autodiff", "best peer", "over it", "% of the floor", WHY]
    days = sorted(map(day, measured.values()))
    dates = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    files = ", ".join(map(link, sorted(measured)))
    return f"{markdown(head, lines)}\n\nMeasured on one {devices(measured)}, {dates}: {files}."


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
"""The tables that say by themselves where their figures come from."""


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
"""Pixels: of the picture, of its names and of what is right of the longest bar, and the height of a bar."""

Bar = tuple[str, float, float, str]
"""The class of the bar, its two ends as shares of the axis, and the words after it."""


def speed() -> str:
    """The chart of the README: times as fast as autodiff and as the best peer, for each family."""
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
    legend = {"first": "JAX's autodiff", "second": "the best peer: PyTorch, Liger-Kernel, tokamax, torchlogix"}
    return chart("How many times as fast as ... (logarithmic; 1x is as fast)", legend, {place(1): "1x"}, bars)


def floors() -> str:
    """The chart of strong and weak points: what share of its floor each kernel reaches, over all places of a run."""
    bars = {}
    for name, shares in sorted(kernel_shares().items(), key=lambda item: (-max(item[1]), item[0])):
        worst, best = min(shares), max(shares)
        words = " to ".join(dict.fromkeys((f"{worst:.0%}", f"{best:.0%}")))
        bars[name] = [[("first", 0.0, min(worst, 1.0), ""), ("pale", min(worst, 1.0), min(best, 1.0), words)]]
    title = "How near to the least time that the device could take (100%: no faster is possible)"
    legend = {"first": "at the size where it is worst", "pale": "where it is best"}
    return chart(title, legend, {share: f"{share:.0%}" for share in (0.25, 0.5, 0.75, 1.0)}, bars)


def kernel_shares() -> dict[str, list[float]]:
    """What runs kernels, with its dtype and layout -> its share of the floor at each place and batch.

    Of several runs of the same place the last counts.
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
    """Draw horizontal bars. Each name has lines, one below the other, and each line has bars, one after the other."""

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


CHARTS: dict[str, Callable[[], str]] = {"speed": speed, "floor": floors}


if __name__ == "__main__":
    sys.exit(main())
