"""Tables and charts for the book and the README, of the measured runs in docs/results/.

    python docs/tables.py            # writes them again
    python docs/tables.py --check    # names what is stale, and returns 1 if something is

A table stands in a page between two marks, of which the first says how it is made:

    <!-- table: works backwards op=conv2d_* -->
    ...
    <!-- end -->

Here `works` is a function of `TABLES`, `backwards` the file docs/results/backwards.json, and the rest the function's
options: for most of them fields of a row with patterns, as of file names. A table whose file is absent is one line that
says so. `computed_in` alone is of no run: it is found in what JAX traces. `CHARTS` are pictures, made from
the same files.
"""

import argparse
import dataclasses
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
from typing import Any

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
    """The page with its tables made again."""

    def table(match):
        kind, *options = match[2].split()
        files = [option for option in options if "=" not in option]
        named = dict(option.split("=", 1) for option in options if "=" in option)
        return f"{match[1]}\n{TABLES[kind](page, *files, **named)}\n\n{match[3]}"

    return REGION.sub(table, text)


# -------------------------------------------------------------------------------------------------------------- results


def load(name: str) -> Report | None:
    """The run of this name, or None where nobody has measured it."""
    path = DOCS / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def no_rows(name: str) -> str:
    return f"*Not measured yet: `docs/results/{name}.json` has no such rows.*"


def no_file(name: str) -> str:
    return f"*Not measured yet: there is no `docs/results/{name}.json`.*"


def rows_of(report: Report | None, where: Mapping[str, str]) -> list[Row]:
    """The rows whose fields match the patterns."""
    rows = report["rows"] if report else []
    return [row for row in rows if all(fnmatch.fnmatchcase(str(row.get(key)), where[key]) for key in where)]


def works_of(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Row]]]:
    """Work and its batch -> its rows by implementation."""
    for (work, batch), group in itertools.groupby(rows, lambda row: (row["work"], row.get("batch"))):
        title = re.sub(r"^(\w+)", r"`\1`", work) if "_" in work.split()[0] else work
        named = {row["implementation"]: row for row in group}
        # The place of a norm, say 65536x1024, begins with its batch.
        yield title if batch is None or f"{batch}x" in work else f"{title}, batch {batch:,}", named


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
    waited = row.get("host_waited")
    return number(time(row)) + ("*" if waited is not None and waited < HOST_BOUND else "")


def ratio(row: Row | None, over: Row | None) -> str:
    """How many times as fast `row` is as `over`."""
    return times(time(over) / time(row)) if time(row) and time(over) else ""


def times(value: float | None) -> str:
    return (
        "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x" if value < 100 else f"{value:.0f}x"
    )


def rate(value: float, unit: str) -> str:
    return f"{value / 1e12:.3g} T{unit}" if value >= 1e11 else f"{value / 1e9:.3g} G{unit}"


def floor(row: Row | None) -> str:
    fraction = row.get("floor_fraction") if row else None
    return "" if fraction is None else f"{min(fraction, 1.0):.0%}"


def mebibytes(row: Row | None) -> str:
    """What a call needs beyond its arguments and results."""
    size = row.get("temporary_bytes") if row else None
    return "" if size is None else number(size / 2**20)


