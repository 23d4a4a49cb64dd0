"""Run the commands of the summary in docs/benchmarks.md again, and print their ratios beside the published ratios."""

import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Column, Table

from experiments.bench.report import groups
from experiments.bench.rows import ratio
from experiments.output.errors import UserError, run_command
from experiments.output.files import OptionalPath, refuse_unwritable
from experiments.output.results import ROOT, keep, provenance

DOCS = ROOT / "docs"
OURS = ("pallas", "None", "xla")
"""The ratios are of the first of these implementations that was measured."""
RATIOS = ("over_autodiff", "over_best_peer")

Report = Mapping[str, Any]
Measure = Callable[[Sequence[str], float], Report]
"""(arguments of a command, time limit) -> the report of `experiments.bench`"""


@dataclasses.dataclass(frozen=True)
class ReproduceConfig:
    """Measure the speedups of the summary in docs/benchmarks.md on this machine."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of files in docs/results, such as `lenet`. Default: the files of the summary."""
    time_limit: float = math.inf
    """Seconds after which no further program is compiled. The commands of the summary take about 20 minutes."""
    json: OptionalPath = None
    """JSON file, written again after each command."""


def main(args: Sequence[str], measure: Measure) -> int:
    return run_command(lambda *given: run(*given, measure), ReproduceConfig, "experiments.bench --reproduce", args)


def run(config: ReproduceConfig, command: str, measure: Measure) -> int:
    started = time.monotonic()
    refuse_unwritable(config.json)
    published = [_read(name) for name in config.files or summary_files()]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for report in published:
        if report["platform"] != jax.default_backend():
            raise UserError(f"the platform is {jax.default_backend()}; wants {report['platform']}, as in docs/results")
    report = provenance(command) | {"rows": []}
    for old in published:
        _, _, _, *args = shlex.split(old["command"])
        new = ratios(measure(args, max(0.0, config.time_limit - (time.monotonic() - started))))
        for title, pair in ratios(old).items():
            here = new.get(title, (None, None))
            values = itertools.chain(zip(RATIOS, here, strict=True), zip(_published(RATIOS), pair, strict=True))
            report["rows"].append({"work": title, "command": old["command"], **dict(values)})
        keep(report, config.json)
    devices = dict.fromkeys(old["device"] for old in published)
    print_ratios(report, ", ".join(devices))
    return 0


def _published(names):
    return [f"published_{name}" for name in names]


def summary_files() -> list[str]:
    """Return the names of the result files from which docs/tables.py made the summary."""
    page = DOCS / "benchmarks.md"
    if not page.exists():
        raise UserError(f"there is no {page}; wants a checkout of the repository, which has the published results")
    table = re.search(r"<!-- table: summary -->.*?<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    return list(dict.fromkeys(re.findall(r"results/([\w-]+)\.json", table[0])))


def _read(name: str) -> Report:
    path = DOCS / "results" / f"{name}.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    if not report["command"].startswith("python -m experiments.bench "):
        raise UserError(f"{path} has the command {report['command']}; wants a command of experiments.bench")
    return report


def ratios(report: Report) -> dict[str, tuple[float | None, float | None]]:
    """Map each workload to the speedup of jaxbp over the fastest autodiff, and over the fastest peer."""
    found = {}
    for title, rows in groups(report):
        timed = {row["implementation"]: row for row in rows if row["microseconds"] is not None}
        ours = next((timed[name] for name in OURS if name in timed), None)
        if ours is not None:
            fastest = min((row["microseconds"] for row in timed.values() if row["peer"]), default=None)
            found[title] = ours["speedup_over_autodiff"], ratio(fastest, ours["microseconds"])
    return found


def print_ratios(report: Report, devices: str, console: Console | None = None) -> None:
    console = console or Console(width=140, highlight=False)
    console.print(f"here: {report['device']}, jax {report['versions']['jax']}; published: {devices}")
    heads = ("over autodiff", "published", "over best peer", "published")
    table = Table("workload", *(Column(head, justify="right") for head in heads))
    for row in report["rows"]:
        values = [row[name] for each in RATIOS for name in (each, *_published([each]))]
        table.add_row(row["work"], *("" if value is None else f"{value:.2f}x" for value in values))
    console.print(table)
