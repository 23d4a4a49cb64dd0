"""Does half precision cost accuracy? The same experiments in each precision, over several seeds.

    python docs/lab/precisions.py --data-dir data --json docs/results/precisions.json

Each run is a process of its own, of `python -m experiments.train`; several run side by side, so that their times say
nothing.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json

EXPERIMENTS = {
    "lenet, mnist": ["lenet", "--dataset", "mnist"],
    "mixer, mnist": ["mixer", "--dataset", "mnist"],
    "logic, digits": ["logic"],
}
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
SECONDS = 400


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(args)
    runs = list(itertools.product(EXPERIMENTS, PRECISIONS, range(given.seeds)))
    # The children have the GPU's memory: this process takes none of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = provenance(shlex.join(["python", "docs/lab/precisions.py", *args])) | {"rows": []}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(given.processes) as pool:
        todo = [pool.submit(trained, *run, given.data_dir, Path(folder)) for run in runs]
        for done in concurrent.futures.as_completed(todo):
            report["rows"] = sorted([*report["rows"], done.result()], key=lambda row: str(row.values()))
            print(done.result(), flush=True)
            write_atomically(given.json, to_json(report))
    return 0


def trained(experiment: str, precision: str, seed: int, data_dir: Path | None, folder: Path) -> dict[str, Any]:
    """A run's accuracy on the test set, and how many of its steps were skipped; or why there is none."""
    name = f"{experiment}-{precision}-{seed}".replace(" ", "").replace(",", "-")
    run, path = folder / name, folder / f"{name}.json"
    command = [sys.executable, "-m", "experiments.train", *EXPERIMENTS[experiment], "--precision", precision]
    command += ["--seed", str(seed), "--run-dir", str(run), "--json", str(path)]
    if data_dir and "mnist" in experiment:
        command += ["--data-dir", str(data_dir)]
    row = {"experiment": experiment, "precision": precision, "seed": seed}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"not done within {SECONDS} s"}
    if done.returncode:
        return row | {"failed": done.stderr.strip()[-300:]}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = json.loads(path.read_text())["test_accuracy"]
    return row | {"test_accuracy": accuracy, "skipped_steps": sum(line["skipped_steps"] for line in metrics)}


if __name__ == "__main__":
    sys.exit(main())