def seconds(row: Row | None) -> str:
    return number(row.get("compile_seconds")) if row else ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, without the columns that have nothing in any line."""
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines)]
    rule = ["---" if heading in (head[0], WHY) else "---:" for heading in head]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in (head, rule, *lines))


def provenance(page: Path, name: str, report: Report, rows: Sequence[Row] = ()) -> str:
    """Below a table: where, when and by which command it was measured, and how far the results are from float64."""
    versions = report.get("versions", {})
    shown = ["jax", *(name for name in versions if name not in ("python", "jax", "jaxlib", "jaxbp", "numpy"))]
    libraries = ", ".join(f"{library} {versions[library]}" for library in shown if library in versions)
    commit = f", commit {report['commit'][:10]}" if report.get("commit") else ""
    where = f"{report['device']}, {libraries}, {str(report['date'])[:10]}{commit}"
    where += "".join(f"; {report[of]}" for of in ("processor", "compiler") if of in report)
    if "dtype" in report:
        where += f"; {report['dtype']}, {report.get('precision', 'default')} precision"
    if "copy_bytes_per_second" in report:
        operations = report["operations_per_second"][report["precision"]]
        where += f"; in this run a copy moved {rate(report['copy_bytes_per_second'], 'B/s')}"
        where += f" and a matrix product did {rate(operations, 'FLOP/s')}"
    link = os.path.relpath(DOCS / "results" / f"{name}.json", page.parent)
    starred = any(microseconds(row).endswith("*") for row in rows)
    parts = [
        f"[{name}.json]({link}): {where}.",
        report.get("note", ""),
        errors(rows),
        "\\*: the device waited for the host, so its own time is less." if starred else "",
    ]
    return "\n".join(["", " ".join(part for part in parts if part), "", f"    {report['command']}"])


def errors(rows: Sequence[Row]) -> str:
    """The largest of each implementation's and each peer's."""
    largest: dict[str, float] = {}
    for row in rows:
        if row.get("error") is not None:
            name = row.get("peer") or row["implementation"]
            largest[name] = max(largest.get(name, 0), row["error"])
    listed = ", ".join(f"{name} {error:.1e}" for name, error in largest.items())
    return f"Largest error of a result against float64: {listed}." if listed else ""


# --------------------------------------------------------------------------------------------------------------- tables

COLUMNS: dict[str, tuple[str, Callable[[Mapping[str, Row]], str]]] = {
    "speedup": ("ours over autodiff", lambda rows: ratio(library(rows), rows.get("autodiff"))),
    "peer": ("ours over the best peer", lambda rows: ratio(library(rows), best_peer(rows))),
    "floor": ("ours, % of the floor", lambda rows: floor(library(rows))),
    "memory": ("temporaries, MiB", lambda rows: mebibytes(library(rows))),
    "peer_memory": ("the best peer's, MiB", lambda rows: mebibytes(best_peer(rows))),
    "autodiff_memory": ("autodiff's, MiB", lambda rows: mebibytes(rows.get("autodiff"))),
    "compilation": ("compilation, s", lambda rows: seconds(library(rows))),
}
"""What `works` can show beside the times: a heading, and the cell of a work's rows."""


def works(page: Path, name: str, columns: str = "speedup,peer,floor", **where: str) -> str:
    """A line for each work and batch, with a column of microseconds for each implementation of ours."""
    if (report := load(name)) is None:
        return no_file(name)
    if not (rows := rows_of(report, where)):
        return no_rows(name)
    implementations = list(dict.fromkeys(row["implementation"] for row in rows if not row.get("peer")))
    shown = [COLUMNS[column] for column in columns.split(",")]
    head = ["work, µs", *(f"`{name}`" for name in implementations), *(heading for heading, _ in shown)]
    lines = [
        [title, *(microseconds(group.get(name)) for name in implementations), *(cell(group) for _, cell in shown)]
        for title, group in works_of(rows)
    ]
    return markdown(head, lines) + "\n" + provenance(page, name, report, rows)


def variants(page: Path, name: str, **where: str) -> str:
    """A line for each implementation and each variant of a peer, with a column of microseconds for each work."""
    if (report := load(name)) is None:
        return no_file(name)
    if not (rows := rows_of(report, where)):
        return no_rows(name)
    found = list(works_of(rows))
    implementations = dict.fromkeys(row["implementation"] for row in rows)
    peers = {row["implementation"] for row in rows if row.get("peer")}
    fastest = [min((time(row) for row in group.values() if time(row) is not None), default=None) for _, group in found]
    lines = []
    for implementation in implementations:
        cells = [microseconds(group.get(implementation)) for _, group in found]
        best = [
            time(group.get(implementation)) == least is not None
            for (_, group), least in zip(found, fastest, strict=True)
        ]
        cells = [f"**{cell}**" if is_best else cell for cell, is_best in zip(cells, best, strict=True)]
        lines.append([implementation if implementation in peers else f"`{implementation}`", *cells])
    return markdown(["µs", *(title for title, _ in found)], lines) + "\n" + provenance(page, name, report, rows)


def ratios(page: Path, name: str, of: str = "None", over: str = "autodiff", low: str = "0", high: str = "inf") -> str:
    """The works whose ratio of times, `of` by `over`, is outside of a band, and how many are inside."""
    if (report := load(name)) is None:
        return no_file(name)
    found = [(title, rows.get(of), rows.get(over)) for title, rows in works_of(report["rows"])]
    timed = [(time(a) / time(b), title, a, b) for title, a, b in found if time(a) and time(b)]
    outside = sorted((line for line in timed if not float(low) <= line[0] <= float(high)), key=lambda line: -line[0])
    band = " and ".join([f"at least {low}x"] * (float(low) > 0) + [f"at most {high}x"] * math.isfinite(float(high)))
    inside = f"{len(timed) - len(outside)} of {len(timed)} works"
    count = f"`{of}` takes {band} as long as `{over}` in {inside}"
    lines = [[title, microseconds(a), microseconds(b), times(value)] for value, title, a, b in outside]
    table = markdown(["work, µs", f"`{of}`", f"`{over}`", f"`{of}` over `{over}`"], lines)
    text = f"{count}; the others:\n\n{table}" if outside else f"{count}."
    return text + "\n" + provenance(page, name, report, report["rows"])


