"""Run the kernels of every op under NVIDIA's compute-sanitizer, in one process per op and tool.

    pip install nvidia-cuda-sanitizer-api
    python -m tests.qa.sanitize relu conv2d --tools memcheck racecheck

A process computes the value and gradients of one op on small arrays in float32 and bfloat16. CUDA allocates each array
separately, because XLA's memory pool would hide accesses beyond its end. Processes sometimes die at exit, or hang in
XLA's compiler. The outcomes are:

    clean              the tool reported no finding
    explained          `EXPLAINED` lists all findings, which are harmless or not caused by jaxbp
    found              another finding (exit code 1)
    crashed at exit    the process died after all kernels had run, with explained findings at most
    failed             a kernel did not run, or the tool printed no summary (exit code 1)
    timed out          the process exceeded the time limit, with explained findings at most (exit code 1)
"""

import collections
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.output.errors import UserError, kept_in, refuse_unknown, run_command


@dataclasses.dataclass(frozen=True)
class Explained:
    """An explanation of findings of `tool`.

    The regular expressions `op`, `kernel`, and `text` match the beginning of a finding's op, kernel, and lines of text,
    joined by spaces.
    """

    name: str
    reason: str
    tool: str
    op: str = ""
    kernel: str = ""
    text: str = ""


EXPLAINED = (
    Explained(
        "equal writes of a warp",
        "the lanes of a warp write the same sum to the same place, by one instruction of a reduction of Mosaic GPU",
        tool="racecheck",
        kernel="layer_norm|rms_norm",
        text=r".* between Write access at (\S+\+0x[0-9a-f]+) in \S+ and Write access at \1 ",
    ),
    Explained(
        "products of the library",
        "a kernel of cuBLAS or CUTLASS, which come with XLA and compute the op's products of matrices",
        tool="initcheck",
        op="linear$|matmul$|layer_norm_linear$|mlp_",
        kernel="nvjet|cublas|(void )?cutlass|.*gemm",
    ),
    Explained(
        "bulk copies of tensors",
        "the kernel reads an array that a kernel of jaxbp or cuBLAS wrote by cp.async.bulk.tensor; initcheck does not "
        "track this instruction, and reports the array as never written",
        tool="initcheck",
        op="linear|matmul|layer_norm_linear|mlp_",
        kernel="mlp_softmax_cross_entropy_weighed_gradients|wrapped_|.*fusion",
    ),
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) \w+(?! were)\b", re.MULTILINE)
UNPRINTED = re.compile(r"^=+ \w+ SUMMARY: (\d+) \w+ were not printed", re.MULTILINE)
BLOCK = re.compile(r"^=+ (?!COMPUTE-SANITIZER|\w+ SUMMARY|Target|Error: process)(\S.*(?:\n=+  +\S.*)*)", re.MULTILINE)
"""A finding in a tool's output: one line, and the indented lines after it."""
KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in ([^(\n]+)|(\S.*?)\+0x)")
PRINTED = 100_000
FOUND = 99
"""The exit code of compute-sanitizer after a finding."""
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
DONE = "all kernels ran"
KEPT_LINES = 40


