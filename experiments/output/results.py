"""What every result file says of the run that made it: when, from which commit, where, and with which versions.

A result file is a JSON object with these fields and those of its command:

    schema     1
    command    the command line
    date       ISO 8601, UTC
    commit     Git's short hash, with `+` if tracked files differ from it; null if unknown
    device     the device's kind, as JAX names it
    platform   "cpu", "gpu", ...
    versions   of Python, this library and what it stands on
    note       what a reader must know beside that; only where there is something
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxbp
from experiments.output.files import write_atomically

ROOT = Path(__file__).parents[2]
COMMIT_VARIABLE = "JAXBP_COMMIT"
"""An environment variable that names the commit where the files were copied without its history."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def provenance(command: str) -> dict[str, Any]:
    """The fields that all result files share."""
    device = jax.devices()[0]
    versions = {"python": sys.version.split()[0], "jaxbp": jaxbp.__version__}
    return {
        "schema": 1,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
    }


def commit(root: Path = ROOT) -> str | None:
    """The short hash of the commit checked out in `root`, with `+` if tracked files differ from it.

    The variable `JAXBP_COMMIT` goes before it. Without either, None.
    """
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    try:
        # An installed package may lie within the checkout of another project, whose commit says nothing of this one.
        if Path(_git(root, "rev-parse", "--show-toplevel")) == root.resolve():
            is_dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
            return _git(root, "rev-parse", "--short", "HEAD") + "+" * is_dirty
    except (OSError, subprocess.CalledProcessError):
        pass
    return None


def to_json(report: Mapping[str, Any]) -> bytes:
    """The report as indented JSON. Numbers that are not finite are refused."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()


def keep(report: Mapping[str, Any], path: Path | None) -> None:
    """Write the report as JSON, if there is a path."""
    if path is not None:
        write_atomically(path, to_json(report))


def finite(value: Any, otherwise: Callable[[float], Any] = lambda number: None) -> Any:
    """Return the value with `otherwise(number)` for each number that is not finite, as JSON has none of these."""
    if isinstance(value, Mapping):
        return {key: finite(inner, otherwise) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner, otherwise) for inner in value]
    return otherwise(value) if isinstance(value, float) and not math.isfinite(value) else value


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout.strip()