def training(page: Path, pattern: str, experiment: str) -> str:
    """A line for each run of this experiment by `experiments.train` among the files whose names match."""
    paths = sorted((DOCS / "results").glob(f"{pattern}.json"))
    reports = {path: load(path.stem) for path in paths}
    reports = {path: run for path, run in reports.items() if f"experiments.train {experiment}" in run["command"]}
    if not reports:
        return no_file(pattern)
    lines = []
    for path, report in reports.items():
        link = os.path.relpath(path, page.parent)
        command = re.sub(r"^.*experiments\.train ", "", report["command"])
        command = re.sub(r" ?--(?:json|data-dir|run-dir)[ =]\S+", "", command)
        lines.append([f"[`{command}`]({link})", *_training_cells(report)])
    head = [
        "`experiments.train`",
        "test accuracy",
        "epochs",
        "training, s",
        "evaluation, s",
        "compilation, s",
        "images/s",
    ]
    devices = dict.fromkeys(f"{r['device']}, jax {r['versions']['jax']}" for r in reports.values())
    return (
        f"{markdown(head, lines)}\n\nA run each: {'; '.join(devices)}. Training is without evaluation and compilation."
    )


def _training_cells(report: Report) -> list[str]:
    images = report.get("images_per_second")
    return [
        f"{report['test_accuracy']:.4f}",
        str(report["epochs"]),
        *(number(report.get(f"{part}_seconds")) for part in ("train", "evaluation", "compile")),
        "" if images is None else f"{images:,.0f}",
    ]


def hardening(page: Path, *names: str) -> str:
    """A line for each recipe of a study: how many seeds came out exact, and whether they stay so."""
    reports = {name: report for name in names if (report := load(name))}
    if not reports:
        return no_file(names[0])
    lines = []
    for report in reports.values():
        for recipe, title in report["recipes"].items():
            runs = [run for run in report["runs"] if run["recipe"] == recipe]
            exact = [run for run in runs if run["right"] == 1]
            if runs:
                updates = sorted(run["updates"] for run in exact)
                cells = (
                    f"{len(exact)} of {len(runs)}",
                    "" if "stands" not in runs[0] else str(sum(run["stands"] == 1 for run in runs)),
                    "" if "heals" not in runs[0] else str(sum(run["heals"] == 1 for run in runs)),
                    number(float(statistics.median(updates))) if updates else "",
                    number(float(statistics.median(run["gates"] for run in exact))) if exact else "",
                )
                lines.append([f"{report['experiment']}: {title}", *cells])
    head = ["recipe", "exact", "stand", "heal", "updates until exact, median", "gates, median"]
    return "\n\n".join([markdown(head, lines), *(provenance(page, name, reports[name]) for name in reports)])


def profile(page: Path, name: str, least: str = "5", **where: str) -> str:
    """A line for each kernel that took at least so many microseconds in a run of docs/lab/profiles.py, with how busy it
    kept the device. Launches of one kernel in one work are added up, and their shares weighed by their times."""
    if (report := load(name)) is None:
        return no_file(name)
    shares = ("dram", "l2", "l1", "sm", "warps")
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows_of(report, where):
        groups.setdefault((row["work"], row["dtype"], row["kernel"].removesuffix("_mosaic_gpu_kernel")), []).append(row)
    lines = []
    for (work, dtype, kernel), rows in groups.items():
        total = sum(row["microseconds"] for row in rows)
        longest = max(rows, key=lambda row: row["microseconds"])
        if total < float(least):
            continue

        def mean(key, rows=rows, total=total):
            values = [(row[key], row["microseconds"]) for row in rows if row.get(key) is not None]
            return f"{sum(share * us for share, us in values) / total:.0f}%" if values else ""

        waits = f"{longest['waits_for'].replace('_', ' ')}, {number(longest['waited_cycles'])}"
        cells = (str(len(rows)), number(total), *map(mean, shares), number(longest.get("issued")))
        lines.append([f"{work}, {dtype}", f"`{kernel}`", *cells, number(longest.get("registers")), waits])
    head = ["work", "kernel", "launches", "µs", "DRAM", "L2", "L1, shared", "busiest unit", "warps", "issued a cycle"]
    return markdown([*head, "registers", "waits for, cycles"], lines) + "\n" + provenance(page, name, report)


# -------------------------------------------------------------------------------------------------------------- summary


