"""What bounds each kernel: the bench's pieces of work under Nsight Compute, kernel by kernel.

    python docs/lab/profiles.py --json docs/results/profiles.json          # on a GPU, with `ncu` on the path
    python docs/lab/profiles.py lenet@8192 layer_norm_backward:65536x1024@65536/bfloat16 --json some.json

A work is CASE[@BATCH][/DTYPE][/IMPLEMENTATION], its case as the bench's command takes it; by default float32 and
"pallas". One call is profiled, of a training step with its update, after another one that nobody looks at. All works
are compiled and run in one process, and a tangent stands between two of them in the profile, which no work computes.

Each kernel runs once for every few counters, with its memory restored in between and the caches flushed: the times are
those of a kernel by itself with cold caches, longer than in the program. Programs are not made into CUDA graphs. The
rows have the time in microseconds and percentages of what the device could do at most: DRAM, L2, L1 (with shared
memory), the tensor cores, the instructions issued, and the warps under way; registers a thread; and what warps waited
for longest, in cycles an instruction.
"""

import argparse
import contextlib
import csv
import ctypes
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.works import Work, selected
from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json

DEFAULT = [
    "lenet@128",
    "lenet@8192",
    "logic@128",
    "gate_layer_backward:4096->8192@8192",
    "layer_norm_backward:65536x1024@65536/bfloat16",
    "layer_norm_backward:32768x4096@32768/bfloat16",
    "layer_norm_linear:65536x1024x1024@65536/bfloat16",
    "layer_norm_linear:65536x1024x4096@65536/bfloat16",
    "layer_norm_linear:32768x4096x4096@32768/bfloat16",
    "max_pool2d_backward:pool1@16384/float32/None",
    "max_pool2d_backward:pool2@16384/float32/None",
    "logic-conv:mnist-m@128",
    "logic-conv:cifar-m@128",
    "logic-large@1024",
]
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy")
BETWEEN = re.compile(r"(^|_)tan(_|$)")
"""The kernel between two works."""
PERCENTAGES = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "issued": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio$")


class Asked(NamedTuple):
    """A work of the command line."""

    work: Work
    batch: int
    dtype: str
    implementation: str

    @property
    def title(self) -> str:
        return f"{self.work.title}, batch {self.batch}"


def asked_for(text: str) -> Asked:
    case, *rest = text.split("/")
    case, _, batch = case.partition("@")
    dtype, implementation = (*rest, *("float32", "pallas")[len(rest) :])
    works = [work for work in selected([case]) if case in (work.op, f"{work.op}:{work.place}")]
    if len(works) != 1:
        raise SystemExit(f"{text}: has {len(works)} places; wants one, as in {works[0].op}:{works[0].place}")
    return Asked(works[0], int(batch or works[0].batches[0][0]), dtype, implementation)


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("works", nargs="*", default=DEFAULT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path, help="keep what Nsight Compute prints, or read it where it is there")
    parser.add_argument("--child", action="store_true", help="run the works: what Nsight Compute is given to run")
    given = parser.parse_args(args)
    asked = [asked_for(text) for text in given.works]
    if given.child:
        run(asked)
        return 0
    text = given.csv.read_text() if given.csv and given.csv.exists() else profiled(given.works, given.csv)
    rows = list(rows_of(text, asked))
    for row in rows:
        print(row)
    if given.json:
        report = provenance(shlex.join(["python", "docs/lab/profiles.py", *args])) | {"rows": rows}
        write_atomically(given.json, to_json(report))
    return 0


def run(asked: Sequence[Asked]) -> None:
    """Each work once before the profiler looks, and once while it does."""
    programs = []
    for work, batch, dtype, implementation in asked:
        function = work.function(None if implementation == "None" else implementation, dtype)
        arguments = jax.block_until_ready((work.draw(0, batch, dtype),))
        program = jax.jit(work.chain(function, 1)).lower(arguments).compile()
        jax.block_until_ready(program(arguments))
        programs.append((program, arguments))
    between = jax.jit(jnp.tan).lower(jnp.zeros(())).compile()
    jax.block_until_ready(between(jnp.zeros(())))
    zero = jnp.zeros(())
    with seen_by_the_profiler():
        for program, arguments in programs:
            jax.block_until_ready(between(zero))
            jax.block_until_ready(program(arguments))


@contextlib.contextmanager
def seen_by_the_profiler() -> Iterator[None]:
    """Nsight Compute profiles the kernels that are launched within."""
    driver, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)
    if failed := driver.cuProfilerStart():
        raise RuntimeError(f"cuProfilerStart failed with CUDA's error {failed}")
    yield
    driver.cuProfilerStop()


def profiled(works: Sequence[str], kept: Path | None) -> str:
    """What Nsight Compute prints of the works: CSV, a line a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = kept or Path(folder, "profile.csv")
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--log-file", str(path)]
        command += [word for section in SECTIONS for word in ("--section", section)]
        environment = os.environ | {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        subprocess.run([*command, sys.executable, __file__, "--child", *works], env=environment, check=True)
        return path.read_text()


def rows_of(text: str, asked: Sequence[Asked]) -> Iterator[dict[str, Any]]:
    """A row a kernel, in the order of their launches."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    of = -1
    for line in reader:
        if not line["ID"]:  # the line of units
            continue
        name = line["Kernel Name"].split("(")[0]
        if BETWEEN.search(name):
            of += 1
            continue
        if of < 0:
            continue
        stalls = {m[1]: number(value) for key, value in line.items() if (m := STALL.match(key)) and number(value)}
        waited = max(stalls, key=stalls.get, default=None)
        yield {
            "work": asked[of].title,
            "dtype": asked[of].dtype,
            "implementation": asked[of].implementation,
            "kernel": name,
            "microseconds": number(line["gpu__time_duration.sum"]) / 1e3,
            **{key: number(line.get(metric)) for key, metric in PERCENTAGES.items()},
            "registers": number(line.get("launch__registers_per_thread")),
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
