"""Studies for the documentation: `python -m experiments.studies.NAME`."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.output.results import keep, provenance


def write_rows(
    study: str, args: Sequence[str], fields: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], path: Path | None
) -> int:
    """Print each row of a study as soon as it is measured, write the result file again, and return the exit code."""
    report = provenance(shlex.join(["python", "-m", f"experiments.studies.{study}", *args])) | fields | {"rows": []}
    for row in rows:
        print(row, flush=True)
        report["rows"].append(row)
        keep(report, path)
    return 0