@dataclasses.dataclass(frozen=True)
class Family:
    """A line of the table that answers "is it fast?".

    Attributes:
      name: of what was timed.
      page: below docs/benchmarks/, with the family's own tables.
      files: runs, in which a figure is looked for in this order.
      where: the rows, as in the tables.
      why: what keeps it from its floor, without figures.
    """

    name: str
    page: str
    files: tuple[str, ...]
    where: Mapping[str, str]
    why: str

    def runs(self) -> list[dict[str, Row]]:
        """The rows of each run that has them, by implementation."""
        found = ({row["implementation"]: row for row in rows_of(load(name), self.where)} for name in self.files)
        return [rows for rows in found if library(rows)]

    def speedups(self) -> tuple[float | None, float | None]:
        """How many times as fast as autodiff, and as the best peer: each in the first run that has both."""

        def first(rival):
            pairs = ((time(rival(rows)), time(library(rows))) for rows in self.runs())
            return next((slow / fast for slow, fast in pairs if slow), None)

        return first(lambda rows: rows.get("autodiff")), first(best_peer)


FAMILIES = (
    Family(
        "LeNet training step, batch 128", "lenet", ("lenet",), {"op": "lenet", "batch": "128"},
        "many short launches, each of which takes longer to start than to run",
    ),
    Family(
        "LeNet training step, batch 8192", "lenet", ("lenet",), {"op": "lenet", "batch": "8192"},
        "operands pass through shared memory, to be transposed or routed, before the tensor cores read them",
    ),
    Family(
        "LayerNorm backward, 65536x1024, bfloat16", "norm", ("layer_norm",),
        {"op": "layer_norm_backward", "place": "65536x1024"},
        "warps wait at the sums of a row; few programs fit a multiprocessor's registers",
    ),
    Family(
        "LayerNorm + Linear, 65536x(1024->1024), bfloat16", "norm", ("layer_norm_linear",),
        {"op": "layer_norm_linear", "place": "65536x1024x1024"},
        "three matrix products at the GPU's power limit",
    ),
    Family(
        "LayerNorm + Linear, 262144x(256->256), bfloat16", "norm", ("layer_norm_linear",),
        {"op": "layer_norm_linear", "place": "262144x256x256"},
        "instructions of the normalisation, which two warps a scheduler do not hide",
    ),
    Family(
        "gates, forward and backward, 4096->8192", "logic", ("gates",),
        {"op": "gate_layer", "place": "4096->8192"},
        "rows are read in random order: the L2 cache's throughput, not memory's, bounds it",
    ),
    Family(
        "logic network step, 6x8000, batch 128", "logic", ("logic",), {"op": "logic", "batch": "128"},
        "short launches, and Adam's pass over the logits",
    ),
    Family(
        "logic network step, 6x64000, batch 1024", "logic", ("logic-large",), {"op": "logic-large", "batch": "1024"},
        "the L2 cache, as for one layer; activations of all layers are written and read",
    ),
    Family(
        "convolutional gates, M for MNIST, batch 128", "logic", ("logic-conv",),
        {"op": "logic-conv", "place": "mnist-m"},
        "instructions of the trees and their latency; the gradients of leaves are written and read again",
    ),
    Family(
        "automaton step, 16x16, 20 ticks, batch 2", "logic", ("automaton",), {"op": "automaton", "place": "16x16"},
        "layers of a tick wait for one another, and few cells hide it: gathers from shared memory, one after the other",
    ),
    Family(
        "convolution, gradient of the weights, conv2", "conv", ("backwards",),
        {"op": "conv2d_backward_weights", "place": "conv2"},
        "transposes to the batch-last layout that the kernel reads",
    ),
    Family(
        "convolution, gradient of the bias, conv1", "conv", ("backwards",),
        {"op": "conv2d_backward_bias", "place": "conv1"},
        "a transpose that the library's sum does not need; `None` takes the library's",
    ),
    Family(
        "convolution, ReLU, pool backward, block 1", "conv", ("backwards",),
        {"op": "conv2d_relu_max_pool2d_backward", "place": "block1"},
        "shared memory: every image is read once for each place of a maximum",
    ),
    Family(
        "max-pool backward, overlapping windows", "conv", ("backwards",),
        {"op": "max_pool2d_backward", "place": "overlapping"},
        "transposes around the kernel; `None` takes the formula, which needs none",
    ),
    Family(
        "softmax and cross-entropy backward", "dense", ("backwards",),
        {"op": "softmax_cross_entropy_backward", "place": "classes"},
        "a launch takes longer than the work; `None` takes the formula, which XLA fuses",
    ),
    Family(
        "ReLU backward, images", "pointwise", ("backwards",), {"op": "relu_backward", "place": "relu1"},
        "nothing to win: it moves bytes at the rate of a copy",
    ),
)  # fmt: skip


