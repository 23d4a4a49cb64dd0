"""The table of tested versions and GPUs."""

import re
import tomllib

from figures import measurements
from figures.cells import link
from figures.measurements import Reports

BY_CI = "by CI, with every test"


def supported(reports: Reports) -> str:
    """Return a table with one line per version of Python that CI or a run on a GPU uses."""
    root = measurements.DOCS.parent
    oldest, newest = re.findall(
        r"^(?:oldest|newest)=\$\(find_python python(\S+)", (root / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE
    )
    dependencies = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (jax,) = (each.removeprefix("jax>=") for each in dependencies if each.startswith("jax>="))
    lines = [(oldest, jax, "none", BY_CI), (newest, "the newest", "none", BY_CI)]
    on_gpus: dict[tuple[str, str], dict[str, str]] = {}
    for name, report in reports.items():
        if report.get("platform") == "gpu":
            versions = report["versions"]
            key = versions["python"].rpartition(".")[0], versions["jax"]
            on_gpus.setdefault(key, {})[report["device"]] = name
    for key, runs in on_gpus.items():
        latest = ", ".join(map(link, sorted(runs.values())))
        lines.append((*key, " and ".join(sorted(runs)), f"by the tests marked `gpu`, and by runs such as {latest}"))
    rows = [("Python", "JAX", "GPU", "tested"), ("---",) * 4, *sorted(lines, key=lambda line: _order(line[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _order(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))
