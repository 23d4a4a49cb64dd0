"""Print the bench's report as a table."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

Row = Mapping[str, Any]

HOST_BOUND = 0.05
"""If the host waits for less than this share of the time, the host is the bottleneck."""


def title(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "python")
    where = f"{report['device']}; {report['dtype']}, {report['precision']} precision; {versions}"
    if "operations_per_second" not in report:
        return where
    rates = ", ".join(
        f"{rate / 1e12:.3g} TFLOP/s at {precision} precision"
        for precision, rate in report["operations_per_second"].items()
    )
    copy = report["copy_bytes_per_second"] / 1e12
    return f"{where}\nmeasured in this run: copy {copy:.3g} TB/s; matrix product {rates}"


def groups(report: Mapping[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    for (workload, batch), rows in itertools.groupby(report["rows"], lambda row: (row["work"], row["batch"])):
        yield f"{workload}, batch {batch}", list(rows)


def is_host_bound(row: Row) -> bool:
    return row["host_waited"] is not None and row["host_waited"] < HOST_BOUND


def print_table(report: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console(width=140)
    console.print(Text(title(report)))
    numbers = ("µs", "× autodiff", "% of roofline", "memory, MiB", "temporary, MiB", "error", "compile, s")
    table = Table(Column("workload", no_wrap=True), *(Column(name, justify="right") for name in numbers))
    for workload, rows in groups(report):
        table.add_row(Text(workload, style="bold"))
        for row in rows:
            table.add_row(Text(f"  {row['implementation']}"), *_cells(row), end_section=row is rows[-1])
    console.print(table)
    if any("tokens_per_second" in row for row in report["rows"]):
        console.print(_tokens_table(report))
    console.print("× autodiff: the time of autodiff divided by the time of the row. Error: against float64.")
    if not report["complete"]:
        console.print(Text(f"not measured: {'; '.join(report['missing'])}"), soft_wrap=True)
    if left_out := report.get("left_out"):
        errors = "; ".join(f"{name}: {error}" for name, error in left_out.items())
        console.print(Text(f"peers that cannot be imported: {errors}"), soft_wrap=True)
    for row in report["rows"]:
        if row["failed"]:
            console.print(
                Text(f"failed: {row['work']}, batch {row['batch']}, {row['implementation']}: {row['failed']}")
            )
    if any(map(is_host_bound, report["rows"])):
        console.print("*: the device waited for the host, so the device alone would take less time.")


def _tokens_table(report: Mapping[str, Any]) -> Table:
    numbers = ("tokens/s", "model FLOP utilization", "peak memory, MiB")
    table = Table(Column("language model", no_wrap=True), *(Column(name, justify="right") for name in numbers))
    for workload, rows in groups(report):
        rows = [row for row in rows if row.get("tokens_per_second") is not None]
        if rows:
            table.add_row(Text(workload, style="bold"))
        for row in rows:
            rates = _text(row["tokens_per_second"], "{:,.0f}"), _text(row["model_flop_utilization"], "{:.1%}")
            memory = _text(row["peak_bytes"], "{:,.1f}", 2**20)
            table.add_row(Text(f"  {row['implementation']}"), *rates, memory, end_section=row is rows[-1])
    return table


def _cells(row: Row) -> list[str]:
    if row["failed"]:
        return ["failed"]
    temporary = row["temporary_bytes"]
    memory = None if temporary is None else row["argument_bytes"] + row["result_bytes"] + temporary
    return [
        _text(row["microseconds"], "{:.1f}") + ("*" if is_host_bound(row) else ""),
        _text(row["speedup_over_autodiff"], "{:.2f}"),
        _text(row["floor_fraction"], "{:.0%}"),
        _text(memory, "{:.1f}", 2**20),
        _text(temporary, "{:.1f}", 2**20),
        "0" if row["error"] == 0 else _text(row["error"], "{:.1e}"),
        _text(row["compile_seconds"], "{:.2f}"),
    ]


def _text(value: float | None, pattern: str, unit: float = 1) -> str:
    return "" if value is None else pattern.format(value / unit)
