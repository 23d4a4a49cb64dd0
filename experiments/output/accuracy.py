"""Measure, print, and save the accuracy of ops for `experiments.check --accuracy`."""

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from experiments.accuracy import DRAWS, OFFSETS, SCALES, Accuracy, accuracy
from experiments.output.results import finite, keep, provenance
from jaxbp.catalogue import Entry

QUICK = dict(offsets=(0.0, 1e2, 1e5), scales=(1e-4, 1.0, 1e4), draws=8)
"""Fewer locations and draws, for convolutions and for kernels without a GPU."""
MORE = 8
"""The factor for the number of draws when a too large error is measured again."""
FULL = dict(offsets=OFFSETS, scales=SCALES, draws=DRAWS)


def measure(
    entries: Sequence[Entry],
    implementations: Sequence[str],
    dtypes: Sequence[str],
    command: str,
    console: Console,
    path: Path | None = None,
) -> bool:
    """Print and save each op's worst error per dtype and implementation. Return whether all errors are allowed.

    Do not repeat measurements that the file `path` has with an allowed error.
    """
    report = {**provenance(command), "passed": True, "rows": _kept(path)}
    done = {(row["op"], row["dtype"], row["implementation"]) for row in report["rows"]}
    without_gpu = jax.default_backend() != "gpu"
    for entry in entries:
        table = Table("op", "dtype", "implementation", "locations", "worst", "error", "autodiff error", "% of allowed")
        for implementation in implementations:
            slow = without_gpu and (implementation == "pallas" or entry.name.startswith(("conv1d", "conv2d")))
            places = QUICK if slow else FULL
            start = time.perf_counter()
            taken = [dtype for dtype in dtypes if implementation != "pallas" or dtype in entry.kernel_dtypes]
            taken = [dtype for dtype in taken if (entry.name, dtype, implementation) not in done]
            if not taken:
                continue
            found = _found(entry, implementation, taken, **places)
            seconds = time.perf_counter() - start
            for dtype in taken:
                row = worst([each for each in found if each.dtype == dtype], places["draws"])
                report["rows"].append(row | {"seconds": round(seconds / len(taken), 2)})
                table.add_row(entry.name, dtype, implementation, *cells(row))
        if table.row_count:
            console.print(table)
        report["passed"] = all(row["excess"] <= 1 for row in report["rows"])
        keep(report, path)
    return report["passed"]


def _kept(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["excess"] <= 1]


def _found(entry: Entry, implementation: str, dtypes: Sequence[str], offsets, scales, draws: int) -> list[Accuracy]:
    run = functools.partial(accuracy, {entry.name: (entry, entry.small)}, (implementation,))
    found = []
    for each in run(dtypes, offsets, scales, draws):
        if each.excess > 1:
            place = each.place
            again = run((each.dtype,), (place.offset,), (place.scale,), MORE * draws)
            (each,) = (a for a in again if (a.place, a.result) == (place, each.result))
        found.append(each)
    return found


def worst(found: Sequence[Accuracy], draws: int) -> dict[str, Any]:
    most = max(found, key=lambda each: each.excess)
    row = dataclasses.asdict(most) | {"places": len({each.place for each in found}), "draws": draws}
    return finite(row, lambda infinite: 1e300)  # larger than any finite error


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    place = row["place"]
    where = f"{row['result']}, {place['offset']:g} + {place['scale']:g} {place['argument']}"
    return str(row["places"]), where, f"{row['error']:.1e}", f"{row['native']:.1e}", f"{row['excess']:.0%}"
