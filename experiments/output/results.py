"""The fields of every result file, a JSON object that a command writes.

date       ISO 8601, UTC
commit     Git's short hash, with `+` if tracked files have changed; null if unknown
device     JAX's name for the kind of device
platform   "cpu", "gpu", ...
versions   of Python, jaxbp, and the packages that jaxbp uses
note       optional text
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
from experiments.output.files import write

ROOT = Path(__file__).parents[2]
COMMIT_VARIABLE = "JAXBP_COMMIT"
"""The environment variable with the commit, for sources without a Git history."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def provenance(command: str) -> dict[str, Any]:
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
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    try:
        # An installed package may lie in another project's checkout.
        if Path(_git(root, "rev-parse", "--show-toplevel")) == root.resolve():
            is_dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
            return _git(root, "rev-parse", "--short", "HEAD") + "+" * is_dirty
    except (OSError, subprocess.CalledProcessError):
        pass
    return None


def to_json(report: Mapping[str, Any]) -> bytes:
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()


def keep(report: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        write(path, to_json(report))


def finite(value: Any, otherwise: Callable[[float], Any] = lambda number: None) -> Any:
    """Replace infinities and NaN, which JSON cannot hold, by `otherwise(number)`."""
    if isinstance(value, Mapping):
        return {key: finite(inner, otherwise) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner, otherwise) for inner in value]
    return otherwise(value) if isinstance(value, float) and not math.isfinite(value) else value


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout.strip()