def summary(page: Path, *_: str) -> str:
    """A line a family: ours, autodiff, the best peer, ratios, per cent of the floor, and why not more."""
    measured = sorted({name for family in FAMILIES for name in family.files if load(name)})
    if not measured:
        return no_file("lenet")
    head = ["work, µs", "ours", "autodiff", "over autodiff", "best peer", "over it", "% of the floor", WHY]
    lines = []
    for family in FAMILIES:
        runs = family.runs()
        link = os.path.relpath(DOCS / "benchmarks" / f"{family.page}.md", page.parent)
        if not runs:
            lines.append([f"[{family.name}]({link})", "not measured yet", *[""] * 5, family.why])
            continue
        best = library(runs[0])
        autodiff = next((rows["autodiff"] for rows in runs if time(rows.get("autodiff"))), None)
        peer = next(filter(None, map(best_peer, runs)), None)
        over_autodiff, over_peer = map(times, family.speedups())
        if over_peer and any((load(name) or {}).get("joined") for name in family.files):
            over_peer += "†"
        named = f"{microseconds(peer)} ({peer['implementation']})" if peer else ""
        cells = [microseconds(best), microseconds(autodiff), over_autodiff, named, over_peer, floor(best), family.why]
        lines.append([f"[{family.name}]({link})", *cells])
    runs = [load(name) for name in measured]
    devices = ", ".join(dict.fromkeys(f"{run['device']} with jax {run['versions']['jax']}" for run in runs))
    days = sorted({str(run["date"])[:10] for run in runs})
    files = ", ".join(f"[{name}]({os.path.relpath(DOCS / 'results' / name, page.parent)}.json)" for name in measured)
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    joined = " †: ours and the peer's are of two runs on the same kind of machine." * any(
        "†" in line[5] for line in lines
    )
    return f"{markdown(head, lines)}\n\nMeasured on one {devices}, {dates}: {files}.{joined}"


def accuracy(page: Path, pattern: str) -> str:
    """A line for each op with its backwards: what its worst place in all these files takes of what is allowed."""
    reports = {path.stem: load(path.stem) for path in sorted((DOCS / "results").glob(f"{pattern}.json"))}
    if not reports:
        return no_file(pattern)
    rows = [row for report in reports.values() for row in report["rows"]]
    columns = list(dict.fromkeys((row["implementation"], row["dtype"]) for row in rows))
    ops: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        worst, column = ops.setdefault(row["op"].partition("_backward")[0], {}), (row["implementation"], row["dtype"])
        worst[column] = max(worst.get(column, 0.0), row["excess"])
    head = ["op with its backwards", *(f'`"{implementation}"`, {dtype}' for implementation, dtype in columns)]
    lines = [
        [f"`{op}`", *("" if column not in worst else f"{worst[column]:.0%}" for column in columns)]
        for op, worst in sorted(ops.items())
    ]
    beyond = sum(row["excess"] > 1 for row in rows)
    count = f"{len(rows) - beyond} of {len(rows)} rows (op, dtype, implementation) are within what is allowed."
    if any(len(worst) < len(columns) for worst in ops.values()):
        count += " An empty cell is not measured yet."
    sources = "\n".join(provenance(page, name, report) for name, report in reports.items())
    return f"{count}\n\n{markdown(head, lines)}\n{sources}"


def fuzz(page: Path, pattern: str) -> str:
    """A line for each run of `experiments.fuzz` among the files whose names match."""
    paths = sorted((DOCS / "results").glob(f"{pattern}.json"))
    if not paths:
        return no_file(pattern)
    lines = []
    for path in paths:
        report = load(path.stem)
        link = os.path.relpath(path, page.parent)
        counts = (report["cases"], report["refused"], len(report["failures"]))
        crashed = f"{len(report['crashes']):,}" if "crashes" in report else ""  # it would have ended the run
        where = f"{report['device']}, jax {report['versions']['jax']}, {str(report['date'])[:10]}"
        lines.append(
            [
                f"[seed {report['seed']}]({link})",
                where,
                *map("{:,}".format, counts),
                crashed,
                number(report["seconds"]),
            ]
        )
    return markdown(["cases", "device", "drawn", "no kernel takes", "failed", "crashed", "seconds"], lines)


SAYS_NOTHING = ("failed", "timed out")
"""Outcomes of the sanitizer after which nothing is known of the kernels."""


