"""Tables of the bench: times of workloads, and ratios of times."""

import math
from collections.abc import Callable, Mapping, Sequence

from figures.cells import (
    devices,
    floor,
    hoisted,
    link,
    markdown,
    mebibytes,
    microseconds,
    number,
    percent,
    temporaries,
    times,
)
from figures.measurements import (
    PREFERRED,
    Reports,
    Row,
    all_rows,
    autodiff,
    best_peer,
    library,
    load,
    products,
    rows_of,
    speedup,
    time,
    waits_for_host,
    works_of,
)

COLUMNS: dict[str, tuple[str, Callable[[Mapping[str, Row]], str]]] = {
    "speedup": ("speedup over autodiff", lambda rows: times(speedup(library(rows), autodiff(rows)))),
    "products": ("products in: jaxbp / autodiff", lambda rows: both_products(library(rows), autodiff(rows))),
    "peer": ("speedup over best peer", lambda rows: times(speedup(library(rows), best_peer(rows)))),
    "floor": ("jaxbp, % of roofline", lambda rows: floor(library(rows))),
    "memory": ("temporary memory, MiB", lambda rows: temporaries(library(rows))),
    "peer_memory": ("temporary memory of best peer, MiB", lambda rows: temporaries(best_peer(rows))),
    "autodiff_memory": ("temporary memory of autodiff, MiB", lambda rows: temporaries(autodiff(rows))),
}
"""Optional columns of `works`: the heading, and a function from a workload's rows to the cell."""


def both_products(ours: Row | None, theirs: Row | None) -> str:
    """Return the precisions of the products in two rows, as "A / B", or "A" if they are equal."""
    return " / ".join(dict.fromkeys(filter(None, (products(ours), products(theirs)))))


def works(reports: Reports, columns: str = "speedup,peer,floor", time: str = "microseconds") -> str:
    """Return a table of the times of each implementation and peer, and of `columns`, keys of `COLUMNS`. Leave out
    workloads without a row of jaxbp. The batch sizes of a workload ascend. `time` is the field of a row with its
    time."""
    rows = [row | {"microseconds": row[time]} for row in all_rows(reports)]
    groups = [(title, group) for title, group in ascending(rows) if not group.keys().isdisjoint(PREFERRED)]
    peer_of = {name: row.get("peer") for _, group in groups for name, row in group.items()}
    names = sorted(peer_of, key=lambda name: peer_of[name] is not None)
    shown = [COLUMNS[column] for column in columns.split(",")]
    heading, titles = hoisted([title for title, _ in groups])
    head = [heading, *(name if peer_of[name] else f"`{name}`" for name in names), *(heading for heading, _ in shown)]
    lines = [
        [title, *times_of(group, names), *(cell(group) for _, cell in shown)]
        for title, (_, group) in zip(titles, groups, strict=True)
    ]
    return markdown(head, lines)


def ascending(rows: Sequence[Row]) -> list[tuple[str, dict[str, Row]]]:
    """Return the pairs of `works_of` in the order of their workloads, with ascending batch sizes of a workload."""
    order = list(dict.fromkeys(row["work"] for row in rows))
    return sorted(
        works_of(rows), key=lambda pair: min((order.index(row["work"]), row["batch"]) for row in pair[1].values())
    )


def masks(reports: Reports) -> str:
    """Return a table of the times of attention with masks, and of the times per tile of scores with a valid pair. The
    shape is the first one with a row without a mask."""
    timed = [(title, row) for title, group in works_of(all_rows(reports)) if (row := library(group))]
    (shape, full), *_ = [(row["place"], time(row)) for _, row in timed if row["share_of_tiles"] == 1]
    timed = [(title, row) for title, row in timed if row["place"].split(" ")[0] == shape]
    heading, titles = hoisted([title for title, _ in timed])
    lines = [
        [title, microseconds(row), percent(row["share_of_tiles"]), times(time(row) / row["share_of_tiles"] / full)]
        for title, (_, row) in zip(titles, timed, strict=True)
    ]
    return markdown([heading, "`pallas`", "tiles with a valid pair", "time per tile / without a mask"], lines)


def models(reports: Reports) -> str:
    """Return a table of the training steps of language models, with a line per implementation and peer."""
    head = ["step", "implementation", "µs", "tokens/s", "model FLOP utilization", "peak memory, MiB"]
    lines = []
    for title, group in works_of(all_rows(reports)):
        for name, row in sorted(group.items(), key=lambda pair: pair[1]["peer"] is not None):
            rates = number(row["tokens_per_second"]), percent(row["model_flop_utilization"])
            name = name if row["peer"] else f"`{name}`"
            lines.append([title, name, microseconds(row), *rates, mebibytes(row["peak_bytes"])])
    return markdown(head, lines)


def times_of(group: Mapping[str, Row], names: Sequence[str]) -> list[str]:
    fastest = min((time(row) for row in group.values() if time(row) is not None), default=math.nan)
    cells = {name: microseconds(row) for name, row in group.items()}
    return [f"**{cells[name]}**" if time(group.get(name)) == fastest else cells.get(name, "") for name in names]


