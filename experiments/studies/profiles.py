"""Profile workloads of the bench with Nsight Compute, to find what limits each kernel.

    python -m experiments.studies.profiles --json docs/results/profiles.json      # on a GPU, with `ncu` on the path

A workload is CASE[@BATCH][/DTYPE[/IMPLEMENTATION[/PRECISION]]]. `python -m experiments.bench --help` describes CASE.
The defaults are float32, pallas, and default. The result file has one row per launch of a kernel of jaxbp, cuBLAS, or
CUTLASS. With the implementation None, it also has XLA's fusions. docs/benchmarks/profiles.md describes the fields.
"""

import contextlib
import csv
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.bench.selection import selected
from experiments.bench.workloads import Workload, implementation
from experiments.output.errors import UserError, exit_code
from experiments.studies import parser_of, write_rows

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
    "dot_product_attention:8192x16x128 causal@4/bfloat16",
    "dot_product_attention:1024x12x64 causal@16/bfloat16",
    "dot_product_attention:384x4x32 bias@384/bfloat16",
    "grouped_linear:16384x8x4096x14336@16384/bfloat16",
    "grouped_linear:65536x128x2048x768@65536/bfloat16",
]
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy")
KERNELS = "_mosaic_gpu|gemm|nvjet|cutlass|xmma"
"""Parts of the names of kernels. The names of jaxbp's kernels end with `_mosaic_gpu_kernel`."""
SECONDS = 100
PROGRAM = "experiments.studies.profiles"
ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
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
    workload: Workload
    batch: int
    dtype: str
    implementation: str
    precision: str

    def run(self) -> None:
        with jax.default_matmul_precision(self.precision):
            function = self.workload.named(self.implementation, self.dtype)
            arguments = jax.block_until_ready((self.workload.draw(0, self.batch, self.dtype),))
            jax.block_until_ready(
                jax.jit(self.workload.chain(function, 1, implementation(self.implementation)))(arguments)
            )


def asked_for(text: str) -> Asked:
    case, *rest = text.split("/")
    case, _, batch = case.partition("@")
    found = [workload for workload in selected([case]) if case in (workload.op, f"{workload.op}:{workload.place}")]
    if len(found) != 1:
        raise UserError(
            f"{text} names {len(found)} workloads; wants the name of one, such as {found[0].op}:{found[0].place}"
        )
    (workload,) = found
    batch = int(batch or workload.batches[0][0])
    return Asked(workload, batch, *rest, *("float32", "pallas", "default")[len(rest) :])


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--run", action="store_true", help="only run the workloads, as Nsight Compute does")
    given = parser.parse_args(args)
    asked = {text: asked_for(text) for text in given.workloads}
    if given.run:
        for each in asked.values():
            each.run()
        return 0
    return write_rows("profiles", args, {}, measured(asked), given.json)


def measured(asked: Mapping[str, Asked]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": folder}
        subprocess.run([sys.executable, "-m", PROGRAM, "--run", *asked], env=environment, check=True)
        for text, each in asked.items():
            kernels = KERNELS + "|fusion" * (each.implementation == "None")
            yield from rows_of(profiled(text, kernels, environment, Path(folder, "profile.csv")), each)


def profiled(workload: str, kernels: str, environment: dict[str, str], log: Path) -> str:
    log.unlink(missing_ok=True)
    command = ["ncu", "--target-processes", "application-only", "--clock-control", "none"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += ["--kernel-name", f"regex:{kernels}", sys.executable, "-m", PROGRAM, "--run", workload]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{workload}: killed after {SECONDS} s", flush=True)
    with contextlib.suppress(ProcessLookupError):  # the profiler's children may outlive it
        os.killpg(process.pid, signal.SIGKILL)
    return log.read_text() if log.exists() else ""


def rows_of(text: str, asked: Asked) -> Iterator[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for line in csv.DictReader(io.StringIO("\n".join(lines))):
        if not line["ID"]:  # the line of units
            continue
        stalls = {m[1]: number(value) for key, value in line.items() if (m := STALL.match(key)) and number(value)}
        waited = max(stalls, key=stalls.get, default=None)
        yield {
            "work": f"{asked.workload.title}, batch {asked.batch}",
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
    try:
        return float((value or "").replace(",", ""))
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(exit_code(main))