def sanitizer(page: Path, pattern: str) -> str:
    """What each tool of compute-sanitizer said of each op, last among the files whose names match. The ops with
    the same answers are one line."""
    reports = {path.stem: load(path.stem) for path in (DOCS / "results").glob(f"{pattern}.json")}
    if not reports:
        return no_file(pattern)
    reports = dict(sorted(reports.items(), key=lambda named: named[1]["date"]))
    rows = [row for report in reports.values() for row in report["rows"]]
    tools = sorted({row["tool"] for row in rows})
    outcomes: dict[str, dict[str, str]] = {}
    for row in rows:
        of = outcomes.setdefault(row["op"], {})
        if row["tool"] not in of or of[row["tool"]] in SAYS_NOTHING or row["outcome"] not in SAYS_NOTHING:
            of[row["tool"]] = row["outcome"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for op, of in sorted(outcomes.items()):
        alike.setdefault(tuple(of.get(tool, "not run") for tool in tools), []).append(f"`{op}`")
    lines = [[", ".join(ops), *of] for of, ops in alike.items()]
    sources = "\n".join(provenance(page, name, report) for name, report in reports.items())
    return f"{markdown(['ops, each with its gradients', *tools], lines)}\n{sources}"


def dtypes(page: Path, *names: str) -> str:
    """A line for each work and batch in each dtype: its time and memory beside those in float32 of the same run."""
    reports = {name: report for name in names if (report := load(name))}
    if not reports:
        return no_file(names[0])
    lines = []
    for report in reports.values():
        found = {
            (row["op"], row["place"], row["batch"], row["dtype"], row["implementation"]): row for row in report["rows"]
        }
        for (op, place, batch, dtype, implementation), row in found.items():
            if row.get("peer") or not time(row):
                continue
            wide = found.get((op, place, batch, "float32", implementation))
            same = {key[4]: other for key, other in found.items() if key[:4] == (op, place, batch, dtype)}
            name = " ".join(part for part in (op.partition("-")[0], place) if part)
            memory, wide_memory = (row_bytes(a) for a in (row, wide))
            share = f"{memory / wide_memory:.0%}" if memory and wide_memory else ""
            cells = [microseconds(row), ratio(row, wide), number(memory / 2**20), share, ratio(row, best_peer(same))]
            lines.append([f"{name}, batch {batch:,}", dtype, *cells])
    head = ["step", "computed in", "µs", "over float32", "MiB", "of float32's", "over the best peer"]
    sources = "\n".join(provenance(page, name, report, report["rows"]) for name, report in reports.items())
    missing = "".join(f"\n\n{no_file(name)}" for name in names if name not in reports)
    return f"{markdown(head, lines)}\n{sources}{missing}"


def row_bytes(row: Row | None) -> int | None:
    """Arguments, results and temporaries."""
    if row is None or row.get("temporary_bytes") is None:
        return None
    return row["argument_bytes"] + row["result_bytes"] + row["temporary_bytes"]


def precisions(page: Path, name: str) -> str:
    """A line for each experiment: the accuracy in each precision, its mean and deviation over the seeds."""
    if (report := load(name)) is None:
        return no_file(name)
    runs = [row for row in report["rows"] if "test_accuracy" in row]
    columns = list(
        dict.fromkeys(row["precision"] for row in sorted(runs, key=lambda row: row["precision"] != "float32"))
    )
    lines = []
    for experiment in dict.fromkeys(row["experiment"] for row in runs):
        cells = []
        for precision in columns:
            of = [row for row in runs if (row["experiment"], row["precision"]) == (experiment, precision)]
            accuracies, skipped = [row["test_accuracy"] for row in of], sum(row["skipped_steps"] for row in of)
            if not of:
                cells.append("")
                continue
            spread = statistics.stdev(accuracies) if len(of) > 1 else 0.0
            steps = f", skipped steps: {skipped}" if skipped else ""
            cells.append(f"{statistics.mean(accuracies):.4f} ± {spread:.4f} ({len(of)} seeds{steps})")
        lines.append([experiment, *cells])
    return markdown(["experiment", *columns], lines) + "\n" + provenance(page, name, report)


def convolutions(page: Path, pattern: str) -> str:
    """A line for each size and settings of convolutional logic networks: means over the seeds."""
    names = sorted(path.stem for path in (DOCS / "results").glob(f"{pattern}.json"))
    if not names:
        return no_file(pattern)
    columns = ["seeds", "gates placed", "simplified", "hardened", "relaxed", "epochs", "s a run", "C, samples/s"]
    tables = []
    for name in names:
        report, of_line = load(name), {}
        for row in report["rows"]:
            settings = f", `{json.dumps(row['settings'])}`" if row["settings"] else ""
            of_line.setdefault(row["size"] + settings, []).append(row)
        lines = [[line, *_convolutions_cells(rows)] for line, rows in of_line.items()]
        tables.append(markdown([f"{report['dataset']}, size", *columns], lines) + "\n" + provenance(page, name, report))
    return "\n\n".join(tables)


def _convolutions_cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    def mean(field: str, digits: int = 0) -> str:
        of = [row[field] for row in rows if field in row]
        return f"{statistics.mean(of):,.{digits}f}" if of else ""

    accuracies = [row["hardened"] for row in rows]
    spread = statistics.stdev(accuracies) if len(rows) > 1 else 0.0
    return [
        str(len(rows)),
        *(mean(field) for field in ("placed_gates", "simplified_gates")),
        f"{statistics.mean(accuracies):.4f} ± {spread:.4f}",
        mean("relaxed", 4),
        *(mean(field) for field in ("epochs", "seconds", "c_samples_per_second")),
    ]


def many_devices(page: Path, name: str) -> str:
    """A line for each step with as many examples a device: on one, on a mesh of one, and on a mesh of all."""
    if (report := load(name)) is None:
        return no_file(name)
    lines = [
        [
            f"{row['work'].replace(' training step', '')}, {row['examples']:,} a device",
            number(row["alone"]),
            f"{row['mesh_of_one'] / row['alone'] - 1:+.1%}",
            f"{row['alone'] / row['mesh']:.1%}",
            f"{row['alone'] / row['mesh_overlapping']:.1%}",
        ]
        for row in report["rows"]
    ]
    count = report["devices"]
    head = ["step", "one device, µs", "mesh of one", f"efficiency on {count}", "with overlap"]
    return markdown(head, lines) + "\n" + provenance(page, name, report)


def communication(page: Path, name: str, measured: str) -> str:
    """A line for each step: what it communicates, and from which batch on that is a twentieth of its time."""
    if (report := load(name)) is None:
        return no_file(name)
    model = summing(report, load(measured))
    lines = []
    for plain, overlapping in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        sums = ", ".join(f"{count} {kind}" for kind, count in plain["collectives"].items())
        parts = sum(overlapping["collectives"].values())
        meanwhile = f"{parts}, {overlapping['kernels_meanwhile']} of {overlapping['kernels']} kernels meanwhile"
        time_of_sum, batch = model(plain["work"]) if model else (None, None)
        cells = [f"{plain['bytes']:,}", sums, meanwhile, number(time_of_sum), "" if batch is None else f"{batch:,}"]
        lines.append([plain["work"].replace(" training step", ""), *cells])
    head = ["step", "bytes", "collectives", "overlapping", "a sum over 8, µs", "batch for 95%"]
    return markdown(head, lines) + "\n" + provenance(page, name, report)


def summing(compiled: Report, measured: Report | None) -> Callable[[str], tuple[float, int]] | None:
    """Work -> the microseconds that the sum over the compiled devices would take, and the batch of which it is 1/19.

    What a sum over two devices takes is what a step takes longer on both: a line through all steps that were measured
    says how much of it is a hop's, and how much a byte's. A tree over n devices has log2 n times the hops, and each
    link moves 2 (n - 1)/n times the bytes. A step's time is a line through its times alone, or proportional to one.
    """
    if measured is None:
        return None
    sizes = {row["work"]: row["bytes"] for row in compiled["rows"]}
    rows = [row for row in measured["rows"] if row["work"] in sizes]
    longer = [row["mesh"] - row["alone"] for row in rows]
    ring, devices = measured["devices"], compiled["devices"]
    a_byte, a_hop = statistics.linear_regression([sizes[row["work"]] for row in rows], longer)
    hops, link = (math.log2(n) for n in (ring, devices)), [2 * (n - 1) / n for n in (ring, devices)]
    few, many = hops

    def model(work: str) -> tuple[float, int]:
        sum_time = a_hop * many / few + a_byte * sizes[work] * link[1] / link[0]
        low, *_, high = [row for row in rows if row["work"] == work] * 2
        slope = (high["alone"] - low["alone"]) / ((high["examples"] - low["examples"]) or math.nan)
        slope = slope if math.isfinite(slope) else low["alone"] / low["examples"]
        fixed = low["alone"] - slope * low["examples"]
        return sum_time, devices * max(1, math.ceil((19 * sum_time - fixed) / slope))

    return model


def computed_in(page: Path) -> str:
    """Not from a run: from what JAX traces."""
    from computed_in import table

    return table()


TABLES: dict[str, Callable[..., str]] = {
    "computed_in": computed_in,
    "dtypes": dtypes,
    "precisions": precisions,
    "convolutions": convolutions,
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
    "hardening": hardening,
    "profile": profile,
}


# --------------------------------------------------------------------------------------------------------------- charts

STYLE = """
  .paper { fill: #ffffff; stroke: #d0d7de } .ink { fill: #1f2328 } .soft { fill: #59636e } .rule { stroke: #d0d7de }
  .even { stroke: #59636e } .first { fill: #2a78d6 } .second { fill: #e07b39 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d } .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .rule { stroke: #3d444d }
    .even { stroke: #9198a1 } .first { fill: #58a6ff } .second { fill: #f0986a }
  }
  text { font: 13px system-ui, sans-serif }
"""
"""A paper of its own keeps a picture readable where a page's scheme is not the browser's."""

WIDTH, LEFT, RIGHT, BAR = 880, 375, 60, 15
"""Pixels: of the picture, of its names and of what is right of the longest bar, and the height of a bar."""
DASHES = 'stroke-dasharray="3 3"'


def speed() -> str:
    """The chart of the README: times as fast as autodiff and as the best peer, for each family."""
    bars = [(family.name, family.speedups()) for family in FAMILIES]
    bars = [(name, values) for name, values in bars if any(values)]
    legend = ("JAX's autodiff", "the best peer: PyTorch, Liger-Kernel, tokamax, torchlogix")
    if not bars:
        return svg(60, text(20, 36, "not measured yet: docs/results/ has none of these runs", "soft"))
    values = [value for _, both in bars for value in both if value]
    low, high = min(0.5, *values), max(2.0, *values)

    def x(value):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    y, parts = 88, []
    for name, both in bars:
        height = BAR * sum(value is not None for value in both)
        parts.append(text(LEFT - 12, y + height / 2 + 4.5, name, "ink", "end"))
        for value, kind in zip(both, ("first", "second"), strict=True):
            if value is not None:
                start, end = sorted((x(1), x(value)))
                parts.append(
                    f'<rect class="{kind}" x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="{BAR - 2}"/>'
                )
                parts.append(text(end + 5, y + 11, times(value), "soft"))
                y += BAR
        y += 9
    head = [text(20, 26, "How many times as fast as ... (logarithmic; 1x is as fast)", "ink")]
    for left, kind, name in ((20, "first", legend[0]), (170, "second", legend[1])):
        head += [f'<rect class="{kind}" x="{left}" y="39" width="12" height="12"/>', text(left + 18, 50, name, "soft")]
    head.append(f'<line class="even" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="76" y2="{y}" {DASHES}/>')
    head.append(text(x(1), 72, "1x", "soft", "middle"))
    return svg(y + 10, *head, *parts)


def floors() -> str:
    """The chart of strong and weak points: what share of its floor each kernel reaches, over all places of a run."""
    shares = sorted(kernel_shares().items(), key=lambda item: (-max(item[1]), item[0]))
    if not shares:
        return svg(60, text(20, 36, "not measured yet: docs/results/ has no rows of kernels", "soft"))

    def x(share):
        return LEFT + (WIDTH - LEFT - RIGHT - 40) * share

    bottom = 76 + (BAR + 4) * len(shares)
    parts = [text(20, 26, "How near to the least time that the device could take (100%: no faster is possible)", "ink")]
    parts.append(text(20, 46, "full: at the size where it is worst; pale: where it is best", "soft"))
    for share in (0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="even" x1="{x(share):.1f}" x2="{x(share):.1f}" y1="70" y2="{bottom}" {DASHES}/>')
        parts.append(text(x(share), 66, f"{share:.0%}", "soft", "middle"))
    for y, (name, of) in zip(range(76, bottom, BAR + 4), shares, strict=True):
        worst, best = min(of), max(of)
        parts.append(text(LEFT - 12, y + 12, name, "ink", "end"))
        for end, pale in ((best, ' opacity="0.4"'), (worst, "")):
            width = x(min(end, 1.0)) - LEFT
            parts.append(f'<rect class="first" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}"{pale}/>')
        low, high = f"{worst:.0%}", f"{best:.0%}"
        parts.append(text(x(min(best, 1.0)) + 5, y + 12, high if low == high else f"{low} to {high}", "soft"))
    return svg(bottom + 10, *parts)


def kernel_shares() -> dict[str, list[float]]:
    """What runs kernels, with its dtype and layout -> its share of the floor at each place and batch.

    Of several runs of the same place the last counts.
    """
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in (DOCS / "results").glob("*.json")]
    latest: dict[str, dict[tuple, float]] = {}
    for report in sorted(reports, key=lambda report: str(report["date"])):
        for row in report.get("rows", []):
            if row.get("implementation") == "pallas" and row.get("floor_fraction"):
                work, *rest = row["work"].removesuffix(f" in {row['dtype']}").split(", ")
                name = work.removesuffix(row["place"]).strip().replace("fwd+bwd", "and its gradient")
                options = [*rest, *([] if row["dtype"] == "float32" else [row["dtype"]])]
                place = row["place"], row["batch"], row["precision"]
                latest.setdefault(", ".join([name, *options]), {})[place] = row["floor_fraction"]
    return {name: list(places.values()) for name, places in latest.items()}


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def svg(height: float, *parts: str) -> str:
    box = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">'
    paper = f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>'
    return "\n".join([box, f"<style>{STYLE}</style>", paper, *parts, "</svg>", ""])


CHARTS: dict[str, Callable[[], str]] = {"speed": speed, "floor": floors}


if __name__ == "__main__":
    sys.exit(main())