@dataclasses.dataclass(frozen=True)
class SanitizeConfig:
    """Run the kernels of ops under NVIDIA's compute-sanitizer."""

    ops: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of the ops to run. By default, all ops of the catalogue."""
    tools: tuple[Literal["memcheck", "racecheck", "initcheck", "synccheck"], ...] = TOOLS
    limit: float = 300.0
    """Seconds after which a process is killed."""
    attempts: int = 2
    """Largest number of processes per op and tool, as long as they fail or time out."""
    processes: int = 1
    """Number of processes that run at once."""
    json: Path | None = None
    """JSON file for one row per op and tool."""
    child: bool = False
    """Internal: run one op in this process, which compute-sanitizer has started."""


def main(args: Sequence[str] | None = None) -> int:
    return run_command(run, SanitizeConfig, "tests.qa.sanitize", args)


def run(config: SanitizeConfig, command: str) -> int:
    if config.child:
        return run_kernels(*config.ops)
    from experiments.output.results import keep, provenance
    from jaxbp.catalogue import CATALOGUE

    for option in ("processes", "attempts"):
        if (number := getattr(config, option)) < 1:
            raise UserError(f"--{option} is {number}; wants at least 1")
    sanitizer, names = find_sanitizer(), refuse_unknown("op", config.ops, (entry.name for entry in CATALOGUE))
    report: dict[str, Any] = {
        **provenance(command),
        "explained": {explained.name: explained.reason for explained in EXPLAINED},
        "rows": [],
    }
    report["versions"] |= {"compute-sanitizer": version_of(sanitizer)}
    with kept_in(config.json), ThreadPoolExecutor(config.processes) as pool:
        tasks = [(name, tool) for name in names for tool in config.tools]
        for row in pool.map(lambda task: attempted(sanitizer, task[1], task[0], config.limit, config.attempts), tasks):
            report["rows"].append(row)
            print(f"{row['op']:40} {row['tool']:10} {row['outcome']:15} {row['seconds']:6.1f} s", flush=True)
            for finding in row["findings"]:
                why = "unexplained" if finding["explained"] is None else f"explained: {finding['explained']}"
                print(f"    {finding['count']} x {finding['message']}, {finding['kernel']}: {why}", flush=True)
            if row["output"]:
                print(row["output"], flush=True)
            keep(report, config.json)
    outcomes = [row["outcome"] for row in report["rows"]]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)))
    return 0 if {"clean", "explained", "crashed at exit"}.issuperset(outcomes) else 1


def find_sanitizer() -> str:
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        for path in Path(folder).glob("*/bin/compute-sanitizer"):
            return str(path)
    if (path := shutil.which("compute-sanitizer")) is not None:
        return path
    raise UserError("compute-sanitizer is not installed; wants: pip install nvidia-cuda-sanitizer-api")


def version_of(sanitizer: str) -> str | None:
    printed = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    return match[1] if (match := re.search(r"Version (\S+)", printed)) else None


def attempted(sanitizer: str, tool: str, name: str, limit: float, attempts: int) -> dict[str, Any]:
    for attempt in range(1, attempts + 1):
        row = sanitized(sanitizer, tool, name, limit) | {"attempts": attempt}
        if row["outcome"] not in ("failed", "timed out"):
            break
    return row


def sanitized(sanitizer: str, tool: str, name: str, limit: float) -> dict[str, Any]:
    options = [
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--print-limit",
        str(PRINTED),
        "--show-backtrace",
        "device",  # the host's backtrace has fifty lines per finding
        "--target-processes",
        "application-only",  # not the compilers that the application runs
    ]
    command = [sanitizer, *options, sys.executable, "-m", "tests.qa.sanitize", name, "--child"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        printed, code = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also kills the sanitizer's child
        printed, code = process.communicate()[0], None
    text = printed.decode(errors="replace")
    findings = findings_in(text, tool, name)
    outcome = outcome_of(text, code, findings)
    return dict(
        op=name,
        tool=tool,
        outcome=outcome,
        code=code,
        seconds=round(time.perf_counter() - start, 1),
        findings=findings,
        output="" if outcome in ("clean", "explained") else "\n".join(text.splitlines()[-KEPT_LINES:]),
    )


def findings_in(text: str, tool: str, op: str) -> list[dict[str, Any]]:
    """Return the findings that compute-sanitizer printed for an op. Equal findings become one with a count."""
    counts: collections.Counter = collections.Counter()
    for block in BLOCK.findall(text):
        lines = [line.lstrip("= ") for line in block.splitlines()]
        message, flat = lines[0].partition(" at ")[0], " ".join(lines)
        kernel = match[1] or match[2] if (match := KERNEL.search("\n".join(lines))) else None
        explained = next(
            (
                each.name
                for each in EXPLAINED
                if each.tool == tool
                and re.match(each.op, op)
                and re.match(each.kernel, kernel or "")
                and re.match(each.text, flat)
            ),
            None,
        )
        counts[message, kernel, explained] += 1
    if unprinted := sum(map(int, UNPRINTED.findall(text))):
        counts["not printed", None, None] = unprinted
    return [
        dict(message=message, kernel=kernel, count=count, explained=explained)
        for (message, kernel, explained), count in counts.items()
    ]


def outcome_of(text: str, code: int | None, findings: Sequence[dict[str, Any]]) -> str:
    summaries = [int(count) for count in SUMMARY.findall(text)]
    if any(finding["explained"] is None for finding in findings) or (any(summaries) and not findings):
        return "found"
    if code is None:
        return "timed out"
    if DONE not in text or not summaries:
        return "failed"
    if code not in (0, FOUND):
        return "crashed at exit"
    return "explained" if findings else "clean"


def run_kernels(name: str) -> int:
    import jax
    import jax.numpy as jnp

    from jaxbp.catalogue import CATALOGUE
    from jaxbp.verify.arguments import bind, take_apart
    from jaxbp.verify.derivatives import value_and_gradients

    (entry,) = (entry for entry in CATALOGUE if entry.name == name)
    for dtype in ("float32", "bfloat16"):
        # On the CPU, so that the tools do not check JAX's random generators.
        with jax.default_device(jax.devices("cpu")[0]):
            drawn = entry.small.draw(0, dtype=jnp.dtype(dtype))
        arguments = take_apart(entry.function, jax.device_put(drawn, jax.devices()[0]))
        function, values = arguments.of_floats(bind(entry.function, "pallas", entry.small.options)), arguments.floats
        try:
            cotangents = [jnp.ones(y.shape, y.dtype) for y in jax.eval_shape(function, *values)]
            jax.block_until_ready(jax.jit(value_and_gradients(function))(values, cotangents))
            print(f"{name}, {dtype}: ran")
        except NotImplementedError as refused:
            print(f"{name}, {dtype}: {refused}")
    print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
