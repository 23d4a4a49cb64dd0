"""What bounds each kernel: the bench's pieces of work under Nsight Compute.

    python docs/lab/profiles.py --json docs/results/profiles.json          # on a GPU, with `ncu` on the path
    python docs/lab/profiles.py lenet@8192 layer_norm_backward:65536x1024@65536/bfloat16 --json some.json

A work is CASE[@BATCH][/DTYPE[/IMPLEMENTATION[/PRECISION]]], its case as the bench's command takes it; by default
float32, "pallas" and "default", the library's precision of products. One call of it is profiled, a training step with
its update, and of its kernels those of this library and the products of XLA's libraries; under "None" XLA's fusions as
well.

All works are compiled first, without the profiler, into a cache of their own. Then each has a process under the
profiler, whose end does not touch the others. Each kernel runs once for every few counters, with its memory restored
and the caches flushed in between: the times are those of a kernel by itself with cold caches, longer than in the
program. Programs are not made into CUDA graphs. The rows have the time in microseconds; percentages of what the device
could do at most: DRAM, L2, L1 (with shared memory), the busiest unit of the multiprocessors (which for products are the
tensor cores), and warps under way; instructions issued in a cycle, of four; registers a thread; and what a warp waited
for longest, in cycles an instruction.
"""

import argparse
import contextlib
import csv
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.bench.works import Work, selected
from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json

DEFAULT = [
    "logic-conv:mnist-m@128",
    "logic-conv:cifar-m@128",
    "gate_layer_backward:4096->8192@8192",
    "layer_norm_linear:65536x1024x1024@65536/bfloat16",
    "layer_norm_linear:65536x1024x4096@65536/bfloat16",
    "layer_norm_linear:32768x4096x4096@32768/bfloat16",
    "layer_norm_backward:65536x1024@65536/bfloat16",
    "layer_norm_backward:32768x4096@32768/bfloat16",
    "max_pool2d_backward:pool1@16384/float32/None",
    "max_pool2d_backward:pool2@16384/float32/None",
    "lenet@128",
    "lenet@8192",
    "logic@128",
    "logic-large@1024",
]
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy")
KERNELS = "conv2d|correlate|pool|cross_entropy|layer|linear|tree|automaton|sum_|gemm|nvjet|cutlass|xmma"
"""Parts of the names of the kernels that are profiled."""
SECONDS = 100
"""After which a process under the profiler is ended."""
METRICS = {
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issued": "sm__inst_issued.avg.per_cycle_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio$")


class Asked(NamedTuple):
    """A work of the command line."""

    work: Work
    batch: int
    dtype: str
    implementation: str
    precision: str

    @property
    def title(self) -> str:
        return f"{self.work.title}, batch {self.batch}"


def asked_for(text: str) -> Asked:
    case, *rest = text.split("/")
    dtype, implementation, precision = (*rest, *("float32", "pallas", "default")[len(rest) :])
    case, _, batch = case.partition("@")
    works = [work for work in selected([case]) if case in (work.op, f"{work.op}:{work.place}")]
    if len(works) != 1:
        raise SystemExit(f"{text}: has {len(works)} places; wants one, as in {works[0].op}:{works[0].place}")
    return Asked(works[0], int(batch or works[0].batches[0][0]), dtype, implementation, precision)


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("works", nargs="*", default=DEFAULT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", action="store_true", help="only run the works: what Nsight Compute is given to run")
    given = parser.parse_args(args)
    asked = [asked_for(text) for text in given.works]
    if given.run:
        for each in asked:
            run(each)
        return 0
    report = provenance(shlex.join(["python", "docs/lab/profiles.py", *args])) | {"rows": []}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment |= {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment["XLA_FLAGS"] = "--xla_gpu_enable_command_buffer="
        subprocess.run([sys.executable, __file__, "--run", *given.works], env=environment, check=True)
        for text, each in zip(given.works, asked, strict=True):
            kernels = KERNELS + "|fusion" * (each.implementation == "None")
            for row in rows_of(profiled(text, kernels, environment, Path(folder, "profile.csv")), each):
                print(row, flush=True)
                report["rows"].append(row)
            if given.json:
                write_atomically(given.json, to_json(report))
    return 0


def run(asked: Asked) -> None:
    """One call of the work."""
    implementation = None if asked.implementation == "None" else asked.implementation
    with jax.default_matmul_precision(asked.precision):
        function = asked.work.function(implementation, asked.dtype)
        arguments = jax.block_until_ready((asked.work.draw(0, asked.batch, asked.dtype),))
        jax.block_until_ready(jax.jit(asked.work.chain(function, 1, implementation))(arguments))


def profiled(work: str, kernels: str, environment: dict[str, str], log: Path) -> str:
    """What Nsight Compute prints of the work: CSV, a line a kernel; empty where it fails."""
    log.unlink(missing_ok=True)
    command = ["ncu", "--target-processes", "application-only", "--clock-control", "none"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += ["--kernel-name", f"regex:{kernels}", sys.executable, __file__, "--run", work]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{work}: not done after {SECONDS} s", flush=True)
    with contextlib.suppress(ProcessLookupError):  # what it started may live on without it
        os.killpg(process.pid, signal.SIGKILL)
    return log.read_text() if log.exists() else ""


def rows_of(text: str, asked: Asked) -> Iterator[dict[str, Any]]:
    """A row a kernel, in the order of their launches."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for line in csv.DictReader(io.StringIO("\n".join(lines))):
        if not line["ID"]:  # the line of units
            continue
        stalls = {m[1]: number(value) for key, value in line.items() if (m := STALL.match(key)) and number(value)}
        waited = max(stalls, key=stalls.get, default=None)
        yield {
            "work": asked.title,
            "dtype": asked.dtype,
            "implementation": asked.implementation,
            "precision": asked.precision,
            "kernel": line["Kernel Name"].split("(")[0],
            "microseconds": number(line["gpu__time_duration.sum"]) / 1e3,
            **{key: number(line.get(metric)) for key, metric in METRICS.items()},
            "waits_for": waited,
            "waited_cycles": stalls.get(waited),
        }


def number(value: str | None) -> float | None:
    """Of a cell, which may have commas in it, or nothing."""
    try:
        return float((value or "").replace(",", ""))
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