def ratios(reports: Reports, low: str = "0", high: str = "inf") -> str:
    """Show the time of `None` divided by the time of autodiff, if it is below `low` or above `high`. Of a workload with
    several runs, the last report that timed both counts."""
    found = [pair for report in reports.values() for pair in works_of(rows_of(report))]
    newest = {title: rows for title, rows in found if time(rows.get("None")) and time(rows.get("autodiff"))}
    pairs = [(title, rows["None"], rows["autodiff"]) for title, rows in newest.items()]
    timed = [(time(a) / time(b), title, a, b) for title, a, b in pairs]
    outside = sorted((line for line in timed if not float(low) <= line[0] <= float(high)), key=lambda line: -line[0])
    band = " and ".join([f"at least {low}x"] * (float(low) > 0) + [f"at most {high}x"] * math.isfinite(float(high)))
    inside = f"{len(timed) - len(outside)} of {len(timed)} workloads"
    count = f"`None` takes {band} the time of `autodiff` in {inside}."
    heading, titles = hoisted([title for _, title, _, _ in outside])
    lines = [
        [title, microseconds(a), microseconds(b), times(value)]
        for title, (value, _, a, b) in zip(titles, outside, strict=True)
    ]
    table = markdown([heading, "`None`", "`autodiff`", "`None` / `autodiff`"], lines)
    return f"{count} The table lists the other workloads.\n\n{table}" if outside else count


COMPARED = {"microseconds": "", "burst_microseconds": ", burst"}
"""Fields of a row with a time, and what the headings of `comparison` add."""


def comparison(reports: Reports, of: str, to: str = "pallas", fields: str = "microseconds") -> str:
    """Return a table of the times of `of` and `to`, both an implementation or a peer, and of their ratio in this run.
    It is for a run of workloads whose times in `works` are from another run. `fields` are keys of `COMPARED`."""
    head, lines = [], []
    for title, rows in ascending(all_rows(reports)):
        a, b = (next(row for name, row in rows.items() if wanted in (name, row["peer"])) for wanted in (of, to))
        names = [row["peer"] or f"`{row['implementation']}`" for row in (a, b)]
        head, line = [], [title]
        for field in fields.split(","):
            timed = [row | {"microseconds": row[field]} for row in (a, b)]
            head += [f"{name}{COMPARED[field]}" for name in (*names, " / ".join(names))]
            line += [*map(microseconds, timed), times(time(timed[0]) / time(timed[1]))]
        lines.append(line)
    heading, titles = hoisted([title for title, *_ in lines])
    return markdown([heading, *head], [[title, *line[1:]] for title, line in zip(titles, lines, strict=True)])


def with_dtype(row: Row) -> Row:
    """Return a row whose workload names a dtype other than float32, as in a run with several dtypes."""
    suffix = f" in {row['dtype']}"
    return row if row["dtype"] == "float32" or row["work"].endswith(suffix) else row | {"work": row["work"] + suffix}


def slower(reports: Reports) -> str:
    newest = {}
    for name, report in reports.items():
        rows = [row for row in rows_of(report) if {"work", "microseconds"} <= row.keys() and not row.get("peer")]
        for title, group in works_of(list(map(with_dtype, rows))):
            ours, theirs = group.get("pallas"), autodiff(group)
            if time(ours) and time(theirs):
                newest[title] = time(theirs) / time(ours), name, any(map(waits_for_host, (ours, theirs)))
    slow = sorted((item for item in newest.items() if item[1][0] < 1), key=lambda item: item[1][0])
    heading, titles = hoisted([title for title, _ in slow])
    lines = [[title, times(of[0]) + "*" * of[2]] for title, (_, of) in zip(titles, slow, strict=True)]
    count = f'An explicit `"pallas"` is slower than autodiff in {len(lines)} of {len(newest)} measured workloads:'
    table = markdown([heading.removesuffix(", µs"), "speedup over autodiff"], lines)
    files = {name: reports[name] for name in sorted({name for _, (_, name, _) in slow})}
    where = f"Measured on {devices(files)}: {', '.join(map(link, files))}."
    if any(waited for _, (*_, waited) in slow):
        where += " \\*: the device waited for the host, so the ratio of the device's times may differ."
    return f"{count}\n\n{table}\n\n{where}"


def dtypes(reports: Reports) -> str:
    newest = {
        step_of(row): (name, row)
        for name, report in load("*").items()
        for row in rows_of(report)
        if row.get("dtype") == "float32" and row.get("precision") == "default" and time(row)
    }
    lines, files = [], {}
    for row in all_rows(reports):
        if row.get("peer") or not time(row):
            continue
        file, float32 = newest.get(step_of(row), ("", None))
        files |= {file: None} if file else {}
        row = float32 if row["dtype"] == "float32" else row
        name = " ".join(part for part in (row["op"].partition("-")[0], row["place"]) if part)
        memory, wide_memory = row_bytes(row), row_bytes(float32)
        share = percent(memory / wide_memory) if memory and wide_memory else ""
        cells = [times(speedup(row, float32)), mebibytes(memory), share]
        lines.append([f"{name}, batch {row['batch']:,}", row["dtype"], *cells])
    head = ["step", "computed in", "speedup over float32", "MiB", "% of float32 memory"]
    table = markdown(head, lines)
    if files.keys() <= reports.keys():
        return table
    newest_runs = f"The rows in float32 are from the newest runs: {', '.join(map(link, files))}. The others are older."
    return f"{table}\n\n{newest_runs}"


def step_of(row: Row) -> tuple:
    return row["op"], row["place"], row["batch"], row["implementation"]


def row_bytes(row: Row | None) -> int | None:
    if row is None or row.get("temporary_bytes") is None:
        return None
    return row["argument_bytes"] + row["result_bytes"] + row["temporary_bytes"]
