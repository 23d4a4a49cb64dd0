"""Studies for the documentation: `python -m experiments.studies.NAME`."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.output.results import keep, provenance


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a study's parser, whose only option is --json. `description` begins with a line for the help."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--json", type=Path)
    return parser


def write_rows(
    study: str,
    args: Sequence[str] | None,
    fields: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    path: Path | None,
) -> int:
    """Print each row of a study as soon as it is measured, write the result file again, and return the exit code."""
    args = sys.argv[1:] if args is None else args
    report = provenance(shlex.join(["python", "-m", f"experiments.studies.{study}", *args])) | fields | {"rows": []}
    for row in rows:
        print(row, flush=True)
        report["rows"].append(row)
        keep(report, path)
    return 0
