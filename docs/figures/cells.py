"""Format cells, tables in Markdown, and the text below a table."""

import re
from collections import Counter
from collections.abc import Sequence

from figures.measurements import DOCS, Report, Reports, Row, grouped, rows_of, time, waits_for_host

WHY = "why not faster"
PUBLISHED = "published automaton"
"""A peer that is not a package, and has JAX's version."""


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2g}"


def microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    if row.get("failed"):
        return "unsupported" if row["failed"].startswith("NotImplementedError") else "failed"
    return number(time(row)) + "*" * waits_for_host(row)


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
    return mebibytes(row.get("temporary_bytes") if row else None)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Return a table. Leave out columns that are empty in every line, except for the first column.

    With `numbers`, all columns but the first and `WHY` are aligned to the right.
    """
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines)]
    rule = ["---:" if numbers and heading not in (head[0], WHY) else "---" for heading in head]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in (head, rule, *lines))


def hoisted(titles: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return a heading (the words that all titles begin with, and the batch of most titles), and the shorter titles."""
    heading, note = "workload", ""
    for pattern in (r", batch [\d,]+$", ", batch last$"):
        batches = Counter(match[0] for title in titles if (match := re.search(pattern, title)))
        batch, count = batches.most_common(1)[0] if batches else ("", 0)
        if count > max(1, len(titles) / 2):
            titles = [title.removesuffix(batch) for title in titles]
            note = batch + " unless stated" * (count < len(titles)) + note
    words = [title.split() for title in titles]
    same = 0
    while len(titles) > 1 and all(len(each) > same + 1 and each[same] == words[0][same] for each in words):
        same += 1
    if same:
        heading = " ".join(words[0][:same]) + " …"
        titles = [" ".join(each[same:]) for each in words]
    return f"{heading}{note}, µs", titles


def link(name: str) -> str:
    return f"[{name}.json](results/{name}.json)"


PEERS_ON_TORCH = {"causal-conv1d", "Liger-Kernel", "Liger-Kernel (CuTe)", "QuACK", "cuDNN", "torchlogix"}


def packages(report: Report) -> str:
    versions, used = report.get("versions", {}), {row.get("peer") for row in rows_of(report)}
    if used & PEERS_ON_TORCH:
        used.add("PyTorch")
    hidden = {"python", "jax", "jaxlib", "jaxbp", "numpy", "flax", "optax", PUBLISHED}
    hidden |= {"PyTorch", "tokamax", "fa4-jax", *PEERS_ON_TORCH} - used
    names = {"cuDNN": "cuDNN frontend"}
    shown = [name for name in ("jax", *(name for name in versions if name not in hidden)) if name in versions]
    return ", ".join(f"{names.get(name, name)} {versions[name]}" for name in shown)


def provenance(name: str, report: Report, rates: bool) -> str:
    """Describe a run, with or without the rates that determine the roofline."""
    rows = rows_of(report)
    where = f"{report['device']}, {packages(report)}, {day(report)}"
    where += f", commit {commit(report)}" if report.get("commit") else ""
    where += "".join(f"; {report[of]}" for of in ("processor", "compiler") if of in report)
    precisions = report.get("precision", "default").split(", ")
    if "dtype" in report:
        where += f"; {report['dtype']}, {' and '.join(precisions)} precision"
    if rates and "copy_bytes_per_second" in report:
        products = {precision: report["operations_per_second"][precision] for precision in precisions}
        computed = [
            rate(value, "FLOP/s") + f" at {precision} precision" * (len(products) > 1)
            for precision, value in products.items()
        ]
        where += f"; copy {rate(report['copy_bytes_per_second'], 'B/s')}"
        where += f", matrix product {' and '.join(computed)}"
    parts = [f"{link(name)}: {where}.", report.get("note", "")]
    compared = [row for row in rows if "work" in row and row.get("error") is not None]
    errors = grouped(compared, lambda row: row.get("peer") or f"`{row['implementation']}`")
    largest = [f"{name} {max(row['error'] for row in of):.1e}" for name, of in errors.items()]
    if largest:
        parts.append(f"Errors: {', '.join(largest)}.")
    if any(map(waits_for_host, rows)):
        parts.append("\\*: the device waited for the host, so the device alone would take less time.")
    return "\n".join(["", " ".join(filter(None, parts)), "", f"    {command(report)}"])


def day(report: Report) -> str:
    return str(report["date"])[:10]


def commit(report: Report) -> str:
    """Return the commit of a run, and whether files had changed since the commit."""
    recorded = report.get("commit") or "unknown"
    return recorded.rstrip("+")[:10] + " with uncommitted changes" * recorded.endswith("+")


def command(report: Report) -> str:
    """Return the command of a run, which checks out the run's commit if its script or an argument is gone today."""
    recorded, script = report["command"], re.match(r"python (?:-m (\S+)|(docs/\S+))", report["command"])
    path = DOCS.parent / (script[1].replace(".", "/") if script[1] else script[2]) if script else DOCS
    is_gone = not (path.exists() or path.with_suffix(".py").exists()) or " mixer " in recorded
    return f"git checkout {report['commit'].rstrip('+')} && {recorded}" if is_gone else recorded


def devices(reports: Reports) -> str:
    return "; ".join(dict.fromkeys(f"{run['device']}, jax {run['versions']['jax']}" for run in reports.values()))
